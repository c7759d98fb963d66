"""Every operation in the registry computes its definition: one walk over all of them.

Each op x each dispatch target available here x float32, bfloat16, float16 x 0, 1, odd and many rows, against float64.
The cases are in op_cases/; an operation that is registered without a case fails here.
"""

from __future__ import annotations

import importlib
import pkgutil
import zlib
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from op_cases import CASES, Case
from torch import nn
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

import llm.layers
from llm.base.construction import constructing_for
from llm.base.custom_op import CustomOp, PluggableLayer, op_registry
from llm.config.compilation import CompilationConfig
from llm.errors import ValidationError
from llm.layers import activation, norm, quant_fp8, rotary
from llm.layers import activation as extra_activation
from llm.layers import norm as gated_norm
from llm.layers import norm as mamba_norm
from llm.layers import rotary as extra_rotary
from llm.layers import vision as conv
from llm.layers import vision as mm_encoder
from llm.layers import vision as rel_pos
from llm.layers.rotary import RopeParameters, RotaryEmbedding
from llm.platforms.cpu import CpuPlatform

pytestmark = pytest.mark.usefixtures("one_core")

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ROWS = (0, 1, 7, 130)
# The suffixes of `forward_*` that this machine can run; an op has those that its class defines.
TARGETS = ("forward_native", "forward_cpu")

for _module in pkgutil.walk_packages(llm.layers.__path__, "llm.layers."):
    importlib.import_module(_module.name)
IN_TREE = {name: op for name, op in op_registry.items() if op.__module__.startswith("llm.layers.")}


def targets(op: type) -> list[str]:
    """The methods to walk: the dispatch targets that the class has, or a layer's only forward."""
    if not issubclass(op, CustomOp) or op.is_layer:
        return ["forward"]
    return [target for target in TARGETS if hasattr(op, target)]


WALK = [
    pytest.param(case, target, id=f"{name}-{index}-{target}")
    for name, op in sorted(IN_TREE.items())
    for index, case in enumerate(CASES.get(name, ()))
    for target in targets(op)
]


# Layers whose only definition is transformers': tests/models/test_models.py holds them against it, in their models.
AGAINST_TRANSFORMERS = {f"{family}_gated_delta_net_attention" for family in ("qwen", "olmo_hybrid", "kimi")}


def without_entry(registry: dict[str, Any], cases: dict[str, list[Case]]) -> set[str]:
    return {name for name in registry if not cases.get(name)} - AGAINST_TRANSFORMERS


def built(case: Case, dtype: torch.dtype, generator: torch.Generator) -> nn.Module:
    """The op with random parameters, which a new one may have left uninitialised."""
    with constructing_for(CpuPlatform()):  # where it finds the kernels of its forward_cpu
        op = case.build(dtype)
    for parameter in op.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.3 + 0.2)
    return op


def widened(value: Any) -> Any:
    is_float = isinstance(value, torch.Tensor) and value.is_floating_point()
    return value.double() if is_float else value


def check(actual: Any, expected: Any, dtype: torch.dtype, tolerance: float, roundings: int = 1) -> None:
    """`actual` is `expected` computed in float32 and rounded to `dtype`."""
    if callable(expected):
        expected(actual)
        return
    if isinstance(expected, tuple):
        assert isinstance(actual, tuple) and len(actual) == len(expected)
        for part, part_expected in zip(actual, expected, strict=True):
            check(part, part_expected, dtype, tolerance, roundings)
        return
    assert actual.dtype == dtype and actual.shape == expected.shape
    if not expected.numel():
        return
    info = torch.finfo(dtype)
    arithmetic = tolerance * max(1.0, expected.abs().max().item())
    rounding = 0.0 if dtype == torch.float32 else 0.501 * info.eps * roundings
    bound = arithmetic + rounding * (expected.abs() + info.smallest_normal)
    error = (actual.double() - expected).abs()
    assert (error <= bound).all(), f"error {error.max():.3g}, {(error / bound).max():.3g} of what is allowed"


