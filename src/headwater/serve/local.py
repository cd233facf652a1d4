"""One conversation in this process: engine, tokenizer and text, without a server. For the terminal commands."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Self

from headwater.engine.config import EngineConfig
from headwater.engine.engine import Engine
from headwater.engine.params import SamplingParams
from headwater.errors import HeadwaterError
from headwater.models.checkpoint import open_checkpoint
from headwater.models.tokenizer import StreamDecoder
from headwater.serve.output import Delta, TextOutput, stopping_at
from headwater.serve.replies import Usage

_REQUEST_ID = "local"


class LocalModel:
    """A loaded model that answers one prompt at a time. Close it, or use it as a context manager.

    Making one takes seconds and as much memory as the weights; raises ModelError, EngineConfigError, MemoryBudgetError.
    """

    def __init__(self, config: EngineConfig, progress: Callable[[int, int], None]) -> None:
        checkpoint = open_checkpoint(config.model, config.load_format)
        self.tokenizer = checkpoint.load_tokenizer()
        self._eos_token_ids = checkpoint.config.eos_token_ids
        own = set(self.tokenizer.eos_token_ids) - set(self._eos_token_ids)
        self._end_ids = sorted(token_id for token_id in own if token_id < checkpoint.config.vocab_size)
        self._engine = Engine(config, checkpoint=checkpoint, progress=progress)
        self.label = checkpoint.label
        self.note = self._engine.placement.reason
        self.usage = Usage(0, 0, 0)
        """Of the last answer."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def answer(self, prompt: Sequence[int], params: SamplingParams) -> Iterator[Delta]:
        """Generate; the last delta has the finish reason. Leaving the loop early, even by Ctrl-C, ends the request.

        Raises RequestError if the prompt is too long.
        """
        params = stopping_at(params, self._end_ids)
        text = TextOutput(StreamDecoder(self.tokenizer), params, self._eos_token_ids)
        try:
            self._engine.add(_REQUEST_ID, prompt, params)
            while text.finish_reason is None:
                for output in self._engine.step():
                    delta = text.feed(output)
                    self.usage = Usage(output.num_prompt_tokens, output.num_cached_tokens, text.num_tokens)
                    yield delta
        except BaseException:  # the loop was left, or Ctrl-C came in the middle of a step
            with suppress(HeadwaterError):  # a broken engine has said so already
                self._end()
            raise
        self._end()

    def _end(self) -> None:
        """The engine forgets the request, which it may not have finished itself (a stop string; nobody listens)."""
        self._engine.abort(_REQUEST_ID)
        while self._engine.has_work:
            self._engine.step()

    def close(self) -> None:
        """Free the engine. Idempotent."""
        self._engine.close()
