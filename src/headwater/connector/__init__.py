"""How an engine plugs into the pool: a scheduler half that knows tokens, a worker half that knows memory.

Engine-neutral: the reference engine calls them directly, adapters for other engines translate. What passes between
the halves are the jobs of `jobs`.
"""
