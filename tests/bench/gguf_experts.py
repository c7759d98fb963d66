"""A Qwen 3 with experts, or a gpt-oss, as a GGUF file for llama.cpp, without a vocabulary. Needs the `gguf` package."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import torch
from safetensors import safe_open

_ATTENTION = {"q_proj": "attn_q", "k_proj": "attn_k", "v_proj": "attn_v", "o_proj": "attn_output"}
# Of a layer: name in the checkpoint, with or without a bias -> name in the file.
_PARTS = {
    "qwen3_moe": {
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
        **{f"self_attn.{theirs}": ours for theirs, ours in _ATTENTION.items()},
        "self_attn.q_norm": "attn_q_norm",
        "self_attn.k_norm": "attn_k_norm",
        "mlp.gate": "ffn_gate_inp",
    },
    "gpt_oss": {
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "post_attention_norm",
        **{f"self_attn.{theirs}": ours for theirs, ours in _ATTENTION.items()},
        "mlp.router": "ffn_gate_inp",
    },
}
_ARCHITECTURES = {"qwen3_moe": "qwen3moe", "gpt_oss": "gpt-oss"}
_KINDS = {"BF16": gguf.GGMLQuantizationType.BF16, "Q8_0": gguf.GGMLQuantizationType.Q8_0}
Load = Callable[[str], torch.Tensor]


def write_gguf(folder: Path, kind: str) -> None:
    """model-KIND.gguf from the checkpoint in `folder`; norms, biases, sinks and routers stay float32."""
    config = json.loads((folder / "config.json").read_text())
    family = config["model_type"]
    writer = gguf.GGUFWriter(folder / f"model-{kind}.gguf", _ARCHITECTURES[family], use_temp_file=False)
    describe(writer, config)
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    files = {file: safe_open(folder / file, framework="pt") for file in set(index.values())}

    def load(name: str) -> torch.Tensor:
        return files[index[name]].get_tensor(name)

    def add(name: str, tensor: torch.Tensor) -> None:
        values = tensor.float().numpy()
        if tensor.dim() == 1 or not name.endswith(".weight") or name.endswith("ffn_gate_inp.weight"):
            writer.add_tensor(name, values)
        else:
            data = gguf.quants.quantize(values, _KINDS[kind])
            writer.add_tensor(name, data, raw_dtype=_KINDS[kind])

    add("token_embd.weight", load("model.embed_tokens.weight"))
    add("output_norm.weight", load("model.norm.weight"))
    add("output.weight", load("lm_head.weight"))
    for layer in range(config["num_hidden_layers"]):
        path = f"model.layers.{layer}"
        for theirs, ours in _PARTS[family].items():
            for last in ("weight", "bias"):
                if f"{path}.{theirs}.{last}" in index:
                    add(f"blk.{layer}.{ours}.{last}", load(f"{path}.{theirs}.{last}"))
        made = stacked(load, path, config) if family == "qwen3_moe" else interleaved(load, path)
        for name, tensor in made:
            add(f"blk.{layer}.{name}", tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def describe(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_expert_count(config.get("num_experts") or config["num_local_experts"])
    writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_expert_feed_forward_length(config.get("moe_intermediate_size") or config["intermediate_size"])
    if "sliding_window" in config:
        writer.add_sliding_window(config["sliding_window"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("none")


def stacked(load: Load, path: str, config: dict[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """A tensor per expert."""
    for part in ("gate", "up", "down"):
        names = [f"{path}.mlp.experts.{index}.{part}_proj.weight" for index in range(config["num_experts"])]
        yield f"ffn_{part}_exps.weight", torch.stack([load(name) for name in names])


def interleaved(load: Load, path: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Input channels first; gate and up take turns."""
    yield "attn_sinks.weight", load(f"{path}.self_attn.sinks")
    both, bias = (load(f"{path}.mlp.experts.gate_up_proj{last}") for last in ("", "_bias"))
    for index, part in enumerate(("gate", "up")):
        yield f"ffn_{part}_exps.weight", both[..., index::2].transpose(1, 2).contiguous()
        yield f"ffn_{part}_exps.bias", bias[..., index::2].contiguous()
    yield "ffn_down_exps.weight", load(f"{path}.mlp.experts.down_proj").transpose(1, 2).contiguous()
    yield "ffn_down_exps.bias", load(f"{path}.mlp.experts.down_proj_bias")
