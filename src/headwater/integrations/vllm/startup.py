"""From vLLM's configuration to the two sides of the connector, or to the reason why there is none."""

from __future__ import annotations

import logging
import os
import secrets
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from headwater.connector.events import EventListener
from headwater.connector.peering import peer_options
from headwater.connector.published import Publisher
from headwater.connector.scheduler import SchedulerSide
from headwater.connector.staging import with_staging
from headwater.connector.worker import WorkerSide
from headwater.errors import HeadwaterError, StoreError
from headwater.integrations.vllm.adapters import Adapters, adapter_rules, watch_loads
from headwater.integrations.vllm.declined import LOGGER, DeclinedError
from headwater.integrations.vllm.identity import server_identity, server_spec, writer_group
from headwater.integrations.vllm.layout import layer_tensors
from headwater.integrations.vllm.options import Options
from headwater.integrations.vllm.probe import prove_view
from headwater.integrations.vllm.reloads import watch_reloads
from headwater.integrations.vllm.settings import check_running_code
from headwater.integrations.vllm.stats import PoolFigures
from headwater.integrations.vllm.steps import NULL_BLOCK, Steps
from headwater.integrations.vllm.weights import check_loaded_tensors, check_sources, model_class, name_weights
from headwater.kv.identity import Identity
from headwater.kv.spec import KVSpec
from headwater.kv.topology import Shard, Topology
from headwater.peers.process import ReceiverChild, ReceiverSpec
from headwater.pool.pool import Pool, open_pool
from headwater.pool.space import Space
from headwater.stores.config import find_pool
from headwater.stores.url import StoreUrl, first_tier, format_size
from headwater.transfer.view import PagedView

log = logging.getLogger(LOGGER)

STEPS_IN_POOL = 8
"""A first tier should hold at least so many of the largest steps."""

SEVERAL_HOSTS = (
    "this engine's ranks do not share one pool, because they run on several hosts, or in containers that do not share "
    "/dev/shm. A chunk is complete where all ranks have written their part, so no chunk would ever be. Run the engine "
    "on one host (data-parallel replicas may run on others), or give its containers one /dev/shm"
)

TWO_NAMES = (
    "the workers name this model otherwise than the scheduler does, so KV would be saved under a wrong name. Were its "
    "files replaced while the server started? Restart it to use the pool"
)

_pools: dict[tuple[str, int], tuple[Pool, PoolFigures, Publisher]] = {}
_pools_lock = threading.Lock()


@dataclass(frozen=True)
class Membership:
    """This process's way to the pool: the pool, whose KV it holds, and in which form."""

    pool: Pool
    figures: PoolFigures
    publisher: Publisher
    identity: Identity
    spec: KVSpec
    chunk_tokens: int
    role: str = "scheduler"
    """What this side is called where its figures are published."""

    @property
    def home(self) -> str:
        """Where this process's KV goes, and whose it is: all processes of a server must agree, or it has no pool."""
        return f"{self.pool.home} {self.identity.digest.hex()}"

    def space(self, epoch: int) -> Space:
        """The server's space in some epoch."""
        identity = replace(self.identity, epoch=epoch)
        return self.pool.space(identity, self.spec, chunk_tokens=self.chunk_tokens)


def join(config: Any, cache: Any, options: Options, weights: str, *, is_first: bool) -> Membership:
    """Open the pool; workers are the `first`. Raises DeclinedError where that, or this model, is not possible."""
    spec = server_spec(config, cache)
    identity = server_identity(config, options, weights)
    url, group = options.connector.pool, writer_group(config)
    try:
        is_reachable = config.parallel_config.world_size == 1 and (is_first or (url, group) in _pools)
        if first_tier(find_pool(url).urls).scheme == "memory" and not is_reachable:
            raise StoreError("memory:// lives in one process, and this vLLM has several; use a shm:// pool")
        member = Membership(*_shared_pool(url, group, identity.label), identity, spec, options.chunk_tokens)
        member.space(identity.epoch)
    except (HeadwaterError, OSError) as error:
        raise DeclinedError(f"the pool cannot be used: {error}") from error
    return member


