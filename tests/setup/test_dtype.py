"""`dtype=` on a platform that computes in float32: the type in which matrices are stored."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from embedded import engine_of
from safetensors.torch import load_file, save_file
from tiny_models import TINY_MODELS, make_prompts, reference_model, tiny_checkpoint

from llm import LLM, SamplingParams
from llm.errors import CheckpointError, OutOfMemoryError
from llm.kernels.select import backend_for
from llm.platforms import current_platform
from llm.platforms.cpu import CpuPlatform
from llm.quantization.on_load import OnlineConfig
from llm.setup import plan

PARAMS = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True, logprobs=3)
PROMPTS = make_prompts(TINY_MODELS["llama"])
OPTIONS: dict[str, Any] = {"skip_tokenizer_init": True, "kv_cache_dtype": "float32", "max_model_len": 64}
ROUNDED = backend_for(current_platform).rounds_bf16_inputs


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A float32 checkpoint."""
    return tiny_checkpoint("llama", tmp_path_factory)


def rewritten(folder: Path, target: Path, change: Callable[[str, torch.Tensor], torch.Tensor]) -> Path:
    target.mkdir()
    (target / "config.json").write_text((folder / "config.json").read_text())
    tensors: dict[str, torch.Tensor] = {}
    for path in folder.glob("*.safetensors"):
        tensors |= load_file(path)
    save_file(
        {name: change(name, tensor).contiguous() for name, tensor in tensors.items()}, target / "model.safetensors"
    )
    return target


def answers(folder: Path, **arguments: Any) -> tuple[Any, ...]:
    with LLM(folder, **OPTIONS, **arguments) as llm:
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], PARAMS, use_tqdm=False)
        found = [(output.outputs[0].token_ids, output.outputs[0].cumulative_logprob) for output in outputs]
        named = engine_of(llm).runner.model.named_parameters()
        return found, {parameter.dtype for name, parameter in named if "norm" in name}, llm.config


