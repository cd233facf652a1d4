"""Write your own connector: a toy engine that keeps its KV in a Headwater pool.

    python examples/own_connector.py

Part 1 is an engine that knows nothing of Headwater: a model, a paged cache and a loop. Part 2 is its connector: the
only part that calls Headwater, and the one to copy. Part 3 runs two such engines, whose caches have different layouts,
on one pool. docs/own-connector.md walks through the numbered places. Needs torch, and runs on a GPU if there is one.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import headwater as hw
from headwater.connector import ConnectorConfig, Scheduled, SchedulerSide, StepOrders, WorkerSide, view_tensors

LAYERS, HEADS, DIM, VOCAB, MAX_LEN = 4, 2, 16, 1000, 4096
WIDTH = HEADS * DIM
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")

# ---- Part 1: an engine. Nothing here knows of Headwater. -----------------------------------------------------------
AXES = ("plane", "block", "token", "head", "dim")
"""The axes of a layer's cache. `plane` is K or V."""
Hook = Callable[[int], None]


@dataclass(eq=False)
class Request:
    """One prompt and its answer."""

    id: str
    tokens: list[int]
    num_prompt: int
    max_tokens: int
    blocks: list[int] = field(default_factory=list)
    num_computed: int = 0
    """Tokens whose KV is in the blocks."""
    num_cached: int = 0
    """Tokens whose KV came from the pool."""
    is_loading: bool = False


