"""Quantizing on load: what is accepted, which layer gets what, and how much memory it takes.

How good the answers are is `test_quant_accuracy.py`.
"""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from embedded import GREEDY, PROMPTS, copy_model, engine_of, open_llm, run, tokens
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from tiny_models import tiny_checkpoint

from llm import LLM, SamplingParams
from llm.base.construction import constructing_for
from llm.errors import CheckpointError, ValidationError
from llm.kernels.reference.quantize_weight import column_squares
from llm.kernels.reference.rotation import block_for, hadamard, rotate
from llm.kernels.weight import Weight, dequantize
from llm.llm import EMBEDDED_MODEL
from llm.platforms import current_platform
from llm.quantization import quantizer
from llm.quantization.on_load import RECIPES, OnlineConfig, QuantizeOnLoad, Unit, add_layer, share
from llm.quantization.quantizer import (
    IntegerWeight,
    are_far_apart,
    decibels,
    guessed_input_squares,
    quantize_weight,
    quantize_weight_as,
    quantize_with_feedback,
    signal_to_noise,
    static_activation,
)
from llm.setup import calibrate
from llm.setup.calibrate import run_texts

TEXTS = ["In the beginning God created the heaven and the earth.", "And it came to pass in those days, that"]
quick = settings(max_examples=20)


