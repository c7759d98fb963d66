"""Models on transformers' own code: the same tokens and logprobs as transformers gives, under every schedule.

`python tests/models/architectures.py` tries every architecture; here two stand for all: one that our kernels compute
entirely (CWM, whose layers alternate between a window and the whole context) and one that they do not (Apertus).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import GREEDY, compare
from kernel_sets import has_kernels, needs_kernels
from torch import nn

from llm import LLM
from llm.errors import UnsupportedModelError, ValidationError
from llm.layers.moe import TransformersFusedMoE
from llm.models.transformers_backend.attention import Misfit, Trace, window_of
from llm.models.transformers_backend.probe import CalledOnly, forget_weights
from llm.models.transformers_backend.probe import compare as compare_hidden
from llm.models.transformers_backend.recognise import recognise
from llm.models.transformers_backend.replace import computes_as_ours
from llm.models.transformers_backend.skeleton import compute_buffers

SIZES = {
    "vocab_size": 257,
    "hidden_size": 48,
    "intermediate_size": 91,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
PROMPTS = [list(range(3, 3 + count)) for count in (1, 5, 23, 40)]


def saved(model_type: str, folder: Path, **more: Any) -> tuple[Path, Any]:
    """A tiny random checkpoint, and transformers' model."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(3)
    config = AutoConfig.for_model(model_type, **{**SIZES, **more})
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    for parameter in model.parameters():
        if parameter.dim() >= 2:
            parameter.data.normal_(0, 1.5 * parameter.shape[-1] ** -0.5)
    model.save_pretrained(folder)
    return folder, model


def load(folder: Path, **more: Any) -> LLM:
    return LLM(folder, skip_tokenizer_init=True, **{"kv_cache_dtype": "float32", "max_model_len": 96, **more})


ROPE = {"rope_type": "default", "rope_theta": 10000.0}


@pytest.fixture(scope="module")
def cwm(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    more = {"head_dim": 10, "sliding_window": 7, "rope_parameters": ROPE}
    more["layer_types"] = ["sliding_attention", "full_attention"]
    return saved("cwm", tmp_path_factory.mktemp("cwm"), **more)


@pytest.fixture(scope="module")
def llm(cwm: tuple[Path, Any]) -> Iterator[LLM]:
    with load(cwm[0]) as llm:
        yield llm


def test_is_transformers_model(cwm: tuple[Path, Any], llm: LLM) -> None:
    worst, same = compare(llm, cwm[1])
    assert worst < 1e-4 and (same or not has_kernels())


@needs_kernels
def test_every_schedule_has_the_same_bits(cwm: tuple[Path, Any], llm: LLM) -> None:
    assert llm.config.invariant, llm.config.reasons["invariant"]
    expected = [llm.generate([prompt], GREEDY, use_tqdm=False)[0].outputs[0].logprobs for prompt in PROMPTS]
    # Chunks of a few tokens, and blocks for two requests at a time: later ones are preempted or wait.
    bytes_per_token = 2 * 2 * 10 * 4 * 2
    for more in ({"max_num_batched_tokens": 7}, {"kv_cache_memory_bytes": 16 * 9 * bytes_per_token}):
        with load(cwm[0], **more) as other:
            outputs = other.generate(PROMPTS, GREEDY, use_tqdm=False)
        assert [output.outputs[0].logprobs for output in outputs] == expected


def test_a_parameter_of_transformers_counts(cwm: tuple[Path, Any], llm: LLM) -> None:
    """The negative control of the comparison."""
    parameters = dict(llm.apply_model(lambda model: list(model.named_parameters()))[0])
    weight = parameters["model.layers.0.input_layernorm.weight"]
    weight.data.mul_(1.01)
    try:
        assert compare(llm, cwm[1])[0] > 1e-4
    finally:
        weight.data.div_(1.01)


def test_the_config_says_what_runs(cwm: tuple[Path, Any], llm: LLM) -> None:
    assert llm.config.model_config.model_impl == "transformers"
    assert "no class of this package for cwm" in str(llm.config)
    assert "CwmForCausalLM of the installed transformers" in str(llm.config)
    with pytest.raises(UnsupportedModelError, match="cwm"):
        load(cwm[0], model_impl="native")
    with pytest.raises(ValidationError, match="model_impl must be 'auto'"):
        load(cwm[0], model_impl="jax")


def test_what_our_kernels_do_not_compute_is_said(tmp_path: Path) -> None:
    folder, model = saved("diffllama", tmp_path, rope_parameters=ROPE)
    with load(folder) as llm:
        assert compare(llm, model)[0] < 1e-4
        assert not llm.config.invariant and "PyTorch's" in llm.config.reasons["invariant"]


EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2}


