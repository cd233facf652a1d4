"""The pool's chunks as vLLM's KV events, for routers that want to know which prefixes a server can have without
computing. Only the scheduler side does this; `connector/events` says when a chunk is announced.
"""

from __future__ import annotations

from vllm.distributed.kv_events import MEDIUM_STORAGE, BlockRemoved, BlockStored, KVCacheEvent

from headwater.connector.events import ChunksRemoved, ChunkStored

OWNERSHIP = "headwater"


def as_vllm_event(event: ChunkStored | ChunksRemoved) -> KVCacheEvent:
    """One event in vLLM's words; a chunk is a block there."""
    if isinstance(event, ChunksRemoved):
        return BlockRemoved(block_hashes=list(event.keys), medium=MEDIUM_STORAGE, ownership=OWNERSHIP)
    chunk = event.chunk
    return BlockStored(
        block_hashes=[chunk.key],
        parent_block_hash=chunk.parent if chunk.number else None,
        token_ids=event.token_ids,
        block_size=chunk.num_tokens,
        lora_id=None,
        medium=MEDIUM_STORAGE,
        lora_name=event.label,
        ownership=OWNERSHIP,
    )
