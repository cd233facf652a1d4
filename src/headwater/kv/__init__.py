"""What KV is: spec, identity, chunk keys, topologies and their shards, the extent and tile format.

Nothing here stores, moves or evicts bytes, and nothing here imports torch.
"""
