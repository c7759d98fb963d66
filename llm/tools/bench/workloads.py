"""What is measured: the options of a run, published shapes, and workloads of token ids that are the same everywhere.

A shape is a config.json in a table; speed depends on it alone, so weights are random and none are downloaded. Ids
change with `rep`, so that no run hits the prefix cache of another; lengths do not. The ids of a name and rep must not
change: other engines were measured with them.

No PyTorch is imported here: the command measures how long that takes.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from llm.base.types import JsonObject
from llm.errors import ValidationError, nearest

# A stream's prefill is timed with the ids of repetition rep + PREFILL_REPS, so rep must be below it.
PREFILL_REPS = 100

_LOWEST_ID = 3  # most vocabularies have their special tokens below
_VOCABULARY = 8000


@dataclass(frozen=True)
class Recipe:
    """The recipe of a workload.

    Attributes:
        rows: number of prompts.
        lengths: shortest and longest prompt, without the shared prefix.
        max_tokens: tokens generated per prompt.
        shared_prefix: length of the prefix that all prompts share, in tokens.
        is_stream: judged by prefill time and time per step; else by throughput.
    """

    about: str
    rows: int
    lengths: tuple[int, int]
    max_tokens: int
    shared_prefix: int = 0
    is_stream: bool = False

    @property
    def longest(self) -> int:
        """Tokens of the longest request, prompt and output."""
        return self.shared_prefix + self.lengths[1] + self.max_tokens


RECIPES: dict[str, Recipe] = {
    "w1": Recipe("one stream: a prompt of 128, 128 new", 1, (128, 128), 128, is_stream=True),
    "w2": Recipe("a batch: 32 prompts of 32 to 256, 64 new", 32, (32, 256), 64),
    "w3": Recipe("a shared prefix: 32 prompts of 512 shared and 32 own, 16 new", 32, (32, 32), 16, 512),
    "w4": Recipe("many rows: 256 prompts of 16 to 64, 64 new", 256, (16, 64), 64),
    "s1": Recipe("steps of 1 row: a prompt of 16, 65 new", 1, (16, 16), 65, is_stream=True),
    "s32": Recipe("steps of 32 rows: prompts of 16, 65 new", 32, (16, 16), 65, is_stream=True),
    "tiny": Recipe("a prompt of 8, 2 new", 1, (8, 8), 2, is_stream=True),
}


@dataclass(frozen=True)
class Workload:
    """The prompts of one run, as token ids."""

    name: str
    recipe: Recipe
    prompts: list[list[int]]

    @property
    def prompt_tokens(self) -> int:
        return sum(map(len, self.prompts))

    @property
    def output_tokens(self) -> int:
        return len(self.prompts) * self.recipe.max_tokens


def make_workload(name: str, rep: int = 0, vocab_size: int = _VOCABULARY) -> Workload:
    """The prompts of repetition `rep`; ids are folded into a vocabulary smaller than 8000."""
    recipe = find_recipe(name)
    content = Random(f"{name.upper()}-{rep}")
    lengths = Random(f"len-{name.upper()}")
    shared = draw_tokens(content, recipe.shared_prefix)
    prompts = [shared + draw_tokens(content, lengths.randint(*recipe.lengths)) for _ in range(recipe.rows)]
    return Workload(name, recipe, [_fold(prompt, vocab_size) for prompt in prompts])


def find_recipe(name: str) -> Recipe:
    if name not in RECIPES:
        raise ValidationError(
            f"workload must be one of {', '.join(RECIPES)}, got {name!r}.{nearest(name, RECIPES)}",
            parameter="workload",
            value=name,
        )
    return RECIPES[name]


def draw_tokens(random: Random, count: int, vocab_size: int = _VOCABULARY) -> list[int]:
    """`count` ids of a vocabulary, without those that are special in most."""
    return [random.randrange(_LOWEST_ID, vocab_size) for _ in range(count)]


def _fold(tokens: list[int], vocab_size: int) -> list[int]:
    if vocab_size >= _VOCABULARY:
        return tokens
    return [_LOWEST_ID + (token - _LOWEST_ID) % max(1, vocab_size - _LOWEST_ID) for token in tokens]


# --- What is asked for. ---

WEIGHT_DTYPES = ("float32", "bfloat16")
RIVALS = ("transformers",)


@dataclass(frozen=True)
class BenchOptions:
    """The command line's arguments; `add_command` documents each. `model` and `shape` None: the embedded model."""

    model: str | None = None
    shape: str | None = None
    weight_dtype: str | None = None
    workloads: tuple[str, ...] = ("w1", "w2")
    reps: int = 3
    threads: int | None = None
    calibrate_seconds: float = 2.0
    against: str | None = None
    profile: bool = False
    engine: JsonObject = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in self.workloads:
            find_recipe(name)
        if self.shape is not None:
            find_shape(self.shape)
            if self.model is not None:
                raise invalid("shape", self.shape, "left out when --model is given")
        elif self.weight_dtype is not None:
            right = "left out without --shape: a model's weights stay as stored"
            raise invalid("weight-dtype", self.weight_dtype, right)
        if self.weight_dtype not in (None, *WEIGHT_DTYPES):
            raise invalid("weight-dtype", self.weight_dtype, f"one of {', '.join(WEIGHT_DTYPES)}")
        if self.against not in (None, *RIVALS):
            raise invalid("against", self.against, f"one of {', '.join(RIVALS)}")
        if not 1 <= self.reps <= PREFILL_REPS:
            raise invalid("reps", self.reps, f"1 to {PREFILL_REPS}")
        if self.threads is not None and self.threads < 1:
            raise invalid("threads", self.threads, "at least 1")
        if not 0 <= self.calibrate_seconds < float("inf"):
            raise invalid("calibrate", self.calibrate_seconds, "a number of seconds, 0 for none")


