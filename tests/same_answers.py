"""Whether two models, or two batches, gave the same answers: bit for bit where kernels promise that, else closely."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import torch
from kernel_sets import has_kernels

from llm.outputs import Logprob, RequestOutput

WORST = 1e-4  # of a logprob; other weights differ by a hundred times more
# What an LLM is opened with to be compared: a KV cache of 16 bits would make a whole step of a rounding difference.
CACHE = {"kv_cache_dtype": "auto" if has_kernels() else "float32"}

Numbers = np.ndarray | torch.Tensor | Sequence[float]
Answer = tuple[Sequence[int], Sequence[Mapping[int, Logprob]] | None]


def told(outputs: Iterable[RequestOutput]) -> list[Answer]:
    """The first completion of each request."""
    return [(output.outputs[0].token_ids, output.outputs[0].logprobs) for output in outputs]


def same(ours: Sequence[Answer], theirs: Sequence[Answer]) -> bool:
    """Bit for bit; without compiled kernels `close`, as the sizes of a batch decide how PyTorch's sums round."""
    return list(ours) == list(theirs) if has_kernels() else close(ours, theirs)


def same_values(ours: Numbers, theirs: Numbers) -> bool:
    """Of numbers, as `same`: without compiled kernels each may differ by 1e-5 of the largest."""
    own, other = np.asarray(ours), np.asarray(theirs)
    if has_kernels():
        return np.array_equal(own, other)
    return own.shape == other.shape and np.allclose(own, other, rtol=0, atol=1e-5 * float(np.abs(other).max()))


def close(ours: Iterable[Answer], theirs: Iterable[Answer]) -> bool:
    """The same tokens, and logprobs of the same tokens that differ by at most WORST."""
    return all(
        list(tokens) == list(their_tokens) and all(map(_agree, logprobs or (), their_logprobs or ()))
        for (tokens, logprobs), (their_tokens, their_logprobs) in zip(ours, theirs, strict=True)
    )


def _agree(ours: Mapping[int, Logprob], theirs: Mapping[int, Logprob]) -> bool:
    pairs = [(ours[token].logprob, theirs[token].logprob) for token in ours if token in theirs]
    # Of what is barred both are -inf.
    return ours.keys() == theirs.keys() and all(one == other or abs(one - other) <= WORST for one, other in pairs)
