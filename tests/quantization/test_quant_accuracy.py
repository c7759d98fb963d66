"""How good quantized answers are, on the embedded model and text it has never seen, with a bar for each scheme.

The bars are the project's promise; a method that misses one is improved, the bar stays. Negative controls plant the
mistakes a quantizer or a packing can make and must turn the gates red.
"""

from __future__ import annotations

import importlib.util
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import held_out
import pytest
import torch
from embedded import copy_model, engine_of, open_llm
from kernel_sets import has_kernels
from safetensors.torch import load_file, save_file

from llm import LLM
from llm.cli import main
from llm.llm import EMBEDDED_MODEL
from llm.quantization import on_load
from llm.quantization.quantizer import Quantized
from llm.tools import quantization_report as measure
from llm.tools.quantization_command import Measured, proposal
from llm.tools.quantization_report import (
    TextScores,
    agreement,
    common_prefix,
    greedy_tokens,
    output_noise,
    prompts_from,
    score_texts,
)

# The perplexity that was measured; its relative change from unquantized; agreement on the likeliest next token; mean
# share of 64 greedy tokens before the first difference; least signal-to-noise of any layer's weights in decibels.
GATES = {
    "w8a8": (18.6535, 0.003, 0.97, 0.40, 40.0),
    "w8a16": (18.6481, 0.002, 0.985, 0.60, 40.0),
    "w4a16": (18.8451, 0.015, 0.91, 0.15, 21.5),
    "w4a8": (18.7242, 0.008, 0.91, 0.15, 21.5),
}
TEXTS = held_out.texts()


def linear_layers(model: torch.nn.Module) -> list[Any]:
    return [module for module in model.modules() if getattr(module, "quant_kind", "") == "linear"]


@pytest.fixture(scope="module")
def plain() -> Iterator[tuple[TextScores, list[Any], list[list[int]]]]:
    with open_llm() as llm:
        prompts = prompts_from(llm, TEXTS)
        assert len(prompts) == 64
        yield score_texts(llm, TEXTS), prompts, greedy_tokens(llm, prompts)


@pytest.fixture(scope="module")
def with_outliers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded model with channels 50 times as large as the others, as real models have them.

    A norm's weights are scaled and the columns that read it scaled back: what is computed stays the same.
    """
    folder = copy_model(tmp_path_factory.mktemp("outliers") / "model")
    tensors = load_file(folder / "model.safetensors")
    channels = torch.arange(256) % 37 == 3
    readers = {"input_layernorm": ("q_proj", "k_proj", "v_proj"), "post_attention_layernorm": ("gate_proj", "up_proj")}
    for name, tensor in tensors.items():
        parts = name.split(".")
        for norm, names in readers.items():
            if norm in parts:
                tensors[name] = torch.where(channels, 50 * tensor.float(), tensor.float()).to(tensor.dtype)
            elif parts[-2] in names:
                tensors[name] = torch.where(channels, tensor.float() / 50, tensor.float()).to(tensor.dtype)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_outliers_cost_w8a8_next_to_nothing_since_rows_are_rotated(with_outliers: Path) -> None:
    """Without the rotation they cost many times as much: the negative control."""
    changes = {}
    with open_llm(with_outliers) as llm:
        before = score_texts(llm, TEXTS[:2])
    for rotates in (True, False):
        with open_llm(with_outliers, quantization={"scheme": "w8a8", "rotate": rotates}) as llm:
            after = score_texts(llm, TEXTS[:2])
        changes[rotates] = (abs(after.perplexity / before.perplexity - 1), agreement(before.likeliest, after.likeliest))
    assert changes[True][0] < 0.006 and changes[True][1] > 0.93, changes
    assert changes[False][0] > 0.03 and changes[False][1] < 0.88, changes


@pytest.mark.parametrize("scheme", ["w4a8", "w4a16"])
def test_outliers_cost_rotated_four_bits_little_since_errors_are_fed_back(
    scheme: str, with_outliers: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without texts. Where the errors stay where they arise they cost dozens of times as much: the negative control."""
    losses, scored = [], [TEXTS[0][:3000]]
    with open_llm(with_outliers) as llm:
        before = score_texts(llm, scored)
    for _ in range(2):
        with open_llm(with_outliers, quantization={"scheme": scheme, "rotate": True}) as llm:
            losses.append(score_texts(llm, scored).perplexity / before.perplexity - 1)
        monkeypatch.setattr(on_load.QuantizeOnLoad, "see", lambda self, loaded: None)
    assert losses[0] < 0.04 and losses[1] > 0.3, losses


