"""The texts whose KV `headwater bench packing` packs: prose, code, and languages that a tokenizer cuts small.

They were written for this benchmark, and do not change: so that figures of different versions can be compared.
"""

from __future__ import annotations

PROSE = """
The lighthouse keeper's daughter had counted ships since she could count at all. Every evening she climbed the ninety
steps with a pencil behind her ear, opened the ledger on the window sill, and wrote down whatever moved between the
two headlands: colliers with their low black sides, the mail steamer that was always late on Thursdays, herring boats
coming home so heavy that their decks were wet. Nobody had asked her to do it. The harbour office kept books of its
own, with tonnage and owners and the names of captains, and the clerk who kept them once told her, not unkindly, that
her numbers were of no use to anyone.

She went on anyway. When the fog came she counted horns. In the winter of the great frost there was nothing to write
for eleven days, so she wrote down the ice: how far it reached, where it had cracked, on which morning a fox had
crossed it from one shore to the other and come back before noon with something in its mouth. By the time she was
thirty the ledgers filled a shelf, and by the time she was fifty they filled a wall.

It was an engineer from the railway who first wanted to read them. He had been sent to find out whether a bridge could
stand at the narrows, and everyone he asked remembered the current differently. Fishermen swore that it ran north
until midsummer; the pilot said that it turned with the moon; the office had no opinion, since a current pays no dues.
"You want to know how the water goes," said the keeper's daughter. "Then look at the empty boats." For an empty boat
is pushed wherever the water likes, and for thirty-four years she had noted which of them were late, and on which side
of the rock they had passed. He sat at her table for a week. On the last evening he drew a line through the points,
and it was smooth, and it did not agree with anybody's memory, and the bridge that was built on it is still there.

People who hear this story like to say that she must have known what her counting was for. I do not believe it. What
she knew was that a thing which is written down on the day it happens can be asked a question later, and that a thing
which is only remembered can merely be told. She did not need the question to come in her lifetime. She sharpened the
pencil, looked out over the grey water between the headlands, and turned to a new page, because a sail had just come
around the point, and from the way it leaned she could already see that it would be late.
"""

CODE = '''
import heapq
from collections import defaultdict
from dataclasses import dataclass, field


@dataclass(order=True)
class Departure:
    minute: int
    line: str = field(compare=False)
    origin: str = field(compare=False)
    target: str = field(compare=False)
    arrival: int = field(compare=False)


class Timetable:
    """Trains between stations, and the earliest way from one to another."""

    def __init__(self, departures: list[Departure], change_minutes: int = 4) -> None:
        self._by_station: dict[str, list[Departure]] = defaultdict(list)
        for departure in sorted(departures):
            self._by_station[departure.origin].append(departure)
        self._change_minutes = change_minutes

    def earliest(self, origin: str, target: str, minute: int) -> list[Departure] | None:
        """Trains to take, or None where the target cannot be reached today."""
        best = {origin: minute}
        taken: dict[str, Departure] = {}
        queue = [(minute, origin, "")]
        while queue:
            now, station, line = heapq.heappop(queue)
            if station == target:
                return self._path(taken, origin, target)
            if now > best.get(station, now):
                continue
            for departure in self._by_station[station]:
                ready = now if departure.line == line else now + self._change_minutes
                if departure.minute < ready or departure.arrival >= best.get(departure.target, 10**9):
                    continue
                best[departure.target] = departure.arrival
                taken[departure.target] = departure
                heapq.heappush(queue, (departure.arrival, departure.target, departure.line))
        return None

    def _path(self, taken: dict[str, Departure], origin: str, target: str) -> list[Departure]:
        path = []
        while target != origin:
            path.append(taken[target])
            target = taken[target].origin
        return path[::-1]


def parse(rows: list[str]) -> list[Departure]:
    found = []
    for number, row in enumerate(rows, start=1):
        line, origin, leaves, target, arrives = (part.strip() for part in row.split(";"))
        hours, minutes = leaves.split(":")
        leaving = 60 * int(hours) + int(minutes)
        hours, minutes = arrives.split(":")
        arriving = 60 * int(hours) + int(minutes)
        if arriving <= leaving:
            raise ValueError(f"row {number}: the train arrives at {arrives}, before it leaves at {leaves}")
        found.append(Departure(leaving, line, origin, target, arriving))
    return found
'''

OTHER = """
河边的小镇上有一家修钟的铺子。老板姓林,今年七十三岁,眼睛还很好。每天早上六点,他先把门口的青石板扫干净,再把墙上的二十一只钟一只一只地上好发条。
镇上的人都说,林师傅的钟从来不差一分钟。其实他自己知道,没有两只钟走得完全一样:有的怕潮,有的怕冷,有的到了夏天就慢下来。
所以他在每只钟的背后贴了一张纸条,记下它每个月快了多少、慢了多少。别人问他为什么要记这些,他笑着回答:"不记下来,我怎么知道它们的脾气呢?"

В нашем дворе растёт старая яблоня. Никто не помнит, кто её посадил, но каждую осень соседи собираются под ней с
корзинами и спорят, чья очередь лезть на лестницу. Яблоки кислые, для пирога в самый раз. Бабушка говорит, что дерево
помнит больше нашего: в сухой год кольцо узкое, в дождливый широкое, и если его спилить, можно прочитать сто лет
погоды.

في كل صباح يفتح الخباز دكانه قبل الفجر، ويكتب على اللوح عدد الأرغفة التي باعها أمس. يقول إن الأرقام لا تكذب، لكنها تحتاج
إلى من يسألها. وحين سأله ابنه لماذا يكتب، قال: لأن الذاكرة تحب الأيام الجميلة وتنسى الباقي.
"""

TEXTS = {"prose": PROSE, "code": CODE, "other languages": OTHER}
"""Each has more than 512 tokens in SmolLM2's vocabulary."""
