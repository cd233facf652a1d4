"""The library with numpy: one server of two ranks writes KV, another of eight ranks reads it.

    python examples/library_numpy.py

There is no engine and no model here: the KV is noise, and every byte that comes back is compared. Needs numpy alone.
"""

from __future__ import annotations

import argparse
import secrets
import sys

import numpy as np

import headwater as hw


def main() -> None:
    parser = argparse.ArgumentParser(description="Write KV with TP=2, read it with TP=8.")
    parser.add_argument(
        "--pool", default="memory://?capacity=256MiB", help="a pool URL; shm:///NAME is kept, its KV is cleared"
    )
    parser.add_argument("--tokens", type=int, default=1000, help="tokens in the prompt")
    args = parser.parse_args()
    random = np.random.default_rng(0)

    # What one token's KV is, and which weights made it. For a real model: hw.Identity.from_checkpoint(path, ...).
    spec = hw.KVSpec.gqa(num_layers=8, num_kv_heads=8, head_dim=64, dtype="bfloat16")
    identity = hw.Identity(weights="sha256:" + "0" * 64, run_dtype="bfloat16", kv_dtype="bfloat16", label="example")

    # A server's ranks are processes of their own that open the pool with the same group number. Here they are one.
    with hw.open_pool(args.pool, group=secrets.randbits(62) + 1) as pool:
        space = pool.space(identity, spec)
        follower = pool.follow()  # events from now on, of any process

        # A prompt is cut into chunks of 256 tokens; the key of a chunk also names all tokens before it.
        prompt = random.integers(0, 128_256, args.tokens, dtype=np.uint32)
        keys = space.keys(prompt, tenant=b"acme")
        chunks = keys.chunks()
        print(f"prompt: {len(prompt)} tokens in {len(chunks)} chunks, {spec.extent_bytes(len(prompt)):,} bytes")

        # The whole model's KV, as an array a chunk: [layer][head][bytes of K and V].
        kv = [random.integers(0, 256, space.empty(chunk, hw.whole_shard(spec)).shape, np.uint8) for chunk in chunks]

        # Each of two ranks writes its own heads. A chunk can be found once the last rank has written its part.
        writers = hw.Topology(tp=2)
        for rank in range(2):
            shard = writers.shard(spec, tp_rank=rank)
            parts = [np.ascontiguousarray(tiles[:, shard.heads.start : shard.heads.stop]) for tiles in kv]
            statuses = space.write(chunks, shard, parts)
            found = space.match(keys).num_tokens
            print(f"writer {rank} of 2: {[status.name for status in statuses]}, {found} tokens can be found")

        for event in follower.poll():
            print(f"event: {event.kind.name.lower()} {event.key.hex()[:8]}, {event.num_tokens} tokens")

        # Another tenant has the same tokens and other keys: it finds nothing.
        print(f"another tenant finds {space.match(space.keys(prompt, tenant=b'other')).num_tokens} tokens")

        # A longer prompt that begins with the same tokens finds all of them. Only what is new is hashed.
        keys.extend(random.integers(0, 128_256, 100, dtype=np.uint32))
        hit = space.match(keys)
        print(f"a prompt of {len(prompt) + 100} tokens with the same beginning finds {hit.num_tokens}")

        # Eight ranks read one head each, under a lease that keeps the chunks from eviction.
        readers, wrong, num_bytes = hw.Topology(tp=8), 0, 0
        with space.lease(hit, request_id="request 1") as lease:
            assert lease.held, "the chunks were evicted between match and lease: compute them"
            for rank in range(8):
                shard = readers.shard(spec, tp_rank=rank)
                buffers = [space.empty(chunk, shard) for chunk in hit.chunks]
                for status, tiles, expected in zip(space.read(hit.chunks, shard, buffers), buffers, kv, strict=True):
                    if status is not hw.Status.OK:  # not there, damaged or late: an engine computes it
                        sys.exit(f"reader {rank}: {status.name}")
                    wrong += int(np.count_nonzero(tiles != expected[:, shard.heads.start : shard.heads.stop]))
                    num_bytes += tiles.nbytes
        print(f"8 readers: {num_bytes:,} bytes, {wrong} wrong")

        removed = pool.clear(tenant=b"acme")
        print(f"cleared {removed} chunks of one tenant; {space.match(keys).num_tokens} tokens can be found")
        sys.exit(wrong != 0)


if __name__ == "__main__":
    main()
