"""A Qwen 3 with experts as a GGUF file for llama.cpp, without a vocabulary. Needs the `gguf` package."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import torch
from safetensors import safe_open

_PARTS = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate": "ffn_gate_inp",
}
_KINDS = {"BF16": gguf.GGMLQuantizationType.BF16, "Q8_0": gguf.GGMLQuantizationType.Q8_0}


def write_gguf(folder: Path, kind: str) -> None:
    """model-KIND.gguf from the checkpoint in `folder`; norms and routers stay float32."""
    config = json.loads((folder / "config.json").read_text())
    writer = gguf.GGUFWriter(folder / f"model-{kind}.gguf", "qwen3moe", use_temp_file=False)
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
    writer.add_expert_count(config["num_experts"])
    writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("none")
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    files = {file: safe_open(folder / file, framework="pt") for file in set(index.values())}

    def load(name: str) -> torch.Tensor:
        return files[index[name]].get_tensor(name)

    def add(name: str, tensor: torch.Tensor) -> None:
        values = tensor.float().numpy()
        if tensor.dim() == 1 or name.endswith("ffn_gate_inp.weight"):
            writer.add_tensor(name, values)
        else:
            data = gguf.quants.quantize(values, _KINDS[kind])
            writer.add_tensor(name, data, raw_dtype=_KINDS[kind])

    add("token_embd.weight", load("model.embed_tokens.weight"))
    add("output_norm.weight", load("model.norm.weight"))
    add("output.weight", load("lm_head.weight"))
    for layer in range(config["num_hidden_layers"]):
        path = f"model.layers.{layer}"
        for theirs, ours in _PARTS.items():
            add(f"blk.{layer}.{ours}.weight", load(f"{path}.{theirs}.weight"))
        for part in ("gate", "up", "down"):
            names = [f"{path}.mlp.experts.{index}.{part}_proj.weight" for index in range(config["num_experts"])]
            add(f"blk.{layer}.ffn_{part}_exps.weight", torch.stack([load(name) for name in names]))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
