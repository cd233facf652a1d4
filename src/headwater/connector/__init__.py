"""How an engine plugs into the pool: a scheduler side that knows requests, a worker side that knows memory.

Between them there is one protocol for every engine: `StepOrders` go down with each step, a `StepReport` comes up. The
reference engine calls both sides directly; adapters for other engines translate and decide nothing.
"""
