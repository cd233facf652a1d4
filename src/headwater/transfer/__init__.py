"""How bytes move: from an engine's paged cache into the pool's extents and back.

`view` says where a cache lies, `convert` turns it into extent order and back, `verify` proves what arrived and `copy`
carries it between the device and mapped memory. Which chunks move, and when, is decided by callers.
"""
