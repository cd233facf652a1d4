"""The part of `headwater bench engine` about n-gram drafts: one request on the CPU, with and without them, in turns.

Two tasks, greedy: to repeat a text, where nearly all drafts are right, and to tell a story, where nearly none are.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from headwater.bench.measure import Note, take_turns
from headwater.engine.config import EngineConfig
from headwater.engine.engine import Engine
from headwater.engine.params import SamplingParams
from headwater.errors import ModelError
from headwater.models.checkpoint import Checkpoint

_TEXT = (
    "The harbour of Aldermouth lies at the mouth of a slow brown river, between two hills of slate. Its first "
    "stone pier was built in 1642 by fishermen who had grown tired of dragging their boats across the mud at "
    "low tide. A second pier followed in 1719, after a storm had carried off the end of the first. The town "
    "grew rich on herring, then poor when the herring went elsewhere, and then modestly comfortable again when "
    "a railway brought visitors from the inland mills. The lighthouse on the northern hill was lit with whale "
    "oil until 1851, with paraffin until 1926, and with electricity since. Its keeper, Thomas Varley, kept a "
    "diary of every ship that passed for thirty-one years."
)
DRAFTS_FIGURES = ("ngram_quote_ratio", "ngram_story_ratio")
TASKS = {
    "quote": f"Repeat the following text word for word:\n\n{_TEXT}",
    "story": "Write a story about a lighthouse keeper who finds a strange bottle.",
}


@dataclass(frozen=True)
class DraftsBench:
    """How much to generate, and how often."""

    num_drafts: int = 8
    output_tokens: int = 96
    pairs: int = 9
    num_threads: int = 1
    """One request leaves several threads waiting for each other, and for whatever else the machine does."""


class _Side:
    """One engine; its last answer and the steps that it took."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.answer: list[int] = []
        self.num_steps = 0

    def serve(self, prompt: list[int], output_tokens: int) -> float:
        """Seconds from the first token to the last: the prompt is computed alike on both sides."""
        engine, answer = self._engine, list[int]()
        engine.reset_prefix_cache()
        engine.add("0", prompt, SamplingParams(max_tokens=output_tokens, temperature=0.0, ignore_eos=True))
        while not answer:
            answer += [token for output in engine.step() for token in output.token_ids]
        begun, num_steps = time.perf_counter(), engine.stats().num_steps
        while engine.has_work:
            answer += [token for output in engine.step() for token in output.token_ids]
        self.answer, self.num_steps = answer, engine.stats().num_steps - num_steps
        return time.perf_counter() - begun


def bench_drafts(bench: DraftsBench, checkpoint: Checkpoint, note: Note) -> dict[str, Any]:
    """Measure both tasks; plain data for JSON. Takes minutes, and the memory of two copies of the weights."""
    try:
        tokenizer = checkpoint.load_tokenizer()
    except ModelError as error:
        return {"ngram_reason": str(error)}
    if not tokenizer.has_chat_template:
        return {"ngram_reason": "the model has no chat template, so it cannot be given a task"}
    report: dict[str, Any] = {
        "ngram_drafts": bench.num_drafts,
        "ngram_output_tokens": bench.output_tokens,
        "ngram_threads": bench.num_threads,
    }
    config = EngineConfig(
        model=str(checkpoint.path), device="cpu", dtype="float32", max_model_len=1024, num_threads=bench.num_threads
    )
    drafting = replace(config, speculative_ngram=bench.num_drafts)
    with Engine(config, checkpoint=checkpoint) as plain, Engine(drafting, checkpoint=checkpoint) as ngram:
        off, on = _Side(plain), _Side(ngram)
        for task, text in TASKS.items():
            note(f"n-gram drafts: {task}")
            prompt = tokenizer.apply_chat_template([{"role": "user", "content": text}])
            run = partial(_Side.serve, prompt=prompt, output_tokens=bench.output_tokens)
            turns = {"off": partial(run, off), "again": partial(run, off), "on": partial(run, on)}
            rounds = take_turns(turns, bench.pairs)
            report |= {
                f"ngram_{task}_ratio": rounds.ratio("off", "on"),
                f"ngram_{task}_noise": rounds.noise("off", "again"),
                f"ngram_{task}_tokens_per_step": (len(on.answer) - 1) / on.num_steps,
                f"ngram_{task}_same_answer": on.answer == off.answer,
            }
    return report
