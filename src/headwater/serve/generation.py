"""From a checked call to deltas of text: tokenising, admission, the engine, decoding, and the metrics of all that."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any, NamedTuple, Protocol, Self

from headwater.connector.transfers import KEY
from headwater.errors import HeadwaterError, RequestError
from headwater.models.tokenizer import StreamDecoder
from headwater.serve.client import Arrival, EngineClient, Flight, GenerationJob
from headwater.serve.metrics import ServerMetrics
from headwater.serve.openai import LARGE_BODY_BYTES, Call, Limits
from headwater.serve.output import Delta, TextOutput, stopping_at
from headwater.serve.replies import Usage
from headwater.serve.tokenising import Encoder, TextLimits, at_once, tokenise
from headwater.serve.workers import TextWorkers

MAX_ANSWER_VALUES = 1 << 20
"""Tokens and log-probabilities of an answer that is not streamed (or 8 contexts, if that is more). One takes some 70
bytes of JSON, which the server keeps until the last of them is there."""


class ServerTokenizer(Encoder, Protocol):
    """What the server needs of `headwater.models.tokenizer.Tokenizer`. Calls may come from several threads at once."""

    @property
    def eos_token_ids(self) -> Sequence[int]: ...
    def decode(self, token_ids: Sequence[int], skip_special: bool = True) -> str: ...
    def token_text(self, token_id: int) -> str: ...
    def token_bytes(self, token_id: int, *, begins_text: bool = False) -> bytes | None: ...


class ChoiceDelta(NamedTuple):
    """A delta and the choice it belongs to."""

    choice: int
    delta: Delta


class Generator:
    """Takes calls to one engine. At most `max_sequences` are with it at a time; more are refused at once.

    A sequence counts until it leaves the engine, not until somebody has read its text: a client that does not read
    takes no room from others.
    """

    def __init__(
        self, client: EngineClient, tokenizer: ServerTokenizer, metrics: ServerMetrics, *, max_sequences: int
    ) -> None:
        self.client = client
        self.tokenizer = tokenizer
        self.metrics = metrics
        self.workers = TextWorkers()
        """For what would keep the event loop too long."""
        self._max_sequences = max_sequences
        self._max_call_sequences = min(max_sequences, max(client.ready.max_num_seqs, max_sequences // 2))
        """One call leaves room for others, and can fill a step of the engine."""
        self._num_preparing = 0
        """Sequences of calls that are being tokenised."""
        ready = client.ready
        self._text_limits = TextLimits(ready.max_model_len, tokenizer.text_bound())
        # The engine stops at the ids of the checkpoint's configs; some checkpoints name one in the tokenizer alone.
        own = set(tokenizer.eos_token_ids) - set(ready.eos_token_ids)
        self._end_ids = sorted(token_id for token_id in own if token_id < ready.vocab_size)

    @property
    def limits(self) -> Limits:
        """What of a call can be refused before it is looked at closely."""
        return Limits(self._max_call_sequences, self._text_limits.max_model_len, self._text_limits.max_call_tokens)

    def close(self) -> None:
        """Fail what is being tokenised; calls fail from now on. Idempotent."""
        self.workers.close()

    async def begin(self, call: Call) -> Generation:
        """Tokenise and send to the engine. Raises RequestError for what the engine or this server cannot take now."""
        arrival_s = time.monotonic()
        if not call.stream:
            self._check_answer(call)
        self._admit(call.num_sequences)
        try:
            prompts = await self._tokenise(call)
        finally:
            # The client counts them from here on: `submit` registers them before it waits for anything.
            self._num_preparing -= call.num_sequences
        call = replace(call, params=stopping_at(call.params, self._end_ids))
        jobs = [
            GenerationJob(prompt, call.params_of(choice), call.cache_salt, call.transfer)
            for prompt in prompts
            for choice in range(call.num_choices)
        ]
        return Generation(self, call, await self.client.submit(jobs), arrival_s)

    def _check_answer(self, call: Call) -> None:
        """Refuse what would be too large to be kept until its end."""
        context = self.client.ready.max_model_len
        num_tokens = min(call.params.max_tokens or context, context)
        num_logprobs = 0 if call.params.logprobs is None else call.params.logprobs
        num_values = call.num_sequences * num_tokens * (1 + num_logprobs)
        most = max(MAX_ANSWER_VALUES, 8 * context)
        if num_values > most:
            text = (
                f"the answer may have {call.num_sequences} sequences x {num_tokens} tokens x (1 + {num_logprobs} "
                f"log-probabilities) = {num_values} values; expected at most {most}. Lower n, max_tokens or "
                "logprobs, send fewer prompts, or set stream to true, which has no such bound"
            )
            raise RequestError(text, param="max_tokens")

    def _admit(self, num_sequences: int) -> None:
        if num_sequences > self._max_call_sequences:
            text = (
                f"the call asks for {num_sequences} sequences (n x prompts); expected at most "
                f"{self._max_call_sequences} of the {self._max_sequences} that this server has for all clients"
            )
            raise RequestError(text, param="n")
        num_taken = self._num_preparing + self.client.num_in_flight
        if num_taken + num_sequences > self._max_sequences:
            text = (
                f"{num_taken} sequences are running or waiting, of {self._max_sequences} that this server takes; "
                f"there is no place for {num_sequences} more now, try again later"
            )
            raise RequestError(text, code="overloaded")
        self._num_preparing += num_sequences

    async def _tokenise(self, call: Call) -> list[list[int]]:
        job = tokenise(self.tokenizer, call, self._text_limits)
        prompts = at_once(job) if call.num_body_bytes <= LARGE_BODY_BYTES else await self.workers.run(job)
        param = "messages" if call.is_chat else "prompt"
        for prompt in prompts:
            self._check(prompt, param)
        return prompts

    def _check(self, prompt: list[int], param: str) -> None:
        ready = self.client.ready
        if not prompt:
            raise RequestError(f"{param} gives no tokens; expected at least one", param=param)
        if max(prompt) >= ready.vocab_size:
            text = f"{param} has token id {max(prompt)}; expected less than {ready.vocab_size}"
            raise RequestError(text, param=param)


class _Sequence:
    """What is counted of one sequence."""

    def __init__(self, text: TextOutput) -> None:
        self.text = text
        self.last_s: float | None = None
        self.num_prompt_tokens = 0
        self.num_cached_tokens = 0
        self.num_sent_tokens: int | None = None


class Generation:
    """A call on its way, without the text of its prompts. Leave its `with` block, for whatever reason, and what still
    runs is aborted."""

    def __init__(self, generator: Generator, call: Call, flight: Flight, arrival_s: float) -> None:
        self._metrics = generator.metrics
        self._num_choices = call.num_choices
        self._transfer = call.transfer
        self._flight = flight
        self._arrival_s = arrival_s
        tokenizer, eos_token_ids = generator.tokenizer, generator.client.ready.eos_token_ids
        self._sequences = [
            _Sequence(TextOutput(StreamDecoder(tokenizer), call.params, eos_token_ids))
            for _ in range(call.num_sequences)
        ]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._flight.close()
        outcome = "error" if isinstance(error, HeadwaterError) else "abort"
        for sequence in self._sequences:
            if sequence.text.finish_reason is None:
                self._metrics.sequences.labels(outcome).inc()

    async def next(self) -> list[ChoiceDelta]:
        """The next deltas, those that say nothing left out; empty when all choices have ended.

        Raises RequestError if the engine refuses the call, EngineDeadError if it dies.
        """
        while arrivals := await self._flight.next():
            deltas = [self._take(arrival) for arrival in arrivals]
            if said := [item for item in deltas if item is not None]:
                return said
        return []

    @property
    def num_sequences(self) -> int:
        """Choices of all prompts."""
        return len(self._sequences)

    @property
    def usage(self) -> Usage:
        """Tokens so far. A prompt counts once, however many choices it has."""
        firsts = self._sequences[:: self._num_choices]
        return Usage(
            sum(sequence.num_prompt_tokens for sequence in firsts),
            sum(sequence.num_cached_tokens for sequence in firsts),
            sum(sequence.text.num_tokens for sequence in self._sequences),
        )

    @property
    def transfer_params(self) -> dict[str, Any] | None:
        """What the answer says of KV that was to go to another server; None where none was."""
        if self._transfer is None or not self._transfer.push_to:
            return None
        sent = min((sequence.num_sent_tokens or 0 for sequence in self._sequences), default=0)
        return {KEY: {"transfer": self._transfer.id, "sent_tokens": sent}}

    def _take(self, arrival: Arrival) -> ChoiceDelta | None:
        index, output, time_s = arrival
        sequence = self._sequences[index]
        if sequence.text.finish_reason is not None:
            return None  # it ended at a stop string, and this was already on its way
        num_before = sequence.text.num_tokens
        delta = sequence.text.feed(output)
        sequence.num_sent_tokens = output.num_sent_tokens
        self._count(sequence, output.num_prompt_tokens, output.num_cached_tokens, num_before, time_s)
        if delta.finish_reason is not None:
            self._flight.finish(index)
            self._metrics.sequences.labels(delta.finish_reason.value).inc()
            self._metrics.sequence_s.observe(time_s - self._arrival_s)
        if not (delta.text or delta.logprobs or delta.finish_reason):
            return None
        return ChoiceDelta(index, delta)

    def _count(self, sequence: _Sequence, num_prompt: int, num_cached: int, num_before: int, time_s: float) -> None:
        num_new = sequence.text.num_tokens - num_before
        if not num_new:
            return
        self._metrics.generated_tokens.inc(num_new)
        if sequence.last_s is None:
            sequence.num_prompt_tokens, sequence.num_cached_tokens = num_prompt, num_cached
            self._metrics.prompt_tokens.inc(num_prompt)
            self._metrics.cached_tokens.inc(num_cached)
            self._metrics.first_token_s.observe(time_s - self._arrival_s)
        else:
            for _ in range(num_new):
                self._metrics.inter_token_s.observe((time_s - sequence.last_s) / num_new)
        sequence.last_s = time_s