def normal(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def methods(llm: LLM) -> dict[str, Any]:
    modules = engine_of(llm).runner.model.named_modules()
    return {name: module.quant_method for name, module in modules if hasattr(module, "quant_method")}


def packed_weights(llm: LLM) -> dict[str, Weight]:
    """Of the layers that compute with integers."""
    modules = dict(engine_of(llm).runner.model.named_modules())
    return {name: modules[name].packed_weight for name, method in methods(llm).items() if method.scheme}


def schemes(llm: LLM) -> dict[str, str]:
    return {name: method.scheme for name, method in methods(llm).items()}


def check_close(llm: LLM, *folder: Any, vocab_size: int = 2304) -> None:
    """Its logprobs follow those of the model that is not quantized."""
    prompt, params = [5, 6, 7, 8], SamplingParams(temperature=0, max_tokens=1, logprobs=vocab_size)
    (found,) = run(llm, prompt, params)[0].outputs[0].logprobs
    values = torch.tensor([found[token].logprob for token in range(vocab_size)])
    with open_llm(*folder, skip_tokenizer_init=True) as plain:
        (reference,) = run(plain, prompt, params)[0].outputs[0].logprobs
    expected = torch.tensor([reference[token].logprob for token in range(vocab_size)])
    assert not torch.equal(values, expected)
    assert torch.corrcoef(torch.stack((values, expected)))[0, 1] > 0.95


# The quantizer


@quick
@given(st.integers(0, 2**31), st.integers(1, 9), st.integers(1, 5), st.sampled_from([8, 16, 32]))
def test_rounding_to_nearest_is_within_half_a_step(seed: int, n: int, groups: int, size: int) -> None:
    weight = normal(seed, n, groups * size)
    for bits, high in ((8, 127), (4, 7)):
        result = quantize_weight(weight, bits, size, search=False)
        steps = result.scale.repeat_interleave(size, dim=1)
        assert (weight - result.q * steps).abs().le(steps * 0.5001).all()
        assert torch.equal(result.q.view(n, groups, size).abs().amax(-1), torch.full((n, groups), high))


@quick
@given(st.integers(0, 2**31), st.sampled_from([32, 128]))
def test_the_search_never_loses_to_rounding(seed: int, size: int) -> None:
    weight = normal(seed, 5, 256)
    error = {}
    for search in (False, True):
        result = quantize_weight(weight, 4, size, search=search)
        back = dequantize(result.q, result.scale, None, size)
        error[search] = (weight - back).square().view(5, -1, size).sum(-1)
        assert result.q.abs().max() <= 8
    assert torch.equal(result.scale.bfloat16().float(), result.scale)
    # A least-squares refit can only improve the first candidate, group by group. Rounding its scale to bfloat16, by a
    # share of at most 2^-8, adds at most the square of that share of the weights' squares.
    rounding = 2**-16 * weight.square().view(5, -1, size).sum(-1)
    assert (error[True] <= error[False] * (1 + 1e-5) + rounding).all()
    assert error[True].sum() < 0.97 * error[False].sum()


@quick
@given(st.integers(0, 2**31))
def test_scales_are_searched_and_refitted_by_importance(seed: int) -> None:
    """Each scale is the weighted least-squares fit to its integers; weighing brings the weighted error down."""
    x = normal(seed, 6, 4, 32)
    importance = normal(seed + 1, 1, 4, 32).square() ** 2
    q, scale = quantizer.quantize_groups(x, 4, quantizer.CLIP_SHARES, importance)
    plain_q, plain_scale = quantizer.quantize_groups(x, 4, quantizer.CLIP_SHARES, None)
    values = q.float()
    fit = (importance * values * x).sum(-1) / (importance * values * values).sum(-1)
    torch.testing.assert_close(scale, fit, rtol=2**-8 + 1e-4, atol=0)  # half a step of bfloat16
    assert torch.equal(scale.bfloat16().float(), scale)
    weighted = (importance * (x - values * scale[..., None]).square()).sum(-1)
    unweighted = (importance * (x - plain_q.float() * plain_scale[..., None]).square()).sum(-1)
    assert (weighted <= unweighted * (1 + 1e-4)).all() and weighted.sum() < 0.99 * unweighted.sum()


def values_of(found: quantizer.Quantized, size: int) -> torch.Tensor:
    return dequantize(found.q, found.scale, found.minimum, size)


@settings(max_examples=8)
@given(st.integers(0, 2**31), st.sampled_from([32, 128]), st.booleans())
def test_feedback_lowers_the_error_of_outputs(seed: int, size: int, asymmetric: bool) -> None:
    """On inputs that follow a few directions; not on those it was computed from."""
    x = normal(seed + 1, 4000, 16) @ normal(seed, 16, 128) + 0.3 * normal(seed + 3, 4000, 128)
    weight = normal(seed + 2, 24, 128)
    moments = [x[:3000].t() @ x[:3000] / 3000]
    plain = (
        quantize_weight_as(weight, "asymmetric", size) if asymmetric else quantize_weight(weight, 4, size, search=True)
    )
    found = quantize_with_feedback(weight, 4, size, moments, form="asymmetric" if asymmetric else "")
    before, after = (
        float((x[3000:] @ (weight - values_of(each, size)).t()).square().mean()) for each in (plain, found)
    )
    assert after < 0.5 * before
    error = float((weight - values_of(found, size)).square().sum())
    assert found.noise == pytest.approx(error, rel=1e-3) and found.signal == pytest.approx(float(weight.square().sum()))


def test_feedback_lowers_the_error_of_outputs_of_floats() -> None:
    """With other columns' moments it does not: the control."""
    x = normal(1, 4000, 16) @ normal(0, 16, 128) + 0.3 * normal(3, 4000, 128)
    weight = normal(2, 24, 128)
    moment = x[:3000].t() @ x[:3000] / 3000

    def error(each: quantizer.Quantized) -> float:
        assert each.q.dtype == torch.float8_e4m3fn and each.minimum is None and torch.isfinite(each.q.float()).all()
        return float((x[3000:] @ (weight - each.q.float() * each.scale).t()).square().mean())

    found, other = (
        quantize_with_feedback(weight, 8, 128, [each], form="float8") for each in (moment, moment.roll((1, 1), (0, 1)))
    )
    plain = error(quantize_weight_as(weight, "float8", 128))
    assert error(found) < 0.5 * plain < 0.5 * error(other)
    assert found.noise == pytest.approx(float((weight - found.q.float() * found.scale).square().sum()), rel=1e-3)


@pytest.mark.parametrize("size", [32, 128])
def test_feedback_lowers_the_error_of_outputs_on_two_levels_of_scales(size: int) -> None:
    """The weight is rotated, and so are the inputs that count errors. Levels of other rows lose all: the control."""
    x = normal(1, 4000, 16) @ normal(0, 16, 128) + 0.3 * normal(3, 4000, 128)
    weight = normal(2, 24, 128)
    moments = [x[:3000].t() @ x[:3000] / 3000]
    found = quantize_with_feedback(weight, 4, size, moments, form="two_levels", rotation=64)
    plain = quantize_weight_as(weight, "two_levels", size, rotation=64)

    def error(each: quantizer.Quantized, levels: torch.Tensor | None) -> float:
        stands_for = IntegerWeight(each.q, each.scale, size, 4, rotation=64, levels=levels).dequantize()
        return float((x[3000:] @ (weight - stands_for).t()).square().mean())

    assert found.minimum is not None and found.minimum.dtype == torch.uint8
    assert error(found, found.minimum) < 0.5 * error(plain, plain.minimum)
    assert error(found, found.minimum.roll(1, dims=0)) > 5 * error(found, found.minimum)
    values = IntegerWeight(found.q, found.scale, size, 4, levels=found.minimum).as_eight_bits()
    noise = float((rotate(weight, 64) - values.q * values.scale).square().sum())
    assert found.noise == pytest.approx(noise, rel=1e-3)


@pytest.mark.parametrize("form", ["two_levels", "asymmetric"])
def test_errors_of_rotated_columns_that_are_far_apart_are_compensated_without_texts(form: str) -> None:
    """Channels 50 times as large as the others, whose weights are as much smaller. Without it: the control."""
    channels = 1 + 49.0 * (torch.arange(128) % 37 == 3)
    x, weight = normal(1, 2000, 128) * channels, normal(0, 40, 128) / channels
    given = weight.clone()
    squares = guessed_input_squares(column_squares(weight))
    assert torch.equal(weight, given)
    even = guessed_input_squares(column_squares(normal(0, 40, 128)))
    assert are_far_apart(squares, 64) and not are_far_apart(even, 64)
    found = quantize_weight_as(weight, form, 32, rotation=64, input_squares=squares)

    def stands_for(each: quantizer.Quantized) -> torch.Tensor:
        zero, levels = (each.minimum, None) if form == "asymmetric" else (None, each.minimum)
        return IntegerWeight(each.q, each.scale, 32, 4, zero, rotation=64, levels=levels).dequantize()

    plain = quantize_weight_as(weight, form, 32, rotation=64)
    errors = [float((x @ (weight - stands_for(each)).t()).square().mean()) for each in (found, plain)]
    assert errors[0] < 0.1 * errors[1], errors
    noise = float((weight - stands_for(found)).square().sum())
    assert found.noise == pytest.approx(noise, rel=1e-3) and found.noise < 2.5 * plain.noise
    # A row's bits do not depend on those beside it.
    alone = quantize_weight_as(weight[7:8], form, 32, rotation=64, input_squares=squares)
    assert torch.equal(alone.q, found.q[7:8]) and torch.equal(alone.scale, found.scale[7:8])
    with pytest.raises(ValueError, match="input_squares are float32"):
        quantize_weight_as(weight, form, 32, rotation=64, input_squares=squares[:-1])
    for size in (128, 4):
        with pytest.raises(ValueError, match="do not divide blocks of 64"):
            quantize_weight_as(weight, form, size, rotation=64, input_squares=squares)
    with pytest.raises(ValueError, match="NaN or infinite"):
        quantize_weight_as(torch.full((2, 128), math.nan), form, 32, rotation=64, input_squares=squares)
    with pytest.raises(ValueError, match="NaN or infinite"):
        column_squares(torch.full((2, 128), math.nan))


@pytest.mark.parametrize("form", ["two_levels", "asymmetric"])
def test_compensation_in_halves_is_gptqs(form: str) -> None:
    """By Cholesky's factor of the inverse of the rotated inputs' moments (arXiv:2210.17323), a column after the other,
    in float64: the same codes but for ties. Factors of other inputs: the control."""
    squares = normal(1, 128).exp()
    weight = normal(0, 30, 128)
    rotated = rotate(weight, 64).double()
    found = quantize_weight_as(weight, form, 32, rotation=64, input_squares=squares)
    scale = found.scale.double()
    agree = []
    for inputs in (squares, squares.flip(0)):
        codes = torch.empty(30, 128, dtype=torch.int8)
        for start in (0, 64):
            turned = hadamard(64).double()
            inverse = turned @ torch.diag(1 / inputs[start : start + 64].double()) @ turned
            factor = torch.linalg.cholesky(inverse, upper=True)
            x = rotated[:, start : start + 64].clone()
            for column in range(64):
                group = (start + column) // 32
                if form == "two_levels":
                    level = found.minimum[:, group].long()
                    step, shift = level % 16, (level % 16 * (level // 16 + 16) * 5).div(16, rounding_mode="floor")
                    least = ((shift - 128) / step).ceil().clamp_min(0)
                    most = ((shift + 127) / step).floor().clamp_max(15)
                    code = ((x[:, column] / scale[:, 0] + shift) / step).round().clamp(least, most)
                    value = (code * step - shift) * scale[:, 0]
                    codes[:, start + column] = code - 8
                else:
                    zero = found.minimum[:, group].double()
                    code = (x[:, column] / scale[:, group] + zero).round().clamp(-8, 7)
                    value = (code - zero) * scale[:, group]
                    codes[:, start + column] = code
                error = (x[:, column] - value) / factor[column, column]
                x[:, column + 1 :] -= error[:, None] * factor[column, column + 1 :]
        agree.append(float((codes == found.q).double().mean()))
    assert agree[0] > 0.995 and agree[1] < 0.9, agree


@quick
@given(st.integers(0, 2**31), st.integers(1, 40), st.integers(1, 60), st.sampled_from(["float32", "bfloat16"]))
def test_squares_of_columns_are_whole_and_of_any_parts(seed: int, rows: int, columns: int, dtype: str) -> None:
    weight = (normal(seed, rows, columns) * normal(seed + 1, rows, 1).exp()).to(getattr(torch, dtype))
    weight[rows // 2] = 0
    shares = weight.double() / weight.double().abs().amax(dim=1, keepdim=True).clamp_min(1e-30)
    found = column_squares(weight)
    assert found.dtype == torch.int64
    torch.testing.assert_close(found.double(), (shares * 2047).round().square().sum(0), rtol=1e-3, atol=5e3)
    assert torch.equal(found, sum(column_squares(part) for part in weight.split(7)))


@pytest.mark.parametrize("asymmetric", [False, True])
@pytest.mark.parametrize("size", [32, 24])  # 24: groups reach over the end of a run
def test_feedback_computes_with_one_thread_and_gives_rows_their_bits_in_any_parts(
    monkeypatch: pytest.MonkeyPatch, size: int, asymmetric: bool
) -> None:
    """Two threads that wait for each other after every column take minutes where other programs run."""
    threads, rounded = [], quantizer._round_with_feedback

    def watched(*args: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        threads.append(torch.get_num_threads())
        return rounded(*args)

    monkeypatch.setattr(quantizer, "_round_with_feedback", watched)
    x, weight, before = normal(0, 300, 96), normal(1, 13, 96), torch.get_num_threads()
    moments = [x.t()[:64] @ x[:, :64], x.t()[64:] @ x[:, 64:]]
    whole = quantize_with_feedback(weight, 4, size, moments, form="asymmetric" if asymmetric else "")
    monkeypatch.setattr(quantizer, "_ROUNDED_ELEMENTS", 5 * 96)
    parts = quantize_with_feedback(
        weight.t().contiguous().t(), 4, size, moments, form="asymmetric" if asymmetric else ""
    )
    assert torch.equal(parts.q, whole.q) and torch.equal(parts.scale, whole.scale)
    assert threads == [1, 1, 1, 1] and torch.get_num_threads() == before


@pytest.mark.parametrize("asymmetric", [False, True])
def test_feedback_survives_channels_that_are_never_used(asymmetric: bool) -> None:
    weight, moment = normal(0, 4, 32), torch.zeros(32, 32)
    for moments in ([moment], [moment.clone().fill_diagonal_(1.0)]):
        result = quantize_with_feedback(weight, 4, 32, moments, form="asymmetric" if asymmetric else "")
        assert signal_to_noise(weight, values_of(result, 32)) > 15
    with pytest.raises(ValueError, match="NaN or infinite"):
        quantize_with_feedback(torch.full((2, 32), math.nan), 4, 32, moments, form="asymmetric" if asymmetric else "")


def test_asymmetric_integers_lose_less_than_symmetric_ones_the_more_so_with_outliers() -> None:
    """Channels scaled by 50, as real models have them, in a third of the columns."""
    weight = normal(0, 64, 256)
    outliers = weight.clone()
    outliers[:, ::97] *= 50
    outliers[:, 1::31] = outliers[:, 1::31].abs() * 4
    gains = []
    for values in (weight, outliers):
        asymmetric, symmetric = (
            quantize_weight_as(values, "asymmetric", 32),
            quantize_weight(values, 4, 32, search=True),
        )
        gains.append(decibels(symmetric.noise, asymmetric.noise))
        zero = asymmetric.minimum
        assert zero is not None and zero.min() >= -8 and zero.max() <= 7 and torch.equal(zero, zero.round())
        assert torch.equal(asymmetric.scale, asymmetric.scale.bfloat16().float())
    assert gains[0] > 0.3 and gains[1] > 1


def test_rows_of_zeros_and_reported_noise() -> None:
    weight = normal(0, 4, 64)
    weight[2] = 0
    for bits in (4, 8):
        result = quantize_weight(weight, bits, 32, search=bits == 4)
        back = dequantize(result.q, result.scale, None, 32)
        assert (back[2] == 0).all() and (result.scale[2] == 1).all()
        assert decibels(result.signal, result.noise) == pytest.approx(signal_to_noise(weight, back), abs=1e-3)
    assert signal_to_noise(weight, weight) == math.inf


@pytest.mark.parametrize(("low", "high"), [(-1.0, 3.0), (0.5, 2.0), (-4.0, -1.0), (0.0, 0.0), (-1e-9, 1e-9)])
def test_static_scales_cover_the_range_and_zero(low: float, high: float) -> None:
    scale, offset = static_activation(low, high)
    assert scale > 0 and -128 <= offset <= 127
    for value in (low, high, 0.0):
        q = max(-128, min(127, round(value / scale) + offset))
        assert abs((q - offset) * scale - value) <= scale
    assert (max(-128, min(127, offset)) - offset) * scale == 0.0


# Which layer gets what


@pytest.mark.parametrize("name", ["w8a8", "w8a16", "w4a8", "w4a16"])
def test_every_linear_layer_and_the_tied_table(name: str) -> None:
    with open_llm(quantization=name) as llm:
        found = schemes(llm)
        assert llm.config.model_config.quantization == name
        layers = {key: scheme for key, scheme in found.items() if key.endswith("_proj")}
        assert len(layers) == 16 and set(layers.values()) == {RECIPES[name].scheme}
        assert (
            found["model.embed_tokens"] == {"8": "W8A8_DYNAMIC", "16": "W8A16"}[name.partition("a")[2].removeprefix("")]
        )
        for method in methods(llm).values():
            assert not method.scheme or (name in method.reason or "w8a" in method.reason)
            assert not method.scheme or method.source == f"quantization={name!r}"
        assert not any(parameter.is_meta for parameter in engine_of(llm).runner.model.parameters())
        check_close(llm)


def test_the_dict_form() -> None:
    asked = {
        "scheme": "w4a16",
        "group_size": 64,
        "layers": {"*.down_proj": "w8a8", "re:.*layers\\.0\\.self_attn": {"scheme": "w4a8", "group_size": 32}},
        "ignore": ["model.layers.1.mlp.gate_up_proj", "model.layers.2.self_attn.o_proj"],
        "lm_head": None,
    }
    with open_llm(quantization=asked) as llm:
        found = schemes(llm)
        sizes = {name: weight.group_size for name, weight in packed_weights(llm).items()}
    assert found["model.layers.0.mlp.down_proj"] == "W8A8_DYNAMIC"
    assert found["model.layers.0.self_attn.qkv_proj"] == found["model.layers.0.self_attn.o_proj"] == "W4A8_DYNAMIC"
    assert sizes["model.layers.0.self_attn.qkv_proj"] == 32 and sizes["model.layers.1.self_attn.qkv_proj"] == 64
    assert found["model.layers.1.mlp.gate_up_proj"] == found["model.layers.2.self_attn.o_proj"] == ""
    assert found["model.embed_tokens"] == ""
    assert found["model.layers.3.mlp.gate_up_proj"] == "W4A16"


# `quantization={"bits": ...}`


def units_of(blocks: int) -> list[Unit]:
    """Of a decoder whose layers have the shapes of SmolLM2-135M."""
    shapes = {"self_attn.qkv_proj": (960, 576), "self_attn.o_proj": (576, 576), "mlp.gate_up_proj": (3072, 576)}
    units: dict[str, Unit] = {}
    for block in range(blocks):
        for name, (rows, columns) in {**shapes, "mlp.down_proj": (576, 1536)}.items():
            layer = SimpleNamespace(output_sizes=[rows], input_size=columns)
            add_layer(units, f"model.layers.{block}.{name}", layer, 0)
    return list(units.values())


@quick
@given(st.integers(1, 12), st.floats(4, 8))
def test_bits_are_shared_out_within_the_budget(blocks: int, bits: float) -> None:
    """Nothing that would still fit is left in 4 bits."""
    units = units_of(blocks)
    shared = share(units, bits, 4)
    assert shared is not None
    weights = sum(unit.weights for unit in units)
    spent = sum((8 if unit in shared.units else 4) * unit.weights for unit in units)
    assert spent / weights == pytest.approx(shared.bits) and spent <= bits * weights
    assert all(spent + 4 * unit.weights > bits * weights for unit in units if unit not in shared.units)
    assert shared.bits > 7.999 or bits < 8


def test_the_order_in_which_layers_earn_8_bits() -> None:
    """Those that write at the ends of the model, attention, the outer blocks, what writes between, the rest."""
    shared = share(units_of(30), 4.5, 4)
    assert shared is not None and len(shared.paths) == len(shared.units)
    found = str(shared)
    assert found.startswith("codes of linear layers have 4.500 bits on average: 8 in model.layers.{0-2,28-29}.self_att")
    assert "model.layers.{0-2,28-29}.mlp.down_proj" in found and "model.layers.{0-12}.self_attn.qkv_proj" in found
    assert "gate_up" not in found and "gate_up" in str(share(units_of(30), 7, 4))
    assert share([replace(unit, bits=8) for unit in units_of(2)], 5, 4) is None


@pytest.mark.parametrize("scheme", [None, "w4a8", "q4_0"])
def test_a_budget_of_bits(scheme: str | None, tmp_path: Path) -> None:
    """It is kept, told, planned for and saved; fused layers share a choice, and patterns are the user's."""
    asked: dict[str, Any] = {"bits": 5} if scheme is None else {"bits": 5, "scheme": scheme, "rotate": False}
    asked["layers"] = {"*.2.mlp.down_proj": "q8_0" if scheme == "q4_0" else "w8a16"}
    with open_llm(quantization=asked) as llm:
        found, packed = methods(llm), packed_weights(llm)
        linear = {name: weight for name, weight in packed.items() if name.endswith("_proj")}
        bits = {name: 4 if weight.kind == "int4" else 8 for name, weight in linear.items()}
        mean = sum(bits[name] * weight.n * weight.k for name, weight in linear.items())
        mean /= sum(weight.n * weight.k for weight in linear.values())
        assert 4.8 < mean <= 5 and bits["model.layers.2.mlp.down_proj"] == 8
        size = sum(part.nbytes for weight in linear.values() for part in weight.memory().values() if part is not None)
        reason = llm.config.reasons["quantization"]
        assert f"bits=5, codes of linear layers have {mean:.3f} bits on average: 8 in model.layers" in reason
        assert f"they take {size:,} bytes" in reason and "within bits=5" in found["model.layers.0.mlp.down_proj"].reason
        assert LLM.plan(EMBEDDED_MODEL, quantization=asked).weight_bytes == llm.stats().weight_bytes
        answers = run(llm, [5, 6, 7, 8], SamplingParams(temperature=0, max_tokens=4, logprobs=3))
        path = tmp_path / ("saved.gguf" if scheme == "q4_0" else "saved")
        llm.save_quantized(path, "gguf" if scheme == "q4_0" else "compressed-tensors")
    with open_llm(path) as saved:
        again = run(saved, [5, 6, 7, 8], SamplingParams(temperature=0, max_tokens=4, logprobs=3))
        assert again[0].outputs[0].logprobs == answers[0].outputs[0].logprobs
        assert {name: weight.kind for name, weight in packed_weights(saved).items() if name in linear} == {
            name: weight.kind for name, weight in linear.items()
        }
    with pytest.raises(ValidationError, match=r"has bits, which are shared out over an unquantized checkpoint"):
        LLM(path, requantize={"bits": 5})


ITSELF: dict[str, Any] = {"scheme": "w8a8"}
ITSELF["me"] = ITSELF


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ("w8a9", r"quantization='w8a9' is not known. Did you mean 'w8a8'\?"),
        ({"scheme": "int3"}, "names the scheme 'int3'; known: w8a8"),
        ({"group_size": 32}, "has no 'scheme', for the layers that no pattern names"),
        ({"bits": 3.9}, "has bits=3.9; it is a number from 4 to 8"),
        ({"bits": float("nan")}, "has bits=nan; it is a number from 4 to 8"),
        ({"bits": True}, "has bits=True; it is a number"),
        ({"bits": "4.5"}, "has bits='4.5'; it is a number"),
        ({"bits": 5, "scheme": "w8a8"}, "has bits beside w8a8, which has 8 in every layer; bits is for w4a8"),
        ({"bits": 4.5, "layers": {"*": "w8a16"}}, "so many layers of 8 bits that bits=4.5 is exceeded"),
        ({"bits": 4.5, "ignore": ["*.nothing"]}, r"names layers that this model does not have"),
        ({"scheme": "w8a8", "group_size": 32}, "has group_size=32 for w8a8, which has one scale per row"),
        ({"scheme": "w4a8", "layers": {"*.o_proj": {"scheme": "w8a8", "group_size": 32}}}, "group_size=32 for w8a8"),
        ({"scheme": "w8a8", "ignore": 3}, "has ignore=3; it takes a list of patterns"),
        ({"scheme": "w8a8", "lm_head": True}, "has lm_head=True; the LM head can be"),
        ({"scheme": "w4a8", "layers": {"lm_head": "w8a8"}}, r"'lm_head'.* is said by lm_head"),
        ({"scheme": "w4a8", "calibration": ["a", ""]}, "calibration takes a list of texts, none of them empty"),
        ({"scheme": "w8a8", "group": 3}, r"has the key 'group'.* Did you mean 'group_size'\?"),
        ({"scheme": "w4a16", "group_size": 0}, "group_size=0; it is a whole number"),
        ({"scheme": "w4a16", "group_size": 48}, "group_size=48 does not divide the 256 columns"),
        ({"scheme": "w8a8", "ignore": ["*.nothing"]}, r"names layers that this model does not have: '\*.nothing'"),
        ({"scheme": "w8a8", "layers": {"re:(": "w8a8"}}, "no regular expression"),
        ({"scheme": "w8a8", "layers": {"a": 3}}, "gives 'a' the value 3"),
        ({"scheme": "w8a8", "lm_head": "w4a16"}, "lm_head='w4a16'; the LM head can be"),
        ({"scheme": "w8a8", "calibration": "a text"}, "calibration takes a list"),
        ({"scheme": "w8a8", "calibration": itertools.repeat("a")}, "calibration must be a list of texts"),
        ({"scheme": "w8a8", "calibration": 3}, "calibration must be a list of texts"),
        ({"scheme": "w8a8", 3: "w8a8"}, "has the key 3; it takes scheme"),
        ({"scheme": "w8a8", "layers": {3: "w8a8"}}, "has the pattern 3, which is no string"),
        ({"scheme": "w8a8", "layers": {"a": {"scheme": "w8a8", 3: 4}}}, "gives 'a' the value"),
        ({"scheme": "w8a8", "layers": ["a"]}, "has 'layers' that is no dict"),
        ({"scheme": "w8a8", "ignore": itertools.repeat("a")}, "a dict with a list of patterns"),
        ({"scheme": "w8a8", "ignore": ["re:(.+)+!$"]}, "repeats too much"),
        ({"scheme": ["w8a8"] * 10**6}, r"names the scheme \['w8a8', 'w8a8'"),
        ({"scheme": "w4a16", "group_size": 10**5000}, "group_size=an integer of"),
        (ITSELF, "has the key 'me'"),
        ("w8a8_static", "needs calibration"),
        (7, "quantization=7 is not known"),
        ("compressed-tensors", "no quantization_config in config.json"),
        ("modelslim", "no quant_model_description"),
    ],
)
def test_mistakes_are_told_in_a_sentence(asked: Any, says: str) -> None:
    with pytest.raises(ValidationError, match=says) as caught:
        LLM(quantization=asked)
    assert caught.value.parameter in ("quantization", "calibration") and len(str(caught.value)) < 2000


def test_shards_of_a_fused_layer_must_agree() -> None:
    with pytest.raises(CheckpointError, match=r"some but not all shards of model.layers.0.self_attn.qkv_proj"):
        LLM(quantization={"scheme": "w8a8", "ignore": ["*.0.self_attn.q_proj"]})
    with pytest.raises(CheckpointError, match="Not all shards of model"):
        LLM(quantization={"scheme": "w8a8", "layers": {"*.up_proj": "w8a16"}})


def test_groups_of_eight_bit_weights() -> None:
    with open_llm(quantization={"scheme": "w8a16", "group_size": 32}) as llm:
        sizes = {weight.group_size for name, weight in packed_weights(llm).items() if name.endswith("_proj")}
    assert sizes == {32}


@pytest.mark.parametrize("ignore", ["lm_head", "model.embed_tokens"])
def test_a_tied_table_is_ignored_by_its_path_and_as_the_lm_head(ignore: str) -> None:
    with open_llm(quantization={"scheme": "w8a8", "ignore": [ignore]}) as llm:
        found = methods(llm)["model.embed_tokens"]
    assert (found.scheme, found.reason) == ("", "in the ignore list")


def test_calibration_that_would_change_nothing_is_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("calibration was run")

    monkeypatch.setattr("llm.setup.build.calibrate", refuse)
    with open_llm(quantization="w8a8", calibration=TEXTS) as llm:
        assert "the calibration texts were not run" in llm.config.reasons["quantization"]
    for asked in ("w4a8", {"scheme": "w8a8", "layers": {"*.down_proj": "w8a8_static"}}):
        with pytest.raises(AssertionError, match="was run"):
            LLM(quantization=asked, calibration=TEXTS)


def test_calibration_texts_are_given_once() -> None:
    with pytest.raises(ValidationError, match="pass them here or as calibration=, not both"):
        LLM(quantization={"scheme": "w4a16", "calibration": TEXTS}, calibration=TEXTS)


def test_texts_longer_than_the_model_are_run_in_windows() -> None:
    with open_llm(max_model_len=8) as llm:
        seen: list[int] = []
        layer = engine_of(llm).runner.model.model.layers[0].self_attn.qkv_proj
        layer.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0].shape[0]))
        run_texts(engine_of(llm), TEXTS, "calibration")
        assert sum(seen) == sum(len(llm.get_tokenizer().encode(text)) for text in TEXTS) > 20
    with open_llm(quantization="w4a16", max_model_len=8, calibration=TEXTS) as llm:
        assert llm.quantization_report(TEXTS, speed=False).layers[1].output_snr


