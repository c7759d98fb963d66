"""InternLM 2, whose code is in no package: it is a Llama whose weights have other names and another order."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import TINY_MODELS, one_thread, tiny_checkpoint

from llm import LLM, SamplingParams

PROMPT = list(range(5, 33))
GREEDY = SamplingParams(temperature=0, max_tokens=6, logprobs=3, ignore_eos=True)
NAMES = {
    "model.embed_tokens": "model.tok_embeddings",
    "lm_head": "output",
    "self_attn.o_proj": "attention.wo",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.up_proj": "feed_forward.w3",
    "mlp.down_proj": "feed_forward.w2",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
}


def repacked(folder: Path, to: Path, order: str) -> None:
    """Write the Llama in `folder` as an InternLM 2 whose fused tensors have `order` per key head."""
    tensors = load_file(folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    heads, size = config["num_key_value_heads"], config["head_dim"]
    found = {}
    for name, tensor in tensors.items():
        if ".self_attn.q_proj" in name:
            parts = {part: tensors[name.replace("q_proj", f"{part}_proj")] for part in "qkv"}
            groups = [parts[part].unflatten(0, (heads, -1, size)) for part in order]
            found[name.replace("self_attn.q_proj", "attention.wqkv")] = torch.cat(groups, dim=1).flatten(0, 2)
        elif not any(f".self_attn.{part}_proj" in name for part in "kv"):
            ours = next(part for part in [*NAMES, "model.norm"] if part in name)
            found[name.replace(ours, NAMES.get(ours, ours))] = tensor
    to.mkdir()
    save_file(found, to / "model.safetensors")
    changed = {"model_type": "internlm2", "architectures": ["InternLM2ForCausalLM"], "bias": False}
    dropped = ("attention_bias", "mlp_bias", "pretraining_tp")
    (to / "config.json").write_text(
        json.dumps({key: value for key, value in config.items() if key not in dropped} | changed)
    )


@pytest.mark.parametrize(("order", "is_same"), [("qkv", True), ("qvk", False)])
def test_it_answers_as_the_llama_it_is(
    order: str, is_same: bool, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    assert TINY_MODELS["llama"].config == {}
    folder = tiny_checkpoint("llama", tmp_path_factory)
    repacked(folder, tmp_path / "internlm2", order)
    answers = []
    with one_thread():
        for each in (folder, tmp_path / "internlm2"):
            with LLM(each, skip_tokenizer_init=True, max_model_len=64) as llm:
                answers.append(llm.generate([PROMPT], GREEDY, use_tqdm=False)[0].outputs[0])
    assert (answers[0].logprobs == answers[1].logprobs) == is_same
