"""PoolingParams: what is made of a prompt's hidden states; and `PoolerConfig`, the same for a whole model.

The names are vLLM's. A value that is None is the model's own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

from llm.base.checks import check_choice, check_flag, check_integer, known_fields, refuse
from llm.base.vllm_paths import missing_names

TASKS = ("embed", "classify", "score", "token_embed", "token_classify")
POOLING_TYPES = ("CLS", "LAST", "MEAN")
TOKEN_POOLING_TYPES = ("ALL",)
_INSTEAD = {
    "step_tag_id": "take the tokens you want from LLM.encode's vectors",
    "returned_token_ids": "take the classes you want from LLM.encode's rows",
    "softmax": "its name is use_activation",
    "activation": "its name is use_activation",
}


@known_fields(_INSTEAD)
@dataclass
class PoolingParams:
    """What is made of one prompt's hidden states.

    Args:
        truncate_prompt_tokens: keep this many of the prompt's first tokens, special ones included; -1: as many as the
            model takes.
        dimensions: keep this many of a vector's first channels, before it is normalised (Matryoshka).
        use_activation: False returns a vector as it is, not normalised, and classes as logits.
        normalize: the same, under its older name.
        task: one of `TASKS`; the methods of `LLM` set it.
        skip_reading_prefix_cache: compute the whole prompt.
    """

    truncate_prompt_tokens: int | None = None
    dimensions: int | None = None
    use_activation: bool | None = None
    normalize: bool | None = None
    task: str | None = None
    skip_reading_prefix_cache: bool | None = None

    def __post_init__(self) -> None:
        kept = self.truncate_prompt_tokens
        if kept is not None and not (isinstance(kept, int) and kept == -1):
            check_integer("truncate_prompt_tokens", kept, 1)
        if self.dimensions is not None:
            check_integer("dimensions", self.dimensions, 1)
        for name in ("use_activation", "normalize", "skip_reading_prefix_cache"):
            if getattr(self, name) is not None:
                check_flag(name, getattr(self, name))
        if self.task is not None:
            check_choice("task", self.task, TASKS)

    @property
    def activates(self) -> bool | None:
        """`use_activation` under either name; None: not given."""
        return self.normalize if self.use_activation is None else self.use_activation


@known_fields(
    {
        **_INSTEAD,
        **dict.fromkeys(("logit_mean", "logit_sigma", "logit_bias", "logit_scale"), "change the logits afterwards"),
        **dict.fromkeys(("enable_chunked_processing", "max_embed_len"), "cut the text, and average its vectors"),
    }
)
@dataclass(frozen=True)
class PoolerConfig:
    """What a pooling model makes of hidden states, in place of what its files say.

    Args:
        task: one of `TASKS`: what the model must be for; another one is an error. `encode` does it by default.
        pooling_type: one of `POOLING_TYPES`: the first token's hidden state, the last one's, or the mean of all; or
            "ALL".
        seq_pooling_type: the same, of a whole text, under its newer name.
        tok_pooling_type: "ALL", for tasks that begin with "token_": each token has its result.
        use_activation: False: vectors are not normalised, and classes are logits.
        normalize: the same, under its older name.
        dimensions: of every vector, see `PoolingParams`.
    """

    pooling_type: str | None = None
    seq_pooling_type: str | None = None
    use_activation: bool | None = None
    normalize: bool | None = None
    dimensions: int | None = None
    task: str | None = None
    tok_pooling_type: str | None = None

    def __post_init__(self) -> None:
        kinds = {"pooling_type": (*POOLING_TYPES, *TOKEN_POOLING_TYPES), "seq_pooling_type": POOLING_TYPES}
        for name, allowed in {**kinds, "tok_pooling_type": TOKEN_POOLING_TYPES, "task": TASKS}.items():
            if getattr(self, name) is not None:
                check_choice(name, getattr(self, name), allowed)
        for name in ("seq_pooling_type", "tok_pooling_type"):
            if self.pooling_type is not None and getattr(self, name) is not None:
                refuse(name, getattr(self, name), "left out where pooling_type is given")
        PoolingParams(dimensions=self.dimensions, use_activation=self.use_activation, normalize=self.normalize)

    @classmethod
    def of(cls, given: object) -> PoolerConfig:
        """From `LLM`'s argument: a `PoolerConfig`, a dict of its fields, or None."""
        if isinstance(given, cls):
            return given
        if not isinstance(given, Mapping | None):
            names = ", ".join(item.name for item in fields(cls))
            refuse("pooler_config", given, f"a dict with {names}, or None")
        return cls(**(given or {}))

    @property
    def kind(self) -> str | None:
        """The pooling type of a whole text under either name; None: not given."""
        whole = self.pooling_type or self.seq_pooling_type
        return None if whole in TOKEN_POOLING_TYPES else whole

    @property
    def params(self) -> PoolingParams:
        """The rest of it, as params."""
        return PoolingParams(dimensions=self.dimensions, use_activation=self.use_activation, normalize=self.normalize)


__getattr__ = missing_names(__name__)