def test_calibration_without_a_recipe_is_refused() -> None:
    with pytest.raises(ValidationError, match="calibration applies when weights are quantized on load"):
        LLM(calibration=TEXTS)


def test_a_model_writes_its_own_texts_for_calibration(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The same every time, kept in the cache and read from it; another model writes others."""
    monkeypatch.setattr(calibrate, "_folder", lambda: tmp_path)
    monkeypatch.setattr(calibrate, "_TEXTS", 4)
    monkeypatch.setattr(calibrate, "_TOKENS", 24)
    written, write = [], calibrate._written

    def watched(engine: Any) -> list[list[int]]:
        written.append(write(engine))
        return written[-1]

    monkeypatch.setattr(calibrate, "_written", watched)
    arguments = {"quantization": "w4a16", "calibration": "auto", "max_model_len": 64}
    found = []
    for _ in range(2):
        with open_llm(**arguments) as llm:
            found.append({key: packed.dequantize() for key, packed in packed_weights(llm).items()})
    (kept,) = tmp_path.iterdir()
    assert len(written) == 1 and json.loads(kept.read_text())["token_ids"] == written[0]
    assert len(written[0]) == 4 and len({tuple(text) for text in written[0]}) == 4
    with open_llm(quantization="w4a16", max_model_len=64) as llm:  # the control
        plain = {key: packed.dequantize() for key, packed in packed_weights(llm).items()}
    assert all(torch.equal(found[1][key], weight) for key, weight in found[0].items())
    assert not any(torch.equal(plain[key], weight) for key, weight in found[0].items() if ".layers." in key)
    for damage in ("{", '{"token_ids": [[-1]]}', '{"token_ids": [[true]]}', "[]", '{"token_ids": [[]]}'):
        kept.write_text(damage)
        with open_llm(**arguments) as llm:
            again = packed_weights(llm)["model.layers.0.mlp.down_proj"].dequantize()
        assert torch.equal(again, found[0]["model.layers.0.mlp.down_proj"]) and written[-1] == written[0]
    assert len(written) == 6
    with open_llm(tiny_checkpoint("llama", tmp_path_factory), skip_tokenizer_init=True, **arguments):
        assert written[-1] != written[0] and len(list(kept.parent.iterdir())) == 2
    with pytest.raises(ValidationError, match="this one gives vectors or scores; pass texts"):
        LLM(quantization="w4a16", calibration="auto", runner="pooling", convert="embed")


def test_models_that_give_vectors_are_calibrated_with_texts() -> None:
    """A text longer than a window; vectors of other texts come closer to the unquantized ones."""
    text = (Path(__file__).parents[1] / "fixtures/held_out.txt").read_text("utf-8")
    others = [text[start : start + 300] for start in range(20000, 24000, 500)]

    def vectors(**options: Any) -> torch.Tensor:
        with open_llm(runner="pooling", convert="embed", max_model_len=256, **options) as llm:
            found = [out.outputs.embedding for out in llm.embed(others, use_tqdm=False)]
        return torch.nn.functional.normalize(torch.tensor(found), dim=1)

    plain = vectors()
    errors = [
        1 - (vectors(quantization="w4a16", calibration=texts) * plain).sum(1).mean() for texts in (None, [text[:12000]])
    ]
    assert errors[1] < 0.8 * errors[0]


def test_default_groups_give_way_to_odd_sizes(tmp_path_factory: pytest.TempPathFactory) -> None:
    asked = {"scheme": "w4a16", "symmetric": True}
    with open_llm(tiny_checkpoint("llama", tmp_path_factory), quantization=asked, skip_tokenizer_init=True) as llm:
        found = packed_weights(llm)
        assert found["model.layers.0.self_attn.qkv_proj"].group_size == 16  # gcd(32, 48 columns)
        assert found["model.layers.0.mlp.down_proj"].group_size == 91
        assert "do not divide 91 columns" in methods(llm)["model.layers.0.mlp.down_proj"].reason
        check_close(llm, tiny_checkpoint("llama", tmp_path_factory), vocab_size=257)


# What is loaded


@pytest.mark.parametrize("model", ["llama-biases-one-kv-head", "phi3", "gpt2", "opt", "llama-sharded", "gemma2"])
@pytest.mark.parametrize("name", ["w8a8", "w4a16"])
def test_the_integers_are_those_of_each_checkpoint_tensor(
    model: str, name: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tiny_checkpoint(model, tmp_path_factory)
    with open_llm(folder, skip_tokenizer_init=True) as plain:
        reference = {
            key: method.dequantize_weight(engine_of(plain).runner.model.get_submodule(key))
            for key, method in methods(plain).items()
        }
    with open_llm(folder, quantization=name, skip_tokenizer_init=True) as llm:
        for key, method in methods(llm).items():
            weight = method.dequantize_weight(engine_of(llm).runner.model.get_submodule(key))
            if not method.scheme:
                assert torch.equal(weight, reference[key])
                continue
            recipe = RECIPES[name]
            bits, size = method.storage.bits, packed_weights(llm)[key].group_size
            rotation = method.storage.rotation
            assert rotation == (block_for(reference[key].shape[1]) if name == "w8a8" else 0)
            if method.storage.form:
                expected = quantize_weight_as(reference[key], method.storage.form, size)
            else:
                expected = quantize_weight(reference[key], bits, size, search=bits == 4, rotation=rotation)
            values = values_of(expected, size)
            assert torch.equal(weight, rotate(values, rotation) if rotation else values)
            ratio = signal_to_noise(reference[key], weight)
            assert ratio == pytest.approx(method.storage.signal_to_noise, abs=0.01)
            assert ratio > (15 if recipe.bits == 4 and method.storage.bits == 4 else 38)


def test_calibration_weighs_the_search_and_fixes_static_scales() -> None:
    with open_llm(quantization="w4a16") as plain, open_llm(quantization="w4a16", calibration=TEXTS) as calibrated:
        models = [engine_of(llm).runner.model.model.layers[0].mlp.down_proj for llm in (plain, calibrated)]
        weights = [layer.quant_method.dequantize_weight(layer) for layer in models]
        assert not torch.equal(*weights)
    with open_llm(quantization="w8a8_static", calibration=TEXTS) as llm:
        assert {scheme for name, scheme in schemes(llm).items() if name.endswith("_proj")} == {"W8A8"}
        scales = [weight.input_scale for name, weight in packed_weights(llm).items() if name.endswith("_proj")]
        assert min(scales) > 0 and len(set(scales)) > 8
        check_close(llm)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_weights_that_are_not_finite_are_named(bad: float, tmp_path: Any) -> None:
    folder = copy_model(tmp_path / "model")
    from safetensors.torch import load_file

    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][3, 5] = bad
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"tensor model.layers.1.mlp.up_proj.weight holds NaN or infinite"):
        LLM(folder, quantization="w8a8")


def test_tied_copies_are_still_compared(tmp_path: Any) -> None:
    from safetensors.torch import load_file

    folder = copy_model(tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, folder / "model.safetensors")
    with open_llm(quantization="w8a8") as one, open_llm(folder, quantization="w8a8") as two:
        assert tokens(run(one, PROMPTS, GREEDY)) == tokens(run(two, PROMPTS, GREEDY))
    tensors["lm_head.weight"][0, 0] += 1
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"lm_head.weight differs from the embedding"):
        LLM(folder, quantization="w8a8")


def test_the_memory_plan_counts_quantized_weights() -> None:
    config = OnlineConfig.parse("w4a8")
    matrix, table, norm = ((1024, 1024), 2 << 20), ((32000, 1024), 65_536_000), ((1024,), 2048)
    expected = config.expected_bytes([matrix, matrix, table, norm])
    assert expected == 65_536_000 + 2048 + 2 * (1024 * 1024 * 5 // 8)
    with open_llm(quantization="w4a8") as llm:
        model = engine_of(llm).runner.model
        held = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
        shapes = [(tuple(parameter.shape), 2 * parameter.numel()) for parameter in plain_parameters()]
        assert held <= config.expected_bytes(shapes) <= 2 * held


def plain_parameters() -> list[Any]:
    from safetensors.torch import load_file

    return list(load_file(EMBEDDED_MODEL / "model.safetensors").values())


def test_parse_gives_what_was_asked() -> None:
    config = OnlineConfig.parse("W4A8")
    assert (config.scheme, config.lm_head, config.group_size) == ("w4a8", "w8a8", None)


@pytest.mark.parametrize("name", ["falcon", "gpt_neox"])
def test_queries_keys_and_values_stored_by_key_head_are_in_the_layers_order(
    name: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder, path = tiny_checkpoint(name, tmp_path_factory), "model.layers.1.self_attn.qkv_proj"
    with open_llm(folder, skip_tokenizer_init=True) as plain:
        layer = dict(engine_of(plain).runner.model.named_modules())[path]
        expected = layer.quant_method.dequantize_weight(layer).clone()  # closing frees the layer's own
        with open_llm(folder, skip_tokenizer_init=True, quantization="w8a8") as llm:
            quantized = dict(engine_of(llm).runner.model.named_modules())[path]
            found = quantized.quant_method.dequantize_weight(quantized)
        rows = layer.restacked(torch.arange(len(expected)), 0)
    assert signal_to_noise(expected, found) > 30 > signal_to_noise(expected, found[rows])


@pytest.mark.parametrize(
    "kind", ["scales", "groups", "zero points", "minima", "table", "int8 minima", "rotated", "two levels"]
)
def test_a_quantized_weight_is_read_back_by_the_kernels_bit_for_bit(kind: str) -> None:
    """What is quantized again: from the same values as by the definition."""
    torch.manual_seed(1)
    bits, size = (8, 96) if kind in ("scales", "rotated") else (8, 16) if kind == "int8 minima" else (4, 32)
    q = torch.randint(-(2 ** (bits - 1)), 2 ** (bits - 1), (33, 96), dtype=torch.int8)
    if kind == "int8 minima":
        q = q // 16
    groups = 96 // size
    weight = IntegerWeight(q, torch.rand(33, groups), size, bits)
    if kind == "zero points":
        weight.zero = torch.randint(-8, 8, (33, groups), dtype=torch.int8)
    if kind in ("minima", "int8 minima"):
        weight.minimum = torch.randn(33, groups)
    if kind == "table":
        weight.table = torch.randn(16)
    if kind in ("rotated", "two levels"):
        weight.rotation = 32
    if kind == "two levels":
        weight.levels = torch.randint(1, 16, (33, groups), dtype=torch.uint8) + 16 * 7
        weight.scale = torch.rand(33, 1)
    with constructing_for(current_platform):
        storage = QuantizeOnLoad(8, 96)
    expected = weight.dequantize()
    assert torch.equal(storage._values_of(weight), expected)
    weight.scale[32, -1] *= 1 + 2**-20
    assert not torch.equal(storage._values_of(weight), expected)
