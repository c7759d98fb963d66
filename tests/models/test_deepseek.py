"""What checkpoints of DeepSeek and gpt-oss have beside their weights: layers left out, formats refused, null ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import TINY_MODELS, make_prompts, tiny_checkpoint

from llm import LLM, SamplingParams
from llm.errors import CheckpointError, LLMError, UnsupportedModelError
from llm.models.config_reader import ConfigReader
from llm.models.registry import resolve_model_cls

pytestmark = pytest.mark.usefixtures("one_core")

GREEDY = SamplingParams(temperature=0, max_tokens=4, logprobs=1, ignore_eos=True)
# As its authors wrote it, but for the widths.
V2_LITE: dict[str, Any] = json.loads(
    """{"architectures": ["DeepseekV2ForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
    "aux_loss_alpha": 0.001, "bos_token_id": 100000, "eos_token_id": 100001, "first_k_dense_replace": 1,
    "hidden_act": "silu", "hidden_size": 64, "initializer_range": 0.02, "intermediate_size": 32, "kv_lora_rank": 512,
    "max_position_embeddings": 163840, "model_type": "deepseek_v2", "moe_intermediate_size": 16, "moe_layer_freq": 1,
    "n_group": 1, "n_routed_experts": 8, "n_shared_experts": 2, "norm_topk_prob": false, "num_attention_heads": 16,
    "num_experts_per_tok": 6, "num_hidden_layers": 2, "num_key_value_heads": 16, "pretraining_tp": 1,
    "q_lora_rank": null, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-06,
    "rope_scaling": {"beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 0.707, "mscale_all_dim": 0.707,
    "original_max_position_embeddings": 4096, "type": "yarn"}, "rope_theta": 10000, "routed_scaling_factor": 1.0,
    "scoring_func": "softmax", "seq_aux": true, "tie_word_embeddings": false, "topk_group": 1, "topk_method": "greedy",
    "torch_dtype": "bfloat16", "transformers_version": "4.33.1", "use_cache": true, "v_head_dim": 128,
    "vocab_size": 102400}"""
)


def copied(folder: Path, to: Path, *, extra: dict[str, torch.Tensor], **keys: Any) -> Path:
    to.mkdir()
    config = json.loads((folder / "config.json").read_text())
    (to / "config.json").write_text(json.dumps({**config, **keys}))
    save_file({**load_file(folder / "model.safetensors"), **extra}, to / "model.safetensors")
    return to


def answers(folder: Path) -> list[Any]:
    with LLM(folder, skip_tokenizer_init=True) as llm:
        outputs = llm.generate(make_prompts(TINY_MODELS["deepseek-v3"])[:2], GREEDY, use_tqdm=False)
    return [(output.outputs[0].token_ids, output.outputs[0].cumulative_logprob) for output in outputs]


def test_layers_that_predict_further_tokens_are_left_out(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tiny_checkpoint("deepseek-v3", tmp_path_factory)
    extra = {"model.layers.2.eh_proj.weight": torch.ones(4, 8), "model.layers.2.mlp.gate.weight": torch.ones(3, 2)}
    one = copied(folder, tmp_path / "one", extra=extra, num_nextn_predict_layers=1)
    assert answers(one) == answers(folder)
    none = copied(folder, tmp_path / "none", extra=extra, num_nextn_predict_layers=0)
    with pytest.raises(CheckpointError, match=r"does not have: model\.layers\.2\.eh_proj\.weight"):
        answers(none)
    # A layer that is computed is never left out.
    behind = copied(
        folder, tmp_path / "behind", extra={"model.layers.1.odd": torch.ones(1)}, num_nextn_predict_layers=1
    )
    with pytest.raises(CheckpointError, match=r"does not have: model\.layers\.1\.odd"):
        answers(behind)


def test_a_published_config_is_read_as_it_is() -> None:
    read: Any = resolve_model_cls(V2_LITE["architectures"], "deepseek_v2").read_config(ConfigReader(V2_LITE))
    attention = read.layers[1].attention
    assert (attention.q_lora_rank, attention.is_neox_style, read.max_position_embeddings) == (None, False, 163840)
    assert attention.scale == pytest.approx(192**-0.5 * 1.5896, rel=1e-4)
    assert (read.layers[1].mlp.groups, read.layers[1].mlp.shared_size) == (1, 32)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("scoring_func", "sigmoid"),
        ("topk_method", "noaux_tc"),
        ("moe_layer_freq", 2),
        ("num_nextn_predict_layers", 10**9),
        ("num_nextn_predict_layers", -1),
        ("q_lora_rank", 0),
        ("num_key_value_heads", 8),
        ("head_dim", 128),
    ],
)
def test_what_is_not_computed_is_refused_by_name(key: str, value: Any) -> None:
    with pytest.raises(UnsupportedModelError, match=key):
        resolve_model_cls([], "deepseek_v2").read_config(ConfigReader({**V2_LITE, key: value}))


def test_mxfp4_of_other_sizes_is_refused(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tiny_checkpoint("gpt-oss", tmp_path_factory)
    quantized = copied(folder, tmp_path / "mxfp4", extra={}, quantization_config={"quant_method": "mxfp4"})
    with pytest.raises(LLMError, match="groups of 32 do not divide 48 columns"):
        answers(quantized)


def test_gpt_oss_scales_positions_where_the_file_does_not_say() -> None:
    """As transformers does; a config without `rope_parameters` is not one of plain positions."""
    from transformers import GptOssConfig

    written = GptOssConfig(num_hidden_layers=2).to_dict()
    cls = resolve_model_cls(["GptOssForCausalLM"], "gpt_oss")
    silent = {key: value for key, value in written.items() if key != "rope_parameters"} | {"rope_theta": 150000.0}
    read = [cls.read_config(ConfigReader(config)) for config in (written, silent)]
    assert read[0] == read[1]
    assert {rope.rope_type for rope in read[0].ropes} == {"yarn"}
    assert cls.read_config(ConfigReader(silent | {"rope_parameters": {"rope_type": "default"}})) != read[0]
