"""The cost of a workload in bytes and operations, independent of the engine.

Owns the sums over a workload's requests, for prefill and decode separately; a model's sizes are `llm.runner.cost`'s.
The least time that a machine needs is max(operations / GEMM rate, bytes / read bandwidth), at the rates of the model's
arithmetic and of as many bytes as it has: calibrate.py.
"""

from __future__ import annotations

from llm.bench.workloads import Workload
from llm.engine.boundary import ModelCost, Phase


def prefill_cost(model: ModelCost, workload: Workload) -> Phase:
    """All prompts in one pass over the weights, a shared prefix once, and one sampled token per prompt."""
    shared = workload.recipe.shared_prefix
    spans = [(shared if row else 0, len(prompt)) for row, prompt in enumerate(workload.prompts)]
    return Phase(model.operations(spans, len(spans)), model.bytes_per_step)


def decode_cost(model: ModelCost, workload: Workload) -> Phase:
    """The tokens after the first of each request, all requests in the same steps."""
    steps = workload.recipe.max_tokens - 1
    spans = [(len(prompt), len(prompt) + steps) for prompt in workload.prompts]
    states = 2 * steps * len(spans) * model.state_bytes  # read and written
    nbytes = steps * model.bytes_per_step + model.kv_bytes(spans) + states
    return Phase(model.operations(spans, steps * len(spans)), nbytes)
