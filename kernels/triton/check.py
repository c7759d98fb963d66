"""Whether kernels compute here what the definitions do: small odd shapes of each operation, on the device itself.

Nobody has run these kernels on every card, driver and version of Triton. So the first start on one compares each kernel
with PyTorch's operation, and what it found is kept beside the compiled kernels. A kernel that disagrees is not used.
"""

from __future__ import annotations

import hashlib
import json
import logging
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

import triton
from llm.base import system
from llm.forward import AttentionMetadata, KVCacheSpec, LatentCacheSpec, RecurrentMetadata
from llm.kernels.backend import Operation, definition
from llm.kernels.reference import attention as attention_definition
from llm.kernels.reference import linear as linear_definition
from llm.kernels.reference.attention import write_latent_cache
from llm.kernels.triton.launch import INTERPRETED, target_of
from llm.kernels.weight import ExpertWeights, LoraTerm, LoraTerms, Weight

logger = logging.getLogger("llm")

# The largest error, as a share of the largest value.
ALLOWED = {torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}
_BLOCK_SIZE = 16
# The types in which kernels are compared on the first start; float16 is computed as bfloat16 is.
_TYPES = (torch.float32, torch.bfloat16)
# Each has a context of the device, of some hundred MB.
_MOST_PROCESSES = 8
# Of logits, which are float32 whatever the activations are.
FLOAT32 = {"log_softmax", "argmax", "gather_logprobs", "block_sums", "draw_nucleus", "select_experts"}


class Case(NamedTuple):
    """A call of an operation. `changed`: the arguments that it writes to. `rows`: those that have a row for each row of
    the result, which is to have the same bits for one row alone. `has_codes`: what it computes in between is rounded to
    the activations' type and then to codes of 8 bits, some of which the last bit decides."""

    label: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = MappingProxyType({})
    changed: tuple[int, ...] = ()
    rows: tuple[int, ...] = ()
    has_codes: bool = False


