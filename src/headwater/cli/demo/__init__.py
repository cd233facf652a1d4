"""The pool at work: one server writes KV, two others of different shapes read it, and every byte is compared.

Read `ranks` first: it is what an engine does with the pool. `cache` is the engine's side (a model and its paged
cache), `servers` starts the processes, `run` is the whole story and `show` prints it.
"""