def check_hosts(parallel: Any) -> None:
    """Raise DeclinedError where vLLM's configuration says that one engine's ranks cannot share a pool.

    Data-parallel replicas are engines of their own. Ray places ranks without saying where: `Pool.home` of each rank
    tells, once they have opened the pool.
    """
    if parallel.nnodes_within_dp > 1:
        raise DeclinedError(SEVERAL_HOSTS)
    if parallel.distributed_executor_backend == "external_launcher" and parallel.world_size > 1:
        raise DeclinedError(
            "an external launcher starts an engine for each rank, and all of them must schedule the same steps, but "
            "the pool may answer them differently; let vLLM start its ranks (distributed_executor_backend mp)"
        )


def start_scheduling(config: Any, cache: Any, options: Options, listener: EventListener) -> tuple[Steps, Membership]:
    """The scheduler side. Raises DeclinedError."""
    check_hosts(config.parallel_config)
    member = join(config, cache, options, name_weights(config, options), is_first=False)
    side = SchedulerSide(
        member.space(member.identity.epoch),
        options.connector,
        block_size=_block_size(cache),
        num_ranks=config.parallel_config.world_size,
        dummy_block=NULL_BLOCK,
        listener=listener,
    )
    _check_capacity(config, member, first_tier(find_pool(options.connector.pool).urls))
    log.info("Headwater: %s shares KV of %s", find_pool(options.connector.pool), member.identity)
    adapters = Adapters(rules=adapter_rules(config.lora_config))
    return Steps(side, hashes_inputs=_hashes_inputs(config), adapters=adapters), member


def start_working(
    config: Any, cache: Any, options: Options, kv_caches: dict[str, Any]
) -> tuple[WorkerSide, Membership]:
    """A worker side, once its caches are there. All ranks call it together. Raises DeclinedError."""
    check_hosts(config.parallel_config)
    watch_reloads(model_class(config.model_config))
    weights = _weights_of_all_ranks(config, options)
    if config.lora_config is not None:
        watch_loads()
    spec = server_spec(config, cache)
    names, tensors, layers = layer_tensors(kv_caches, spec.num_layers)
    shard = _shard(config, spec, layers)
    attention = [config.compilation_config.static_forward_context[name] for name in names]
    view = prove_view(spec, shard, tensors, layers, attention)
    member = join(config, cache, options, weights, is_first=True)
    rank = _rank()
    side = WorkerSide(
        member.space(member.identity.epoch),
        view,
        shard,
        with_staging(options.connector, _step_bytes(config, options, shard, view), view.device),
        block_size=_block_size(cache),
        dummy_block=NULL_BLOCK,
        open_space=member.space,
        starting=_all_cores,
        server=writer_group(config),
        rank=rank,
    )
    return side, replace(member, role=f"rank {rank}")


def start_receiver(options: Options) -> ReceiverChild | None:
    """The process into which other servers push, if one is wanted. One that cannot listen is left out, with a warning:
    then KV comes from nowhere, and is computed."""
    if options.peer_listen is None:
        return None
    connector = options.connector
    child = ReceiverChild(ReceiverSpec(connector.pool, options.peer_listen, peer_options(connector)))
    try:
        child.start()
    except HeadwaterError as error:
        log.warning("Headwater: %s", error)
        return None
    log.info("Headwater: other servers push KV to %s", child.address)
    return child


def new_epoch() -> int:
    """An epoch that no other server has."""
    return secrets.randbits(62) | 1


def _shared_pool(url: str, group: int, model: str) -> tuple[Pool, PoolFigures, Publisher]:
    """One pool for both sides where they live in one process, so that its figures are reported and published once."""
    with _pools_lock:
        if (url, group) not in _pools:
            pool = open_pool(url, group=group)
            publisher = Publisher(pool, engine="vllm", model=model, starting=_all_cores)
            _pools[url, group] = pool, PoolFigures(pool), publisher
        return _pools[url, group]


