"""Writes GGUF files with the `gguf` package, the way llama.cpp's converter lays out a Hugging Face checkpoint.

What a file holds is returned as a Hugging Face checkpoint too: the values that `gguf.dequantize` gives.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Type
from safetensors.torch import load_file, save_file

ARCHITECTURES = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
    "gemma": gguf.MODEL_ARCH.GEMMA,
    "gemma2": gguf.MODEL_ARCH.GEMMA2,
    "gemma3_text": gguf.MODEL_ARCH.GEMMA3,
    "phi": gguf.MODEL_ARCH.PHI2,
    "phi3": gguf.MODEL_ARCH.PHI3,
    "olmo2": gguf.MODEL_ARCH.OLMO2,
    "olmo3": gguf.MODEL_ARCH.OLMO2,
    "smollm3": gguf.MODEL_ARCH.SMOLLM3,
    "starcoder2": gguf.MODEL_ARCH.STARCODER2,
    "glm4": gguf.MODEL_ARCH.GLM4,
    "lfm2": gguf.MODEL_ARCH.LFM2,
    "cohere": gguf.MODEL_ARCH.COMMAND_R,
    "cohere2": gguf.MODEL_ARCH.COHERE2,
    "stablelm": gguf.MODEL_ARCH.STABLELM,
    "seed_oss": gguf.MODEL_ARCH.SEED_OSS,
    "ernie4_5": gguf.MODEL_ARCH.ERNIE4_5,
    "arcee": gguf.MODEL_ARCH.ARCEE,
}
# Of architectures that llama.cpp rotates in pairs of neighbours, and whose converter permutes rows for that.
_PERMUTED = ("llama", "smollm3", "arcee")
FLOATS = {Type.F32: torch.float32, Type.F16: torch.float16, Type.BF16: torch.bfloat16}
# Where the float16 scale and minimum of a block are, of types that the package only reads.
_HALVES = {
    Type.Q2_K: (80, 82),
    Type.Q3_K: (108, None),
    Type.Q4_K: (0, 2),
    Type.Q5_K: (0, 2),
    Type.Q6_K: (208, None),
    Type.IQ4_NL: (0, None),
    Type.IQ4_XS: (0, None),
}
TypeOf = Callable[[str], Type]


def random_blocks(kind: Type, rows: int, columns: int, std: float, seed: int = 0) -> np.ndarray:
    """Raw rows, uint8 [rows, bytes], of random bits with scales that give weights of mean 0 and deviation `std`."""
    values, size = gguf.GGML_QUANT_SIZES[kind]
    rng = np.random.default_rng(seed)
    raw = rng.integers(0, 256, (rows * columns // values, size), dtype=np.uint8)
    at_scale, at_minimum = _HALVES[kind]

    def put(place: int, value: np.ndarray | float) -> None:
        halves = np.broadcast_to(np.asarray(value, np.float16), (len(raw),)).copy()
        raw[:, place : place + 2] = halves.view(np.uint8).reshape(-1, 2)

    put(at_scale, 1.0)
    lowered = 0.0
    if at_minimum is not None:
        put(at_minimum, 0.0)
        mean = gguf.dequantize(raw, kind).mean()
        put(at_scale, 0.0)
        put(at_minimum, 1.0)
        lowered = -mean / gguf.dequantize(raw, kind).mean()
        put(at_scale, 1.0)
        put(at_minimum, lowered)
    scale = std / gguf.dequantize(raw, kind).std() * rng.uniform(0.5, 1.5, len(raw))
    put(at_scale, scale)
    if at_minimum is not None:
        put(at_minimum, lowered * scale)
    return raw.reshape(rows, -1)


def encoded(values: torch.Tensor, kind: Type, seed: int) -> tuple[np.ndarray, torch.Tensor]:
    """(what the file holds, the values it stands for); a type that the package cannot write gets random ones."""
    array = values.float().numpy()
    if kind in _HALVES:
        data = random_blocks(kind, math.prod(array.shape[:-1]), array.shape[-1], float(array.std()), seed)
        data = data.reshape(*array.shape[:-1], -1)
    else:
        data = gguf.quantize(array, kind)
    return data, torch.from_numpy(gguf.dequantize(data, kind).astype(np.float32)).view(values.shape)


def write_gguf(
    folder: Path,
    path: Path,
    type_of: TypeOf,
    *,
    tokenizer: bool = False,
    extra: Mapping[str, Any] | None = None,
    split: int = 0,
) -> Path:
    """`folder`'s model as a GGUF file, and beside it, in `path` without suffix, the checkpoint of its exact values.

    Args:
        type_of: Hugging Face's name of a matrix -> its type; vectors are F32.
        extra: further metadata, by key.
        split: most tensors of a part; 0: one file.

    Returns: the folder of that checkpoint.
    """
    config = json.loads((folder / "config.json").read_text())
    arch = ARCHITECTURES[config["model_type"]]
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[arch], split_max_tensors=split)
    add_metadata(writer, config)
    if tokenizer:
        add_byte_level_tokenizer(writer, folder)
    for key, value in (extra or {}).items():
        add_value(writer, key, value)
    names = gguf.get_tensor_name_map(arch, config["num_hidden_layers"])
    exact: dict[str, torch.Tensor] = {}
    for index, (name, tensor) in enumerate(load_file(folder / "model.safetensors").items()):
        converted = convert(name, tensor, config)
        kind = type_of(name) if tensor.dim() == 2 else Type.F32
        data, values = encoded(converted, kind, index)
        raw_dtype = None if kind in (Type.F32, Type.F16) else kind
        writer.add_tensor(names.get_name(name, (".weight", ".bias")), data, raw_dtype=raw_dtype)
        exact[name] = convert_back(name, values, config).contiguous()
    for name, factors in rope_tensors(config).items():
        writer.add_tensor(name, np.asarray(factors, np.float32))
    finish(writer)
    twin = path.with_suffix("")
    twin.mkdir()
    save_file(exact, twin / "model.safetensors", metadata={"format": "pt"})
    (twin / "config.json").write_text(json.dumps(config | {"dtype": "float32"}))
    return twin


def finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_value(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    (writer.add_array if isinstance(value, list) else add[type(value)])(key, value)


def convert(name: str, tensor: torch.Tensor, config: dict[str, Any]) -> torch.Tensor:
    """What the converter does to a tensor: rows of queries and keys in pairs, norms of Gemma plus one."""
    heads = heads_of(name, config)
    if heads:
        return tensor.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)
    if tensor.dim() == 3:  # the channels' own filters
        return tensor.squeeze(1)
    return tensor.float() + 1 if is_gemma_norm(name, config) else tensor


def convert_back(name: str, tensor: torch.Tensor, config: dict[str, Any]) -> torch.Tensor:
    heads = heads_of(name, config)
    if heads:
        return tensor.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)
    if name.endswith("conv.conv.weight"):
        return tensor.unsqueeze(1)
    return tensor - 1 if is_gemma_norm(name, config) else tensor


def heads_of(name: str, config: dict[str, Any]) -> int:
    if config["model_type"] not in _PERMUTED or not any(part in name for part in ("q_proj", "k_proj")):
        return 0
    return config["num_attention_heads"] if "q_proj" in name else config["num_key_value_heads"]


def is_gemma_norm(name: str, config: dict[str, Any]) -> bool:
    return config["model_type"].startswith("gemma") and name.endswith("norm.weight")


def add_metadata(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    """The keys that the converter writes for these families."""
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(feed_forward_of(config))
    writer.add_head_count(config["num_attention_heads"])
    if config["model_type"] == "lfm2":
        heads = config["num_key_value_heads"]
        writer.add_head_count_kv([heads if kind == "full_attention" else 0 for kind in config["layer_types"]])
        writer.add_shortconv_l_cache(config["conv_L_cache"])
    else:
        writer.add_head_count_kv(config["num_key_value_heads"])
    if config.get("head_dim"):
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    if "rms_norm_eps" in config or "norm_eps" in config:
        writer.add_layer_norm_rms_eps(config.get("rms_norm_eps", config.get("norm_eps")))
    else:
        writer.add_layer_norm_eps(config.get("norm_epsilon", config.get("layer_norm_eps")))
    writer.add_vocab_size(config["vocab_size"])
    rope = config.get("rope_parameters") or {"rope_theta": config.get("rope_theta", 10000.0)}
    rope = rope.get("full_attention", rope)
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_rope_dimension_count(int(head_dim * rope.get("partial_rotary_factor", 1.0)))
    kind = rope.get("rope_type", "default")
    if kind in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(kind))
        writer.add_rope_scaling_factor(rope["factor"])
    if kind in ("yarn", "longrope"):
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if kind == "longrope":
        stretch = config["max_position_embeddings"] / rope["original_max_position_embeddings"]
        attention = (1 + np.log(stretch) / np.log(rope["original_max_position_embeddings"])) ** 0.5
        writer.add_rope_scaling_attn_factors(float(attention))
    if config.get("sliding_window") and config["model_type"] in ("gemma2", "gemma3_text", "phi3", "cohere2", "olmo3"):
        writer.add_sliding_window(config["sliding_window"])
    if config["model_type"] == "olmo3":
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config["layer_types"]])
    if "logit_scale" in config:
        writer.add_logit_scale(config["logit_scale"])
    if "use_parallel_residual" in config:
        writer.add_parallel_residual(config["use_parallel_residual"])
    if config["model_type"] == "gemma2":
        writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    for key in ("bos", "eos"):
        if config.get(f"{key}_token_id") is not None:
            add_value(writer, f"tokenizer.ggml.{key}_token_id", config[f"{key}_token_id"])


def feed_forward_of(config: dict[str, Any]) -> int:
    if not config.get("block_auto_adjust_ff_dim"):
        return config["intermediate_size"]
    size, multiple = int(2 * config["intermediate_size"] / 3), config["block_multiple_of"]
    return multiple * -(-size // multiple)


def rope_tensors(config: dict[str, Any]) -> dict[str, list[float]]:
    """Divisors of the frequencies: LongRoPE's, and those of Llama 3.1's scaling by the converter's formula."""
    rope = config.get("rope_parameters") or {}
    if rope.get("rope_type") == "longrope":
        return {f"rope_factors_{name}.weight": rope[f"{name}_factor"] for name in ("long", "short")}
    if rope.get("rope_type") != "llama3":
        return {}
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    original, low, high = (
        rope[key] for key in ("original_max_position_embeddings", "low_freq_factor", "high_freq_factor")
    )
    factors = []
    for pair in range(head_dim // 2):
        length = 2 * np.pi * rope["rope_theta"] ** (2 * pair / head_dim)
        smooth = (original / length - low) / (high - low)
        between = 1 / ((1 - smooth) / rope["factor"] + smooth)
        factors.append(1.0 if length < original / high else rope["factor"] if length > original / low else between)
    return {"rope_freqs.weight": factors}


def add_byte_level_tokenizer(writer: gguf.GGUFWriter, folder: Path, pre: str = "gpt-2") -> None:
    """The tokenizer.json of a byte-level BPE, with its chat template."""
    saved = json.loads((folder / "tokenizer.json").read_text())
    config = json.loads((folder / "tokenizer_config.json").read_text())
    ids = saved["model"]["vocab"] | {token["content"]: token["id"] for token in saved["added_tokens"]}
    special = {token["content"] for token in saved["added_tokens"]}
    tokens = sorted(ids, key=ids.__getitem__)
    kinds = [gguf.TokenType.CONTROL if token in special else gguf.TokenType.NORMAL for token in tokens]
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in saved["model"]["merges"]]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges(merges)
    writer.add_add_bos_token(saved.get("post_processor") is not None)
    if config.get("chat_template"):
        writer.add_chat_template(config["chat_template"])