def test_outliers_cost_w4a16_less_with_zero_points(with_outliers: Path) -> None:
    """Without them they cost more: the negative control."""
    losses = {}
    with open_llm(with_outliers) as llm:
        before = score_texts(llm, TEXTS[:2])
    for symmetric in (True, False):
        with open_llm(with_outliers, quantization={"scheme": "w4a16", "symmetric": symmetric}) as llm:
            after = score_texts(llm, TEXTS[:2])
        losses[symmetric] = after.perplexity / before.perplexity - 1
    assert losses[False] < 0.03 and losses[False] < 0.9 * losses[True], losses


def test_outliers_cost_calibrated_w4a16_less_since_it_is_rotated(with_outliers: Path) -> None:
    """Without the rotation they cost several times as much: the negative control."""
    losses, scored = {}, [TEXTS[0][:3000]]
    with open_llm(with_outliers) as llm:
        before = score_texts(llm, scored)
    for rotates in (None, False):
        asked = {"scheme": "w4a16", "rotate": rotates}
        with open_llm(with_outliers, quantization=asked, calibration=TEXTS[2:3]) as llm:
            losses[rotates] = score_texts(llm, scored).perplexity / before.perplexity - 1
            reasons = [layer.quant_method.reason for layer in linear_layers(engine_of(llm).runner.model)]
        assert all(("rotated in blocks of 256" in reason) == (rotates is None) for reason in reasons)
    assert losses[None] < 0.015 and losses[None] < 0.5 * losses[False], losses


@pytest.mark.parametrize("scheme", GATES)
def test_the_bars_are_met(scheme: str, plain: Any) -> None:
    before, prompts, tokens = plain
    measured, perplexity, next_token, prefix, decibels = GATES[scheme]
    with open_llm(quantization=scheme) as llm:
        after = score_texts(llm, TEXTS)
        shares = [common_prefix(*pair) for pair in zip(tokens, greedy_tokens(llm, prompts), strict=True)]
        assert after.tokens == before.tokens == 9242
        assert abs(after.perplexity / before.perplexity - 1) <= perplexity
        # Another instruction set rounds floats differently, by far less than this.
        assert after.perplexity == pytest.approx(measured, rel=1e-3)
        assert agreement(before.likeliest, after.likeliest) >= next_token
        assert sum(shares) / len(shares) >= prefix
        for name, module in engine_of(llm).runner.model.named_modules():
            storage = getattr(getattr(module, "quant_method", None), "storage", None)
            if storage is not None:
                least = decibels if storage.bits == 4 else 40.0
                assert storage.signal_to_noise >= least, name


def test_calibration_helps_four_bits_and_a_few_sentences_do_no_harm() -> None:
    """Calibrated on other text than it is scored on."""
    sentences = [sentence for sentence in TEXTS[0].split(". ") if len(sentence) > 60][:3]
    scores = []
    for calibration in (None, sentences, TEXTS[:2]):
        with open_llm(quantization="w4a16", calibration=calibration) as llm:
            scores.append(score_texts(llm, TEXTS[2:]).perplexity)
    assert scores[1] < 1.002 * scores[0]  # without shrinking: 1.02
    assert scores[2] < 0.9985 * scores[0]


def test_static_activation_scales_stay_usable() -> None:
    with open_llm(quantization="w8a8_static", calibration=TEXTS[:2]) as llm, open_llm() as reference:
        change = score_texts(llm, TEXTS[2:]).perplexity / score_texts(reference, TEXTS[2:]).perplexity - 1
    assert abs(change) <= 0.03


# Negative controls


def swapped_nibbles(result: Quantized) -> None:
    result.q.copy_(result.q.view(result.q.shape[0], -1, 2).flip(2).flatten(1))


def transposed_scales(result: Quantized) -> None:
    result.scale.copy_(result.scale.t().reshape(result.scale.shape))


def transposed_levels(result: Quantized) -> None:
    assert result.minimum is not None
    result.minimum.copy_(result.minimum.t().reshape(result.minimum.shape))


def shifted_groups(result: Quantized) -> None:
    result.scale.copy_(result.scale.roll(1, dims=1))


def turned_scales(result: Quantized) -> None:
    result.scale.copy_(result.scale.roll(1, dims=0))


