"""Writes GGUF files of Granite and of mixtures of experts with the `gguf` package, as the converter lays them out.

What a file holds is written as a Hugging Face checkpoint too, as in `gguf.py`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import torch
from gguf import GGMLQuantizationType as Type
from safetensors.torch import load_file, save_file

from checkpoints.gguf import add_metadata, encoded, finish

ARCHITECTURES = {
    "mixtral": gguf.MODEL_ARCH.LLAMA,
    "qwen2_moe": gguf.MODEL_ARCH.QWEN2MOE,
    "qwen3_moe": gguf.MODEL_ARCH.QWEN3MOE,
    "olmoe": gguf.MODEL_ARCH.OLMOE,
    "granite": gguf.MODEL_ARCH.GRANITE,
    "granitemoe": gguf.MODEL_ARCH.GRANITE_MOE,
    "granitemoeshared": gguf.MODEL_ARCH.GRANITE_MOE,
    "gpt_oss": gguf.MODEL_ARCH.GPT_OSS,
    "deepseek_v2": gguf.MODEL_ARCH.DEEPSEEK2,
    "deepseek_v3": gguf.MODEL_ARCH.DEEPSEEK2,
}
_PERMUTED = ("mixtral", "granite", "granitemoe", "granitemoeshared")
_EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(\w+)\.weight")
Tensors = dict[str, torch.Tensor]


def write_mixture(folder: Path, path: Path, kind: Type, *, split_latent: bool = False) -> Path:
    """`folder`'s model as a GGUF file, and beside it, in `path` without suffix, the checkpoint of its exact values.

    Args:
        kind: of matrices, or of the experts alone if it is MXFP4; routers and vectors are F32.
        split_latent: DeepSeek's kv_b_proj as two tensors, as files since 2025 have it.

    Returns: the folder of that checkpoint.
    """
    config = json.loads((folder / "config.json").read_text())
    arch = ARCHITECTURES[config["model_type"]]
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[arch])
    _describe(writer, config, split_latent)
    names = gguf.get_tensor_name_map(arch, config["num_hidden_layers"])
    written: Tensors = {}
    for index, (name, tensor) in enumerate(_converted(load_file(folder / "model.safetensors"), config).items()):
        known = name.replace("e_score_correction_bias", "e_score_correction.bias")
        known = known if known.endswith((".weight", ".bias")) else f"{known}.weight"
        theirs = names.get_name(known, (".weight", ".bias"))
        for last, part in _latent_parts(name, tensor, config) if split_latent else [("", tensor)]:
            is_vector = part.dim() == 1 or theirs.endswith(".bias") or "ffn_gate_inp" in theirs
            of_part = Type.F32 if is_vector or (kind is Type.MXFP4 and "exps" not in theirs) else kind
            data, values = encoded(part, of_part, index)
            stored = theirs.replace("attn_kv_b", f"attn_{last}_b") if last else theirs
            writer.add_tensor(stored, data, raw_dtype=None if of_part in (Type.F32, Type.F16) else of_part)
            written[f"{name}|{last}"] = values
    finish(writer)
    twin = path.with_suffix("")
    twin.mkdir()
    exact = {name: tensor.contiguous() for name, tensor in _restored(written, config).items()}
    save_file(exact, twin / "model.safetensors", metadata={"format": "pt"})
    (twin / "config.json").write_text(json.dumps(config | {"dtype": "float32"}))
    return twin


def _latent_parts(name: str, tensor: torch.Tensor, config: Mapping[str, Any]) -> list[tuple[str, torch.Tensor]]:
    if not name.endswith("kv_b_proj.weight"):
        return [("", tensor)]
    by_head = tensor.unflatten(0, (config["num_attention_heads"], -1))
    keys, values = by_head.split([config["qk_nope_head_dim"], config["v_head_dim"]], dim=1)
    return [("k", keys.transpose(1, 2).contiguous()), ("v", values.contiguous())]


def _converted(tensors: Tensors, config: Mapping[str, Any]) -> Tensors:
    """Experts stacked, gate and up apart, queries and keys in pairs."""
    found: Tensors = {}
    stacks: dict[str, list[tuple[int, torch.Tensor]]] = {}
    for name, tensor in tensors.items():
        if expert := _EXPERT.fullmatch(name):
            stacks.setdefault(f"{expert[1]}.{expert[3]}.weight", []).append((int(expert[2]), tensor))
        elif name.endswith("block_sparse_moe.input_linear.weight"):
            for part, half in zip(("gate", "up"), tensor.chunk(2, dim=1), strict=True):
                found[name.replace("block_sparse_moe.input_linear", f"mlp.experts.{part}_proj")] = half
        elif name.endswith("shared_mlp.input_linear.weight"):
            for part, half in zip(("gate", "up"), tensor.chunk(2), strict=True):
                found[name.replace("shared_mlp.input_linear", f"mlp.shared_experts.{part}_proj")] = half
        elif name.endswith("shared_mlp.output_linear.weight"):
            found[name.replace("shared_mlp.output_linear", "mlp.shared_experts.down_proj")] = tensor
        elif "experts.gate_up_proj" in name:
            for part, half in zip(("gate", "up"), (tensor[..., ::2], tensor[..., 1::2]), strict=True):
                found[_of_gpt_oss(name, part)] = half if name.endswith("bias") else half.transpose(1, 2)
        elif "gpt_oss" in config["model_type"] and "experts.down_proj" in name:
            found[_of_gpt_oss(name, "down")] = tensor if name.endswith("bias") else tensor.transpose(1, 2)
        elif name.endswith("block_sparse_moe.output_linear.weight"):
            found[name.replace("block_sparse_moe.output_linear", "mlp.experts.down_proj")] = tensor
        elif name.endswith("shared_expert_gate.weight"):
            found[name] = tensor[0]
        else:
            found[name] = _permuted(name, tensor, config, lambda t, heads: t.unflatten(0, (heads, 2, -1)))
    return found | {
        name: torch.stack([part for _, part in sorted(stack, key=lambda item: item[0])])
        for name, stack in stacks.items()
    }


def _of_gpt_oss(name: str, part: str) -> str:
    path = name.rpartition(".")[0]
    return f"{path}.{part}_proj.{'bias' if name.endswith('bias') else 'weight'}"


def _permuted(
    name: str, tensor: torch.Tensor, config: Mapping[str, Any], cut: Callable[[torch.Tensor, int], torch.Tensor]
) -> torch.Tensor:
    if config["model_type"] not in _PERMUTED or not any(part in name for part in ("q_proj", "k_proj")):
        return tensor
    heads = config["num_attention_heads"] if "q_proj" in name else config["num_key_value_heads"]
    return cut(tensor, heads).transpose(1, 2).flatten(0, 2)


def _restored(written: Tensors, config: Mapping[str, Any]) -> Tensors:
    """The inverse of all of this, under the names of the checkpoint."""
    found: Tensors = {}
    for key, values in written.items():
        name, _, last = key.partition("|")
        path, _, end = name.rpartition(".")
        if last == "k":
            by_head = torch.cat((values.transpose(1, 2), written[f"{name}|v"]), dim=1)
            found[name] = by_head.flatten(0, 1)
        elif last == "v":
            continue
        elif ".experts." in name and config["model_type"].startswith("granitemoe"):
            up = written.get(f"{path.replace('gate_proj', 'up_proj')}.{end}|")
            stored = name.replace("mlp.experts.gate_proj", "block_sparse_moe.input_linear")
            if "gate_proj" in name and up is not None:
                found[stored] = torch.cat((values, up), dim=1)
            elif "down_proj" in name:
                found[name.replace("mlp.experts.down_proj", "block_sparse_moe.output_linear")] = values
        elif ".experts." in name and config["model_type"] == "gpt_oss":
            found |= _gpt_oss_experts(name, values, written)
        elif ".experts." in name:
            owner, _, part = path.rpartition(".")
            found |= {f"{owner}.{index}.{part}.weight": each for index, each in enumerate(values)}
        elif "shared_experts.gate_proj" in name and "granite" in config["model_type"]:
            both = (values, written[f"{path.replace('gate_proj', 'up_proj')}.{end}|"])
            found[name.replace("mlp.shared_experts.gate_proj", "shared_mlp.input_linear")] = torch.cat(both)
        elif "shared_experts.down_proj" in name and "granite" in config["model_type"]:
            found[name.replace("mlp.shared_experts.down_proj", "shared_mlp.output_linear")] = values
        elif "shared_experts.up_proj" in name and "granite" in config["model_type"]:
            continue
        elif name.endswith("shared_expert_gate.weight"):
            found[name] = values[None]
        else:
            found[name] = _permuted(name, values, config, lambda t, heads: t.unflatten(0, (heads, -1, 2)))
    return found


def _gpt_oss_experts(name: str, values: torch.Tensor, written: Tensors) -> Tensors:
    path, _, end = name.rpartition(".")
    owner, suffix = path.rpartition(".")[0], "_bias" if end == "bias" else ""
    if "up_proj" in name:
        return {}
    both = [values]
    if "gate_proj" in name:
        both.append(written[f"{path.replace('gate_proj', 'up_proj')}.{end}|"])
    if end == "weight":
        both = [part.transpose(1, 2) for part in both]
    part = "gate_up_proj" if "gate_proj" in name else "down_proj"
    return {f"{owner}.{part}{suffix}": torch.stack(both, dim=-1).flatten(-2)}


def _describe(writer: gguf.GGUFWriter, config: dict[str, Any], split_latent: bool) -> None:
    """The keys that the converter writes for these families, beside those of all models."""
    kind = config["model_type"]
    add_metadata(writer, config | ({"head_dim": _head_of(config, split_latent)} if "deepseek" in kind else {}))
    counts = [config[key] for key in ("num_local_experts", "num_experts", "n_routed_experts") if config.get(key)]
    if counts:
        writer.add_expert_count(counts[0])
        writer.add_expert_used_count(config["num_experts_per_tok"])
    if kind in ("qwen2_moe", "qwen3_moe"):
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    if kind == "qwen2_moe":
        writer.add_expert_shared_feed_forward_length(config["shared_expert_intermediate_size"])
    if kind == "gpt_oss":
        writer.add_expert_feed_forward_length(config["intermediate_size"])
        writer.add_sliding_window(config["sliding_window"])
    if kind == "granitemoeshared":
        writer.add_expert_shared_feed_forward_length(config["shared_intermediate_size"])
    if kind.startswith("granite"):
        writer.add_embedding_scale(config["embedding_multiplier"])
        writer.add_residual_scale(config["residual_multiplier"])
        writer.add_attention_scale(config["attention_multiplier"])
        writer.add_logit_scale(config["logits_scaling"])
    if "deepseek" in kind:
        _describe_deepseek(writer, config, split_latent)


def _head_of(config: Mapping[str, Any], split_latent: bool) -> int:
    rotated = config["qk_rope_head_dim"]
    return rotated + (config["kv_lora_rank"] if split_latent else config["qk_nope_head_dim"])


def _describe_deepseek(writer: gguf.GGUFWriter, config: Mapping[str, Any], split_latent: bool) -> None:
    rotated, is_v3 = config["qk_rope_head_dim"], config["model_type"] == "deepseek_v3"
    arch = writer.arch
    sizes = (config["qk_nope_head_dim"] + rotated, config["v_head_dim"])
    values = {
        f"{arch}.attention.key_length_mla": sizes[0],
        f"{arch}.attention.value_length_mla": sizes[1],
    }
    kv = writer.kv_data[0]
    for key in ("attention.value_length", "rope.dimension_count"):
        kv.pop(f"{arch}.{key}", None)
    writer.add_value_length(config["kv_lora_rank"] if split_latent else config["v_head_dim"])
    writer.add_rope_dimension_count(rotated)
    if split_latent:
        kv.pop(f"{arch}.attention.head_count_kv")
        writer.add_head_count_kv(1)
        for key, value in values.items():
            writer.add_uint32(key, value)
    writer.add_leading_dense_block_count(config["first_k_dense_replace"])
    if config.get("q_lora_rank"):
        writer.add_q_lora_rank(config["q_lora_rank"])
    writer.add_kv_lora_rank(config["kv_lora_rank"])
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_expert_shared_count(config["n_shared_experts"])
    writer.add_expert_weights_scale(config["routed_scaling_factor"])
    if is_v3:
        writer.add_expert_weights_norm(config["norm_topk_prob"])
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    writer.add_uint32(f"{arch}.expert_group_count", config["n_group"])
    writer.add_uint32(f"{arch}.expert_group_used_count", config["topk_group"])
    rope = config.get("rope_parameters") or {}
    if rope.get("rope_type") == "yarn":
        writer.add_rope_scaling_yarn_log_mul(0.1 * rope["mscale_all_dim"])
