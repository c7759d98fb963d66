"""Operations over the vocabulary in C++; `kernels/reference/vocabulary.py` defines them."""

from __future__ import annotations

import torch

from llm.kernels.cpu.library import Library, as_float32
from llm.kernels.cpu.signatures import KERNELS, Signature
from llm.kernels.reference import vocabulary as reference

_LOG_SOFTMAX = KERNELS["llm_log_softmax"]
_ARGMAX = KERNELS["llm_argmax"]
_TOP_K = KERNELS["llm_top_k"]
_GATHER = KERNELS["llm_gather_logprobs"]
_BLOCK_SUMS = KERNELS["llm_block_sums"]
_DRAW_NUCLEUS = KERNELS["llm_draw_nucleus"]
_CUT = KERNELS["llm_cut_below_largest"]
_DIVIDE = KERNELS["llm_divide_rows"]
# For a larger k, sorting the row is faster.
_MOST = 1024


def log_softmax(library: Library, logits: torch.Tensor) -> torch.Tensor:
    """float [n, vocab] -> float32 [n, vocab]."""
    logits = as_float32(logits)
    out = torch.empty_like(logits)
    rows, width = logits.shape
    library.call(_LOG_SOFTMAX, logits.data_ptr(), out.data_ptr(), rows, width, torch.get_num_threads())
    return out


def argmax(library: Library, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 [n, vocab] -> (values float32 [n], ids int64 [n])."""
    logits = as_float32(logits)
    rows, width = logits.shape
    if not width:
        raise ValueError("the rows of argmax are empty")
    values, ids = torch.empty(rows, dtype=torch.float32), torch.empty(rows, dtype=torch.int64)
    library.call(_ARGMAX, logits.data_ptr(), values.data_ptr(), ids.data_ptr(), rows, width, torch.get_num_threads())
    return values, ids


def top_k(library: Library, logits: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 [n, vocab] -> (values float32 [n, k], ids int64 [n, k])."""
    rows, width = logits.shape
    if not 1 <= k <= min(width, _MOST):
        return reference.top_k(logits, k)
    logits = as_float32(logits)
    values, ids = torch.empty(rows, k, dtype=torch.float32), torch.empty(rows, k, dtype=torch.int64)
    library.call(_TOP_K, logits.data_ptr(), k, values.data_ptr(), ids.data_ptr(), rows, width, torch.get_num_threads())
    return values, ids


def gather_logprobs(
    library: Library, logits: torch.Tensor, ids: torch.Tensor, ranked: int, normalise: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 [n, vocab], int64 [n, m] -> (float32 [n, m], ranks int64 [n, ranked])."""
    logits, ids = as_float32(logits), ids.contiguous()
    rows, width = logits.shape
    if ids.dtype != torch.int64 or ids.dim() != 2 or len(ids) != rows or not 0 <= ranked <= ids.shape[1]:
        raise ValueError(f"ids must be int64 [{rows}, {ranked} or more], got {ids.dtype} {list(ids.shape)}")
    values, ranks = torch.empty(ids.shape, dtype=torch.float32), torch.empty(rows, ranked, dtype=torch.int64)
    if not library.call(
        _GATHER,
        logits.data_ptr(),
        ids.data_ptr(),
        ids.shape[1],
        ranked,
        normalise,
        values.data_ptr(),
        ranks.data_ptr(),
        rows,
        width,
        torch.get_num_threads(),
    ):
        raise IndexError(f"ids must be in [0, {width}), got {ids.min()} to {ids.max()}")
    return values, ranks


def block_sums(library: Library, logits: torch.Tensor, largest: torch.Tensor, block: int) -> torch.Tensor:
    """float32 [n, vocab], [n] -> float32 [n, ceil(vocab / block)]."""
    logits, largest = as_float32(logits), as_float32(largest)
    rows, width = logits.shape
    if block < 16 or block % 16 or largest.shape != (rows,):
        raise ValueError(f"block must be a multiple of 16 and largest [{rows}], got {block} and {list(largest.shape)}")
    sums = torch.empty(rows, -(-width // block), dtype=torch.float32)
    library.call(
        _BLOCK_SUMS, logits.data_ptr(), largest.data_ptr(), block, sums.data_ptr(), rows, width, torch.get_num_threads()
    )
    return sums


def draw_nucleus(
    library: Library, logits: torch.Tensor, largest: torch.Tensor, top_p: torch.Tensor, uniform: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 [n, vocab], [n], float64 [n], [n] -> (tokens int64 [n], edges int64 [n])."""
    logits, largest = as_float32(logits), as_float32(largest)
    top_p, uniform = top_p.double().contiguous(), uniform.double().contiguous()
    rows, width = logits.shape
    if not width or not largest.shape == top_p.shape == uniform.shape == (rows,):
        shapes = [list(item.shape) for item in (logits, largest, top_p, uniform)]
        raise ValueError(f"logits must be [n, 1 or more] and largest, top_p and uniform [n], got {shapes}")
    tokens, edges = torch.empty(rows, dtype=torch.int64), torch.empty(rows, dtype=torch.int64)
    library.call(
        _DRAW_NUCLEUS,
        logits.data_ptr(),
        largest.data_ptr(),
        top_p.data_ptr(),
        uniform.data_ptr(),
        tokens.data_ptr(),
        edges.data_ptr(),
        rows,
        width,
        torch.get_num_threads(),
    )
    return tokens, edges


def cut_below_largest(library: Library, logits: torch.Tensor, offset: torch.Tensor) -> torch.Tensor:
    """float32 [n, vocab], [n] -> `logits`, in place if they are contiguous float32."""
    return _change(library, _CUT, "offset", logits, offset)


def divide_rows(library: Library, logits: torch.Tensor, divisor: torch.Tensor) -> torch.Tensor:
    """float32 [n, vocab], [n] -> `logits`, in place if they are contiguous float32."""
    return _change(library, _DIVIDE, "divisor", logits, divisor)


def _change(
    library: Library, kernel: Signature, name: str, logits: torch.Tensor, numbers: torch.Tensor
) -> torch.Tensor:
    logits, numbers = as_float32(logits), as_float32(numbers)
    rows, width = logits.shape
    if numbers.shape != (rows,):
        raise ValueError(f"{name} must be [{rows}], got {list(numbers.shape)}")
    library.call(kernel, logits.data_ptr(), numbers.data_ptr(), rows, width, torch.get_num_threads())
    return logits