def run(case: Case, target: str, dtype: torch.dtype, rows: int) -> tuple[Any, Any]:
    """(what the op returns, what it must return or a function that judges it); inputs must come out unchanged."""
    seed = zlib.crc32(f"{rows}-{dtype}".encode())
    generator = torch.Generator().manual_seed(seed)
    op = built(case, dtype, generator)
    inputs = case.inputs(rows, dtype, generator)
    before = [value.clone() if isinstance(value, torch.Tensor) else value for value in inputs]
    if isinstance(op, CustomOp) and target != "forward_native" and (reason := op.declines(target)):
        pytest.skip(reason)
    actual = getattr(op, target)(*inputs)
    for value, copy in zip(inputs, before, strict=True):
        if isinstance(value, torch.Tensor):
            assert torch.equal(value, copy), "an input was written to"
    if case.judge is not None:
        return actual, lambda result: case.judge(op, result, inputs, dtype)
    return actual, case.reference(op, *map(widened, inputs))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("case", "target"), WALK)
def test_op_is_its_definition(case: Case, target: str, dtype: torch.dtype) -> None:
    for rows in ROWS:
        check(*run(case, target, dtype, rows), case.returns or dtype, case.tolerance, case.roundings)


@pytest.mark.parametrize(("ours", "theirs"), [(norm.RMSNorm, LlamaRMSNorm), (norm.GemmaRMSNorm, Gemma2RMSNorm)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rms_norms_round_where_the_published_formulas_do(ours: Any, theirs: Any, dtype: torch.dtype) -> None:
    """vLLM's page: the two differ in `(x * w).to(orig_dtype)` instead of `x.to(orig_dtype) * w`."""
    x, residual = (torch.randn(64, 96, generator=torch.Generator().manual_seed(seed)).to(dtype) for seed in (1, 2))
    expected, op = theirs(96, 1e-5).to(dtype), ours(96, 1e-5, dtype=dtype)
    for module in (expected, op):
        module.weight.data.copy_(torch.linspace(-2, 2, 96))
    if dtype == torch.float32:
        torch.testing.assert_close(op(x), expected(x))
        return
    assert torch.equal(op(x), expected(x))
    normed, total = op(x, residual)
    assert torch.equal(total, (x.float() + residual.float()).to(dtype))
    if ours is norm.RMSNorm:
        assert torch.equal(normed, norm.RMSNorm(96, 1e-5, has_weight=False)(x, residual)[0] * op.weight)


def test_every_op_has_an_entry() -> None:
    assert without_entry(IN_TREE, CASES) == set()
    assert set(CASES) <= set(IN_TREE), "entries of operations that do not exist"


# vLLM's names, as far as this package has them; plugins replace by class name, users switch by registered name.
VLLM_OPS = {
    "silu_and_mul": "SiluAndMul",
    "mul_and_silu": "MulAndSilu",
    "gelu_and_mul": "GeluAndMul",
    "gelu_and_mul_sparse": "GeluAndMulSparse",
    "gelu": "GELU",
    "gelu_tanh": "GELUTanh",
    "gelu_new": "NewGELU",
    "gelu_fast": "FastGELU",
    "quick_gelu": "QuickGELU",
    "relu2": "ReLUSquaredActivation",
    "xielu": "XIELU",
    "swigluoai_and_mul": "SwigluOAIAndMul",
    "fatrelu_and_mul": "FatreluAndMul",
    "silu_and_mul_with_clamp": "SiluAndMulWithClamp",
    "swiglustep_and_mul": "SwigluStepAndMul",
    "rms_norm": "RMSNorm",
    "gemma_rms_norm": "GemmaRMSNorm",
    "rms_norm_gated": "RMSNormGated",
    "mixer2_gated_rms_norm": "Mixer2RMSNormGated",
    "layer_norm": "LayerNorm",
    "rotary_embedding": "RotaryEmbedding",
    "dual_chunk_rotary_embedding": "DualChunkRotaryEmbedding",
    "apply_rotary_emb": "ApplyRotaryEmb",
    "quant_fp8": "QuantFP8",
    "conv2d": "Conv2dLayer",
    "conv3d": "Conv3dLayer",
    "mm_encoder_attn": "MMEncoderAttention",
}
VLLM_LAYERS = {
    "replicated_linear": "ReplicatedLinear",
    "column_parallel_linear": "ColumnParallelLinear",
    "row_parallel_linear": "RowParallelLinear",
    "vocab_parallel_embedding": "VocabParallelEmbedding",
    "parallel_lm_head": "ParallelLMHead",
    "logits_processor": "LogitsLayer",
    "rel_pos_attention": "RelPosAttention",
    "qwen2_decoder": "CustomQwen2Decoder",
}


@pytest.mark.parametrize(("base", "names"), [(CustomOp, VLLM_OPS), (PluggableLayer, VLLM_LAYERS)])
def test_names_and_mechanisms_are_those_of_vllm(base: type, names: dict[str, str]) -> None:
    assert {name: IN_TREE[name].__name__ for name in names} == names
    assert all(issubclass(IN_TREE[name], base) for name in names)


# Negative controls: the walk turns red.


def test_an_op_without_an_entry_is_caught() -> None:
    assert without_entry({**IN_TREE, "made_up": CustomOp}, CASES) == {"made_up"}
    assert without_entry(IN_TREE, {**CASES, "rms_norm": []}) == {"rms_norm"}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("case", "target"), WALK)
def test_a_small_error_is_caught(case: Case, target: str, dtype: torch.dtype) -> None:
    """One element off by a few roundings, where results are largest."""
    actual, expected = run(case, target, dtype, 7)
    dtype = case.returns or dtype
    parts = list(actual) if isinstance(actual, tuple) else [actual]
    # 8-bit floats have no arithmetic: of a quantization the scale is moved.
    changed = 1 if case.judge is not None else 0
    parts[changed] = moved(parts[changed], max(16 * case.tolerance, 2 * torch.finfo(dtype).eps))
    with pytest.raises(AssertionError):
        check(tuple(parts) if isinstance(actual, tuple) else parts[0], expected, dtype, case.tolerance)


def moved(x: torch.Tensor, relative: float) -> torch.Tensor:
    """x with its largest element off by that much."""
    x = x.clone()
    index = torch.unravel_index(x.abs().argmax(), x.shape)
    x[index] += x[index].abs().clamp(min=1.0) * relative
    return x


def test_a_quantization_to_another_float_is_caught() -> None:
    """The values are those of a smaller x, the scale is right."""
    case = CASES["quant_fp8"][0]
    actual, judged = run(case, "forward_native", torch.float32, 7)
    quantized, scale = actual
    judged((quantized, scale))
    cut = (quantized.float() * 0.9).to(quantized.dtype)
    with pytest.raises(AssertionError, match="nearest"):
        judged((cut, scale))


@pytest.mark.parametrize("name", ["silu_and_mul", "rms_norm"])
def test_a_planted_defect_is_caught(name: str) -> None:
    """Halves exchanged; a mean over one channel too few."""
    case = CASES[name][0]
    wrong = {
        "silu_and_mul": lambda dtype: extra_activation.MulAndSilu(),
        "rms_norm": lambda dtype: norm.RMSNorm(66, 1e-5, var_hidden_size=65, dtype=dtype),
    }[name]
    reference = case.build(torch.float32)
    planted = replace(case, build=wrong, reference=lambda op, x: case.reference(reference, x))
    with pytest.raises(AssertionError):
        check(*run(planted, "forward_native", torch.float32, 7), torch.float32, case.tolerance)


# What a constructor refuses


@pytest.mark.parametrize(
    ("build", "parameter"),
    [
        (lambda: activation.GeluAndMul("erf"), "approximate"),
        (lambda: activation.GeluAndMulSparse(0.5, "erf"), "approximate"),
        (lambda: activation.GeluAndMulSparse(0.0), "activation_sparsity"),
        (lambda: activation.GeluAndMulSparse(1.0), "activation_sparsity"),
        (lambda: norm.RMSNorm(8, var_hidden_size=9), "var_hidden_size"),
        (lambda: gated_norm.RMSNormGated(8, group_size=3), "group_size"),
        (lambda: gated_norm.RMSNormGated(8, activation="relu"), "activation"),
        (lambda: mamba_norm.Mixer2RMSNormGated(8, 3), "full_n_groups"),
        (lambda: quant_fp8.QuantFP8(False, (0, 1)), "group_shape"),
        (lambda: quant_fp8.QuantFP8(True, use_ue8m0=True), "use_ue8m0"),
        (lambda: conv.Conv2dLayer(4, 4, 3, padding_mode="reflect"), "padding_mode"),
        (lambda: conv.Conv2dLayer(4, 6, 3, groups=4), "groups"),
        (lambda: conv.Conv3dLayer(4, 4, (3, 3)), "kernel_size"),
        (lambda: mm_encoder.MMEncoderAttention(4, 8, num_kv_heads=3), "num_kv_heads"),
        (lambda: rel_pos.RelPosAttention(8, 3), "num_heads"),
        (lambda: rel_pos.RelPosAttention(8, 2, use_rel_pos=True), "input_size"),
        (lambda: rotary.RotaryEmbedding.of(8, 9, RopeParameters(mrope_section=(1, 1, 1))), "mrope_section"),
        (lambda: rotary.RotaryEmbedding.of(8, 9, RopeParameters(mrope_section=(2, 2))), "mrope_section"),
        (
            lambda: rotary.RotaryEmbedding.of(8, 9, RopeParameters(mrope_section=(0, 2, 2), mrope_interleaved=True)),
            "mrope_section",
        ),
        (lambda: extra_rotary.DualChunkRotaryEmbedding(8, 8, 9, 1e4, chunk_size=4, local_size=4), "local_size"),
    ],
)
def test_a_constructor_names_what_is_wrong(build: Any, parameter: str) -> None:
    with pytest.raises(ValidationError) as caught:
        build()
    assert caught.value.parameter == parameter


def test_a_gated_activation_needs_two_halves() -> None:
    for op in (activation.SiluAndMul(), extra_activation.SwigluOAIAndMul()):
        with pytest.raises(ValueError, match="even"):
            op.forward_native(torch.zeros(2, 5))


def test_positions_of_a_grid_need_sections() -> None:
    op = rotary.RotaryEmbedding.of(8, 9, RopeParameters())
    with pytest.raises(ValueError, match="mrope_section"):
        op.forward_native(torch.zeros(3, 2, dtype=torch.int64), torch.zeros(2, 8), torch.zeros(2, 8))


@pytest.mark.parametrize(
    "arguments",
    [
        (torch.zeros(2, 3, 4),),
        (torch.zeros(2, 4), torch.ones(1)),
        (torch.zeros(2, 6),),
    ],
    ids=["three dimensions", "a scale", "groups that do not divide"],
)
def test_a_dynamic_quant_refuses(arguments: Any) -> None:
    with pytest.raises(ValueError):
        quant_fp8.QuantFP8(False, (1, 4)).forward_native(*arguments)


def test_a_static_quant_needs_the_scale_of_its_groups() -> None:
    op = quant_fp8.QuantFP8(True, (1, 4))
    for scale, bound in ((None, None), (torch.ones(3), None), (torch.ones(1), torch.ones(1))):
        with pytest.raises(ValueError):
            op.forward_native(torch.zeros(2, 8), scale, bound)


@pytest.mark.parametrize("bounds", [[0, 3], [1, 4], [0, 3, 2, 4], []])
def test_sequences_must_cover_the_tokens(bounds: list[int]) -> None:
    x = torch.zeros(1, 4, 8)
    with pytest.raises(ValueError, match="cu_seqlens"):
        mm_encoder.MMEncoderAttention(2, 4).forward_native(x, x, x, torch.tensor(bounds))


def test_patches_are_rows_exactly_where_nothing_overlaps() -> None:
    assert conv.Conv2dLayer(4, 4, 3, 3).enable_linear and conv.Conv3dLayer(4, 4, (1, 2, 2), (1, 2, 2)).enable_linear
    for more in ({"stride": 1}, {"stride": 3, "padding": 1}, {"stride": 3, "dilation": 2}, {"stride": 3, "groups": 2}):
        assert not conv.Conv2dLayer(4, 4, 3, **more).enable_linear


@pytest.mark.parametrize("op", [conv.Conv2dLayer(4, 4, 2, 2), conv.Conv3dLayer(4, 4, 2)])
def test_a_convolution_takes_a_batch(op: conv.ConvLayerBase) -> None:
    with pytest.raises(ValueError, match="dimensions"):
        op.forward_native(torch.zeros(4, *[6] * op.num_dim))


def test_a_rotation_can_be_enforced() -> None:
    with constructing_for(CpuPlatform(), CompilationConfig.of({"custom_ops": ["none"]})):
        bindings = [extra_rotary.ApplyRotaryEmb(enforce_enable=enforce).binding for enforce in (True, False)]
    assert ["enforced" in binding.reason for binding in bindings] == [True, False]


@pytest.mark.parametrize(
    "sections", [(24, 20, 20), (16, 24, 24), (11, 11, 10), (4, 3, 3), (14, 10, 8), (20, 30, 14)], ids=str
)
@pytest.mark.parametrize("interleaved", [False, True], ids=["runs", "interleaved"])
def test_each_pair_follows_the_position_that_transformers_gives_it(
    sections: tuple[int, int, int], interleaved: bool
) -> None:
    """[24, 20, 20] is Qwen3-VL's, [16, 24, 24] Qwen2-VL's. Each angle is the number of its axis."""
    from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLRotaryEmbedding
    from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextRotaryEmbedding

    pairs = sum(sections)
    rope = RopeParameters(mrope_section=sections, mrope_interleaved=interleaved)
    if interleaved and any(index + 3 * (sections[index] - 1) >= pairs for index in (1, 2)):  # more than its turns
        with pytest.raises(ValidationError, match="mrope_section"):
            RotaryEmbedding.of(2 * pairs, 4, rope)
        return
    owner: Any = Qwen3VLTextRotaryEmbedding if interleaved else Qwen2VLRotaryEmbedding
    angles = torch.arange(3.0)[:, None, None, None].expand(3, 1, 1, pairs).clone()
    holder = SimpleNamespace(mrope_section=list(sections))
    expected = owner.recomposition_frequencies(holder, angles).flatten()[:pairs]
    assert RotaryEmbedding.of(2 * pairs, 4, rope).pair_axis.tolist() == expected.tolist()


def test_a_long_rotary_table_is_made_in_parts() -> None:
    table = rotary.cos_sin_table(torch.tensor([1.0, 0.01]), 140_000, 0.5)
    angles = torch.tensor([0, 65_535, 65_536, 139_999]).double()[:, None] * torch.tensor([1.0, 0.01]).double()
    exact = torch.cat((angles.cos(), angles.sin()), dim=1) / 2
    assert torch.allclose(table[[0, 65_535, 65_536, 139_999]].double(), exact, atol=1e-3)


def test_rotary_embedding_takes_vllms_arguments() -> None:
    """Head size, rotary dim, positions, base, style, type; a replacement with these gets them from models too."""
    op = RotaryEmbedding(8, 4, 16, 500.0, False, torch.bfloat16)
    same = RotaryEmbedding.of(8, 16, RopeParameters(theta=500.0, partial_rotary_factor=0.5), False)
    assert torch.equal(op.cos_sin_cache, same.cos_sin_cache) and op.rotary_dim == 4 and not same.is_neox_style

    class Theirs(RotaryEmbedding):
        def __init__(self, head_size, rotary_dim, max_position_embeddings, base, is_neox_style, dtype) -> None:
            super().__init__(head_size, rotary_dim, max_position_embeddings, base, is_neox_style, dtype)

    table = Theirs.of(8, 16, RopeParameters(theta=500.0)).cos_sin_cache
    assert torch.equal(table[0], torch.tensor([1.0] * 4 + [0] * 4))
    with pytest.raises(TypeError, match="rope"):  # another recipe is not dropped
        Theirs.of(8, 16, RopeParameters(rope_type="linear", factor=2.0))
