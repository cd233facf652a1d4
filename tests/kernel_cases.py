"""Random inputs for kernels, shared by the tests that run on the CPU and on a GPU.

Everything that a kernel must not read (unused pages, the tail of a last page, the gaps between strided rows) is NaN.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from headwater.kernels.attention import AttentionBackend, AttentionBatch
from headwater.kernels.rope import RopeOrder

PAGE_SIZES = (1, 3, 16, 48)
HEAD_DIMS = (8, 16, 64, 80, 128)
LAYOUTS = ("layer-first", "page-first")


def relative_error(got: Tensor, expected: Tensor) -> float:
    """‖got − expected‖ / ‖expected‖, in float64; NaN anywhere makes it NaN, which passes no bound."""
    got, expected = got.double(), expected.double()
    return float((got - expected).norm() / expected.norm().clamp_min(1e-30))


def tolerance(dtype: torch.dtype) -> float:
    """What rounding alone may cost."""
    return 1e-5 if dtype == torch.float32 else 1e-2


def empty_pages(
    num_pages: int, page_size: int, heads: int, dim: int, *, layout: str, device: str, dtype: torch.dtype
) -> Tensor:
    """Pages full of NaN, alone or (page-first) as one plane among others within each page."""
    if layout == "layer-first":
        return torch.full((num_pages, page_size, heads, dim), float("nan"), device=device, dtype=dtype)
    shape = (num_pages, 3, page_size, heads, dim)
    return torch.full(shape, float("nan"), device=device, dtype=dtype)[:, 1]


@dataclass(frozen=True)
class AttentionShape:
    """What is asked for; `page_table` and values are drawn from `seed`."""

    query_lens: tuple[int, ...]
    prefix_lens: tuple[int, ...]
    num_decodes: int
    page_size: int = 16
    kv_heads: int = 2
    group: int = 4
    dim: int = 64
    v_dim: int | None = None
    layout: str = "layer-first"
    seed: int = 0


@dataclass
class AttentionCase:
    """Arguments of `AttentionBackend.plan` and `run`."""

    shape: AttentionShape
    device: str = "cpu"
    dtype: torch.dtype = torch.float32
    batch: AttentionBatch = field(init=False)
    q: Tensor = field(init=False)
    k_pages: Tensor = field(init=False)
    v_pages: Tensor = field(init=False)

    def __post_init__(self) -> None:
        shape, device, dtype = self.shape, self.device, self.dtype
        torch.manual_seed(shape.seed)
        kv_lens = tuple(q + p for q, p in zip(shape.query_lens, shape.prefix_lens, strict=True))
        counts = [-(-kv_len // shape.page_size) for kv_len in kv_lens]
        num_pages = sum(counts) + 2
        page_ids = list(range(num_pages))
        random.Random(shape.seed).shuffle(page_ids)
        poisoned = page_ids.pop()

        def pages(width: int) -> Tensor:
            return empty_pages(
                num_pages, shape.page_size, shape.kv_heads, width, layout=shape.layout, device=device, dtype=dtype
            )

        self.k_pages, self.v_pages = pages(shape.dim), pages(shape.v_dim or shape.dim)
        table = torch.full((len(kv_lens), max(counts) + 1), poisoned, dtype=torch.int32)
        for request, (kv_len, count) in enumerate(zip(kv_lens, counts, strict=True)):
            owned = torch.tensor([page_ids.pop() for _ in range(count)])
            table[request, :count] = owned.int()
            token = torch.arange(kv_len)
            where = owned[token // shape.page_size].to(device), (token % shape.page_size).to(device)
            for plane in (self.k_pages, self.v_pages):
                plane[where] = torch.randn(kv_len, *plane.shape[2:], device=device).to(dtype)
        starts = torch.tensor((0, *shape.query_lens)).cumsum(0).int()
        heads = shape.kv_heads * shape.group
        # A slice of a fused QKV product, as in a model: rows are strided.
        fused = torch.full((int(starts[-1]), heads + 3, shape.dim), float("nan"), device=device, dtype=dtype)
        self.q = fused[:, :heads]
        self.q.copy_(torch.randn(self.q.shape, device=device))
        self.batch = AttentionBatch(
            query_starts=starts.to(device),
            kv_lens=torch.tensor(kv_lens, dtype=torch.int32, device=device),
            page_table=table.to(device),
            query_lens_cpu=shape.query_lens,
            kv_lens_cpu=kv_lens,
            num_decodes=shape.num_decodes,
            page_size=shape.page_size,
        )

    @property
    def scale(self) -> float:
        return self.shape.dim**-0.5


@dataclass
class LatentCase:
    """Arguments of `run_latent`: the planes of one layer, and queries that are slices of something wider."""

    shape: AttentionShape
    device: str = "cpu"
    dtype: torch.dtype = torch.float32
    rope: int = 16
    empty: tuple[int, ...] = ()
    """Requests of whose tokens nothing is here, as on a rank that holds others."""

    def __post_init__(self) -> None:
        shape = replace(self.shape, kv_heads=1, v_dim=self.rope)
        whole = AttentionCase(shape, device=self.device, dtype=self.dtype)
        self.latent_pages, self.rope_pages = whole.k_pages, whole.v_pages
        self.q_latent = whole.q
        fused = torch.full((len(whole.q), shape.group, 5 + self.rope), float("nan"), dtype=self.dtype)
        fused[..., 5:] = torch.randn(len(whole.q), shape.group, self.rope)
        self.q_rope = fused.to(self.device)[..., 5:]
        kv_lens = tuple(0 if i in self.empty else n for i, n in enumerate(whole.batch.kv_lens_cpu))
        held = torch.tensor(kv_lens, dtype=torch.int32, device=self.device)
        self.batch = replace(whole.batch, kv_lens=held, kv_lens_cpu=kv_lens)
        self.scale = 1.3 * (shape.dim + self.rope) ** -0.5

    def run(self, backend: AttentionBackend) -> tuple[Tensor, Tensor]:
        """(out, lse)."""
        lse = torch.full(self.q_latent.shape[:2], float("nan"), dtype=torch.float32, device=self.device)
        args = (self.q_latent, self.q_rope, self.latent_pages, self.rope_pages)
        return backend.run_latent(*args, backend.plan(self.batch), self.scale, lse), lse


def random_latent_case(
    rng: random.Random, *, device: str = "cpu", dtype: torch.dtype = torch.float32, max_prefix: int = 100
) -> LatentCase:
    """A mixed batch over latents, some requests without a token here."""
    shape = random_shape(rng, max_query=12, max_prefix=max_prefix)
    shape = replace(shape, group=rng.choice((1, 4, 5, 16, 40)), dim=rng.choice((16, 24, 64)))
    empty = tuple(i for i in range(len(shape.query_lens)) if rng.random() < 0.2)
    return LatentCase(shape, device=device, dtype=dtype, rope=rng.choice((8, 16, 24)), empty=empty)


def random_shape(
    rng: random.Random, *, max_requests: int = 4, max_query: int = 40, max_prefix: int = 100
) -> AttentionShape:
    """A mixed batch: some decodes, then some prefills, each with or without a prefix."""
    num_requests = rng.randint(1, max_requests)
    num_decodes = rng.randint(0, num_requests)
    dim = rng.choice(HEAD_DIMS)
    return AttentionShape(
        query_lens=tuple(1 if i < num_decodes else rng.randint(1, max_query) for i in range(num_requests)),
        prefix_lens=tuple(rng.choice((0, rng.randint(0, max_prefix))) for _ in range(num_requests)),
        num_decodes=num_decodes,
        page_size=rng.choice(PAGE_SIZES),
        kv_heads=rng.choice((1, 2, 3)),
        group=rng.randint(1, 8),
        dim=dim,
        v_dim=rng.choice((dim, dim, 24)),
        layout=rng.choice(LAYOUTS),
        seed=rng.randrange(2**31),
    )


@dataclass
class RopeCase:
    """Arguments of `rope_and_store`, with q, k and v as slices of one fused product and poisoned pages."""

    rows: int
    heads: int
    kv_heads: int
    dim: int
    page_size: int
    layout: str
    seed: int
    device: str = "cpu"
    dtype: torch.dtype = torch.float32
    width: int | None = None
    """How much of the head is rotated; all of it if None."""
    order: RopeOrder = "halves"

    def __post_init__(self) -> None:
        torch.manual_seed(self.seed)
        heads = self.heads + 2 * self.kv_heads
        fused = torch.randn(self.rows, heads, self.dim, device=self.device).to(self.dtype)
        self.q, self.k, self.v = fused.split((self.heads, self.kv_heads, self.kv_heads), dim=1)
        max_len = 50
        angles = torch.rand(max_len, (self.width or self.dim) // 2) * 6
        self.cos_sin = torch.cat((angles.cos(), angles.sin()), dim=-1).to(self.device)
        self.positions = torch.randint(0, max_len, (self.rows,), device=self.device)
        num_pages = -(-self.rows // self.page_size) + 2
        self.k_pages, self.v_pages = (
            empty_pages(
                num_pages,
                self.page_size,
                self.kv_heads,
                self.dim,
                layout=self.layout,
                device=self.device,
                dtype=self.dtype,
            )
            for _ in range(2)
        )
        self.slots = torch.randperm(num_pages * self.page_size)[: self.rows].to(self.device)
        self.q_norm, self.k_norm = (torch.randn(self.dim, device=self.device).to(self.dtype) for _ in range(2))
        self.eps = 1e-5


def random_rope_case(rng: random.Random, *, device: str = "cpu", dtype: torch.dtype = torch.float32) -> RopeCase:
    """Any shape that a model might have, and odd ones."""
    dim = rng.choice((*HEAD_DIMS, 2, 6))
    return RopeCase(
        rows=rng.choice((1, 2, 7, 33)),
        heads=rng.choice((1, 3, 8, 12)),
        kv_heads=rng.choice((1, 2, 3, 9)),
        dim=dim,
        width=rng.choice((None, 2 * rng.randint(1, dim // 2))),
        order=rng.choice(("halves", "pairs")),
        page_size=rng.choice(PAGE_SIZES),
        layout=rng.choice(LAYOUTS),
        seed=rng.randrange(2**31),
        device=device,
        dtype=dtype,
    )
