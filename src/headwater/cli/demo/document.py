"""What the demo asks about: a log book as long as anyone wants, the same in every run, and a question about it."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import NamedTuple

_WINDS = ("north", "north-east", "east", "south-east", "south", "south-west", "west", "north-west")
_SIGHTINGS = ("a heron", "two otters", "a barge with timber", "nothing unusual", "some canoes", "ice at the bank")
_OPENING = "This is the log book of the gauge at the head of the river.\n"


class Question(NamedTuple):
    """A document with a question at its end."""

    text: str
    about: str


def make_question(num_tokens: int, count_tokens: Callable[[str], int]) -> Question:
    """A document of about so many tokens, and a question about its last day."""
    rng = random.Random(7)
    lines, left, day = [_OPENING], num_tokens - count_tokens(_OPENING) - 40, 0
    while left > 0:
        day += 1
        level = rng.randrange(80, 400)
        line = (
            f"Day {day}: the water stood at {level} cm, the wind came from the {rng.choice(_WINDS)}, "
            f"the ferry carried {rng.randrange(2, 90)} people, and the keeper saw {rng.choice(_SIGHTINGS)}.\n"
        )
        lines.append(line)
        left -= count_tokens(line)
    about = f"According to the log book, how high did the water stand on day {day}?"
    return Question("".join(lines) + "\n" + about, about)
