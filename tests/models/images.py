"""Tries every family that reads images of the installed transformers, on a tiny random checkpoint each.

    python tests/models/images.py [MODEL_TYPE ...] [--write] [--videos]

Prompts with no, one and two pictures of odd sizes: token ids and pixels must be those of transformers' processor, and
the logprobs of whole prompts and of greedy answers within 1e-4 of transformers' float32. One request is asked again
alone, in chunks. `--float64` compares with transformers in float64, which tells whose rounding a difference is, and
prints transformers' own difference between both; `--seed 4` draws other weights. `--videos` does the same with videos,
of the pixels that are made here (tests/models/test_videos.py compares these). `--write` writes the table IMAGES.md
beside this file. All take some minutes, so this is not part of the test suite.
"""

from __future__ import annotations

import argparse
import copy
import inspect
import json
import logging
import sys
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

sys.path.insert(0, str(Path(__file__).parents[1]))
from kernel_sets import has_kernels
from same_answers import Answer, same
from tiny_models import BASE, TINY_MODELS, randomise

from llm import LLM, SamplingParams
from llm.errors import LLMError
from llm.text.videos import timing_of

TOLERANCE = 1e-4
TABLE = Path(__file__).parent / "IMAGES.md"
# Answers are of letters: a token that stands for a picture would be one more for transformers.
_LETTERS = list(range(3, 259))
GREEDY = SamplingParams(
    temperature=0, max_tokens=6, logprobs=3, prompt_logprobs=2, ignore_eos=True, allowed_token_ids=_LETTERS
)
VOCAB = 384
_TOKENS = (
    "<image>", "<video>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>", "<|image_pad|>",
    "<|video_pad|>", "<|vision_start|>", "<|vision_end|>", "[IMG]", "[IMG_BREAK]", "[IMG_END]", "<image_soft_token>",
    "<start_of_image>", "<end_of_image>", "<img>", "</img>", "<IMG_CONTEXT>", "<|image|>", "<|video|>",
    "<|begin_of_image|>", "<|end_of_image|>", "<imgpad>", "<|image_start|>", "<|image_end|>", "<|patch|>",
    "<|tile_x_separator|>", "<|tile_y_separator|>", "<|START_OF_IMG|>", "<|END_OF_IMG|>", "<|IMG_PATCH|>",
    "<|IMG_LINE_BREAK|>", "TILE", "TILE_GLOBAL", "<|IMAGE_START|>", "<|IMAGE_END|>", "<|IMAGE_PLACEHOLDER|>",
    "<image_id>", "</image_id>", "<slice>", "</slice>", "<|image_unpad|>", "<|listen|>", "</image>",
    "<|img_row_1_col_1|>",
    "<|img_thumbnail|>", "<|begin_of_video|>", "<|end_of_video|>", "<IMG_START>", "<IMG_END>", "<IMG_ATOM>",
    "<IMG_GRID>", "<IMG_COL>", "<IMG_ROW>",
)  # fmt: skip
CLIP = {
    "model_type": "clip_vision_model", "hidden_size": 16, "intermediate_size": 20, "num_hidden_layers": 3,
    "num_attention_heads": 2, "image_size": 32, "patch_size": 8,
}  # fmt: skip
SIGLIP = {**CLIP, "model_type": "siglip_vision_model", "num_hidden_layers": 2, "vision_use_head": False}
PIXTRAL = {**CLIP, "model_type": "pixtral", "num_hidden_layers": 2, "head_dim": 8}
QWEN_VISION = {
    "depth": 2, "hidden_size": 16, "intermediate_size": 20, "num_heads": 2, "out_hidden_size": 48, "patch_size": 4,
    "window_size": 16, "fullatt_block_indexes": [1], "num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1],
}  # fmt: skip
INTERNVL = {
    "hidden_size": 16, "intermediate_size": 20, "num_hidden_layers": 2, "num_attention_heads": 2,
    "image_size": [32, 32],
    "patch_size": [8, 8],
}  # fmt: skip
_QWEN = {key: value for key, value in BASE.items() if key != "head_dim"}
_MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
_CROP = {"size": {"shortest_edge": 32}, "crop_size": {"height": 32, "width": 32}}
_TILES = {"size": {"height": 32, "width": 32}, "crop_to_patches": True, "min_patches": 1, "max_patches": 4}
_QWEN_PIXELS = {"patch_size": 4, "size": {"shortest_edge": 64, "longest_edge": 4096}}
_GRIDS = [[32, 64], [64, 32], [64, 64]]


@dataclass(frozen=True)
class Family:
    """A tiny checkpoint.

    Attributes:
        text, vision: the keys of the nested configs; more: those beside them. A token's text stands for its id.
        processor, pixels: the keys of processor_config.json and preprocessor_config.json.
        tokens: what the tokenizer has as attributes, such as `image_token`.
        logits: a factor that the language model's own class of transformers has, and this family's leaves out.
        positions: how long a prompt may be.
    """

    text: Mapping[str, Any]
    vision: Mapping[str, Any]
    more: Mapping[str, Any] = field(default_factory=dict)
    processor: Mapping[str, Any] = field(default_factory=dict)
    pixels: Mapping[str, Any] = field(default_factory=dict)
    tokens: Mapping[str, str] = field(default_factory=dict)
    logits: float = 1.0
    positions: int = 1024


def _text(kind: str, **more: Any) -> dict[str, Any]:
    return {**BASE, "model_type": kind, "vocab_size": VOCAB, **more}


