"""Engines that share KV through a pool, against what `transformers` says: what the tests of the two have in common."""

from __future__ import annotations

import gc
import logging
import os
import random
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from headwater.engine.config import EngineConfig
from headwater.engine.engine import Engine
from headwater.engine.params import SamplingParams

from engine_models import VOCAB, Comparison, Reference, greedy_reference, load_transformers, save_random_checkpoint
from support import wait_until

NUM_TOKENS = 40
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)

Oracle = Callable[[int], tuple[Path, list[Reference]]]
"""(checkpoint, references) by number of KV heads."""


def make_oracle(factory: pytest.TempPathFactory, **overrides: Any) -> Oracle:
    """An oracle that computes each answer once: two prompts that share 300 tokens, and one of its own."""
    known: dict[int, tuple[Path, list[Reference]]] = {}

    def ask(kv_heads: int) -> tuple[Path, list[Reference]]:
        if kv_heads not in known:
            heads = 12 if kv_heads == 6 else 8
            shape = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "hidden_size": 8 * heads}
            path = save_random_checkpoint("llama", factory.mktemp("model"), seed=kv_heads, **shape, **overrides)
            known[kv_heads] = path, _references(path, kv_heads)
        return known[kv_heads]

    return ask


def make_family_oracle(factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, list[Reference]]]:
    """The same by family, in the shape that `engine_models` gives it."""
    known: dict[str, tuple[Path, list[Reference]]] = {}

    def ask(family: str) -> tuple[Path, list[Reference]]:
        if family not in known:
            path = save_random_checkpoint(family, factory.mktemp(family))
            known[family] = path, _references(path, 7)
        return known[family]

    return ask


def _references(path: Path, seed: int) -> list[Reference]:
    rng = random.Random(seed)
    first = [rng.randrange(3, VOCAB) for _ in range(530)]
    prompts = [first, [*first[:300], 5, 6, 7], [rng.randrange(3, VOCAB) for _ in range(270)]]
    torch.set_num_threads(1)
    model = load_transformers(path)
    return [greedy_reference(model, prompt, NUM_TOKENS) for prompt in prompts]


def small_config(path: Path, **settings: Any) -> EngineConfig:
    """An engine with room for all three prompts. Its layers are small, and still each travels by itself."""
    defaults = {"device": "cpu", "max_model_len": 600, "num_pages": 120, "num_threads": 1, "pool_group_bytes": 1}
    return EngineConfig(model=str(path), **{**defaults, **settings})


Answers = tuple[list[list[int]], list[int]]
"""(tokens, cached tokens) of each prompt."""


def generate(
    engine: Engine,
    references: list[Reference],
    between: Iterable[Callable[[], None]] = (),
    params: SamplingParams = GREEDY,
) -> Answers:
    """Ask all prompts at once. `between`: what to do after each of the first steps."""
    tokens: dict[str, list[int]] = {}
    cached: dict[str, int] = {}
    events = iter(between)
    for number, reference in enumerate(references):
        engine.add(str(number), reference.prompt, params)
    while engine.has_work:
        for output in engine.step():
            tokens.setdefault(output.request_id, []).extend(output.token_ids)
            cached[output.request_id] = output.num_cached_tokens
        next(events, lambda: None)()
    engine.check_integrity()
    numbers = [str(number) for number in range(len(references))]
    return [tokens[n] for n in numbers], [cached[n] for n in numbers]


def check_tokens(where: str, references: list[Reference], got: list[list[int]], totals: Comparison) -> None:
    """Fail unless the tokens are the references' (ties apart, which are counted)."""
    compared = Comparison()
    for number, (reference, tokens) in enumerate(zip(references, got, strict=True)):
        compared.add(f"{where}, prompt {number}", reference, tokens)
    totals.num_tokens += compared.num_tokens
    totals.num_ties += compared.num_ties
    assert not compared.wrong, "\n".join(compared.wrong)


@contextmanager
def logged_as_text() -> Iterator[None]:
    """Log records hold no errors: pytest keeps records, and an error's traceback keeps what its frames had open."""
    usual = logging.getLogRecordFactory()

    def make(*args: Any, **more: Any) -> logging.LogRecord:
        record = usual(*args, **more)
        record.msg, record.args = record.getMessage(), None
        if record.exc_info:
            record.exc_text, record.exc_info = logging.Formatter().formatException(record.exc_info), None
        return record

    logging.setLogRecordFactory(make)
    try:
        yield
    finally:
        logging.setLogRecordFactory(usual)


@contextmanager
def nothing_left() -> Iterator[None]:
    """Threads and descriptors that were opened inside are closed at the end."""

    def held() -> tuple[set[str], set[str]]:
        gc.collect()
        links = set()
        for name in os.listdir("/proc/self/fd"):
            try:
                links.add(f"{name} {os.readlink(f'/proc/self/fd/{name}')}")
            except FileNotFoundError:
                continue  # the one that listed them
        return {f"{t.ident} {t.name}" for t in threading.enumerate()}, links

    before = held()
    with logged_as_text():
        yield
    left: list[set[str]] = []

    def nothing() -> bool:
        left[:] = [now - then for now, then in zip(held(), before, strict=True)]
        return not any(left)

    try:
        wait_until(nothing)
    except AssertionError:
        raise AssertionError(f"left behind: threads {left[0]}, descriptors {left[1]}") from None