def weights(n: int, k: int) -> Iterator[tuple[str, Weight]]:
    """One of each kind, with groups of 32."""
    groups = -(-k // 32)
    int8, int4 = (torch.randint(-high, high, (n, k)).to(torch.int8) for high in (128, 8))
    scale, per_row = torch.rand(n, groups) * 0.1 + 0.01, torch.rand(n, 1) * 0.1 + 0.01
    zero = torch.randint(-8, 8, (n, groups))
    pack = linear_definition.pack
    eight, four = pack(int8, "int8").scaled(per_row), pack(int4, "int4").scaled(scale, group_size=32)
    float8 = pack(torch.randn(n, k).to(torch.float8_e4m3fn))
    yield "float32", pack(torch.randn(n, k))
    yield "bfloat16", replace(pack(torch.randn(n, k).bfloat16()), bias=torch.randn(n))
    yield "w8a16", eight
    yield "fp8", float8.scaled(per_row)
    yield "fp8 in groups", float8.scaled(scale, group_size=32)
    yield "w4a16", four
    yield "w4a16 rounded", replace(four, activations="bfloat16")
    yield "w4a16 with zeros", four.scaled(scale, zero, 32)
    yield "w4a16 with minima", four.scaled(scale, None, 32, minimum=scale * 4)
    yield "w4a16 of a table", replace(four, table=torch.randn(16))
    yield "w4a16 in an order", four.scaled(scale, None, 32, columns=torch.randperm(k).to(torch.int32))
    yield "w8a8", replace(eight, activations="int8")
    yield "w8a8 static", replace(eight, activations="int8", input_scale=0.03, input_offset=5, bias=torch.randn(n))
    yield "w4a8", replace(four, activations="int8")
    yield "w4a8 with zeros", replace(four.scaled(scale, zero, 32), activations="int8")
    if k % 32 == 0:
        levels = four.scaled(per_row, None, 32, levels=torch.randint(0, 256, (n, groups)).to(torch.uint8))
        levels = replace(levels, activations="int8")
        yield "w4a8 in two levels", levels
        yield "w8a8 rotated", replace(eight, activations="int8", rotation=16)
        yield "w4a8 rotated", replace(levels, rotation=32)
        yield "w4a8 rotated in groups", replace(four, activations="int8", rotation=32)
        yield "w4a16 rotated", replace(four, rotation=32)
        yield "w4a16 rotated, rounded", replace(four, rotation=32, activations="bfloat16")


# With many rows their tiles are others.
_BY_TILE = {"bfloat16", "w8a16", "w8a8", "w4a16", "w4a8 in two levels"}


def _linear() -> Iterator[Case]:
    for n, k in ((40, 96), (17, 77)):
        for label, weight in weights(n, k):
            yield Case(f"{label} {n}x{k}", (torch.randn(19, k), weight), rows=(0,))
    for label, weight in weights(40, 96):
        if label in _BY_TILE:
            yield Case(f"{label}, 150 rows", (torch.randn(150, 96), weight), rows=(0,))
    yield Case("segments", (torch.randn(3, 1100), linear_definition.pack(torch.randn(24, 1100))), rows=(0,))


def paged(rows: Sequence[tuple[int, int]], blocks: int = 96) -> tuple[AttentionMetadata, torch.Tensor]:
    """(metadata of rows with (new tokens, tokens), the slots of all their tokens in order); block 0 is nobody's."""
    widest = max(-(-length // _BLOCK_SIZE) for _, length in rows)
    table = (torch.randperm(blocks)[: len(rows) * widest] + 1).view(len(rows), widest).to(torch.int32)
    counts, lengths = [count for count, _ in rows], [length for _, length in rows]
    starts = torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()], dtype=torch.int32)
    slots = [
        int(table[row, place // _BLOCK_SIZE]) * _BLOCK_SIZE + place % _BLOCK_SIZE
        for row, length in enumerate(lengths)
        for place in range(length)
    ]
    sizes = torch.tensor(lengths, dtype=torch.int32)
    empty = torch.zeros(0, dtype=torch.int64)
    return AttentionMetadata(table, empty, starts, sizes, _BLOCK_SIZE, counts, lengths), torch.tensor(slots)


def _filled(
    dtype: torch.dtype, heads: int, size: int, slots: torch.Tensor, blocks: int = 96
) -> tuple[torch.Tensor, ...]:
    """Caches with random keys and values at these slots; a read of what nobody wrote is a NaN."""
    caches = []
    for shape in attention_definition.kv_cache_shapes(KVCacheSpec(heads, size, dtype), blocks + 1, _BLOCK_SIZE):
        cache = torch.zeros(shape, dtype=dtype)
        if dtype.itemsize > 1:
            cache[:, _BLOCK_SIZE:] = float("nan")
        caches.append(cache)
    new = torch.randn(2, len(slots), heads, size)
    attention_definition.write_kv_cache(new[0], new[1], caches[0], caches[1], slots)
    return tuple(caches)


_ATTENTION: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"sliding_window": 9},
    "long window": {"sliding_window": 270},
    "chunks": {"attention_chunk": 8},
    "soft cap": {"soft_cap": 2.0},
    "sinks": {"sinks": torch.tensor([0.5, -1.0, 2.0, 0.0])},
    "alibi": {"alibi_slopes": torch.tensor([0.5, 0.25, 0.1, 0.05])},
    "both ways": {"causal": False},
    "int8 cache": {"cache": torch.int8},
    "fp8 cache": {"cache": torch.float8_e4m3fn},
    "bfloat16 cache": {"cache": torch.bfloat16},
}


def _paged_attention() -> Iterator[Case]:
    for label, options in _ATTENTION.items():
        given = dict(options)
        cache = given.pop("cache", torch.float32)
        rows = ((1, 5), (7, 19), (3, 33))
        if "causal" in given:
            rows = ((5, 5), (20, 20))  # type: ignore[assignment]
        elif label in ("plain", "long window"):
            rows = (*rows, (1, 300), (2, 270))  # type: ignore[assignment]
        metadata, slots = paged(rows)
        keys, values = _filled(cache, 2, 24, slots)
        query = torch.randn(sum(count for count, _ in rows), 4, 24)
        yield Case(label, (query, keys, values, metadata), {"scale": 0.2, **given})


def _latent_attention() -> Iterator[Case]:
    rows = ((1, 5), (3, 19), (1, 300))
    for cache in (torch.float32, torch.int8):
        metadata, slots = paged(rows)
        latents = torch.zeros(LatentCacheSpec(40 + 16, cache, scales=2).shape(97, _BLOCK_SIZE), dtype=cache)
        write_latent_cache(torch.randn(len(slots), 40), torch.randn(len(slots), 16), latents, slots)
        args = (torch.randn(5, 4, 40), torch.randn(5, 4, 16), latents, metadata)
        yield Case(str(cache), args, {"scale": 0.2})


def _writes() -> Iterator[Case]:
    slots = torch.tensor([16, 40, 17, 33, 20])
    for cache in (torch.float32, torch.bfloat16, torch.int8, torch.float8_e4m3fn):
        shapes = attention_definition.kv_cache_shapes(KVCacheSpec(2, 24, cache), 3, _BLOCK_SIZE)
        caches = [torch.zeros(shape, dtype=cache) for shape in shapes]
        yield Case(str(cache), (*torch.randn(2, 5, 2, 24), *caches, slots), changed=(2, 3))


def _latent_writes() -> Iterator[Case]:
    for cache in (torch.bfloat16, torch.int8):
        latents = torch.zeros(LatentCacheSpec(56, cache, scales=2).shape(3, _BLOCK_SIZE), dtype=cache)
        slots = torch.tensor([16, 40, 17])
        yield Case(str(cache), (torch.randn(3, 40), torch.randn(3, 16), latents, slots), changed=(2,))


def _experts() -> Iterator[Case]:
    """Five experts: all tokens go to expert 2 and to one of 0, 1 and 3."""
    gate_up, down = ([dict(weights(n, k)) for _ in range(5)] for n, k in ((64, 64), (64, 32)))
    several = ("float32", "w8a8", "fp8", "bfloat16", "w4a16")
    for kind in ("float32", "bfloat16", "fp8", "w4a16 with zeros", "w8a8", "w4a8 in two levels", "of several kinds"):
        kinds = several if kind == "of several kinds" else (kind,) * 5
        pairs = [(gate_up[e][own], down[e][own]) for e, own in enumerate(kinds)]
        others = torch.tensor([0, 1, 3])[torch.randint(0, 3, (19,))]
        ids = torch.stack((torch.full((19,), 2), others), dim=1)
        together = ExpertWeights(tuple(pair[0] for pair in pairs), tuple(pair[1] for pair in pairs))
        x = torch.randn(19, 64) * 0.1  # float16 has no more than 65504
        yield Case(
            kind,
            (x, ids, torch.rand(19, 2), together),
            rows=(0, 1, 2),
            has_codes=any(weight.activations == "int8" for weight in together.down),
        )
    up = [linear_definition.pack(torch.randn(24, 64)) for _ in range(3)]
    ungated = ExpertWeights(tuple(up), tuple(linear_definition.pack(torch.randn(64, 24)) for _ in range(3)))
    args = (torch.randn(4, 64), torch.tensor([[0], [2], [1], [2]]), torch.rand(4, 1), ungated, "relu2_no_mul")
    yield Case("without a gate", args, rows=(0, 1, 2))


# 23 tokens: a number that no other size is.
_STATES = {
    "rows": RecurrentMetadata.of_rows((2, 0, 3), (0, 5, 1), (3, 9, 18), (1, 0, 1)),
    "drafts": RecurrentMetadata.of_rows((1, 4, 4), (3, 0, 2), (0, 7, 17), stored=[2, 0, 17]),
}


def _recurrent(name: str) -> Iterator[Case]:
    for label, rows in _STATES.items():
        for case in _RECURRENT[name]():
            yield case._replace(label=f"{case.label}, {label}", args=(*case.args, rows), changed=(len(case.args) - 1,))


def _convolutions() -> Iterator[Case]:
    for taps, bias, kwargs in ((4, torch.randn(300), {"activation": "silu"}), (2, None, {}), (21, None, {})):
        yield Case(f"{taps} taps", (torch.randn(23, 300), torch.randn(300, taps), bias, torch.randn(5, 300, taps - 1)),
                   kwargs)  # fmt: skip


def _delta_rules() -> Iterator[Case]:
    for label, decay in (("of a head", torch.randn(23, 2)), ("of each row", torch.randn(23, 2, 20))):
        keys, values = torch.randn(2, 23, 1, 20), torch.randn(23, 2, 35)
        yield Case(label, (*keys, values, decay, torch.randn(23, 2), -torch.rand(2), torch.randn_like(decay[0]),
                   torch.randn(5, 2, 20, 35)), {"beta_scale": 2.0})  # fmt: skip


def _selective_scans() -> Iterator[Case]:
    x, dt, gate = torch.randn(3, 23, 150)
    for label, own in (("gate", gate), ("no gate", None)):
        yield Case(label, (x, dt, -torch.rand(5, 150), *torch.randn(2, 23, 5), torch.randn(150),
                   None if own is None else torch.randn(150), own, torch.randn(4, 5, 150)))  # fmt: skip


def _mamba2_scans() -> Iterator[Case]:
    for label, d in (("of a head", torch.randn(4)), ("of a channel", torch.randn(4 * 35))):
        yield Case(label, (torch.randn(23, 4 * 35), torch.randn(23, 4), -torch.rand(4), *torch.randn(2, 23, 2 * 7), d,
                   torch.randn(4), torch.randn(4, 4, 7, 35)), {"dt_limit": (0.1, 0.9)})  # fmt: skip


_RECURRENT: dict[str, Callable[[], Iterator[Case]]] = {
    "causal_conv1d": _convolutions,
    "gated_delta_rule": _delta_rules,
    "selective_scan": _selective_scans,
    "mamba2_scan": _mamba2_scans,
}


def _lora(is_lookup: bool) -> Iterator[Case]:
    pack = linear_definition.pack
    down = torch.randn(50, 4) if is_lookup else torch.randn(4, 50)
    terms = (LoraTerm(1, 0, pack(down), pack(torch.randn(12, 4)), 0.5), LoraTerm(2, 8, pack(down * 2),
             pack(torch.randn(16, 4)), 2.0))  # fmt: skip
    inputs = torch.randint(0, 50, (6,)) if is_lookup else torch.randn(6, 50)
    slots = torch.tensor([0, 1, 2, 1, 0, 2])
    yield Case("two", (torch.randn(6, 24), inputs, slots, LoraTerms(terms, 24, is_lookup)), rows=(0, 1, 2))


def cases(name: str) -> list[Case]:
    """Of an operation, always the same ones."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(20)
        return list(_cases(name))


def _cases(name: str) -> Iterator[Case]:
    x, residual, weight, bias = torch.randn(5, 77), torch.randn(5, 77), torch.rand(77) + 0.5, torch.randn(77)
    logits = torch.randn(4, 1700) * 4
    made: dict[str, Callable[[], Iterator[Case]]] = {
        "linear": _linear,
        "paged_attention": _paged_attention,
        "latent_attention": _latent_attention,
        "write_kv_cache": _writes,
        "write_latent_cache": _latent_writes,
        "experts": _experts,
        "lora": lambda: _lora(False),
        "lora_embedding": lambda: _lora(True),
        **{one: partial(_recurrent, one) for one in _RECURRENT},
    }
    plain: dict[str, list[Case]] = {
        "kv_cache_shapes": [Case("int8", (KVCacheSpec(2, 24, torch.int8), 3, 16))],
        "quantize_per_token": [Case("odd", (x,), rows=(0,))],
        "heads_linear": [Case("odd", (torch.randn(5, 3, 20), torch.randn(3, 20, 33)), rows=(0,))],
        "rms_norm": [
            Case("odd", (x, weight, 1e-5), rows=(0,)),
            Case("offset", (x, weight, 1e-5, 31, 1.0), rows=(0,)),
            Case("rounded first", (x, weight, 1e-5), {"rounds_first": True}, rows=(0,)),
            Case("of one channel", (x[:, :2], None, 1e-30, 1), rows=(0,)),
        ],
        "add_rms_norm": [
            Case("odd", (x, residual, weight, 1e-5), rows=(0, 1)),
            Case("rounded first", (x, residual, weight, 1e-5), {"rounds_first": True}, rows=(0, 1)),
        ],
        "layer_norm": [Case("odd", (x, weight, bias, 1e-5), rows=(0,))],
        "add_layer_norm": [Case("odd", (x, residual, weight, bias, 1e-5), rows=(0, 1))],
        "gated_rms_norm": [
            Case("groups", (x[:, :72], residual[:, :72], weight[:72], 1e-5, 3), rows=(0, 1)),
            Case("before", (x[:, :72], residual[:, :72], weight[:72], 1e-5, 1, True, "sigmoid"), rows=(0, 1)),
            Case("gate alone", (x, residual, None, 0.0), rows=(0, 1)),
        ],
        "silu_and_mul": [Case("odd", (x[:, :66],), rows=(0,))],
        "mul_and_silu": [Case("odd", (x[:, :66],), rows=(0,))],
        "gelu_and_mul": [Case(kind, (x[:, :66], kind), rows=(0,)) for kind in ("none", "tanh")],
        "gelu_and_mul_sparse": [Case("tanh", (x[:, :66], 0.5, "tanh"), rows=(0,))],
        "rotary_embedding": [
            Case(
                f"{width} {neox} {keys}",
                (torch.tensor([0, 3, 9]), torch.randn(3, 80), torch.randn(3, keys), torch.randn(10, width), 20, neox),
                rows=(0, 1, 2),
            )
            for width, neox, keys in ((16, True, 40), (16, False, 40), (20, True, 40), (16, True, 0))
        ],
        "select_experts": [
            Case("softmax", (x[:, :12], 3), rows=(0,)),
            Case("groups", (x[:, :12], 3, "sigmoid", True, torch.randn(12), 4, 2, 2.5), rows=(0,)),
        ],
        "log_softmax": [Case("odd", (logits,), rows=(0,))],
        "argmax": [Case("ties", (logits.round(),), rows=(0,))],
        "gather_logprobs": [Case("two ranks", (logits, torch.randint(0, 1700, (4, 3)), 2), rows=(0, 1))],
        "block_sums": [Case("512", (logits, logits.amax(1), 512), rows=(0, 1))],
        "draw_nucleus": [Case("odd", (logits, logits.amax(1), *torch.rand(2, 4).double()), rows=(0, 1, 2, 3))],
    }
    yield from made[name]() if name in made else plain[name]


# --- Comparing. ---


def disagreement(
    name: str, operation: Operation, device: torch.device, dtype: torch.dtype = torch.float32, case: Case | None = None
) -> str:
    """Where the operation differs from its definition; "": nowhere. `dtype`: of the float inputs."""
    for one in cases(name) if case is None else [case]:
        try:
            found = _difference(name, operation, one, device, dtype)
        except Exception as error:  # a kernel that cannot run here is one that is not used, whatever it raised
            found = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        if found:
            return f"{one.label}: {found}"
    return ""


def _difference(name: str, operation: Operation, case: Case, device: torch.device, dtype: torch.dtype) -> str:
    dtype = torch.float32 if name in FLOAT32 else dtype
    narrow = [_as_type(item, dtype, at in case.changed) for at, item in enumerate(case.args)]
    there = [_moved(item, device) for item in narrow]
    kwargs = {key: _moved(value, device) for key, value in case.kwargs.items()}
    here = [_moved(_as_type(item, torch.float32, at in case.changed), None) for at, item in enumerate(narrow)]
    states = {at: there[at].clone() for at in case.changed}
    got = operation(*there, **kwargs)
    want = definition(name)(*here, **case.kwargs)
    pairs = list(zip(_tensors(got), _tensors(want), strict=True))
    pairs += [(there[at], here[at]) for at in case.changed]
    for own, theirs in pairs:
        if found := _error(own, theirs, torch.bfloat16 if case.has_codes and dtype.itemsize == 2 else dtype):
            return found
    has_rows = any(isinstance(item, AttentionMetadata) for item in there)
    if has_rows and not all(torch.equal(*pair) for pair in _rows_alone(operation, there, kwargs, got)):
        return "a row alone, or its last token, has other bits than in a batch"
    if isinstance(there[-1], RecurrentMetadata):
        pairs = _rows_of_states(operation, there, kwargs, got, case.changed[0], states)
        if not all(torch.equal(*pair) for pair in pairs):
            return "a row alone, in one step or in two, has other bits than in a batch"
    if case.rows:
        again = [item.clone() if isinstance(item, torch.Tensor) else item for item in there]
        if name.startswith("lora"):
            again[0] = _moved(narrow[0], device)
        alone = [item[1:2] if at in case.rows else item for at, item in enumerate(again)]
        single = operation(*alone, **kwargs)
        if not all(torch.equal(one[0], all_of[1]) for one, all_of in zip(_tensors(single), _tensors(got), strict=True)):
            return "a row alone has other bits than in a batch"
    return ""


def _rows_alone(
    operation: Operation, args: Sequence[Any], kwargs: Mapping[str, Any], got: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """(the result for one batch row, or for its last token, alone; the same of the batch)."""
    at = next(index for index, item in enumerate(args) if isinstance(item, AttentionMetadata))
    metadata, first = args[at], 0
    inputs = [index for index in range(at) if len(args[index]) == len(got)]
    for row, (count, length) in enumerate(zip(metadata.query_lens_list, metadata.seq_lens_list, strict=True)):
        first += count
        for some in {count, 1} if kwargs.get("causal", True) else {count}:
            part = slice(first - some, first)
            table = metadata.block_table[row : row + 1, : -(-length // _BLOCK_SIZE)]
            starts = metadata.query_start_loc.new_tensor([0, some])
            sizes = metadata.seq_lens[row : row + 1]
            own = AttentionMetadata(table, metadata.slot_mapping, starts, sizes, _BLOCK_SIZE, [some], [length])
            given = [own if i == at else item[part] if i in inputs else item for i, item in enumerate(args)]
            yield operation(*given, **kwargs), got[part]


def _rows_of_states(
    operation: Operation,
    args: Sequence[Any],
    kwargs: Mapping[str, object],
    got: torch.Tensor,
    at: int,
    states: Mapping[int, torch.Tensor],
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(what a row has alone, in one step or in two; the same of the batch): results and states. `states`: args[at] as
    it was before the batch."""
    metadata, first, pairs = args[-1], 0, []
    stored = metadata.query_lens_list if metadata.stored is None else metadata.stored.tolist()
    for slot, count, length, seen in zip(
        metadata.slots.tolist(), metadata.query_lens_list, metadata.seq_lens_list, stored, strict=True
    ):
        for cut in {0, count // 2} if seen == count else {0}:
            state, results = states[at].clone(), []
            for start, end in ((0, cut), (cut, count)) if cut else ((0, count),):
                part = slice(first + start, first + end)
                own = RecurrentMetadata.of_rows(
                    (slot, length - count + start, end - start), stored=None if seen == count else [seen]
                )
                given = [
                    item[part] if isinstance(item, torch.Tensor) and len(item) == len(got) else item for item in args
                ]
                given[at], given[-1] = state, _moved(own, got.device)
                results.append(operation(*given, **kwargs))
            pairs += [(torch.cat(results), got[first : first + count]), (state[slot], args[at][slot])]
        first += count
    return pairs


def _error(own: torch.Tensor, theirs: torch.Tensor, dtype: torch.dtype) -> str:
    own = own.cpu()
    if own.shape != theirs.shape:
        return f"the shape {list(own.shape)} in the place of {list(theirs.shape)}"
    if not own.is_floating_point() or own.dtype.itemsize == 1:
        same = torch.equal(own.view(torch.uint8) if own.dtype.itemsize == 1 else own,
                           theirs.view(torch.uint8) if theirs.dtype.itemsize == 1 else theirs)  # fmt: skip
        return "" if same else "other integers"
    if not own.numel():
        return ""
    own, theirs = own.double().flatten(), theirs.double().flatten()
    errors = (own - theirs).abs() / theirs.abs().max().clamp(min=1e-30)
    if bool((errors <= ALLOWED[dtype]).all()):
        return ""
    at = int(errors.argmax())
    where = f"number {at} of {len(own)} is {float(own[at]):.7g}, not {float(theirs[at]):.7g}"
    return f"an error of {float(errors[at]):.1e}, allowed are {ALLOWED[dtype]:.0e}: {where}"


def _tensors(found: Any) -> list[torch.Tensor]:
    return [item for item in (found if isinstance(found, tuple) else (found,)) if isinstance(item, torch.Tensor)]


def _as_type(item: Any, dtype: torch.dtype, is_changed: bool) -> Any:
    """float32 inputs, which are not caches, in `dtype`."""
    floats = (torch.float32, torch.bfloat16, torch.float16)
    is_input = isinstance(item, torch.Tensor) and item.dtype in floats and item.dim() > 1 and not is_changed
    return item.to(dtype) if is_input else item


def _moved(item: Any, device: torch.device | None) -> Any:
    """A copy on the device; None: a copy where it is."""
    if isinstance(item, torch.Tensor):
        return item.clone() if device is None else item.clone().to(device)
    if isinstance(item, Weight):
        fields = {key: _moved(value, device) for key, value in vars(item).items() if isinstance(value, torch.Tensor)}
        return replace(item, **fields)
    if isinstance(item, AttentionMetadata | RecurrentMetadata):
        fields = {key: _moved(value, device) for key, value in vars(item).items() if isinstance(value, torch.Tensor)}
        return replace(item, **fields) if isinstance(item, RecurrentMetadata) else replace(item, plan=None, **fields)
    if isinstance(item, ExpertWeights):
        parts = (tuple(_moved(one, device) for one in each) for each in (item.gate_up, item.down))
        return ExpertWeights(*parts)
    if isinstance(item, LoraTerms):
        terms = tuple(replace(t, down=_moved(t.down, device), up=_moved(t.up, device)) for t in item.terms)
        return LoraTerms(terms, item.width, item.is_lookup)
    return item


class Task(NamedTuple):
    """One case of an operation, in one type of activations."""

    name: str
    case: int
    dtype: torch.dtype


def tasks_of(names: Sequence[str], dtypes: Sequence[torch.dtype]) -> list[Task]:
    return [Task(name, case, dtype) for name in names for dtype in dtypes for case in range(len(cases(name)))]


_CHILD = """
import json, sys
sys.path[:], device, tasks = json.loads(sys.argv[1])
import torch
from llm.kernels.triton.backend import kernel
from llm.kernels.triton.check import cases, disagreement
for name, case, dtype in tasks:
    found = disagreement(name, kernel(name), torch.device(device), getattr(torch, dtype), cases(name)[case])
    print(json.dumps(found), flush=True)
    if found:
        break
"""


def found_apart(tasks: Sequence[Task], device: torch.device) -> dict[Task, str]:
    """What `disagreement` says of kernels, computed in a process of its own, which ends at the first that differs: one
    that reads what it must not ends its process's use of the device. The others go on in another."""
    found: dict[Task, str] = {}
    while rest := tasks[len(found) :]:
        plain = [(task.name, task.case, str(task.dtype).removeprefix("torch.")) for task in rest]
        argument = json.dumps([system.search_path(), str(device), plain])
        done = subprocess.run([sys.executable, "-c", _CHILD, argument], capture_output=True, text=True, check=False)
        answers = [json.loads(line) for line in done.stdout.splitlines()]
        found |= zip(rest, answers, strict=False)
        # What ends badly after a difference, or after all of them, says nothing of the next.
        if done.returncode and len(answers) < len(rest) and not any(answers):
            said = done.stderr.strip().splitlines()
            found[tasks[len(found)]] = f"its process ended with {done.returncode}: {said[-1] if said else ''}"
    return found


def found_by_several(tasks: Sequence[Task], device: torch.device) -> dict[Task, str]:
    """The same of several processes at a time: nearly all of it is compiling."""
    count = max(1, min(_MOST_PROCESSES, len(system.cores()), len(tasks)))
    with ThreadPoolExecutor(count) as pool:
        each = pool.map(partial(found_apart, device=device), [tasks[start::count] for start in range(count)])
        return {task: text for found in each for task, text in found.items()}


# --- Remembering. ---


def agreeing(
    kernels: Mapping[str, Operation], device: torch.device, folder: Path | None
) -> tuple[dict[str, Operation], dict[str, str]]:
    """(the kernels that agree with their definitions on this device, why each of the others does not).

    Args:
        folder: where findings are kept, by device, driver and versions; None: they are not.
    """
    found = _remembered(folder, device)
    missing = [name for name in kernels if name not in found]
    if missing:
        logger.warning("%s kernels are compared with PyTorch's operations on this device, once", len(missing))
        if device.type == "cuda":
            each = found_by_several(tasks_of(missing, _TYPES), device)
            found |= {name: next((text for task, text in each.items() if task.name == name and text), "")
                      for name in missing}  # fmt: skip
        else:
            for name in missing:
                each_type = (disagreement(name, kernels[name], device, dtype) for dtype in _TYPES)
                found[name] = next(filter(None, each_type), "")
        _remember(folder, device, found)
    wrong = {name: found[name] for name in kernels if found[name]}
    for name, why in wrong.items():
        logger.warning(
            "the Triton kernel of %s is not right on %s (%s): PyTorch computes it; please report this",
            name, identity(device), why,
        )  # fmt: skip
    return {name: kernel for name, kernel in kernels.items() if name not in wrong}, wrong


def identity(device: torch.device) -> str:
    """The device, its driver and the versions that a kernel's code depends on."""
    if INTERPRETED or device.type != "cuda":
        return f"{target_of(device).name}, Triton {triton.__version__}"
    name = torch.cuda.get_device_name(device)
    driver = torch.version.cuda or torch.version.hip
    return f"{name}, {target_of(device).name}, {driver}, Triton {triton.__version__}, PyTorch {torch.__version__}"


def _file(folder: Path, device: torch.device) -> Path:
    sources = sorted(Path(__file__).parent.glob("*.py"))
    digest = hashlib.sha256(identity(device).encode() + b"".join(path.read_bytes() for path in sources))
    return folder / f"triton-{digest.hexdigest()[:16]}.json"


def _remembered(folder: Path | None, device: torch.device) -> dict[str, str]:
    if folder is None:
        return {}
    try:
        found = json.loads(_file(folder, device).read_text())
    except (OSError, ValueError):
        return {}
    return {key: value for key, value in found.items() if isinstance(value, str)} if isinstance(found, dict) else {}


def _remember(folder: Path | None, device: torch.device, found: Mapping[str, str]) -> None:
    if folder is None:
        return
    path = _file(folder, device)
    try:
        own = path.with_suffix(".new")
        own.write_text(json.dumps(dict(found), indent=1))
        own.replace(path)
    except OSError as error:
        logger.warning("what the comparison of kernels found cannot be kept in %s: %s", folder, error)