def _step_bytes(config: Any, options: Options, shard: Shard, view: PagedView) -> int:
    num_tokens = int(config.scheduler_config.max_num_batched_tokens) + options.chunk_tokens
    layers, heads, row_bytes = shard.local_shape(view.spec, 0, 1)
    return num_tokens * layers * heads * row_bytes


def _check_capacity(config: Any, member: Membership, url: StoreUrl) -> None:
    """Say at the start where the pool is small for what one step computes: chunks would often find no room."""
    step_bytes = int(config.scheduler_config.max_num_batched_tokens) * member.spec.extent_bytes(1)
    data_bytes = member.pool.stats().store.data_bytes
    if data_bytes < STEPS_IN_POOL * step_bytes:
        place = str(url).partition("?")[0]
        first = f"; remove the pool that there is first (headwater pool clear --remove {place})"
        log.warning(
            "Headwater: %s holds %s, and one step of %d tokens computes %s of KV; give it a capacity of %s or more "
            "(pool: %s?capacity=…), or long prompts push each other out%s",
            url,
            format_size(data_bytes),
            config.scheduler_config.max_num_batched_tokens,
            format_size(step_bytes),
            format_size(STEPS_IN_POOL * step_bytes),
            place,
            "" if url.scheme == "memory" else first,
        )


def _hashes_inputs(config: Any) -> bool:
    """Whether images and sounds have names that say what they are. Without any cache of its own vLLM only counts
    them, and the third image of one server is not that of another."""
    media = config.model_config.multimodal_config
    return media is None or media.mm_processor_cache_gb > 0 or bool(config.cache_config.enable_prefix_caching)


def _block_size(cache: Any) -> int:
    return int(cache.kv_cache_groups[0].kv_cache_spec.block_size)


def _weights_of_all_ranks(config: Any, options: Options) -> str:
    """Rank 0 of a tensor-parallel group reads the weights, and tells the others."""
    from vllm.distributed.parallel_state import get_tp_group

    group = get_tp_group()
    answer: tuple[str, str] = ("", "")
    if group.rank_in_group == 0:
        try:
            check_sources(config.model_config)
            check_loaded_tensors(config)
            check_running_code(config.model_config)
            answer = (name_weights(config, options), "")
        except Exception as error:  # whatever it is, the other ranks wait for an answer
            answer = ("", str(error) if isinstance(error, DeclinedError) else f"{type(error).__name__}: {error}")
    if group.world_size > 1:
        answer = group.broadcast_object(answer, src=0)
    if answer[1]:
        raise DeclinedError(answer[1])
    return answer[0]


def _rank() -> int:
    """This worker's number among those of its engine."""
    from vllm.distributed.parallel_state import get_pp_group, get_tp_group

    tensor = get_tp_group()
    return int(get_pp_group().rank_in_group * tensor.world_size + tensor.rank_in_group)


def _shard(config: Any, spec: KVSpec, layers: range) -> Shard:
    """What this rank holds. Which layers a stage has is vLLM's own division, so they are taken as they are."""
    from vllm.distributed.parallel_state import get_tp_group

    try:
        topology = Topology(tp=config.parallel_config.tensor_parallel_size)
        if len(spec.planes) == 2 and spec.planes[0].name == "latent":
            size = config.parallel_config.tensor_parallel_size
            return Shard(layers, range(1), replicas=size, replica=get_tp_group().rank_in_group)
        return replace(topology.shard(spec, tp_rank=get_tp_group().rank_in_group), layers=layers)
    except HeadwaterError as error:
        raise DeclinedError(f"this parallel layout is not supported: {error}") from error


@contextmanager
def _all_cores() -> Iterator[None]:
    """Threads that are started inside may run on every core that this process has.

    vLLM ties the threads of its CPU workers to a core each, and new threads inherit that of the one that starts them.
    """
    own = os.sched_getaffinity(0)
    cores = set(own)
    for task in os.listdir("/proc/self/task"):
        try:
            cores |= os.sched_getaffinity(int(task))
        except OSError:
            continue  # the thread has ended
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, own)
