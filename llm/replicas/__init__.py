"""Replicas: one `LLM` over several processes of this machine, each with the whole model and an engine of its own.

The engine of the `LLM` (`engine.py`) has all requests and hands them to the replicas as they have room (`dispatch.py`).
A replica (`worker.py`) computes them by an ordinary engine and reports each of its steps. The death of a replica is a
preemption of its requests: they go on elsewhere, after the tokens that they have.
"""
