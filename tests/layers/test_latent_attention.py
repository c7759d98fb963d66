"""The weight that latent attention reads in parts: its layout, and what quantization does with it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints.compressed_tensors import compress
from embedded import engine_of
from tiny_models import TINY_MODELS, make_prompts, one_thread, tiny_checkpoint

from llm import LLM, SamplingParams
from llm.errors import UnsupportedModelError
from llm.forward import QUANTIZED_CACHE_DTYPES, LatentCacheSpec
from llm.layers.latent_attention import LatentAttention, LatentProjection
from llm.layers.rotary import RopeParameters, yarn_score_factor
from llm.loading.source import FolderSource
from llm.quantization.unquantized import UnquantizedLinearMethod
from llm.setup.memory import widened_bytes

pytestmark = pytest.mark.usefixtures("one_core")

ROW = TINY_MODELS["minicpm3"]
HEADS, KEY, VALUE, RANK = 3, 7, 9, 20
GREEDY = SamplingParams(temperature=0, max_tokens=5, logprobs=2, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint("minicpm3", tmp_path_factory)


def opened(folder: Path, **more: Any) -> LLM:
    return LLM(folder, skip_tokenizer_init=True, **{**ROW.engine, **more})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_absorbed_weight_is_the_loaded_one_in_its_memory(dtype: torch.dtype) -> None:
    layer: Any = LatentProjection(RANK, HEADS, KEY, VALUE, params_dtype=dtype)
    loaded = torch.randn(HEADS * (KEY + VALUE), RANK, generator=torch.Generator().manual_seed(0)).to(dtype)
    layer.weight_loader(layer.weight, loaded)
    layer.quant_method.process_weights_after_loading(layer)
    layer.quant_method.process_weights_after_loading(layer)
    by_head = loaded.view(HEADS, KEY + VALUE, RANK)
    assert torch.equal(layer.absorbed.of_queries(), by_head[:, :KEY])
    assert torch.equal(layer.absorbed.of_outputs().transpose(1, 2), by_head[:, KEY:])
    assert torch.equal(layer.absorbed.unpack(), loaded) and layer.weight.nbytes == loaded.nbytes
    assert torch.equal(layer.quant_method.dequantize_weight(layer), loaded.float())
    x = torch.randn(4, RANK)
    torch.testing.assert_close(layer(x)[0], x @ loaded.float().t())
    # The parameter is what is multiplied with.
    layer.weight.data = torch.zeros_like(loaded)
    assert not layer.absorbed.of_queries().any() and not layer.absorbed.of_outputs().any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, *QUANTIZED_CACHE_DTYPES])
def test_a_token_takes_its_latent_and_its_rotated_key(folder: Path, dtype: torch.dtype) -> None:
    with opened(folder, kv_cache_dtype=str(dtype).removeprefix("torch.").replace("float8_e4m3fn", "fp8_e4m3")) as llm:
        runner = engine_of(llm).runner
        specs, states = runner.plan.kv_cache_specs, runner.states
        layers = [module for module in runner.model.modules() if isinstance(module, LatentAttention)]
    width = ROW.config["kv_lora_rank"] + ROW.config["qk_rope_head_dim"]
    specs_of_layers = [layer.kv_cache_spec(dtype) for layer in layers]
    assert [*specs] == [LatentCacheSpec(width, dtype, scales=2)] * 3 == specs_of_layers
    scales = 4 if dtype in QUANTIZED_CACHE_DTYPES else 0
    assert {spec.bytes_per_token() for spec in specs} == {width * dtype.itemsize + scales}
    assert all(len(state) == 1 for state in states)


def test_answers_over_a_quantized_cache_stay_close(folder: Path) -> None:
    """Of prompts that are scored, in multiples of what bfloat16 moves them by: it rounds to 1 / 512 of an element,
    int8 to 1 / 254 of a token's largest, fp8 to 1 / 16 of an element."""
    prompts = make_prompts(ROW)[:3]
    params = SamplingParams(max_tokens=1, prompt_logprobs=0)
    found: dict[str, list[float]] = {}
    for dtype in ("float32", "bfloat16", "int8", "fp8"):
        with opened(folder, kv_cache_dtype=dtype) as llm:
            outputs = llm.generate(prompts, params, use_tqdm=False)
            said = str(llm.config)
        lines = [line for output in outputs for line in output.prompt_logprobs or () if line]
        found[dtype] = [next(iter(line.values())).logprob for line in lines]
    away = {
        dtype: sum(abs(a - b) for a, b in zip(found[dtype], found["float32"], strict=True)) / len(found[dtype])
        for dtype in found
    }
    assert 0 < away["bfloat16"] < away["int8"] < 5 * away["bfloat16"] < away["fp8"] < 20 * away["bfloat16"], away
    assert "bytes per token" in said


