"""The names of the places in a model where activations can be read or changed, and other libraries' names of them.

layers.3.input               the residual stream that enters the layer
layers.3.attention.input     what attention reads, behind its norm
layers.3.attention.query     of each head, behind norm and rotary embedding; .key and .value of each KV head; of latent
                             attention .key is the latent, which is the value too, and the rotated channels
layers.3.attention.pattern   the weight of each position, of each head
layers.3.attention.heads     each head's output, before the output projection
layers.3.attention.output    what attention adds to the stream
layers.3.mixer.input         of a recurrent layer; .output
layers.3.middle              the residual stream between attention and MLP
layers.3.mlp.input           what the MLP reads, behind its norm; .output
layers.3.mlp.activation      its inner channels, before the last projection
layers.3.experts.logits      the router's; .chosen, the experts' numbers, and .weights; .output, of the chosen ones
layers.3.output              the residual stream that leaves the layer
norm.output                  the hidden state that the LM head reads
logits
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from llm.base.checks import refuse
from llm.base.text import show
from llm.errors import ValidationError, nearest

FINAL, LOGITS = "norm.output", "logits"


@dataclass(frozen=True, eq=False)
class Scoring:
    """How attention weighs keys; fields as in `llm.layers.attention.AttentionParams`.

    Attributes:
        cache_dtype: the type that keys are rounded to where they are kept, "float32", "bfloat16" or "float16".
    """

    num_kv_heads: int
    scale: float
    sliding_window: int | None
    soft_cap: float | None
    attention_chunk: int | None
    sinks: np.ndarray | None
    alibi_slopes: np.ndarray | None
    cache_dtype: str


@dataclass(frozen=True)
class Site:
    """A place in a model.

    Attributes:
        shape: of one position's activation; -1: as many as there are positions up to the last that is captured.
        dtype: "float32" or "int64".
        can_capture: it may be read.
        can_change: it may be changed; `note` says why not.
        in_parts: of several ranks, each has some of its numbers.
        module: the dotted path of the module in the model.
        scoring: of a pattern, which is computed from queries and keys by its definition; None: it is read as it is.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str = "float32"
    can_change: bool = True
    can_capture: bool = True
    note: str = ""
    in_parts: bool = False
    module: str = ""
    scoring: Scoring | None = None

    @property
    def size(self) -> int:
        """Numbers of one position."""
        count = 1
        for length in self.shape:
            count *= length
        return count


# Behind the number of a layer, TransformerLens' names -> ours.
_LENS = {
    "hook_resid_pre": "input",
    "hook_resid_mid": "middle",
    "hook_resid_post": "output",
    "hook_attn_out": "attention.output",
    "hook_mlp_out": "mlp.output",
    "attn.hook_rot_q": "attention.query",
    "attn.hook_rot_k": "attention.key",
    "attn.hook_v": "attention.value",
    "attn.hook_z": "attention.heads",
    "attn.hook_pattern": "attention.pattern",
    "mlp.hook_post": "mlp.activation",
}
# Behind the number of a layer, Hugging Face's names of modules -> ours, of what they return.
_MODULES = {
    "": "output",
    **dict.fromkeys(("self_attn", "attn", "attention", "self_attention"), "attention.output"),
    **dict.fromkeys(("linear_attn", "mamba", "conv", "temporal_block"), "mixer.output"),
    **dict.fromkeys(("mlp", "feed_forward", "block_sparse_moe", "ffn"), "mlp.output"),
    **dict.fromkeys(("input_layernorm", "ln_1"), "attention.input"),
    **dict.fromkeys(("self_attn.o_proj", "attn.c_proj", "attention.dense"), "attention.output"),
    **dict.fromkeys(("mlp.down_proj", "mlp.c_proj", "mlp.dense_4h_to_h"), "mlp.output"),
}
_WHOLE = {
    **dict.fromkeys(("model.norm", "norm", "transformer.ln_f", "gpt_neox.final_layer_norm"), FINAL),
    **dict.fromkeys(("lm_head", "output.logits", "embed_out"), LOGITS),
    **dict.fromkeys(("embeddings", "model.embed_tokens", "transformer.wte", "blocks.0.hook_embed"), "layers.0.input"),
}
_LENS_LAYER = re.compile(r"blocks\.(-?\d+|\*)\.(.+)")
# TransformerLens' names of queries and keys before the rotary embedding.
_UNROTATED = re.compile(r"blocks\.(-?\d+|\*)\.attn\.hook_([qk])")
_MODULE_LAYER = re.compile(r"(?:\w+\.)+(?:layers|h|blocks|block)\.(-?\d+|\*)(?:\.(.+))?")


def canonical(name: str) -> str:
    """Our name of a place that TransformerLens or Hugging Face name otherwise; any other name as it is."""
    if name in _WHOLE:
        return _WHOLE[name]
    if (found := _LENS_LAYER.fullmatch(name)) and found[2] in _LENS:
        return f"layers.{found[1]}.{_LENS[found[2]]}"
    if (found := _MODULE_LAYER.fullmatch(name)) and (found[2] or "") in _MODULES:
        return f"layers.{found[1]}.{_MODULES[found[2] or '']}"
    return name


