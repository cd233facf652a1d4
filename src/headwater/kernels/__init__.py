"""GPU kernels (Triton), each with a torch reference of the same signature, which is also the CPU path and the oracle.

Inputs are checked at the boundary. Nothing here knows of requests, schedules or models: only tensors.
"""
