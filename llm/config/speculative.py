"""`SpeculativeConfig`: who drafts tokens, and how many; vLLM's names.

Owns the check of what the user passed as `speculative_config`. `llm.runner.speculation` drafts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from llm.base.checks import check_integer, refuse
from llm.errors import ValidationError, nearest

METHODS = ("ngram", "draft_model", "mtp", "eagle3")
# vLLM's older names, one per family.
_ALIASES = {f"{family}_mtp": "mtp" for family in ("deepseek", "glm4_moe", "qwen3_next", "qwen3_5")}
_WITH_MODEL = ("draft_model", "eagle3")
# A step with eight tokens of a row reads the weights once, as one with a single token does.
DEFAULT_NUM_SPECULATIVE_TOKENS = 7
MOST_SPECULATIVE_TOKENS = 63  # with the row's last token, as many as a recorded step has
# vLLM's keys that ask for nothing at these values -> what to do instead.
_HARMLESS: dict[str, tuple[tuple[object, ...], str]] = {
    "draft_tensor_parallel_size": ((None, 1), "a model runs on one device"),
    "disable_padded_drafter_batch": ((None, False, True), ""),
    "enforce_eager": ((None, False, True), ""),
    "rejection_sample_method": ((None, "strict"), "drafts are compared with the token that is drawn, which is exact"),
    "revision": ((None,), "pass a local folder as model"),
    "moe_backend": ((None, "auto"), "the platform chooses the kernels"),
    "attention_backend": ((None, "auto"), "the platform chooses the kernels"),
}
_ELSEWHERE = {
    "eagle": "heads of EAGLE 1 and 2 are not read",
    "medusa": "Medusa heads are not read",
    "suffix": "method='ngram' finds the longest repeated suffix",
}


@dataclass(frozen=True)
class SpeculativeConfig:
    """What drafts tokens for the model to verify. Answers do not depend on it.

    Attributes:
        method: "ngram": the tokens that followed the longest earlier occurrence of the last tokens, and the tokens that
            a grammar forces. "draft_model": a smaller model with the same tokenizer. "mtp": the layer for multi-token
            prediction of the model's own checkpoint; of several the first. "eagle3": an EAGLE-3 head that was trained
            for the model.
        num_speculative_tokens: most drafts of a request in a step. Fewer are drafted where the times of the steps so
            far and the request's accepted drafts say that more would cost more than they give.
        prompt_lookup_min: shortest repeated suffix that is continued.
        prompt_lookup_max: None; accepted from vLLM's users: the longest repeated suffix is at least as long.
        model, quantization: of the draft model or of the EAGLE-3 head, as in `LLM`.
        is_default: True if the user did not choose.
    """

    method: str = "ngram"
    num_speculative_tokens: int = DEFAULT_NUM_SPECULATIVE_TOKENS
    prompt_lookup_min: int = 2
    prompt_lookup_max: int | None = None
    model: str | None = None
    quantization: str | None = None
    is_default: bool = False

    @property
    def has_head(self) -> bool:
        """A head reads the target's hidden states."""
        return self.method in ("mtp", "eagle3")

    def __str__(self) -> str:
        who = self.method if self.model is None else f"{self.method} {self.model}"
        return f"{who}, at most {self.num_speculative_tokens} drafts"

    @classmethod
    def of(cls, given: object) -> SpeculativeConfig | None:
        """From what the user passed: "auto", None, a dict or a `SpeculativeConfig`; None: nothing is drafted."""
        if isinstance(given, SpeculativeConfig):
            return given
        if given is None or given == {}:
            return None
        if given == "auto":
            return cls(is_default=True)
        if not isinstance(given, Mapping):
            refuse("speculative_config", given, "'auto', None, or a dict such as {'method': 'ngram'}")
        return cls._read({str(key): value for key, value in given.items()})

    @classmethod
    def _read(cls, given: dict[str, Any]) -> SpeculativeConfig:
        known = [item.name for item in fields(cls) if item.name != "is_default"]
        for name in [name for name in given if name not in known]:
            if name not in _HARMLESS:
                right = f"one of {', '.join(known)}.{nearest(name, known)}"
                raise ValidationError(f"speculative_config has the key {name!r}; it takes {right}", value=name)
            harmless, instead = _HARMLESS[name]
            if given.pop(name) not in harmless:
                raise ValidationError(f"speculative_config[{name!r}] is refused: {instead}.", value=name)
        if given.get("model") in ("ngram", "[ngram]") and given.get("method", "ngram") == "ngram":
            given["model"], given["method"] = None, "ngram"  # vLLM's older name of the method
        given.setdefault("method", "draft_model" if given.get("model") is not None else "ngram")
        given["method"] = _ALIASES.get(str(given["method"]), given["method"])
        config = cls(**given)
        config._check()
        return config

    def _check(self) -> None:
        if self.method not in METHODS:
            instead = _ELSEWHERE.get(str(self.method), "it is unknown")
            choice = ", ".join(map(repr, METHODS[:-1])) + f" or {METHODS[-1]!r}"
            raise ValidationError(f"speculative_config method={self.method!r}: {instead}; use {choice}.")
        check_integer("num_speculative_tokens", self.num_speculative_tokens, 1, MOST_SPECULATIVE_TOKENS)
        check_integer("prompt_lookup_min", self.prompt_lookup_min, 1)
        if self.prompt_lookup_max is not None:
            check_integer("prompt_lookup_max", self.prompt_lookup_max, self.prompt_lookup_min)
        if (self.method in _WITH_MODEL) != (self.model is not None):
            right = "the folder of what drafts, with method='draft_model' or 'eagle3' only"
            refuse("speculative_config['model']", self.model, right)