class PagedCache:
    """Blocks of `block_size` tokens: one tensor a layer, with its axes in any order. The last block is a spare one."""

    def __init__(self, num_blocks: int, block_size: int, axes: Sequence[str]) -> None:
        self.num_blocks, self.block_size, self.axes = num_blocks, block_size, axes
        sizes = {"plane": 2, "block": num_blocks + 1, "token": block_size, "head": HEADS, "dim": DIM}
        self.layers = [torch.zeros([sizes[axis] for axis in axes], device=DEVICE) for _ in range(LAYERS)]
        self._ordered = [layer.permute([axes.index(axis) for axis in AXES]) for layer in self.layers]

    def write(self, layer: int, request: Request, first: int, kv: Tensor) -> None:
        """Store [plane, token, head, dim] of the tokens from `first` on."""
        self._ordered[layer][:, *self._places(request, first, first + kv.shape[1])] = kv

    def read(self, layer: int, request: Request, num_tokens: int) -> Tensor:
        """The first tokens, as [plane, token, head, dim]."""
        return self._ordered[layer][:, *self._places(request, 0, num_tokens)]

    def _places(self, request: Request, start: int, stop: int) -> tuple[Tensor, Tensor]:
        positions = torch.arange(start, stop, device=DEVICE)
        blocks = torch.tensor(request.blocks, device=DEVICE)
        return blocks[positions // self.block_size], positions % self.block_size


class Model:
    """Attention layers with random weights. It talks nonsense, but every token depends on all tokens before it."""

    def __init__(self, seed: int = 0) -> None:
        random = torch.Generator().manual_seed(seed)
        self.embedding = torch.randn(VOCAB, WIDTH, generator=random).to(DEVICE)
        self.position = torch.randn(MAX_LEN, WIDTH, generator=random).to(DEVICE)
        self.qkv = (torch.randn(LAYERS, WIDTH, 3 * WIDTH, generator=random) / WIDTH**0.5).to(DEVICE)

    def digest(self) -> str:
        """The SHA-256 of all weights: what the pool knows this model by. For a checkpoint: hw.digest_checkpoint."""
        weights = hashlib.sha256()
        for tensor in (self.embedding, self.position, self.qkv):
            weights.update(tensor.cpu().numpy().tobytes())
        return f"sha256:{weights.hexdigest()}"

    @torch.inference_mode()
    def forward(self, batch: Sequence[Request], cache: PagedCache, before_layer: Hook, after_layer: Hook) -> list[int]:
        """Compute all tokens of each request that have no KV yet; the next token of each."""
        hidden = [
            self.embedding[r.tokens[r.num_computed :]] + self.position[r.num_computed : len(r.tokens)] for r in batch
        ]
        for layer in range(LAYERS):
            before_layer(layer)
            for number, request in enumerate(batch):
                query, key, value = (hidden[number] @ self.qkv[layer]).view(-1, 3, HEADS, DIM).unbind(1)
                cache.write(layer, request, request.num_computed, torch.stack([key, value]))
                keys, values = cache.read(layer, request, len(request.tokens)).transpose(1, 2)
                mask = torch.ones(len(query), keys.shape[1], dtype=torch.bool, device=DEVICE).tril(request.num_computed)
                attended = scaled_dot_product_attention(query.transpose(0, 1), keys, values, mask)
                hidden[number] = hidden[number] + attended.transpose(0, 1).reshape(-1, WIDTH)
            after_layer(layer)
        return [int((state[-1] @ self.embedding.T).argmax()) for state in hidden]


class ToyEngine:
    """Continuous batching at its smallest: a request that waits gets blocks, and one with blocks is in every step."""

    def __init__(self, model: Model, pool: hw.Pool, *, block_size: int = 16, axes: Sequence[str] = AXES) -> None:
        self.model = model
        self.cache = PagedCache(num_blocks=256, block_size=block_size, axes=axes)
        self.free = list(range(self.cache.num_blocks))
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.connector = Connector(pool, model, self.cache)

    def generate(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[Request]:
        """Answer some prompts, greedily."""
        if any(len(prompt) + max_tokens > MAX_LEN for prompt in prompts):
            raise ValueError(f"a prompt and its answer may have {MAX_LEN} tokens together")
        requests = [Request(f"request {n}", [*p], len(p), max_tokens) for n, p in enumerate(prompts)]
        for request in requests:
            self.connector.add(request)
        self.waiting += requests
        while self.waiting or self.running:
            self.step()
        self.connector.flush()
        return requests

    def step(self) -> None:
        """One step of the engine."""
        self.waiting = [request for request in self.waiting if not self._admit(request)]
        batch = [request for request in self.running if not request.is_loading]
        orders = self.connector.begin_step(batch)
        try:
            next_tokens = self.model.forward(batch, self.cache, self.connector.before_layer, self.connector.after_layer)
        except BaseException:
            self.connector.step_failed(orders)
            raise
        loaded = self.connector.end_step()
        for request, token in zip(batch, next_tokens, strict=True):
            request.num_computed = len(request.tokens)
            request.tokens.append(token)
            if len(request.tokens) == request.num_prompt + request.max_tokens:
                self._finish(request)
        for request in self.running:
            if request.id in loaded:
                request.is_loading = False
                request.num_computed = request.num_cached = min(loaded[request.id], request.num_prompt - 1)

    def _admit(self, request: Request) -> bool:
        """Give a request blocks for its whole life, unless there are too few or its KV is still on the way."""
        num_blocks = -(-(request.num_prompt + request.max_tokens) // self.cache.block_size)
        if num_blocks > len(self.free) or (num_tokens := self.connector.look_up(request)) is None:
            return False
        request.blocks, self.free = self.free[:num_blocks], self.free[num_blocks:]
        if num_tokens:
            self.connector.start_load(request)
            request.is_loading = True
        self.running.append(request)
        return True

    def _finish(self, request: Request) -> None:
        self.connector.finish(request)
        self.running.remove(request)
        self.free += request.blocks


# ---- Part 2: the connector. The only part that calls Headwater. ----------------------------------------------------
class Connector:
    """One scheduler side and one worker side. A larger engine has one worker side on each rank."""

    def __init__(self, pool: hw.Pool, model: Model, cache: PagedCache) -> None:
        # (1) What the KV is, and which weights made it. Engines share KV if and only if both are equal.
        spec = hw.KVSpec.gqa(num_layers=LAYERS, num_kv_heads=HEADS, head_dim=DIM, dtype="float32")
        identity = hw.Identity(weights=model.digest(), run_dtype="float32", kv_dtype="float32", label="toy")
        space = pool.space(identity, spec)
        # (2) Where the KV lies. A view is addresses and strides: nothing is copied, and any layout will do.
        view = view_tensors(spec, cache.layers, cache.axes)
        # (3) The two sides. The spare block takes bytes that must not go into blocks which others use.
        config = ConnectorConfig(load_mode="async")
        spare = cache.num_blocks
        self.scheduler = SchedulerSide(space, config, block_size=cache.block_size, num_ranks=1, dummy_block=spare)
        self.worker = WorkerSide(space, view, hw.whole_shard(spec), config, dummy_block=spare)

    # (4) Requests: what the engine's scheduler tells the scheduler side.
    def add(self, request: Request) -> None:
        """A new request. The scheduler side keeps the list of tokens and reads what the engine appends to it."""
        self.scheduler.add(request.id, request.tokens, request.num_prompt)

    def look_up(self, request: Request) -> int | None:
        """Tokens that the pool has; None while they come from a lower tier: ask again with the next step."""
        plan = self.scheduler.match(request.id, num_local=0)
        return None if plan is None else plan.num_tokens

    def start_load(self, request: Request) -> None:
        """Load what was found into the request's blocks. The order goes down with the next step."""
        self.scheduler.start_load(request.id, request.blocks)

    def finish(self, request: Request) -> None:
        """A request is over. Others may have its blocks at once: the next step saves them before it writes any.

        An engine that aborts requests keeps the blocks of one that loads until its load has ended (`end_step`).
        """
        self.scheduler.finish(request.id, request.num_computed, request.blocks)

    # (5) A step: orders go down, the model runs, a report comes up.
    def begin_step(self, batch: Sequence[Request]) -> StepOrders:
        """Before the model runs. A step without requests waits up to 50 ms for a fetch or a load to end."""
        if not batch:
            self.scheduler.wait_fetch(timeout_s=0.05)
        scheduled = [Scheduled(r.id, r.num_computed, len(r.tokens) - r.num_computed, r.blocks) for r in batch]
        orders = self.scheduler.order(scheduled, is_idle=not batch)
        self.worker.start_step(orders)
        self.worker.start_loads(orders)
        return orders

    def before_layer(self, layer: int) -> None:
        """The model is about to read the KV of this layer."""
        self.worker.before_layer(layer)

    def after_layer(self, layer: int) -> None:
        """All KV of this layer is in the cache: it can be saved while the next layer is computed."""
        self.worker.after_layer(layer)

    def end_step(self) -> dict[str, int]:
        """After the model ran: by request whose load has ended, how many of its first tokens have KV now."""
        self.worker.end_step()
        return {end.request_id: end.num_tokens for end in self.scheduler.handle_report(self.worker.take_report())}

    # (6) When something fails, and at the end.
    def step_failed(self, orders: StepOrders) -> None:
        """The model raised: nothing of this step is saved, and its loads have ended."""
        self.worker.discard(orders)
        self.scheduler.step_failed(orders)

    def flush(self) -> None:
        """Save what the last step left, and wait until it is in the pool."""
        self.begin_step([])
        self.end_step()
        self.worker.drain(timeout_s=10)

    def close(self) -> None:
        """Stop the worker side's threads."""
        self.worker.close()


# ---- Part 3: two engines on one pool. ------------------------------------------------------------------------------
def main() -> None:
    parser = argparse.ArgumentParser(description="Two toy engines with different cache layouts share a pool.")
    parser.add_argument("--pool", default="memory://?capacity=64MiB", help="with shm:///NAME, a second run hits, too")
    parser.add_argument("--tokens", type=int, default=1000, help="tokens in each prompt")
    args = parser.parse_args()
    model = Model()
    random = torch.Generator().manual_seed(1)
    prompts = [torch.randint(VOCAB, (args.tokens,), generator=random).tolist() for _ in range(2)]
    layouts = [
        ("first engine", 16, ("plane", "block", "token", "head", "dim")),
        ("second engine", 24, ("block", "head", "plane", "token", "dim")),
    ]
    answers = []
    with hw.open_pool(args.pool) as pool:
        for name, block_size, axes in layouts:
            engine = ToyEngine(model, pool, block_size=block_size, axes=axes)
            engine.generate([[1, 2, 3]], max_tokens=1)  # the first steps of a process are slow
            start = time.perf_counter()
            requests = engine.generate(prompts, max_tokens=8)
            seconds = time.perf_counter() - start
            engine.connector.close()
            for request in requests:
                found = f"{request.num_cached} of {request.num_prompt} prompt tokens from the pool"
                print(f"{name}, {request.id}: {found}, answer {request.tokens[request.num_prompt :]}")
            print(f"{name}: {seconds:.3f} s")
            answers.append([request.tokens for request in requests])
    print(f"same answers: {'yes' if answers[0] == answers[1] else 'NO'}")
    sys.exit(answers[0] != answers[1])


if __name__ == "__main__":
    main()