@pytest.mark.parametrize(
    ("model_type", "schemes"), [("flex_olmo", (None, "w8a16")), ("granitemoeshared", (None,))], ids=str
)
def test_experts_are_ours(model_type: str, schemes: tuple[str | None, ...], tmp_path: Path) -> None:
    """From a checkpoint with a tensor per expert, which transformers would stack, and from one where they are stacked
    under a name of their own; also quantized on load."""
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4}
    folder, model = saved(model_type, tmp_path, **sizes, **EXPERTS)
    for quantization in schemes:
        with load(folder, quantization=quantization, model_impl="transformers") as llm:
            runner: Any = llm._engine.runner  # type: ignore[union-attr]
            layers = [layer for layer in runner.model.modules() if isinstance(layer, TransformersFusedMoE)]
            assert [len(layer.experts) for layer in layers] == [4, 4]
            found = {expert.down_proj.quant_method.scheme for layer in layers for expert in layer.experts}
            assert found == {"W8A16" if quantization else ""}
            assert 0 < compare(llm, model)[0] < 1e-4 or quantization
            runner.start_counting_experts()
            llm.generate(PROMPTS[2:3], GREEDY, use_tqdm=False)
            counts = runner.stop_counting_experts()
            assert len(counts) == 2 and all(sum(tokens) >= 2 * len(PROMPTS[2]) for tokens in counts.values())


def test_quantized_on_load(cwm: tuple[Path, Any], llm: LLM) -> None:
    with load(cwm[0], quantization="w8a16") as quantized:
        schemes = {report.name: report.scheme for report in quantized.quantization_report().layers}
        outputs = quantized.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert schemes["model.layers.1.mlp.down_proj"] == "W8A16"
    expected = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    for output, other in zip(outputs, expected, strict=True):
        first, second = (item.outputs[0].logprobs[0] for item in (output, other))  # type: ignore[index]
        both = [abs(first[token].logprob - second[token].logprob) for token in first if token in second]
        assert both and 0 < max(both) < 0.3


# Values of 6 channels and keys of 12, in one cache.
NARROW_VALUES: dict[str, Any] = {
    **{"qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6},
    **{"kv_lora_rank": 16, "q_lora_rank": 16, "num_key_value_heads": 6},
}


@pytest.mark.parametrize(("model_type", "more"), [("qwen3", {}), ("minicpm3", NARROW_VALUES)])
def test_a_native_family_on_transformers_code(tmp_path: Path, model_type: str, more: dict[str, Any]) -> None:
    folder, model = saved(model_type, tmp_path, **more)
    with load(folder, model_impl="transformers") as llm:
        assert llm.config.reasons["model_impl"] == "asked for"
        assert compare(llm, model)[0] < 1e-4


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"model_type": "electra", "architectures": ["ElectraForCausalLM"]}, "attends to tokens in both directions"),
        (
            {"auto_map": {"AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}},
            "code from a model folder",
        ),
        ({"architectures": ["CwmForSequenceClassification"]}, "is not supported"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000, must be at most"),
        ({"num_attention_heads": "six"}, "transformers cannot"),
    ],
)
def test_refused_with_the_reason(cwm: tuple[Path, Any], tmp_path: Path, changes: dict[str, Any], reason: str) -> None:
    config = json.loads((cwm[0] / "config.json").read_text()) | changes
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModelError, match=reason):
        load(tmp_path, load_format="dummy")


@pytest.mark.parametrize(
    ("model_type", "more"),
    [
        # ALiBi, and two layers of which one has recurrent states.
        ("bloom", {"num_attention_heads": 4, "hidden_size": 32}),
        ("lfm2", {"layer_types": ["conv", "full_attention"]}),
    ],
)
def test_row_by_row(tmp_path: Path, model_type: str, more: dict[str, Any]) -> None:
    folder, model = saved(model_type, tmp_path, **more)
    with load(folder, max_num_batched_tokens=7, model_impl="transformers") as llm:
        assert compare(llm, model)[0] < 1e-4
        assert not llm.config.invariant
        assert "row by row" in llm.config.reasons["invariant"] or not has_kernels()


