"""The router's choice: runs of blocks, bounds of its memory, and who gets what. Nothing here has a socket."""

from __future__ import annotations

import json
import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("msgspec")

from headwater.proxy.calls import CallBody, parse_call
from headwater.proxy.choice import UNKNOWN_TOKENS_PER_S, Router, ServerCandidate
from headwater.proxy.index import Bits, History, Table, runs
from headwater.proxy.keys import TEXT, PromptKeys, TokenScheme, canonical_text, tokens_of


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def chat(*contents: str, **fields: object) -> CallBody:
    roles = ["user", "assistant"] * len(contents)
    messages = [{"role": role, "content": content} for role, content in zip(roles, contents, strict=False)]
    return parse_call(json.dumps({"messages": messages, **fields}).encode(), is_chat=True)


def prompt(*contents: str, **fields: object) -> PromptKeys:
    return PromptKeys(chat(*contents, **fields), None)


def words(seed: int, count: int = 2000) -> str:
    dice = random.Random(seed)
    return " ".join(str(dice.randrange(10**6)) for _ in range(count))


# ---- the index --------------------------------------------------------------------------------------------------
@given(
    st.lists(st.sets(st.integers(0, 7)), max_size=20),
    st.lists(st.sets(st.integers(0, 7), max_size=3), min_size=1, max_size=5),
    st.integers(1, 3),
)
def test_a_run_is_what_looking_at_each_server_gives(held: list[set[int]], servers: list[set[int]], parts: int) -> None:
    keys = [bytes([number]) for number in range(len(held))]
    tables: list[dict[bytes, int]] = [{} for _ in range(parts)]
    for number, (key, places) in enumerate(zip(keys, held, strict=True)):
        for place in places:
            table = tables[(number + place) % parts]
            table[key] = table.get(key, 0) | 1 << place
    masks = [sum(1 << place for place in places) for places in servers]
    expected = []
    for places in servers:
        length = 0
        while length < len(held) and held[length] & places:
            length += 1
        expected.append(length)
    assert runs(keys, masks, tables) == expected


def test_a_table_holds_no_more_than_it_has_room_for_and_forgets_what_is_gone() -> None:
    table = Table(max_blocks=3)
    for number in range(5):
        table.add(bytes([number]), 1)
    table.add(bytes([0]), 2)
    assert (len(table.masks), table.num_dropped) == (3, 2)
    table.remove(bytes([0]), 1)
    assert table.masks[bytes([0])] == 2
    table.clear(1)
    assert table.masks == {bytes([0]): 2}
    table.replace([bytes([7]), bytes([8])], 2)
    assert table.masks == {bytes([7]): 2, bytes([8]): 2}


def test_history_is_bounded_and_ages() -> None:
    clock = Clock()
    history = History(max_blocks=100, age_s=60, clock=clock)
    for number in range(10_000):
        history.note([number.to_bytes(4, "big")], 1)
        assert len(history) <= 100
    newest = (9999).to_bytes(4, "big")
    clock.now_s += 29
    history.turn()
    assert newest in history.young
    clock.now_s += 2
    history.turn()
    assert newest in history.old, "still there after half of its time"
    clock.now_s += 31
    history.turn()
    assert len(history) == 0
    history.note([b"x"], 1)
    clock.now_s += 1000
    history.turn()
    assert len(history) == 0, "also if nobody came for long"


def test_a_bit_rests_until_no_entry_can_have_it() -> None:
    clock = Clock()
    bits = Bits(rest_s=60, clock=clock)
    first = bits.take()
    bits.give_back(first)
    assert bits.take() != first
    clock.now_s += 61
    assert bits.take() == first


# ---- keys -------------------------------------------------------------------------------------------------------
def test_a_longer_conversation_begins_with_the_shorter_ones_blocks() -> None:
    first, second = words(1), words(2)
    short = TEXT.keyed(chat(first))
    longer = TEXT.keyed(chat(first, "answer", second))
    assert canonical_text(chat(first, "answer")).startswith(canonical_text(chat(first)))
    assert longer.keys[: len(short.keys)] == short.keys
    assert len(longer.keys) > len(short.keys) > 5
    assert TEXT.keyed(chat(second)).keys[0] != short.keys[0]


@pytest.mark.parametrize("fields", [{"model": "b"}, {"cache_salt": "s"}, {"tools": [{"type": "function"}]}])
def test_other_models_salts_and_tools_share_no_blocks(fields: dict[str, object]) -> None:
    text = words(1)
    assert TEXT.keyed(chat(text)).keys[0] != TEXT.keyed(chat(text, **fields)).keys[0]


class Letters:
    """A tokenizer: a letter is a token."""

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        return [*([0] if add_special else []), *text.encode()]

    def render_chat(self, messages: object) -> str:
        return "".join(f"<{message['role']}>{message['content']}" for message in messages)  # type: ignore[attr-defined]


def test_tokens_are_those_that_a_server_makes() -> None:
    assert tokens_of(chat("ab"), Letters()) == list(b"<user>ab")
    parts = {"role": "developer", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}
    call = parse_call(json.dumps({"messages": [parts]}).encode(), is_chat=True)
    assert tokens_of(call, Letters()) == list(b"<system>a\nb")
    assert tokens_of(parse_call(b'{"prompt": "ab"}', is_chat=False), Letters()) == [0, *b"ab"]
    assert tokens_of(parse_call(b'{"prompt": [5, 6]}', is_chat=False), Letters()) == [5, 6]