def invalid(name: str, value: object, right: str) -> ValidationError:
    """The error for option `--name`, which must be `right`."""
    return ValidationError(f"--{name} must be {right}, got {value!r}.", parameter=name, value=value)


def _decoder(
    family: str, sizes: tuple[int, ...], positions: int, theta: float, eps: float, **other: object
) -> JsonObject:
    """A config.json with the keys that all families here share; see `SHAPES` for the order of `sizes`."""
    hidden, layers, heads, kv_heads, intermediate, vocab = sizes
    return {
        "architectures": [f"{family.capitalize()}ForCausalLM"],
        "model_type": family,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": intermediate,
        "vocab_size": vocab,
        "max_position_embeddings": positions,
        "rope_theta": theta,
        "rms_norm_eps": eps,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 0,
        **other,
    }


def _llama(*sizes: int, positions: int, theta: float, **other: object) -> JsonObject:
    return _decoder("llama", sizes, positions, theta, 1e-5, **other)


def _llama3(factor: float, *sizes: int, **other: object) -> JsonObject:
    scaling = {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    return _llama(*sizes, positions=131072, theta=5e5, rope_scaling=scaling, **other)


def _qwen2(*sizes: int, **other: object) -> JsonObject:
    return _decoder("qwen2", sizes, 32768, 1e6, 1e-6, **other)


def _qwen3(*sizes: int) -> JsonObject:
    return _decoder("qwen3", sizes, 40960, 1e6, 1e-6, head_dim=128, attention_bias=False)


_UNTIED: JsonObject = {"tie_word_embeddings": False}


def _qwen3_moe(experts: int, per_token: int, intermediate: int, *sizes: int) -> JsonObject:
    """`intermediate`: of an expert."""
    mixture = {
        **{"num_experts": experts, "num_experts_per_tok": per_token, "moe_intermediate_size": intermediate},
        **{"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []},
    }
    heads = {"architectures": ["Qwen3MoeForCausalLM"], "head_dim": 128, "attention_bias": False}
    return _decoder("qwen3_moe", sizes, 40960, 1e6, 1e-6, **heads, **mixture, **_UNTIED)


def _gpt_oss(experts: int, per_token: int, *sizes: int) -> JsonObject:
    mixture = {"num_local_experts": experts, "num_experts_per_tok": per_token, "swiglu_limit": 7.0}
    # transformers' default extends the context; these are its 4096 positions as they were trained.
    positions = {"rope_parameters": {"rope_type": "default", "rope_theta": 1.5e5}}
    windows = {"sliding_window": 128, "layer_types": ["sliding_attention", "full_attention"] * (sizes[1] // 2)}
    heads = {"architectures": ["GptOssForCausalLM"], "head_dim": 64, "attention_bias": True}
    return _decoder("gpt_oss", sizes, 4096, 1.5e5, 1e-5, **heads, **positions, **windows, **mixture, **_UNTIED)


def _lfm2(attention: tuple[int, ...], *sizes: int) -> JsonObject:
    """Short convolutions, and attention in some layers. `block_multiple_of` and its like are written out in `sizes`."""
    kinds = ["full_attention" if layer in attention else "conv" for layer in range(sizes[1])]
    convolutions = {"conv_L_cache": 3, "conv_bias": False, "block_auto_adjust_ff_dim": False, "norm_eps": 1e-5}
    config = _decoder("lfm2", sizes, 128000, 1e6, 1e-5, layer_types=kinds, **convolutions)
    return {key: value for key, value in config.items() if key not in ("hidden_act", "rms_norm_eps")}


def _granite_h(attention: tuple[int, ...], head: int, *sizes: int) -> JsonObject:
    """Mamba 2 with 48 heads of `head` channels, and attention without positions in some layers; no experts."""
    kinds = ["attention" if layer in attention else "mamba" for layer in range(sizes[1])]
    mamba = {
        **{"mamba_n_heads": 48, "mamba_d_head": head, "mamba_d_state": 128, "mamba_d_conv": 4, "mamba_expand": 2},
        **{"mamba_n_groups": 1, "mamba_conv_bias": True, "mamba_proj_bias": False, "mamba_chunk_size": 256},
    }
    scales = {"embedding_multiplier": 12.0, "logits_scaling": 3.0, "residual_multiplier": 0.25}
    other = {"num_local_experts": 0, "num_experts_per_tok": 0, "shared_intermediate_size": sizes[4]}
    names = {"architectures": ["GraniteMoeHybridForCausalLM"], "position_embedding_type": "nope"}
    attended = {"attention_multiplier": 0.015625, "attention_bias": False, "layer_types": kinds}
    return _decoder("granitemoehybrid", sizes, 32768, 1e4, 1e-5, **names, **mamba, **scales, **other, **attended)


# model-b is not a published model: it is small, for w4, s1 and s32, which measure the engine's overhead. A name with
# "-6gb" is a published one with fewer layers and a smaller vocabulary, so that its bfloat16 weights take 6 GiB.
# Sizes: hidden, layers, query heads, key and value heads, intermediate, vocabulary.
SHAPES: dict[str, JsonObject] = {
    "model-b": _llama(512, 8, 8, 4, 1536, 8192, positions=4096, theta=1e4, **_UNTIED),
    "smollm2-135m": _llama(576, 30, 9, 3, 1536, 49152, positions=8192, theta=1e5),
    "smollm2-360m": _llama(960, 32, 15, 5, 2560, 49152, positions=8192, theta=1e5),
    "smollm2-1.7b": _llama(2048, 24, 32, 32, 8192, 49152, positions=8192, theta=1.3e5),
    "tinyllama-1.1b": _llama(2048, 22, 32, 4, 5632, 32000, positions=2048, theta=1e4, **_UNTIED),
    "llama-3.2-1b": _llama3(32.0, 2048, 16, 32, 8, 8192, 128256),
    "llama-3.2-3b": _llama3(32.0, 3072, 28, 24, 8, 8192, 128256),
    "llama-3.1-8b": _llama3(8.0, 4096, 32, 32, 8, 14336, 128256, **_UNTIED),
    "qwen2.5-0.5b": _qwen2(896, 24, 14, 2, 4864, 151936),
    "qwen2.5-1.5b": _qwen2(1536, 28, 12, 2, 8960, 151936),
    "qwen2.5-7b": _qwen2(3584, 28, 28, 4, 18944, 152064, **_UNTIED),
    "qwen3-0.6b": _qwen3(1024, 28, 16, 8, 3072, 151936),
    "qwen3-1.7b": _qwen3(2048, 28, 16, 8, 6144, 151936),
    "qwen3-4b": _qwen3(2560, 36, 32, 8, 9728, 151936),
    "lfm2-1.2b": _lfm2((2, 5, 8, 10, 12, 14), 2048, 16, 32, 8, 8192, 65536),
    "granite-4.0-h-350m": _granite_h((10, 13, 17, 27), 32, 768, 32, 12, 4, 2048, 100352),
    "granite-4.0-h-1b": _granite_h((5, 15, 25, 35), 64, 1536, 40, 12, 4, 4096, 100352),
    "qwen3-30b-a3b-6gb": _qwen3_moe(128, 8, 768, 2048, 5, 32, 4, 6144, 32768),
    "gpt-oss-20b-6gb": _gpt_oss(32, 4, 2880, 4, 64, 8, 2880, 32768),
}


def find_shape(name: str) -> JsonObject:
    if name not in SHAPES:
        raise ValidationError(
            f"shape must be one of {', '.join(SHAPES)}, got {name!r}.{nearest(name, SHAPES)}",
            parameter="shape",
            value=name,
        )
    return SHAPES[name]


def write_config(name: str, weight_dtype: str, folder: Path) -> None:
    """Write the shape's config.json, with weights of `weight_dtype`."""
    config = {**find_shape(name), "dtype": weight_dtype}
    (folder / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