@pytest.mark.parametrize("name, dtype", [("bfloat16", torch.bfloat16), ("half", torch.float16)])
def test_matrices_are_stored_as_asked(
    name: str, dtype: torch.dtype, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if ROUNDED:  # they round activations too
        monkeypatch.setenv("LLM_CPU_ISA", "avx2")
    ours, norms, config = answers(folder, dtype=name)
    cast = rewritten(folder, tmp_path / "cast", lambda _, tensor: tensor.to(dtype) if tensor.dim() > 1 else tensor)
    assert ours == answers(cast)[0]
    assert ours != answers(folder)[0]  # the rounding can be seen
    assert norms == {torch.float32}
    assert (config.model_config.dtype, config.model_config.weight_dtype) == (torch.float32, dtype)
    assert f"asked for by dtype={name}" in config.reasons["weight_dtype"]


@pytest.mark.skipif(not ROUNDED, reason="no matrix tiles")
def test_bfloat16_rounds_activations_for_matrix_tiles(folder: Path, tmp_path: Path) -> None:
    """As vLLM's bfloat16 does, everything else stays float32: asked for, and only then.

    So it is much nearer to a transformers model whose linear layers are given rounded activations than to one as it is.
    """
    stored = rewritten(folder, tmp_path / "stored", lambda _, tensor: tensor.bfloat16())
    exact = answers(stored)[0]
    assert exact != answers(stored, dtype="bfloat16")[0]
    with LLM(stored, **OPTIONS, dtype="bfloat16") as llm:
        modules = [module for module in engine_of(llm).runner.model.modules() if hasattr(module, "packed_weight")]
        assert modules and all(module.packed_weight.activations == "bfloat16" for module in modules)
        assert "rounded to bfloat16" in llm.config.reasons["dtype"]
        prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
        together = llm.generate(prompts, PARAMS, use_tqdm=False)
        alone = [llm.generate(prompt, PARAMS, use_tqdm=False)[0] for prompt in prompts]
        assert [o.outputs[0].logprobs for o in together] == [o.outputs[0].logprobs for o in alone]
    model = reference_model(stored)
    exactly = _farthest(together, model)
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_pre_hook(lambda _, given: (given[0].bfloat16().float(),))
    assert _farthest(together, model) < 0.2 * exactly


@pytest.mark.skipif(not ROUNDED - {"bfloat16"}, reason="activations are rounded for bfloat16 weights alone")
@pytest.mark.parametrize(
    "quantization, rounds",
    [("w8a16", True), ("w4a16", True), ("fp8", True), ("mxfp4", True), ("nf4", False), ("w8a8", False)],
)
def test_bfloat16_rounds_activations_for_weights_with_scales(quantization: str, rounds: bool, folder: Path) -> None:
    """Where no instruction multiplies what weights store they stay float32, as by default."""
    for dtype, expected in (("auto", "float"), ("bfloat16", "bfloat16" if rounds else "float")):
        with LLM(folder, **OPTIONS, dtype=dtype, quantization=quantization) as llm:
            modules = engine_of(llm).runner.model.named_modules()
            found = {module.packed_weight.activations for name, module in modules if name.endswith("proj")}
            assert found == {"int8" if quantization == "w8a8" else expected}
            prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
            together = llm.generate(prompts, PARAMS, use_tqdm=False)
            alone = [llm.generate(prompt, PARAMS, use_tqdm=False)[0] for prompt in prompts]
            assert [o.outputs[0].logprobs for o in together] == [o.outputs[0].logprobs for o in alone]


@torch.no_grad()
def _farthest(outputs: list[Any], model: Any) -> float:
    """The largest distance of a first token's logprobs to those of transformers' `model`."""
    distances = []
    for output in outputs:
        logprobs = model(torch.tensor([output.prompt_token_ids])).logits[0, -1].log_softmax(-1)
        first = output.outputs[0].logprobs[0]
        distances += [abs(ours.logprob - logprobs[token].item()) for token, ours in first.items()]
    return max(distances)


@pytest.mark.parametrize(
    "gain, found, scheme, weights, told",
    [
        (1.7, False, "", torch.bfloat16, True),
        (1.7, False, "w4a16", torch.bfloat16, True),
        (1.0, False, "", torch.bfloat16, False),
        (1.2, False, "", torch.bfloat16, False),  # not worth a line
        (1.7, True, "", torch.bfloat16, False),  # integers are multiplied
        (1.7, False, "w8a8", torch.bfloat16, False),
        (1.7, False, "", torch.float32, False),  # it would round the weights too
    ],
)
def test_the_config_says_where_rounding_is_faster(
    gain: float, found: bool, scheme: str, weights: torch.dtype, told: bool
) -> None:
    """Where float weights are multiplied, and an instruction multiplies bfloat16."""
    args = SimpleNamespace(dtype="auto")
    config = OnlineConfig.parse(scheme) if scheme else None
    model = SimpleNamespace(quantization=SimpleNamespace(found=found, config=config))
    exact = plan.Dtypes(torch.float32, weights, None)
    backend = SimpleNamespace(
        device=torch.device("cpu"), rounds_bf16_inputs={"bfloat16"} if gain > 1 else set(), bf16_gain=gain
    )
    reason = plan._dtype_reason(args, model, exact, backend)
    assert (f"dtype='bfloat16' rounds what matrix products read: prompts and batches {gain:g} times" in reason) == told
    assert "activations and accumulation are float32" in reason


def test_every_kernel_that_rounds_says_what_it_gains() -> None:
    backend = backend_for(current_platform)
    assert (backend.bf16_gain > 1) == ("bfloat16" in backend.rounds_bf16_inputs)


def test_what_is_quantized_on_load_is_quantized_from_what_was_stored(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if ROUNDED:  # they round activations too
        monkeypatch.setenv("LLM_CPU_ISA", "avx2")

    def cast_table(name: str, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.bfloat16() if "embed_tokens" in name else tensor  # the one matrix that stays float

    cast = rewritten(folder, tmp_path / "cast", cast_table)
    assert answers(folder, quantization="w8a8", dtype="bfloat16")[0] == answers(cast, quantization="w8a8")[0]


def test_memory_is_planned_for_what_is_stored(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stored = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    monkeypatch.setattr(CpuPlatform, "memory_free", lambda self: stored * 3 // 4)
    with pytest.raises(OutOfMemoryError, match="the weights take"):
        answers(folder, max_num_seqs=1, offload_weights=False)
    assert answers(folder, max_num_seqs=1, dtype="bfloat16", offload_weights=False)


def test_a_value_beyond_the_range_is_refused(folder: Path, tmp_path: Path) -> None:
    large = rewritten(folder, tmp_path / "large", lambda _, tensor: tensor * 1e6)
    with pytest.raises(CheckpointError, match=r"beyond the range of float16; use dtype='bfloat16'"):
        answers(large, dtype="float16")
