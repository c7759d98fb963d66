"""Rotary embeddings: pairs of channels as complex numbers, frequencies by transformers."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from llm.layers import rotary
from llm.layers import rotary as extra_rotary
from llm.layers.rotary import RopeParameters
from op_cases.base import Case, Inputs, normal

HEAD, HEADS, KV_HEADS = 20, 3, 2
LONGEST = 150  # more than the model was made for, so that dynamic scaling acts
MADE_FOR = 128

# What transformers calls the parameters that config.json has; ours are `RopeParameters`.
SCALINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 3.0},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 32, "mscale": 0.7, "mscale_all_dim": 0.5},
    "longrope": {
        "factor": 4.0,
        "original_max_position_embeddings": 32,
        "short_factor": [1.0] * (HEAD // 2),
        "long_factor": [1.0 + 0.3 * index for index in range(HEAD // 2)],
    },
}


def rope_parameters(kind: str) -> RopeParameters:
    given = {name: tuple(value) if isinstance(value, list) else value for name, value in SCALINGS[kind].items()}
    return RopeParameters(rope_type=kind, max_position_embeddings=MADE_FOR, **given)


def transformers_frequencies(kind: str) -> tuple[torch.Tensor, float]:
    """transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS[kind], for `LONGEST` positions."""
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = LlamaConfig(
        hidden_size=HEAD * HEADS,
        num_attention_heads=HEADS,
        head_dim=HEAD,
        max_position_embeddings=MADE_FOR,
        rope_parameters={"rope_type": kind, "rope_theta": 10000.0, **SCALINGS[kind]},
    )
    if kind == "default":
        return LlamaRotaryEmbedding.compute_default_rope_parameters(config)
    return ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"), seq_len=LONGEST)


def default_frequencies(rotary_dim: int, theta: float = 10000.0) -> torch.Tensor:
    return torch.tensor([theta ** (-2 * index / rotary_dim) for index in range(rotary_dim // 2)], dtype=torch.float64)


def rotated(x: torch.Tensor, angles: torch.Tensor, is_neox: bool = True, factor: float = 1.0) -> torch.Tensor:
    """x [..., N, heads, size] turned by angles [N, d]: (a + ib) e^(i angle) for each pair of channels."""
    half = angles.shape[-1]
    turned, rest = x[..., : 2 * half], x[..., 2 * half :]
    real, imaginary = (turned[..., :half], turned[..., half:]) if is_neox else (turned[..., ::2], turned[..., 1::2])
    result = torch.complex(real, imaginary) * torch.polar(torch.tensor(factor).double(), angles.double()).unsqueeze(-2)
    parts = (result.real, result.imag)
    return torch.cat((torch.cat(parts, -1) if is_neox else torch.stack(parts, -1).flatten(-2), rest), dim=-1)


def of_heads(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    return rotated(x.unflatten(-1, (x.shape[-1] // HEAD, HEAD)), *args, **kwargs).flatten(-2)


def query_and_key(rows: int, dtype: torch.dtype, generator: torch.Generator) -> Inputs:
    query = normal(rows, HEADS * HEAD, dtype=dtype, generator=generator)
    return query, normal(rows, KV_HEADS * HEAD, dtype=dtype, generator=generator)


def token_inputs(rows: int, dtype: torch.dtype, generator: torch.Generator) -> Inputs:
    positions = torch.randint(0, LONGEST, (rows,), generator=generator)
    return positions, *query_and_key(rows, dtype, generator)


def grid_inputs(rows: int, dtype: torch.dtype, generator: torch.Generator) -> Inputs:
    positions = torch.randint(0, LONGEST, (3, rows), generator=generator)
    return positions, *query_and_key(rows, dtype, generator)


def scaled_reference(kind: str) -> Callable[..., Any]:
    def reference(op: Any, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> Any:
        per_position, factor = transformers_frequencies(kind)
        angles = torch.outer(positions.double(), per_position.double())
        return of_heads(query, angles, factor=factor), of_heads(key, angles, factor=factor)

    return reference


def deepseek_reference(op: Any, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> Any:
    """transformers' yarn frequencies, yarn_get_mscale of its DeepSeek V3, pairs interleaved as DeepSeek has them."""
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import yarn_get_mscale

    angles = torch.outer(positions.double(), transformers_frequencies("yarn")[0].double())
    factor = yarn_get_mscale(4.0, 0.9) / yarn_get_mscale(4.0, 0.4)
    return of_heads(query, angles, False, factor), of_heads(key, angles, False, factor)