@pytest.mark.parametrize(
    "body",
    ['{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}', '{"messages": "x"}', "{}",
     '{"messages": [{"role": "user", "content": "x"}], "tools": []}', '{"messages": [7]}'],
)  # fmt: skip
def test_what_is_no_plain_text_is_told_apart_by_its_text(body: str) -> None:
    call = parse_call(body.encode(), is_chat=True)
    assert tokens_of(call, Letters()) is None
    scheme = TokenScheme()
    assert PromptKeys(call, None).of(scheme) == TEXT.keyed(call)


# ---- the choice -------------------------------------------------------------------------------------------------
def fleet(router: Router, count: int, **options: float) -> list[ServerCandidate]:
    return [ServerCandidate(f"s{number}", router, **options) for number in range(count)]


def test_a_conversation_stays_where_it_was() -> None:
    router = Router()
    servers = fleet(router, 4)
    homes = {}
    for talk in range(20):
        asked = prompt(words(talk))
        choice = router.choose(asked, servers)
        router.send(asked, choice).end()
        homes[talk] = choice.server
    assert len(set(homes.values())) == 4, "idle servers take turns"
    for talk, home in homes.items():
        choice = router.choose(prompt(words(talk), "answer", words(99)), servers)
        assert choice.server is home
        assert choice.cached_tokens > 0.4 * choice.num_tokens


def test_queued_tokens_outweigh_a_cached_prefix() -> None:
    """All prompts begin alike, and nothing is ever answered: no server gets everything."""
    router = Router()
    servers = fleet(router, 4)
    system = words(0, 3000)
    counts: Counter[str] = Counter()
    for number in range(400):
        asked = prompt(system, "ok", words(number + 1, 300))
        choice = router.choose(asked, servers)
        router.send(asked, choice)
        counts[choice.server.name] += 1
    assert max(counts.values()) / 100 <= 1.3


def test_weights_divide_the_cost() -> None:
    router = Router()
    small, large = ServerCandidate("small", router), ServerCandidate("large", router, weight=3)
    counts: Counter[str] = Counter()
    for number in range(400):
        asked = prompt(words(number, 200))
        choice = router.choose(asked, [small, large])
        router.send(asked, choice)
        counts[choice.server.name] += 1
    assert counts["large"] == pytest.approx(300, abs=10)


def test_a_ticket_takes_back_what_it_added_whatever_the_order() -> None:
    router = Router()
    (server,) = fleet(router, 1)
    asked = prompt(words(1))
    tickets = [router.send(asked, router.choose(asked, [server])) for _ in range(4)]
    assert server.queued_tokens > 0
    tickets[0].begin()
    tickets[0].begin()
    assert (server.num_queued, server.num_running) == (3, 1)
    for ticket in tickets * 2:
        ticket.end()
        ticket.begin()
    assert (server.queued_tokens, server.num_queued, server.num_running) == (0, 0, 0)


def test_a_queue_is_measured_in_the_time_that_its_server_takes() -> None:
    router = Router()
    server = ServerCandidate("a", router)
    assert server.queue_s == 0.0
    server.queued_tokens = 4000
    assert server.queue_s == 4000 / UNKNOWN_TOKENS_PER_S
    server.note_pace(100, 10.0)  # too short to say anything
    server.note_pace(8000, 0.0)
    assert server.tokens_per_s == 0.0
    server.note_pace(8000, 0.5)
    assert server.queue_s == pytest.approx(0.25)
    server.note_pace(8000, 1.0)
    assert 8000 < server.tokens_per_s < 16000, "a mean, in which the newest counts for a part"


def test_a_restarted_server_has_nothing() -> None:
    router = Router()
    servers = fleet(router, 2)
    asked = prompt(words(1))
    choice = router.choose(asked, servers)
    router.send(asked, choice).end()
    assert router.choose(asked, servers).cached_tokens > 0
    choice.server.forget()
    assert [found.cached_tokens for found in router.costs(asked, servers)] == [0, 0]


def test_events_count_and_what_was_sent_just_now() -> None:
    """A burst of equal prompts goes where the first one went, before any event says that it is there."""
    clock = Clock()
    router = Router(clock=clock)
    servers = fleet(router, 3)
    for server in servers:
        server.event_bits = router.bits.take()
    asked = prompt(words(1))
    keys = asked.of(TEXT).keys
    first = router.choose(asked, servers)
    router.send(asked, first).end()
    assert router.choose(asked, servers).server is first.server
    clock.now_s += 30
    assert [found.cached_tokens for found in router.costs(asked, servers)] == [0, 0, 0], "no event ever came"
    for key in keys:
        router.table.add(key, servers[2].event_bits)
    assert router.choose(asked, servers).server is servers[2]
    router.table.remove(keys[0], servers[2].event_bits)
    assert [found.cached_tokens for found in router.costs(asked, servers)] == [0, 0, 0]


def test_a_prompt_is_hashed_once_for_servers_of_one_scheme() -> None:
    calls = []

    class Counted(TokenScheme):
        def keyed(self, call, tokens):  # type: ignore[no-untyped-def]
            calls.append(call)
            return super().keyed(call, tokens)

    router = Router()
    scheme = Counted()
    servers = [ServerCandidate(f"s{number}", router, scheme=scheme) for number in range(5)]
    asked = PromptKeys(chat("x"), list(range(5000)))
    router.send(asked, router.choose(asked, servers))
    assert len(calls) == 1