@pytest.mark.parametrize(
    ("scheme", "plant"),
    [
        ("w4a16", swapped_nibbles),
        ("w4a8", swapped_nibbles),
        ("w4a16", transposed_scales),
        ("w4a8", transposed_levels),
        ("w4a16", shifted_groups),
        ("w8a8", swapped_nibbles),
        ("w8a8", turned_scales),
        ("w8a16", swapped_nibbles),
        ("w8a16", turned_scales),
    ],
)
def test_planted_mistakes_turn_the_gate_red(scheme: str, plant: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("quantize_weight", "quantize_weight_as"):
        quantize = getattr(on_load, name)

        def broken(weight: torch.Tensor, *args: Any, quantize: Any = quantize, **kwargs: Any) -> Quantized:
            result: Quantized = quantize(weight, *args, **kwargs)
            if weight.shape[0] != 2304:  # the table alone is fine
                plant(result)
            return result

        monkeypatch.setattr(on_load, name, broken)
    with open_llm(quantization=scheme) as llm:
        # A whole chapter is plenty for a mistake that the gate must see.
        after = score_texts(llm, TEXTS[:1])
    with open_llm() as reference:
        first = score_texts(reference, TEXTS[:1])
    assert abs(after.perplexity / first.perplexity - 1) > GATES[scheme][1]


@pytest.mark.skipif(
    shutil.which("bible") is None or importlib.util.find_spec("tokenizers") is None, reason="needs the bible program"
)
def test_the_text_is_what_the_recipe_holds_out() -> None:
    assert held_out.from_the_bible() == TEXTS


def test_output_noise_is_of_every_token_however_often_the_texts_are_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with open_llm() as plain, open_llm(quantization="w8a8") as quantized:
        engines = engine_of(plain), engine_of(quantized)
        score_texts(plain, TEXTS[3:5])  # leaves the texts in the prefix cache
        tokens = Counter[str]()
        take = engines[0].runner.take_captured

        def counted() -> Any:
            captured = take()
            tokens.update({name: len(y) for name, (_, y) in captured.items()})
            return captured

        monkeypatch.setattr(engines[0].runner, "take_captured", counted)
        once = output_noise(*engines, TEXTS[3:5])
        assert len(once) == 16 and set(tokens.values()) == {sum(map(len, plain_ids(plain, TEXTS[3:5])))}
        monkeypatch.setattr("llm.tools.quantization_report._CAPTURED_BYTES", 1)  # a layer at a time
        assert output_noise(*engines, TEXTS[3:5]) == once


def plain_ids(llm: Any, texts: list[str]) -> list[list[int]]:
    return llm._preprocessor.token_ids(texts, "texts")


def test_the_report() -> None:
    with open_llm(quantization={"scheme": "w4a16", "layers": {"*.down_proj": "w8a8"}}) as llm:
        report = llm.quantization_report(TEXTS[3:5], prompts=["In the beginning", "And Moses said"])
        shown = str(report)
    assert report.name == "w4a16" and len(report.layers) == 17
    assert report.bytes_after < 0.5 * report.bytes_before and "5.62 MiB ->" in shown
    assert report.perplexity_before and report.perplexity_after and report.tokens_scored == 356
    assert 0.5 < (report.next_token_agreement or 0) <= 1 and report.prompts == 2
    down = [layer for layer in report.layers if layer.name.endswith("down_proj")]
    assert all(layer.scheme == "W8A8_DYNAMIC" and (layer.weight_snr or 0) > 40 for layer in down)
    assert all(25 < (layer.output_snr or 0) < 60 for layer in down)
    assert "perplexity" in shown and "model.layers.3.mlp.down_proj" in shown and "tokens/s" in shown
    slower = report.speed_after.decode < report.speed_before.decode  # type: ignore[union-attr]
    assert slower == ("SLOWER" in next(line for line in report.summary() if line.startswith("decode")))
    frame = report.to_dataframe()
    assert list(frame["scheme"]).count("W4A16") == 12 and frame["bytes_after"].sum() == report.bytes_after
    page = report._repr_html_()
    assert page.count("<rect") == 2 * 16 + 1 and "<svg" in page


def test_the_report_of_a_checkpoint_that_was_quantized_before(tmp_path: Any) -> None:
    with open_llm(quantization="w8a8") as llm:
        llm.save_quantized(tmp_path / "saved")
    with open_llm(tmp_path / "saved") as llm:
        alone = llm.quantization_report(TEXTS[4:5], prompts=[], speed=False)
        assert alone.perplexity_before is None and alone.perplexity_after
        assert "pass against='its folder'" in str(alone)
        compared = llm.quantization_report(TEXTS[4:5], prompts=[], against=EMBEDDED_MODEL, speed=False)
        assert compared.perplexity_change is not None and abs(compared.perplexity_change) < 0.02
        assert all(layer.weight_snr is None for layer in compared.layers)


def test_a_gguf_file_is_compared_with_its_own_requantizations(tmp_path: Any) -> None:
    """By its name and in its size, which are not those of a float model."""
    path = tmp_path / "m.gguf"
    with open_llm(EMBEDDED_MODEL, quantization="q4_0") as llm:
        llm.save_quantized(path, "gguf")
    with open_llm(path, requantize="w8a16") as llm:
        report = llm.quantization_report(TEXTS[4:5], prompts=[], speed=False)
    assert (report.name, report.baseline) == ("w8a16", "gguf")
    assert report.summary()[0].startswith("quantization w8a16 of gguf: ")
    assert 0.8 * path.stat().st_size < report.bytes_before < 1.1 * path.stat().st_size
    found = LLM.compare(path, ["none", "w8a16"], TEXTS[4:5], speed=False, speculative_config=None)
    assert [row.quantization for row in found.rows] == ["gguf", "w8a16"]
    assert found.rows[0].weight_bytes < found.rows[1].weight_bytes and found.rows[0].change == 0
    assert found.rows[1].change != 0


def test_layers_far_from_their_weights_are_told_in_a_warning_the_config_and_the_report(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Groups of 256 for 4 bits; not with the default groups, the negative control."""
    told = "dB of their weights"
    for asked, far in (("w4a16", False), ({"scheme": "w4a16", "group_size": 256, "symmetric": True}, True)):
        with open_llm(quantization=asked) as llm:
            reason = llm.config.reasons["quantization"]
            summary = "\n".join(llm.quantization_report(prompts=[], speed=False).summary())
        warned = [record.getMessage() for record in caplog.records if told in record.getMessage()]
        assert (told in reason) == (told in summary) == far and len(warned) == far
        assert not far or "16 of 17 layers keep less than 20 dB" in reason


def test_an_unquantized_model_has_no_report() -> None:
    with open_llm() as llm, pytest.raises(ValueError, match="the model is not quantized"):
        llm.quantization_report()


def test_the_command_prints_the_table(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "texts.txt").write_text(" ".join(TEXTS[3:6]))
    assert main(["quantization", "--texts", str(tmp_path / "texts.txt"), "--schemes", "w8a16"]) == 0
    out, err = capsys.readouterr()
    assert err == ""  # though the text is longer than the window
    lines = out.splitlines()
    assert lines[0].startswith("| quantization | weights |") and len(lines) == 4
    size = "3,033,088" if has_kernels() else "2,991,104"  # kernels keep the sum of each row beside it
    assert lines[2].startswith("| none | 5,898,240 B |") and lines[3].startswith(f"| w8a16 | {size} B (51%) |")
    assert main(["quantization", "--texts", str(tmp_path / "texts.txt"), "--schemes", "w8a16,w9"]) == 1
    out, err = capsys.readouterr()
    assert out == "" and "schemes must be of w8a8" in err  # before any work
    assert main(["quantization", "--texts", str(tmp_path / "none.txt")]) == 1
    assert "cannot be read" in capsys.readouterr().err


def test_the_command_proposes_the_smallest_scheme_within_a_loss(
    tmp_path: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = tmp_path / "texts.txt"
    texts.write_text(TEXTS[3][:2000])
    asked = ["quantization", str(EMBEDDED_MODEL), "--texts", str(texts), "--schemes", "w8a16,w4a16:6"]
    assert main([*asked, "--find", "2%"]) == 0
    out = capsys.readouterr().out
    assert "quantization={'scheme': 'w4a16', 'bits': 6} is the smallest within 2%: " in out and "| w4a16:6 | " in out
    for wrong in ("w4a16:much", "w4a16:9", "w8a16:5"):
        assert main([*asked[:-1], wrong]) == 1 and "bits" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main([*asked, "--find", "much"])
    assert "is no share of perplexity" in capsys.readouterr().err
    assert main([*asked, "--model", "other"]) == 1 and "named already" in capsys.readouterr().err
    measured = [Measured("small", 1, 0.2), Measured("middle", 2, 0.009), Measured("large", 3, 0.001)]
    assert "quantization='middle' is the smallest within 1%: +0.90%" in proposal(reversed(measured), 0.01)
    assert "No scheme is within 0.05%" in (told := proposal(measured, 0.0005)) and "'large' with +0.10%" in told


@pytest.mark.parametrize("noise", [0.0, 9.0])
def test_speed_is_of_the_middle_step_on_a_noisy_machine(noise: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that steps alone advance: 2 s for a prompt, 0.1 s for a token, and `noise` on every fourth step."""
    clock, steps = [0.0], [0]
    with open_llm(quantization="w8a8", max_model_len=300) as llm:
        engine = llm._open_engine()
        step = engine.step

        def timed_step() -> None:
            is_prompt = bool(engine.scheduler.waiting)
            step()
            steps[0] += 1
            clock[0] += 2.0 if is_prompt else 0.1 + (noise if steps[0] % 4 == 0 else 0.0)

        monkeypatch.setattr(engine, "step", timed_step)
        monkeypatch.setattr(measure, "perf_counter", lambda: clock[0])
        speed = measure.measure_speed(llm)
    assert speed.prefill == pytest.approx(256 / 2.0)
    assert speed.decode == pytest.approx(10.0)