def style_reference(op: Any, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> Any:
    angles = torch.outer(positions.double(), default_frequencies(op.rotary_dim))
    return of_heads(query, angles, op.is_neox_style), of_heads(key, angles, op.is_neox_style)


def sections_reference(module: str, sections: list[int]) -> Callable[..., Any]:
    """`recomposition_frequencies` of transformers' Qwen2-VL or Qwen3-VL."""

    def reference(op: Any, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> Any:
        from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLRotaryEmbedding
        from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextRotaryEmbedding

        owner = {"qwen2_vl": Qwen2VLRotaryEmbedding, "qwen3_vl": Qwen3VLTextRotaryEmbedding}[module]
        grid = positions if positions.dim() == 2 else positions.expand(3, -1)
        angles = grid[..., None].double() * default_frequencies(HEAD)
        holder: Any = SimpleNamespace(mrope_section=sections)
        angles = owner.recomposition_frequencies(holder, angles)[..., : HEAD // 2]
        return of_heads(query, angles), of_heads(key, angles)

    return reference


def rotary_case(rope: RopeParameters, reference: Callable[..., Any], inputs: Any = token_inputs, **more: Any) -> Case:
    return Case(lambda _: rotary.RotaryEmbedding.of(HEAD, LONGEST, rope, **more), inputs, reference, 2e-5)


def apply_inputs(*leading: int) -> Callable[[int, torch.dtype, torch.Generator], Inputs]:
    def make(rows: int, dtype: torch.dtype, generator: torch.Generator) -> Inputs:
        angles = torch.randn(rows, 7, generator=generator).double() * 3
        x = normal(*leading, rows, HEADS, HEAD, dtype=dtype, generator=generator)
        return x, angles.cos().float(), angles.sin().float()

    return make


def apply_reference(op: Any, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    return rotated(x, torch.atan2(sin, cos), op.is_neox_style)


def dual_chunk(is_neox_style: bool, rotary_dim: int, chunk_size: int, local_size: int) -> Callable[[Any], nn.Module]:
    def build(_: torch.dtype) -> nn.Module:
        return extra_rotary.DualChunkRotaryEmbedding(
            HEAD, rotary_dim, LONGEST, 10000.0, is_neox_style, chunk_size=chunk_size, local_size=local_size
        )

    return build


def dual_chunk_reference(op: Any, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor, *more: Any) -> Any:
    """The five places of a query and the one of a key, one position at a time."""
    places, length = positions.tolist(), op.chunk_len
    if more:
        places = (positions + more[0]).tolist()

    def turned(x: torch.Tensor, place_of: Callable[[int], float]) -> torch.Tensor:
        rows = torch.tensor([place_of(position) for position in places], dtype=torch.float64)
        return of_heads(x, torch.outer(rows, default_frequencies(op.rotary_dim)), op.is_neox_style)

    queries = [
        turned(query, lambda p: p % length),
        turned(query, lambda p: min(p % length + length, op.chunk_size)),
        turned(query, lambda p: min(length - 1 + length, op.chunk_size)),
        turned(query, lambda p: p % length + length),
        turned(query, lambda p: p % length + op.chunk_size),
    ]
    return torch.cat(queries, dim=-1), turned(key, lambda p: p % length)


def inputs_with_offsets(rows: int, dtype: torch.dtype, generator: torch.Generator) -> Inputs:
    return *token_inputs(rows, dtype, generator), torch.randint(0, 9, (rows,), generator=generator)


DEEPSEEK = RopeParameters(
    rope_type="deepseek_yarn", factor=4.0, original_max_position_embeddings=32, mscale=0.9, mscale_all_dim=0.4
)
SECTIONS = [4, 3, 3]

ROTARY: dict[str, list[Case]] = {
    "rotary_embedding": [
        *(rotary_case(rope_parameters(kind), scaled_reference(kind)) for kind in SCALINGS),
        rotary_case(DEEPSEEK, deepseek_reference, is_neox_style=False),
        rotary_case(RopeParameters(partial_rotary_factor=0.5), style_reference),
        rotary_case(RopeParameters(partial_rotary_factor=0.5), style_reference, is_neox_style=False),
        rotary_case(
            RopeParameters(mrope_section=tuple(SECTIONS)), sections_reference("qwen2_vl", SECTIONS), inputs=grid_inputs
        ),
        rotary_case(
            RopeParameters(mrope_section=tuple(SECTIONS), mrope_interleaved=True),
            sections_reference("qwen3_vl", SECTIONS),
            inputs=grid_inputs,
        ),
        rotary_case(RopeParameters(mrope_section=tuple(SECTIONS)), sections_reference("qwen2_vl", SECTIONS)),
    ],
    "apply_rotary_emb": [
        Case(lambda _: extra_rotary.ApplyRotaryEmb(), apply_inputs(), apply_reference),
        Case(lambda _: extra_rotary.ApplyRotaryEmb(is_neox_style=False), apply_inputs(2), apply_reference),
    ],
    "dual_chunk_rotary_embedding": [
        Case(dual_chunk(True, HEAD, 24, 8), token_inputs, dual_chunk_reference, 2e-5),
        Case(dual_chunk(False, 12, 24, 0), inputs_with_offsets, dual_chunk_reference, 2e-5),
        # Two chunks end before chunk_size, so the earlier ones' place is 2L - 1.
        Case(dual_chunk(True, HEAD, 24, 16), token_inputs, dual_chunk_reference, 2e-5),
    ],
}