_GRANITE = {
    "embedding_multiplier": 3.0, "logits_scaling": 2.0, "residual_multiplier": 0.5, "attention_multiplier": 0.2,
}  # fmt: skip
_LLAVA = {"patch_size": 8, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
_QWEN2 = {**_QWEN, "vocab_size": VOCAB, "rope_parameters": _MROPE}
_QWEN3_MROPE = {**_MROPE, "mrope_section": [3, 1, 1], "mrope_interleaved": True}
_QWEN3_5 = {
    **TINY_MODELS["qwen3-5"].config,
    "head_dim": 16,
    "rope_parameters": {
        **{"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
        **{"mrope_section": [2, 1, 1], "mrope_interleaved": True},
    },
}
_COHERE = {
    key: value for key, value in _text("cohere2", sliding_window=64, logit_scale=0.5).items() if key != "rms_norm_eps"
}
_QWEN_IDS = {
    "image_token_id": "<|image_pad|>", "video_token_id": "<|video_pad|>", "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
}  # fmt: skip
FAMILIES: dict[str, Family] = {
    "llava": Family(_text("llama"), CLIP, {"image_token_id": "<image>"}, _LLAVA, _CROP),
    "vipllava": Family(
        _text("llama"),
        {**CLIP, "num_hidden_layers": 3},
        {"image_token_id": "<image>", "vision_feature_layers": [-1, -2]},
        _LLAVA,
        _CROP,
    ),
    "llava_next": Family(
        _text("mistral"),
        CLIP,
        {"image_token_id": "<image>", "image_grid_pinpoints": _GRIDS},
        _LLAVA,
        {**_CROP, "image_grid_pinpoints": _GRIDS},
    ),
    "llava_next-granite": Family(
        _text("granite", **_GRANITE),
        CLIP,
        {"image_token_id": "<image>", "image_grid_pinpoints": _GRIDS, "vision_feature_layer": [-2, -1]},
        _LLAVA,
        {**_CROP, "image_grid_pinpoints": _GRIDS},
        logits=0.5,
    ),
    "llava_onevision": Family(
        {**_QWEN, "model_type": "qwen2", "vocab_size": VOCAB},
        SIGLIP,
        {
            "image_token_id": "<image>",
            "video_token_id": "<video>",
            "image_grid_pinpoints": _GRIDS,
            "vision_feature_select_strategy": "full",
            "vision_aspect_ratio": "anyres_max_9",
        },
        {"num_image_tokens": 16, "vision_feature_select_strategy": "full"},
        {"size": {"height": 32, "width": 32}, "image_grid_pinpoints": _GRIDS},
    ),
    "idefics3": Family(
        _text("llama"),
        {**SIGLIP, "model_type": "idefics3_vision"},
        {"image_token_id": "<image>", "scale_factor": 2},
        {"image_seq_len": 4},
        {"size": {"longest_edge": 64}, "max_image_size": {"longest_edge": 32}},
    ),
    "smolvlm": Family(
        _text("llama"),
        {**SIGLIP, "model_type": "smolvlm_vision"},
        {"image_token_id": "<image>", "scale_factor": 2},
        {"image_seq_len": 4},
        {"size": {"longest_edge": 64}, "max_image_size": {"longest_edge": 32}},
    ),
    "internvl": Family(
        {**_QWEN, "model_type": "qwen2", "vocab_size": VOCAB},
        INTERNVL,
        {"image_token_id": "<IMG_CONTEXT>"},
        {"image_seq_length": 4},
        _TILES,
        {
            "start_image_token": "<img>",
            "end_image_token": "</img>",
            "context_image_token": "<IMG_CONTEXT>",
            "video_token": "<video>",
        },
    ),
    "got_ocr2": Family(
        {
            **_QWEN,
            "model_type": "qwen2",
            "vocab_size": VOCAB,
            "max_position_embeddings": 1024,
        },
        {
            "hidden_size": 16,
            "output_channels": 8,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": 128,
            "patch_size": 2,
            "mlp_dim": 20,
            "window_size": 2,
            "global_attn_indexes": [1],
        },
        {"image_token_id": "<imgpad>"},
        {},
        {"size": {"height": 128, "width": 128}},
    ),
    "aya_vision": Family(
        _COHERE,
        SIGLIP,
        {"image_token_id": "<|IMG_PATCH|>", "downsample_factor": 2, "alignment_intermediate_size": 32},
        {"patch_size": 8, "img_size": 32, "downsample_factor": 2},
        _TILES,
        logits=0.5,
    ),
    "qwen2_vl": Family(
        _QWEN2,
        {"depth": 2, "embed_dim": 16, "num_heads": 2, "hidden_size": 48, "patch_size": 4},
        _QWEN_IDS,
        {},
        _QWEN_PIXELS,
    ),
    "qwen2_5_vl": Family(_QWEN2, QWEN_VISION, _QWEN_IDS, {}, _QWEN_PIXELS),
    "qwen3_vl": Family(
        {**BASE, "vocab_size": VOCAB, "rope_parameters": _QWEN3_MROPE}, QWEN_VISION, _QWEN_IDS, {}, _QWEN_PIXELS
    ),
    "qwen3_vl_moe": Family(
        {
            **BASE,
            "vocab_size": VOCAB,
            "rope_parameters": _QWEN3_MROPE,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "decoder_sparse_step": 1,
        },
        QWEN_VISION,
        _QWEN_IDS,
        {},
        {**_QWEN_PIXELS, "image_processor_type": "Qwen2VLImageProcessorPil"},
    ),
    "qwen3_5": Family({**BASE, **_QWEN3_5, "vocab_size": VOCAB}, QWEN_VISION, _QWEN_IDS, {}, _QWEN_PIXELS),
    "qwen3_5_moe": Family(
        {
            **{key: value for key, value in BASE.items() if key != "intermediate_size"},
            **_QWEN3_5,
            "vocab_size": VOCAB,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 16,
        },
        QWEN_VISION,
        _QWEN_IDS,
        {},
        _QWEN_PIXELS,
    ),
    "gemma3": Family(
        _text("gemma3_text", sliding_window=40, num_hidden_layers=3),
        SIGLIP,
        {
            "image_token_id": "<image_soft_token>",
            "boi_token_index": "<start_of_image>",
            "mm_tokens_per_image": 16,
            "eoi_token_index": "<end_of_image>",
        },
        {"image_seq_length": 16},
        {"size": {"height": 32, "width": 32}},
        {"image_token": "<image_soft_token>", "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"},
    ),
    "paligemma": Family(
        _text("gemma"),
        {**SIGLIP, "projection_dim": 48},
        {"image_token_id": "<image>", "projection_dim": 48},
        {},
        {"size": {"height": 32, "width": 32}, "image_seq_length": 16},
        {"image_token": "<image>"},
    ),
    "mistral3": Family(
        _text("mistral"),
        PIXTRAL,
        {"image_token_id": "[IMG]", "spatial_merge_size": 2, "vision_feature_layer": -1},
        {"patch_size": 8, "spatial_merge_size": 2},
        {"size": {"longest_edge": 64}, "patch_size": 8},
    ),
    "llava-pixtral": Family(
        _text("mistral"),
        PIXTRAL,
        {"image_token_id": "[IMG]", "vision_feature_layer": -1, "vision_feature_select_strategy": "full"},
        {"patch_size": 8, "processor_class": "PixtralProcessor"},
        {"size": {"longest_edge": 64}, "patch_size": 8, "image_processor_type": "PixtralImageProcessor"},
    ),
    "llama4": Family(
        {**BASE, **TINY_MODELS["llama4"].config, "vocab_size": VOCAB},
        {
            "hidden_size": 16,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": 32,
            "patch_size": 8,
            "vision_output_dim": 16,
            "projector_input_dim": 16,
            "projector_output_dim": 16,
        },
        {"image_token_index": "<|patch|>"},
        {"patch_size": 8},
        {"size": {"height": 32, "width": 32}, "max_patches": 4},
    ),
    "glm4v": Family(
        _text(
            "glm4v_text",
            head_dim=8,
            rope_parameters={**_MROPE, "mrope_section": [1, 1, 0], "partial_rotary_factor": 0.5},
        ),
        {**QWEN_VISION, "image_size": 32, "spatial_merge_size": 2},
        {
            "image_token_id": "<|image|>",
            "video_token_id": "<|video|>",
            "image_start_token_id": "<|begin_of_image|>",
            "image_end_token_id": "<|end_of_image|>",
        },
        {},
        _QWEN_PIXELS,
    ),
    "gemma4": Family(
        {
            **BASE,
            **TINY_MODELS["gemma4"].config,
            "vocab_size": VOCAB,
            "vocab_size_per_layer_input": VOCAB,
            "tie_word_embeddings": False,
        },
        {
            "hidden_size": 16,
            "intermediate_size": 20,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "patch_size": 4,
            "position_embedding_size": 64,
        },
        {"image_token_id": "<image_soft_token>", "video_token_id": "<|video|>"},
        {"image_seq_length": 70},
        {"patch_size": 4, "max_soft_tokens": 70},
        {
            "image_token": "<image_soft_token>",
            "boi_token": "<start_of_image>",
            "audio_token": "<|listen|>",
            "boa_token": "<slice>",
            "eoa_token": "</slice>",
            "eoi_token": "<end_of_image>",
        },
    ),
    "lighton_ocr": Family(
        _text("qwen3"),
        PIXTRAL,
        {"image_token_id": "<|image_pad|>", "spatial_merge_size": 2},
        {"patch_size": 8, "spatial_merge_size": 2},
        {"size": {"longest_edge": 64}, "patch_size": 8},
        {"image_token": "<|image_pad|>", "image_break_token": "<|vision_start|>", "image_end_token": "<|vision_end|>"},
    ),
    "llava_next_video": Family(
        _text("llama"),
        CLIP,
        {"image_token_index": "<image>", "video_token_index": "<video>", "image_grid_pinpoints": _GRIDS},
        _LLAVA,
        {**_CROP, "image_grid_pinpoints": _GRIDS},
    ),
    "idefics2": Family(
        _text("mistral"),
        {**SIGLIP, "model_type": "idefics2_vision"},
        {
            "image_token_id": "<image>",
            "perceiver_config": {
                "hidden_size": 48,
                "resampler_n_latents": 4,
                "resampler_depth": 1,
                "resampler_n_heads": 2,
                "resampler_head_dim": 8,
                "num_key_value_heads": 1,
            },
        },
        {"image_seq_len": 4},
        {"size": {"shortest_edge": 24, "longest_edge": 64}, "do_image_splitting": False},
    ),
    "ovis2": Family(
        {**_QWEN, "model_type": "qwen2", "vocab_size": VOCAB},
        {**SIGLIP, "vocab_size": 32, "hidden_stride": 2, "num_visual_indicator_tokens": 5},
        {
            "image_token_id": "<IMG_ATOM>",
            "visual_indicator_token_ids": ["<IMG_START>", "<IMG_END>", "<IMG_GRID>", "<IMG_COL>", "<IMG_ROW>"],
            "hidden_size": 48,
            "vocab_size": VOCAB,
        },
        {"image_seq_length": 4},
        {"size": {"height": 32, "width": 32}, "crop_to_patches": True, "max_patches": 4},
    ),
    "qianfan_ocr": Family(
        _text("qwen3"),
        INTERNVL,
        {"image_token_id": "<IMG_CONTEXT>"},
        {"image_seq_length": 4},
        _TILES,
        {"start_image_token": "<img>", "end_image_token": "</img>", "context_image_token": "<IMG_CONTEXT>"},
    ),
    "video_llama_3": Family(
        {**_QWEN, "model_type": "qwen2", "vocab_size": VOCAB},
        {**SIGLIP, "model_type": "video_llama_3_vision", "patch_size": 4},
        {"image_token_id": "<|image_pad|>", "video_token_id": "<|video_pad|>"},
        {},
        {"patch_size": 4, "min_pixels": 64, "max_pixels": 4096},
    ),
    "deepseek_vl": Family(
        _text("llama"),
        SIGLIP,
        {"image_token_id": "<image>"},
        {"num_image_tokens": 16},
        {"size": {"height": 32, "width": 32}},
        {"image_token": "<image>"},
    ),
    "janus": Family(
        _text("llama"),
        {
            "hidden_size": 16,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": 192,
            "patch_size": 8,
            "projection_dim": 48,
            "depth": 2,
            "num_image_tokens": 576,
        },
        {
            "image_token_id": "<image>",
            "vq_config": {
                "embed_dim": 8,
                "num_embeddings": 32,
                "latent_channels": 32,
                "base_channels": 32,
                "channel_multiplier": [1, 1],
                "num_res_blocks": 1,
                "num_patches": 4,
                "projection_dim": 48,
                "image_token_embed_dim": 48,
            },
        },
        {"use_default_system_prompt": False},
        {"size": {"height": 192, "width": 192}, "min_size": 8},
        {"image_token": "<image>", "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"},
        positions=2048,
    ),
    "exaone4_5": Family(
        _text("exaone4", sliding_window=64),
        {**QWEN_VISION, "num_key_value_heads": 2},
        {"image_token_id": "<|image_pad|>", "video_token_id": "<|video_pad|>"},
        {},
        _QWEN_PIXELS,
    ),
    "hyperclovax_vision_v2": Family(
        _text("hyperclovax"),
        QWEN_VISION,
        {"image_token_id": "<|image_pad|>", "video_token_id": "<|video_pad|>"},
        {},
        _QWEN_PIXELS,
        {"image_token": "<|image_pad|>", "video_token": "<|video_pad|>"},
    ),
    "minicpmv4_6": Family(
        {**BASE, **_QWEN3_5, "model_type": "qwen3_5_text", "vocab_size": VOCAB},
        {**SIGLIP, "model_type": "minicpmv4_6_vision", "insert_layer_id": 0, "image_size": 64, "patch_size": 4},
        {
            "image_token_id": "<image>",
            "video_token_id": "<video>",
            "insert_layer_id": 0,
            "image_size": 64,
            "patch_size": 4,
        },
        {},
        {"scale_resolution": 32, "patch_size": 4, "max_slice_nums": 2},
        {
            "image_token": "<image>",
            "video_token": "<video>",
            "image_start_token": "<img>",
            "image_end_token": "</img>",
            "slice_start_token": "<slice>",
            "slice_end_token": "</slice>",
            "image_id_start_token": "<image_id>",
            "image_id_end_token": "</image_id>",
        },
    ),
    "glm46v": Family(
        _text(
            "glm4v_text",
            head_dim=8,
            rope_parameters={**_MROPE, "mrope_section": [1, 1, 0], "partial_rotary_factor": 0.5},
        ),
        {**QWEN_VISION, "image_size": 32, "spatial_merge_size": 2},
        {
            "image_token_id": "<|image|>",
            "video_token_id": "<|video|>",
            "image_start_token_id": "<|begin_of_image|>",
            "image_end_token_id": "<|end_of_image|>",
        },
        {},
        _QWEN_PIXELS,
    ),
    "glm_ocr": Family(
        _text("glm_ocr_text", head_dim=8, rope_parameters={**_MROPE, "partial_rotary_factor": 1.0}),
        {**QWEN_VISION, "image_size": 32, "spatial_merge_size": 2},
        {
            "image_token_id": "<|image|>",
            "video_token_id": "<|video|>",
            "image_start_token_id": "<|begin_of_image|>",
            "image_end_token_id": "<|end_of_image|>",
        },
        {"processor_class": "Glm46VProcessor"},
        {**_QWEN_PIXELS, "image_processor_type": "Glm46VImageProcessorPil"},
    ),
    "deepseek_ocr2": Family(
        {
            **_QWEN,
            "model_type": "deepseek_ocr2_text",
            "vocab_size": VOCAB,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_shared_experts": 1,
            "moe_intermediate_size": 16,
            "mlp_layer_types": ["dense", *["sparse"] * (BASE["num_hidden_layers"] - 1)],
        },
        {
            "sam_config": {
                "hidden_size": 16,
                "output_channels": 8,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "image_size": 256,
                "mlp_dim": 20,
                "window_size": 4,
                "global_attn_indexes": [1],
                "downsample_channels": [12, 16],
            },
            "encoder_config": {
                "hidden_size": 16,
                "intermediate_size": 20,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "num_key_value_heads": 1,
                "vocab_size": 8,
            },
        },
        {"image_token_id": "<image>"},
        {},
        {"size": {"height": 1024, "width": 1024}, "tile_size": 768},
        {"image_token": "<image>"},
    ),
    "paddleocr_vl": Family(
        _text("paddleocr_vl_text", head_dim=8, rope_parameters=_MROPE),
        {**SIGLIP, "model_type": "paddleocr_vl_vision", "patch_size": 4, "image_size": 32},
        {**_QWEN_IDS},
        {},
        {"patch_size": 4, "min_pixels": 64, "max_pixels": 4096},
        {"image_token": "<|image_pad|>"},
    ),
    "glm4v_moe": Family(
        {
            **BASE,
            **TINY_MODELS["glm4-moe"].config,
            "model_type": "glm4v_moe_text",
            "vocab_size": VOCAB,
            "head_dim": 8,
            "use_qk_norm": False,
            "moe_intermediate_size": 16,
            "rope_parameters": {**_MROPE, "mrope_section": [1, 1, 0], "partial_rotary_factor": 0.5},
        },
        {**QWEN_VISION, "image_size": 32, "spatial_merge_size": 2},
        {
            "image_token_id": "<|image|>",
            "video_token_id": "<|video|>",
            "image_start_token_id": "<|begin_of_image|>",
            "image_end_token_id": "<|end_of_image|>",
        },
        {"processor_class": "Glm4vProcessor"},
        {**_QWEN_PIXELS, "image_processor_type": "Glm4vImageProcessorPil"},
    ),
    "granite_docling": Family(
        {**BASE, "model_type": "granite_docling_text", "vocab_size": VOCAB, **_GRANITE},
        {
            **{key: value for key, value in SIGLIP.items() if key != "vision_use_head"},
            "model_type": "granite_docling_vision",
            "num_hidden_layers": 3,
            "out_hidden_size": 48,
            "scale_factor": 2,
            "deepstack_visual_indexes": [0, 1],
            "use_fine_route": False,
        },
        {"image_token_id": "<image>"},
        {"image_seq_len": 4},
        {"size": {"height": 32, "width": 32}, "max_patches": 4},
    ),
    "lfm2_vl": Family(
        {
            key: value
            for key, value in _text("lfm2", **TINY_MODELS["lfm2"].config).items()
            if value is not None and key != "rms_norm_eps"
        },
        {**SIGLIP, "model_type": "siglip2_vision_model", "num_patches": 64, "patch_size": 4},
        {"image_token_id": "<image>", "projector_hidden_size": 20},
        {},
        {
            "tile_size": 32,
            "encoder_patch_size": 4,
            "min_image_tokens": 4,
            "max_image_tokens": 16,
            "max_num_patches": 64,
            "max_tiles": 4,
            "min_tiles": 2,
        },
        {"image_token": "<image>"},
    ),
    "cohere2_vision": Family(
        {
            key: value
            for key, value in _text("cohere2", sliding_window=64, logit_scale=0.5).items()
            if key != "rms_norm_eps"
        },
        SIGLIP,
        {"image_token_id": "<|IMG_PATCH|>", "downsample_factor": 2, "alignment_intermediate_size": 32},
        {},
        {"size": {"height": 32, "width": 32}, "patch_size": 2, "max_patches": 4},
        {
            "image_token": "<|IMG_PATCH|>",
            "boi_token": "<|START_OF_IMG|>",
            "eoi_token": "<|END_OF_IMG|>",
            "img_line_break_token": "<|IMG_LINE_BREAK|>",
        },
        logits=0.5,
    ),
}


_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {% if message['content'] is string %}"
    "{{ message['content'] }}{% else %}{% for part in message['content'] %}{% if part['type'] == 'image' %}"
    "PLACEHOLDER{% elif part['type'] == 'video' %}MOVIE{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}"
    "\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


@cache
def _tokenizer(tokens: tuple[tuple[str, str], ...]) -> Any:
    from transformers import PreTrainedTokenizerFast

    letters = ["<pad>", "<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    own = Tokenizer(models.BPE({letter: index for index, letter in enumerate(letters)}, []))
    own.pre_tokenizer, own.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    theirs = PreTrainedTokenizerFast(
        tokenizer_object=own, bos_token="<s>", eos_token="</s>", pad_token="<pad>", extra_special_tokens=dict(tokens)
    )
    theirs.add_special_tokens({"additional_special_tokens": list(_TOKENS)})
    return theirs


def write(name: str, folder: Path, seed: int = 3) -> Any:
    """A tiny checkpoint in `folder`; returns transformers' model."""
    import transformers
    from transformers import AutoConfig, AutoModelForImageTextToText
    from transformers.models.auto.image_processing_auto import IMAGE_PROCESSOR_MAPPING_NAMES

    family, kind = FAMILIES[name], name.partition("-")[0]
    tokenizer = _tokenizer(tuple(sorted(family.tokens.items())))

    def with_ids(value: Any) -> Any:
        if isinstance(value, list):
            return [with_ids(item) for item in value]
        return tokenizer.convert_tokens_to_ids(value) if isinstance(value, str) and value in _TOKENS else value

    more = {key: with_ids(value) for key, value in family.more.items()}
    config = AutoConfig.for_model(
        kind,
        text_config={**family.text, "max_position_embeddings": family.positions},
        vision_config=dict(family.vision),
        **{"tie_word_embeddings": False, **more},
    )
    with torch.random.fork_rng(devices=()):  # some vectors keep what they start from
        torch.manual_seed(seed)
        model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32).eval()
    if kind == "llama4":  # whose forward of transformers 5.24 reads what its language model does not return
        transformers.models.llama4.modeling_llama4.MoeCausalLMOutputWithPast.image_outputs = None
    randomise(model, seed=seed)
    model.save_pretrained(folder)
    tokenizer.chat_template = _TEMPLATE.replace("PLACEHOLDER", wrapped(name)).replace("MOVIE", video_mark(name))
    tokenizer.save_pretrained(folder)
    known = IMAGE_PROCESSOR_MAPPING_NAMES.get(kind, {})
    pixels = {"image_processor_type": known.get("pil") or known.get("torchvision"), **family.pixels}
    (folder / "preprocessor_config.json").write_text(json.dumps(pixels))
    if family.processor:
        (folder / "processor_config.json").write_text(json.dumps(dict(family.processor)))
    return model


def write_classifier(name: str, folder: Path, architecture: str, classes: int) -> Any:
    """The same with a classifier in the place of the LM head."""
    import transformers

    config = write(name, folder).config
    config.num_labels, config.pad_token_id = classes, 0
    model = getattr(transformers, architecture)(config).eval()
    randomise(model, seed=5)
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder)
    return model


def placeholder(name: str) -> str:
    """What stands for a picture in a prompt of this family."""
    tokens = {"gemma3": "<start_of_image>", "aya_vision": "<image>", "llama4": "<|image|>", "qianfan_ocr": "<image>"}
    tokens["ovis2"] = "<image>"
    family = FAMILIES[name]
    found = tokens.get(name) or family.more.get("image_token_id") or family.more.get("image_token_index")
    return str(found)


def wrapped(name: str) -> str:
    """With the tokens that chat templates put around it."""
    around = {"qwen": ("<|vision_start|>", "<|vision_end|>"), "padd": ("<|vision_start|>", "<|vision_end|>")}
    around |= dict.fromkeys(("glm4", "glm_"), ("<|begin_of_image|>", "<|end_of_image|>"))
    first, last = around.get(name[:4], ("", ""))
    return f"{first}{placeholder(name)}{last}"


def video_mark(name: str) -> str:
    """What stands for a video in a prompt, with the tokens around it."""
    if name[:4] in ("glm4", "glm_"):
        return "<|begin_of_video|><|video|><|end_of_video|>"
    return "<|vision_start|><|video_pad|><|vision_end|>" if name[:4] == "qwen" else VIDEO_TOKENS.get(name, "<video>")


def picture(width: int, height: int, seed: int = 0) -> Any:
    from PIL import Image

    values = np.random.default_rng([seed, width, height]).integers(0, 255, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(values)


PICTURES = (picture(53, 37), picture(20, 90), picture(64, 64))
# Text, where # stands for a picture; which pictures.
PROMPTS: tuple[tuple[str, tuple[int, ...]], ...] = (
    ("hello world", ()),
    ("a # b", (0,)),
    ("x##y", (1, 0)),
    ("# what # is this", (2, 2)),
)


VIDEO_TOKENS = {
    **dict.fromkeys(("exaone4_5", "video_llama_3"), "<|video_pad|>"),
    "hyperclovax_vision_v2": "<|video_duration|>: <|video_pad|>",
    "gemma4": "<|video|>",
}
VIDEO_FAMILIES = (
    *("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe", "glm4v", "glm46v", "glm_ocr"),
    *("exaone4_5", "llava_onevision", "llava_next_video", "internvl", "smolvlm", "video_llama_3", "gemma4"),
    *("minicpmv4_6", "hyperclovax_vision_v2", "glm4v_moe"),
)
VIDEOS: tuple[Any, ...] = (
    ([picture(53, 37, seed) for seed in range(3)], {"fps": 2.0}),
    ([picture(40, 48, seed) for seed in range(4)], {"fps": 24.0, "frames_indices": [0, 30, 60, 95]}),
    ([picture(53, 37, seed) for seed in range(4, 7)], {"fps": 2.0}),
)
# Of those transformers takes only videos of as many frames in one prompt, and of those no pictures beside videos.
_AS_MANY = ("llava_onevision", "llava_next_video")
_VIDEOS_ALONE = ("smolvlm", "internvl", "glm4v", "glm4v_moe", "glm46v", "glm_ocr")
# Text, where @ stands for a video; which videos and pictures.
VIDEO_PROMPTS: tuple[tuple[str, tuple[int, ...], tuple[int, ...]], ...] = (
    ("a @ b", (0,), ()),
    ("@ or @?", (1, 0), ()),
    ("x # @ # y", (1,), (1, 0)),
)


def asked_of_videos(name: str) -> list[dict[str, Any]]:
    """The prompts for `LLM.generate`."""
    found: list[dict[str, Any]] = []
    for text, videos, pictures in VIDEO_PROMPTS[: 2 if name in _VIDEOS_ALONE else 3]:
        videos = (2, 0) if len(videos) == 2 and name in _AS_MANY else videos
        data = {"video": [VIDEOS[index] for index in videos], "image": [PICTURES[index] for index in pictures]}
        marked = text.replace("#", wrapped(name)).replace("@", video_mark(name))
        found.append({"prompt": marked, "multi_modal_data": data})
    return found


def asked(name: str) -> list[dict[str, Any]]:
    """The prompts for `LLM.generate`."""
    mark = wrapped(name)
    return [
        {"prompt": text.replace("#", mark), "multi_modal_data": {"image": [PICTURES[index] for index in own]}}
        for text, own in PROMPTS
    ]


def worst(name: str, llm: LLM, model: Any, prompt: Mapping[str, Any], output: Any) -> float:
    """The largest difference of a logprob to transformers'; raises where ids or pixels differ."""
    images = prompt["multi_modal_data"]["image"]
    videos = prompt["multi_modal_data"].get("video", ())
    inputs = theirs(llm, prompt, output)
    if images and not videos:
        own = llm._preprocessor.images
        for index, image in enumerate(images):  # one at a time gives the pixels of all together
            found = own.processor.process(image, {}).inputs
            for key in ("pixel_values", "image_grid_thw"):
                if key in found and len(images) == 1:
                    assert torch.equal(found[key], inputs[key]), f"{key} of image {index}"
    logprobs = logprobs_of(name, model, inputs)
    return max(abs(logprob - float(logprobs[row, token])) for row, token, logprob in asked_for(output))


def check_near(name: str, llm: LLM, model: Any, prompt: Mapping[str, Any], output: Any) -> None:
    """Logprobs are transformers' up to TOLERANCE. Without kernels, where sums round as batches fall, those that are
    not are no farther from its float64 than its float32 is."""
    off = worst(name, llm, model, prompt, output)
    if off >= TOLERANCE and not has_kernels():
        exact = in_float64(model)
        assert worst(name, llm, exact, prompt, output) <= own_rounding(name, llm, model, exact, prompt, output)
    else:
        assert off < TOLERANCE


def asked_for(output: Any) -> list[tuple[int, int, float]]:
    """(row of transformers' logits, token, logprob) of every logprob of a prompt and its answer."""
    tops = [*output.prompt_logprobs[1:], *output.outputs[0].logprobs]
    return [(row, token, item.logprob) for row, own in enumerate(tops) for token, item in own.items()]


def logprobs_of(name: str, model: Any, inputs: Mapping[str, Any]) -> torch.Tensor:
    """transformers', [tokens, vocabulary], in the model's type."""
    taken = inspect.signature(model.forward).parameters
    given = {key: value for key, value in inputs.items() if key in taken}
    given = {key: value.to(model.dtype) if torch.is_floating_point(value) else value for key, value in given.items()}
    with torch.inference_mode():
        logits: torch.Tensor = model(**given).logits[0] * FAMILIES[name].logits
    return logits.log_softmax(-1)


def in_float64(model: Any) -> Any:
    found = copy.deepcopy(model).double()
    with suppress(ValueError):  # it has no experts
        found.set_experts_implementation("eager")  # the others have no float64
    return found


def own_rounding(name: str, llm: LLM, model: Any, exact: Any, prompt: Mapping[str, Any], output: Any) -> float:
    """The largest difference of a logprob that was asked for between transformers' float32 and its float64."""
    inputs = theirs(llm, prompt, output)
    off = (logprobs_of(name, model, inputs) - logprobs_of(name, exact, inputs)).abs()
    return max(float(off[row, token]) for row, token, _ in asked_for(output))


def theirs(llm: LLM, prompt: Mapping[str, Any], output: Any) -> dict[str, Any]:
    """transformers' inputs for a prompt and its answer; raises where its processor gives other ids."""
    images = prompt["multi_modal_data"]["image"]
    processor = llm._preprocessor.images.processor._theirs
    videos = prompt["multi_modal_data"].get("video", ())
    nested = type(processor).__name__ in ("Idefics2Processor", "Idefics3Processor", "SmolVLMProcessor")
    given = {"images": [images] if nested else images} if images else {}
    if videos:
        inputs = _inputs_of_videos(llm, prompt["prompt"], images, videos)
    elif images:
        inputs = dict(processor(text=[prompt["prompt"]], return_tensors="pt", **given))
    else:
        inputs = dict(processor.tokenizer([prompt["prompt"]], return_tensors="pt"))
    inputs.pop("labels", None)
    ids = inputs["input_ids"][0].tolist()
    assert ids == list(output.prompt_token_ids), f"ids {list(output.prompt_token_ids)} are {ids} in transformers"
    full = ids + (list(output.outputs[0].token_ids) if isinstance(output.outputs, list) else [])
    inputs["input_ids"] = torch.tensor([full])
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    for key in ("mm_token_type_ids", "token_type_ids"):
        if key in inputs:
            more = torch.full((1, len(full) - len(ids)), int("PaliGemma" in type(processor).__name__))
            more = more.to(inputs[key].dtype)
            inputs[key] = torch.cat([inputs[key], more], 1)
    return inputs


def _inputs_of_videos(llm: LLM, text: str, images: Any, videos: Any) -> dict[str, Any]:
    """As transformers' processor makes them, of pixels that were made here."""
    own = llm._preprocessor.images.processor
    seen = [own.process(image, {}) for image in images]
    shown = [own.videos.process(frames, timing_of(known, len(frames)), {}) for frames, known in videos]
    found: dict[str, Any] = dict(own._theirs.image_processor(images, return_tensors="pt")) if images else {}
    for item in shown:
        places = {"SmolVLMProcessor": 1, "MiniCPMV4_6Processor": -1}  # of frames, and of patches
        for key, value in item.inputs.items():
            place = places.get(type(own._theirs).__name__, 0) if key.startswith("pixel") else 0
            found[key] = torch.cat([found[key], value], place) if key in found else value
    if hasattr(own._theirs, "_pending_video_durations"):
        timings = [timing_of(known, len(frames)) for frames, known in videos]
        own._theirs._pending_video_durations = [round(item.total / item.fps, 2) for item in timings]
    replaced = [[own.before(index, {}) + item.text for index, item in enumerate(kind)] for kind in (seen, shown)]
    (whole,), _ = own._theirs.get_text_with_replacements([text], *replaced)
    ids = own._theirs.tokenizer([whole])["input_ids"]
    kinds = own._theirs.create_mm_token_type_ids(ids)
    return {**found, "input_ids": torch.tensor(ids), "mm_token_type_ids": torch.tensor(kinds)}


@dataclass(frozen=True, eq=False)
class Bits:
    """What an answer says. It equals another as `same_answers.same` has it: to the bit where kernels compute."""

    answer: Answer

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Bits) and same([self.answer], [other.answer])


def bits(output: Any) -> Bits:
    """Everything of an answer that may not depend on anything else."""
    answer = output.outputs[0]
    scored = [tops or {} for tops in output.prompt_logprobs]
    return Bits(([*output.prompt_token_ids, *answer.token_ids], [*scored, *answer.logprobs]))


def answer_bits(output: Any) -> Bits:
    """The same of the answer alone."""
    return Bits((output.outputs[0].token_ids, output.outputs[0].logprobs))


def check_lost_blocks(folder: Path, prompts: Sequence[Any], max_tokens: int, blocks: int) -> None:
    """Answers have the same bits where there are so few blocks that rows lose theirs."""
    params = SamplingParams(temperature=0.7, seed=3, max_tokens=max_tokens, logprobs=2, ignore_eos=True)
    with LLM(folder, use_tqdm_on_load=False, max_model_len=192) as llm:
        roomy = llm.generate(prompts, params, use_tqdm=False)
        small = llm.config.cache_config.kv_cache_memory_bytes // llm.config.cache_config.num_blocks * blocks
    with LLM(folder, use_tqdm_on_load=False, max_model_len=192, kv_cache_memory_bytes=small) as llm:
        tight = llm.generate(prompts, params, use_tqdm=False)
        assert llm._engine.scheduler.num_preemptions > 0
    assert [answer_bits(output) for output in tight] == [answer_bits(output) for output in roomy]


@dataclass(frozen=True)
class Result:
    """`how`: "agrees", "refused", "wrong", or "not built" where no tiny one could be."""

    name: str
    how: str
    note: str


def attempt(
    name: str, folder: Path, make: Callable[[str], list[dict[str, Any]]] = asked, float64: bool = False, seed: int = 3
) -> Result:
    try:
        model = write(name, folder, seed)
    except Exception as error:
        return Result(name, "not built", f"{type(error).__name__}: {_line(error)}")
    try:
        with LLM(folder, use_tqdm_on_load=False) as llm:
            prompts = make(name)[name == "paligemma" :]  # without a picture it has no mask in transformers
            outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
            pairs = list(zip(prompts, outputs, strict=True))
            exact = in_float64(model) if float64 else model
            each = [worst(name, llm, exact, prompt, output) for prompt, output in pairs]
            if float64:
                own = max(own_rounding(name, llm, model, exact, prompt, output) for prompt, output in pairs)
                print(f"transformers' float32 is {own:.1e} from its float64; ours is:", flush=True)
            logging.getLogger("images").debug("%s", each)
            found = max(each)
        with LLM(folder, use_tqdm_on_load=False, max_num_batched_tokens=16, enable_prefix_caching=False) as llm:
            again = llm.generate(prompts[-2], GREEDY, use_tqdm=False)
        if bits(again[0]) != bits(outputs[-2]):
            return Result(name, "wrong", "in chunks of 16 tokens the bits are others")
        return Result(name, "agrees" if found < TOLERANCE else "wrong", f"{found:.1e}")
    except LLMError as error:
        return Result(name, "refused", _line(error))
    except Exception as error:
        logging.getLogger("images").debug("%s", name, exc_info=error)
        return Result(name, "wrong", f"{type(error).__name__}: {_line(error)}")


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:160].replace("|", "/")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--videos", action="store_true")
    parser.add_argument("--float64", action="store_true")
    parser.add_argument("--seed", type=int, default=3)
    parser.add_argument("--debug", action="store_true")
    given = parser.parse_args(arguments)
    if given.debug:
        logging.basicConfig(level=logging.WARNING)
        logging.getLogger("images").setLevel(logging.DEBUG)
    warnings.simplefilter("ignore")
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    rows: list[Result] = []
    make = asked_of_videos if given.videos else asked
    for name in given.families or (VIDEO_FAMILIES if given.videos else [*FAMILIES]):
        with tempfile.TemporaryDirectory() as folder:
            rows.append(attempt(name, Path(folder), make, given.float64, given.seed))
        print(f"{rows[-1].name:20} {rows[-1].how:10} {rows[-1].note}", flush=True)
    agree = sum(row.how == "agrees" for row in rows)
    print(f"{agree} of {len(rows)} agree")
    if given.write:
        lines = [f"| {row.name} | {row.how} | {row.note} |" for row in rows]
        head = "# Families that read images\n\nWritten by `python tests/models/images.py --write`.\n\n"
        TABLE.write_text(
            f"{head}{agree} of {len(rows)} agree.\n\n| family | | |\n|---|---|---|\n" + "\n".join(lines) + "\n"
        )


if __name__ == "__main__":
    main()