def test_weights_that_are_read_without_a_call_are_found() -> None:
    """Loaded, the weights of layers that are called are packed: who reads them otherwise would get other values."""
    embedding, linear = nn.Embedding(9, 4), nn.Linear(4, 4)
    model = nn.ModuleDict({"linear": linear})
    forget_weights(model, ["linear"])
    assert (torch.ones(1, 4) @ linear.weight).isnan().all()
    with pytest.raises(IndexError):
        CalledOnly(embedding).weight[0, :]
    assert torch.equal(CalledOnly(embedding)(torch.tensor([3])), embedding.weight[3:4])


def test_a_table_that_nothing_computes_is_refused() -> None:
    from transformers import PreTrainedConfig, PreTrainedModel

    class Model(PreTrainedModel):
        def __init__(self, is_set: bool) -> None:
            super().__init__(PreTrainedConfig())
            self.register_buffer("table", torch.ones(3, device="meta"), persistent=False)
            self.is_set = is_set

        def _init_weights(self, module: nn.Module) -> None:
            if self.is_set:
                self.table.fill_(0.0)

    compute_buffers(Model(True))
    with pytest.raises(UnsupportedModelError, match="computes table of Model in no way known here"):
        compute_buffers(Model(False))


def test_a_model_that_mixes_tokens_is_refused() -> None:
    with pytest.raises(Misfit, match="differ from transformers' own by"):
        compare_hidden([torch.ones(3, 4)], [torch.ones(3, 4) + 0.01 * torch.eye(3, 4)], "MixingForCausalLM")
    with pytest.raises(Misfit):
        compare_hidden([torch.ones(3, 4)], [torch.full((3, 4), math.nan)], "NotANumberForCausalLM")


def causal(_: Any, __: Any, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    return key <= query


def test_windows_are_found_where_they_are_felt() -> None:
    assert window_of(causal, 4096) is None
    assert window_of(lambda b, h, q, k: causal(b, h, q, k) & (k > q - 1000), 4096) == 1000
    for mask in (lambda b, h, q, k: k >= 0, lambda b, h, q, k: causal(b, h, q, k) & (k // 512 == q // 512)):
        with pytest.raises(Misfit, match="neither causal nor a sliding window"):
            window_of(mask, 4000)


class _Norm(nn.Module):
    def __init__(self, offset: float, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, 16))
        self.another, self.offset, self.variance_epsilon = 1e-6, offset, eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.weight + self.offset) * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)


def test_modules_are_recognised_by_their_values() -> None:
    with torch.no_grad():
        found = [recognise(_Norm(offset, eps), 16) for offset, eps in ((0.0, 1e-5), (1.0, 1e-6), (0.5, 1e-6))]
        scaled = recognise(nn.Softplus(), 16)
        plain = [recognise(module, 16) for module in (nn.SiLU(), nn.GELU(), nn.GELU("tanh"), nn.LayerNorm(16, 1e-3))]
    assert found[0] is not None and (found[0].kind, found[0].eps) == ("RMSNorm", 1e-5)
    assert found[1] is not None and (found[1].kind, found[1].eps) == ("GemmaRMSNorm", 1e-6)
    assert found[2] is None and scaled is None
    kinds = [item and (item.kind, item.eps) for item in plain]
    assert kinds == [("SiLU", 0.0), ("GELU", 0.0), ("GELUTanh", 0.0), ("LayerNorm", 1e-3)]


def test_experts_of_another_kind_stay() -> None:
    """Of Qwen 3's class, with an activation that its config does not name."""
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    config = Qwen3MoeConfig(hidden_size=16, moe_intermediate_size=8, num_experts=4)
    config._experts_implementation = "eager"
    with torch.no_grad():
        experts = Qwen3MoeExperts(config)
        assert computes_as_ours(experts)
        experts.act_fn = nn.GELU()
        assert not computes_as_ours(experts)
    assert experts.gate_up_proj.shape == (4, 16, 16)


def test_nothing_stays_registered_with_transformers() -> None:
    from transformers import AttentionInterface, AttentionMaskInterface

    for interface in (AttentionInterface, AttentionMaskInterface):
        assert not [name for name in interface._global_mapping if name.startswith("offline_llm_trace")]
    assert Trace(nn.Linear(2, 2), 4).calls == []
