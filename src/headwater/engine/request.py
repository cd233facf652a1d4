"""One request on its way through the engine: integer arithmetic over its tokens, and the pages it holds.

    0 ────────── num_computed ────────── len(tokens) ── num_tokens
    │ KV in pages, or being written │ known, to compute │ in flight │

Tokens in flight were sampled by a step whose result has not reached the host yet; only the device knows them. Where the
step had drafts, some of them may turn out never to have been said. Drafts themselves are not among the tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from headwater.engine.params import FinishReason, SamplingParams

if TYPE_CHECKING:
    from headwater.connector.transfers import TransferParams
    from headwater.engine.pages import PageId
    from headwater.engine.prefix.base import Handle
    from headwater.engine.sampler import TokenCounts


class Request:
    """The state of one request. The scheduler is the only one that changes it."""

    __slots__ = (
        "arrival",
        "counts",
        "finish_reason",
        "handle",
        "id",
        "is_loading",
        "max_tokens",
        "num_assumed",
        "num_cached",
        "num_computed",
        "num_in_flight",
        "num_prompt",
        "page_row",
        "pages",
        "params",
        "sample_index",
        "seed",
        "stop_ids",
        "tenant",
        "tokens",
        "transfer",
    )

    def __init__(
        self,
        request_id: str,
        prompt: list[int],
        params: SamplingParams,
        *,
        arrival: int,
        max_tokens: int,
        stop_ids: frozenset[int],
        seed: int,
        max_pages: int,
        tenant: bytes = b"",
        transfer: TransferParams | None = None,
    ) -> None:
        self.id = request_id
        self.params = params
        self.arrival = arrival
        """Order of arrival: the only thing that decides who goes first and who is preempted."""
        self.tokens = prompt
        self.num_prompt = len(prompt)
        self.max_tokens = max_tokens
        """Output tokens at most: what was asked for, or what the context leaves."""
        self.stop_ids = stop_ids
        self.seed = seed
        self.tenant = tenant
        """Whose KV it may use: requests of different tenants share none, here or in the pool."""
        self.transfer = transfer
        """What it says of KV that another server sends."""
        self.num_computed = 0
        self.num_in_flight = 0
        self.sample_index = -1
        """Where the last token in flight stands in the last step's samples."""
        self.pages: list[PageId] = []
        self.page_row: npt.NDArray[np.int32] = np.zeros(max_pages, dtype=np.int32)
        """`pages` as a row of the step's page table, kept up to date so that a step only copies it."""
        self.handle: Handle | None = None
        """What this request pins in the prefix cache: the first `handle.num_tokens` tokens."""
        self.num_cached: int | None = None
        """Prompt tokens found in the cache at the first admission; None before it."""
        self.is_loading = False
        """Its KV is on the way from the pool into its pages: nobody else may have them, and it cannot run, unless …"""
        self.num_assumed = 0
        """… it runs at the same time, as if the KV of so many tokens were there, and takes its step back if not."""
        self.finish_reason: FinishReason | None = None
        self.counts: TokenCounts | None = None
        """What penalties need to know of `tokens`, kept by the sampler from one token to the next."""

    @property
    def num_tokens(self) -> int:
        """Prompt and output, those in flight included."""
        return len(self.tokens) + self.num_in_flight

    @property
    def num_uncomputed(self) -> int:
        """Tokens whose KV must be computed before the next one can be sampled."""
        return self.num_tokens - self.num_computed

    @property
    def num_outputs(self) -> int:
        """Tokens sampled so far, those in flight included."""
        return self.num_tokens - self.num_prompt

    @property
    def wants_more(self) -> bool:
        """Whether another token may be sampled, as far as counting tells (a stop token in flight is not known)."""
        return self.finish_reason is None and self.num_outputs < self.max_tokens

    @property
    def room_for_drafts(self) -> int:
        """How many drafts the next step may check: it gives one token in any case, and none beyond `max_tokens`."""
        return 0 if self.num_in_flight else self.max_tokens - self.num_outputs - 1

    def set_pages(self, pages: list[PageId]) -> None:
        """Replace all pages."""
        self.pages = pages
        self.page_row[: len(pages)] = pages

    def add_pages(self, pages: list[PageId]) -> None:
        """Append newly allocated pages."""
        self.page_row[len(self.pages) : len(self.pages) + len(pages)] = pages
        self.pages += pages


class SampleRow(NamedTuple):
    """A row of logits to sample from: what follows the request's tokens and, as if they had been said, some drafts."""

    request: Request
    drafted: tuple[int, ...] = ()

    @property
    def num_outputs(self) -> int:
        """Tokens that the request has said before this one, the drafts included."""
        return self.request.num_outputs + len(self.drafted)