def test_quantization_on_load_leaves_it_as_it_is_and_says_so(folder: Path, tmp_path: Path) -> None:
    prompts = make_prompts(ROW)[:2]
    with opened(folder, quantization="w8a8") as llm:
        model = engine_of(llm).runner.model
        schemes = {name: module.quant_method.scheme for name, module in model.named_modules() if "proj" in name}
        assert {name for name, scheme in schemes.items() if not scheme} == {
            f"model.layers.{index}.self_attn.kv_b_proj" for index in range(3)
        }
        assert "reads it in parts" in str(llm.explain())
        expected = [output.outputs[0].token_ids for output in llm.generate(prompts, GREEDY, use_tqdm=False)]
        llm.save_quantized(tmp_path / "saved", format="compressed-tensors")
    with opened(tmp_path / "saved") as llm:
        assert [output.outputs[0].token_ids for output in llm.generate(prompts, GREEDY, use_tqdm=False)] == expected


@pytest.mark.parametrize("bits", [8, 4])
def test_stored_integers_are_held_as_what_they_stand_for(folder: Path, tmp_path: Path, bits: int) -> None:
    """Of 8 bits, and of 4 with zero points; against the model of the package that wrote them."""
    pytest.importorskip("compressed_tensors")
    weights = {"num_bits": bits, "type": "int", "symmetric": bits == 8, "strategy": "channel"}
    with one_thread():
        theirs = compress(
            folder, tmp_path / "compressed", {"g": {"targets": ["Linear"], "weights": weights}}, ["lm_head"]
        )
    prompt = max(make_prompts(ROW), key=len)
    with opened(tmp_path / "compressed") as llm:
        layers = [module for module in engine_of(llm).runner.model.modules() if isinstance(module, LatentProjection)]
        assert {layer.absorbed.kind for layer in layers} == {"float32"}
        plan, tensors = engine_of(llm).runner.plan, FolderSource(tmp_path / "compressed").tensors().tensors
        in_file = sum(info.nbytes for name, info in tensors.items() if ".kv_b_proj." in name)
        held = sum(layer.weight.nbytes for layer in layers)
        assert in_file + widened_bytes(plan.architecture, tensors) == held > 3 * in_file
        assert widened_bytes(plan.architecture, FolderSource(folder).tensors().tensors) == 0
        stored = [theirs.model.layers[index].self_attn.kv_b_proj.weight for index in range(3)]
        assert all(
            torch.equal(*pair) for pair in zip((layer.absorbed.unpack() for layer in layers), stored, strict=True)
        )
        said = f"kv_b_proj, W{bits}A16 in the checkpoint, is held as float32"
        assert said in str(llm.config) and "held as float32" in str(llm.explain())
        [output] = llm.generate([prompt], GREEDY, use_tqdm=False)
    tokens = output.outputs[0].token_ids
    with torch.no_grad():
        logits = theirs(input_ids=torch.tensor([[*prompt, *tokens]]), use_cache=False).logits[0]
    assert logits[len(prompt) - 1 : -1].argmax(dim=-1).tolist() == tokens
    for line, ours in zip(
        logits[len(prompt) - 1 : -1].log_softmax(dim=-1), output.outputs[0].logprobs or [], strict=True
    ):
        assert all(abs(line[token].item() - item.logprob) < 1e-4 for token, item in ours.items())


@pytest.mark.parametrize(("scheme", "said"), [("ODD", "ODD"), ("", "Odd")])
def test_what_only_a_plugin_can_read_is_refused_by_name(scheme: str, said: str) -> None:
    class Config:
        def get_quant_method(self, layer: Any, prefix: str) -> Any:
            return Odd()

    class Odd(UnquantizedLinearMethod):
        pass

    Odd.scheme = scheme
    with pytest.raises(UnsupportedModelError, match=rf"x\.kv_b_proj is stored as {said}; .* in parts"):
        LatentProjection(RANK, HEADS, KEY, VALUE, quant_config=Config(), prefix="x.kv_b_proj")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("rope", "factor"),
    [
        (RopeParameters(mscale_all_dim=1.0), 1.0),
        (RopeParameters(rope_type="yarn", factor=4.0), 1.0),
        (RopeParameters(rope_type="yarn", factor=4.0, mscale_all_dim=1.0), 1.2964),
        (RopeParameters(rope_type="yarn", factor=40.0, mscale_all_dim=0.707), 1.5896),
        (RopeParameters(rope_type="yarn", factor=0.5, mscale_all_dim=1.0), 1.0),
    ],
)
def test_scores_are_scaled_by_the_square_of_mscale_all_dim(rope: RopeParameters, factor: float) -> None:
    """0.1 * mscale_all_dim * ln(factor) + 1, squared."""
    assert yarn_score_factor(rope) == pytest.approx(factor, abs=1e-4)