def matching(patterns: str | Sequence[str], sites: Mapping[str, Site]) -> list[str]:
    """The names of the sites that the patterns stand for, in the model's order.

    `*` stands for one part of a name, and a negative number counts layers from the last.

    Raises:
        ValidationError: a pattern stands for none.
    """
    count = 1 + max((layer_of(name) for name in sites), default=-1)
    found: set[str] = set()
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        own = _from_the_start(canonical(pattern), count)
        if own in sites:
            found.add(own)
            continue
        expression = re.compile(re.escape(own).replace(r"\*", r"[^.]+"))
        names = [name for name in sites if expression.fullmatch(name)] if "*" in own else []
        if not names:
            raise ValidationError(_unknown(pattern, sites), parameter="sites", value=pattern)
        found.update(names)
    return [name for name in sites if name in found]


def layer_of(name: str) -> int:
    """The number of the layer that a site is in; -1: it is in none."""
    parts = name.split(".")
    return int(parts[1]) if parts[0] == "layers" and len(parts) > 2 and parts[1].isdecimal() else -1


def _from_the_start(name: str, count: int) -> str:
    parts = name.split(".")
    if len(parts) > 1 and parts[0] == "layers" and re.fullmatch(r"-\d+", parts[1]):
        parts[1] = str(count + int(parts[1]))
    return ".".join(parts)


def _unknown(pattern: str, sites: Iterable[str]) -> str:
    if found := _UNROTATED.fullmatch(pattern):
        name = {"q": "query", "k": "key"}[found[2]]
        return (
            f"{pattern} is before the rotary embedding, which is no site here; layers.{found[1]}.attention.{name} is "
            "behind it, where the model has one."
        )
    names = list(sites)
    kinds = list(dict.fromkeys(re.sub(r"^layers\.\d+", "layers.*", name) for name in names))
    hint = nearest(pattern, names)
    return f"this model has no site {show(pattern)}.{hint} It has: {', '.join(kinds)}."


# --- Positions. ---

# "last": of the prompt, from which the first token is drawn. A slice or numbers: of the prompt, negative ones from its
# end. A callable: (position, number of prompt tokens) -> bool.
Positions = str | int | slice | Sequence[int] | Callable[[int, int], bool]
_WORDS = ("last", "prompt", "generated", "all")
_RIGHT = "'last', 'prompt', 'generated', 'all', an integer, a list of them, a slice, or a callable"


def check_positions(positions: object) -> None:
    """Raise `ValidationError` for what are no positions."""
    if isinstance(positions, str) and positions in _WORDS:
        return
    if isinstance(positions, slice) or (callable(positions) and not isinstance(positions, type)):
        return
    numbers = [positions] if not isinstance(positions, list | tuple | range | np.ndarray) else positions
    if len(numbers) == 0 or not all(
        isinstance(item, int | np.integer) and not isinstance(item, bool) for item in numbers
    ):
        refuse("positions", positions, _RIGHT)


def wanted(positions: Positions, at: np.ndarray, num_prompt: int) -> np.ndarray:
    """bool [N]: which of the positions `at`, int64 [N], are meant in a request with so many prompt tokens."""
    if isinstance(positions, str):
        if positions == "last":
            return at == num_prompt - 1
        if positions == "prompt":
            return at < num_prompt
        return at >= num_prompt if positions == "generated" else np.ones(len(at), dtype=bool)
    if (listed := numbers(positions, num_prompt)) is not None:
        return np.isin(at, listed)
    return np.array([bool(positions(int(one), num_prompt)) for one in at], dtype=bool)  # type: ignore[operator]


def numbers(positions: Positions, num_prompt: int) -> list[int] | None:
    """The positions of a prompt in the order given; None: they are not of the prompt alone."""
    if isinstance(positions, slice):
        return list(range(*positions.indices(num_prompt)))
    if positions in ("last", "prompt") if isinstance(positions, str) else False:
        return [num_prompt - 1] if positions == "last" else list(range(num_prompt))
    if isinstance(positions, str) or callable(positions):
        return None
    given = [positions] if isinstance(positions, int | np.integer) else positions
    return [int(item) + num_prompt if item < 0 else int(item) for item in given]


def check_within(positions: Positions, num_prompt: int) -> None:
    """Raise `ValidationError` for a number that is no position of the prompt."""
    if isinstance(positions, str | slice) or callable(positions):
        return
    for item in numbers(positions, num_prompt) or ():
        if not 0 <= item < num_prompt:
            refuse("positions", positions, f"numbers from {-num_prompt} to {num_prompt - 1}, of the prompt's tokens")


def most(positions: Positions, num_prompt: int, num_generated: int) -> int:
    """At most so many positions are meant, if so many tokens are generated."""
    computed = num_prompt + max(0, num_generated - 1)
    if positions == "generated" if isinstance(positions, str) else False:
        return max(0, num_generated - 1)
    listed = numbers(positions, num_prompt)
    return computed if listed is None else len(listed)
