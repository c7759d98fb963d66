"""`LLM.verify`: transformers' float32 model beside ours, token by token of some texts.

Owns the comparison and its report. The folder is read with transformers' own classes; code in it is never run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from llm.base.quiet import quiet
from llm.errors import OutOfMemoryError, ValidationError
from llm.platforms import select_platform
from llm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from llm.api import LLM

# The largest difference of logprobs that adding in another order in float32 explains.
_ROUNDING = 5e-3


@dataclass(frozen=True)
class Difference:
    """Our logprobs beside transformers', at every position of the texts.

    Attributes:
        name: of the settings that ours were computed with.
        largest, mean: of |ours - theirs|, of the text's token and of our likeliest one.
        agreement: share of positions with the same likeliest token.
        margin: the largest logprob by which transformers prefers its likeliest token where ours is another; 0.0: none.
    """

    name: str
    largest: float
    mean: float
    agreement: float
    margin: float


@dataclass(frozen=True)
class Verification:
    """What `LLM.verify` found. `print` shows it.

    Attributes:
        positions: tokens that were compared.
        loaded: the model as it is loaded.
        exact: with float weights and a float32 KV cache; the same as `loaded` if that is so loaded.
        agrees: `exact` differs by no more than rounding in float32 explains.
        explained: the settings that may explain what `loaded` differs by beyond `exact`.
    """

    positions: int
    loaded: Difference
    exact: Difference
    explained: tuple[str, ...]

    @property
    def agrees(self) -> bool:
        return self.exact.largest <= _ROUNDING

    def __str__(self) -> str:
        shown = [self.exact] if self.loaded == self.exact else [self.exact, self.loaded]
        width = max(len(each.name) for each in shown)
        lines = [f"{self.positions:,} positions, beside transformers in float32"]
        lines += [
            f"{each.name.ljust(width)}  logprobs differ by at most {each.largest:.2e}, {each.mean:.2e} on average; "
            f"the same likeliest token at {each.agreement:.2%}, elsewhere it is likelier by at most {each.margin:.2e}"
            for each in shown
        ]
        if self.explained:
            lines.append(f"what the second line has more is explained by {', '.join(self.explained)}")
        verdict = "is" if self.agrees else "is NOT"
        return "\n".join([*lines, f"the first line {verdict} explained by rounding in float32 (at most {_ROUNDING})"])

    __repr__ = __str__


@dataclass(frozen=True)
class _Position:
    """Of one text token: its logprob, our likeliest token and its logprob."""

    logprob: float
    likeliest: int
    best: float


def verify(llm: LLM, texts: Sequence[str], folder: Path, open_exact: Callable[[], LLM] | None) -> Verification:
    """Compare `llm` with transformers' model of `folder`.

    Args:
        open_exact: opens the model with float weights and a float32 KV cache; None: `llm` is so loaded.
    """
    windows = _windows(llm, texts)
    loaded = exact = _scored(llm, windows)
    if open_exact is not None:
        with open_exact() as other:
            exact = _scored(other, windows)
    reference = _Reference(folder, llm)
    theirs = [reference.differences(ids, (*pair,)) for ids, *pair in zip(windows, loaded, exact, strict=True)]
    first = _summed("as loaded", [each[0] for each in theirs])
    if open_exact is None:
        return Verification(len(first[1]), first[0], first[0], ())
    second = _summed("float weights and KV cache", [each[1] for each in theirs])
    return Verification(len(first[1]), first[0], second[0], _settings(llm))


def is_exact(llm: LLM) -> bool:
    """True if nothing but the order of additions in float32 keeps its logprobs from transformers'."""
    return not _settings(llm)


def _settings(llm: LLM) -> tuple[str, ...]:
    """What rounds more than transformers' float32 does."""
    config, found = llm.config, []
    if config.model_config.quantization is not None:
        found.append(f"quantization={config.model_config.quantization!r}")
    if llm._args.dtype not in ("auto", "float32", torch.float32):
        found.append(f"dtype={llm._args.dtype}")
    if config.cache_config.kv_cache_dtype is not torch.float32:
        found.append(f"kv_cache_dtype={str(config.cache_config.kv_cache_dtype).removeprefix('torch.')}")
    return tuple(found)


def _windows(llm: LLM, texts: Sequence[str]) -> list[list[int]]:
    if isinstance(texts, str):
        raise ValidationError("texts is one text, pass a list of texts.", parameter="texts", value=texts)
    limit = llm.config.model_config.max_model_len - 1
    encoded = llm._preprocessor.token_ids(texts, "texts")
    windows = [ids[start : start + limit] for ids in encoded for start in range(0, len(ids), limit)]
    windows = [ids for ids in windows if len(ids) > 1]
    if not windows:
        raise ValidationError("the texts have no token to compare.", parameter="texts", value=len(texts))
    return windows


def _scored(llm: LLM, windows: Sequence[list[int]]) -> list[list[_Position]]:
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1, detokenize=False)
    params.skip_reading_prefix_cache = True
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in windows], params, use_tqdm=False)
    found = []
    for ids, output in zip(windows, outputs, strict=True):
        positions = [position for position in output.prompt_logprobs or () if position]
        scored = []
        for token, position in zip(ids[1:], positions, strict=True):
            likeliest = min(position, key=lambda item, at=position: at[item].rank)  # type: ignore[misc]
            scored.append(_Position(position[token].logprob, likeliest, position[likeliest].logprob))
        found.append(scored)
    return found


class _Reference:
    """transformers' model of a folder, in float32."""

    def __init__(self, folder: Path, llm: LLM) -> None:
        from transformers import AutoModelForCausalLM

        needed = 4 * llm._open_engine().runner.cost().parameters
        free = select_platform("cpu")[0].memory_free()
        if needed > free:
            raise OutOfMemoryError(
                f"transformers' model takes {needed} bytes in float32 and {free} are free; verify a smaller model of "
                "the family, or free memory."
            )
        with quiet():
            self._model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
                folder, dtype=torch.float32, local_files_only=True, use_safetensors=True, trust_remote_code=False
            ).eval()

    @torch.inference_mode()
    def differences(self, ids: list[int], ours: Sequence[Sequence[_Position]]) -> list[list[tuple[float, float]]]:
        """For each of ours and each position: (|difference| of logprobs, margin of their likeliest token over ours)."""
        logits = self._model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, :-1]
        theirs = logits.float().log_softmax(dim=-1)
        best = theirs.max(dim=-1).values.tolist()
        found = []
        for positions in ours:
            own = []
            for row, token, position, highest in zip(theirs, ids[1:], positions, best, strict=True):
                at_likeliest = float(row[position.likeliest])
                apart = max(abs(float(row[token]) - position.logprob), abs(at_likeliest - position.best))
                own.append((apart if math.isfinite(apart) else math.inf, highest - at_likeliest))
            found.append(own)
        return found


def _summed(name: str, windows: Sequence[Sequence[tuple[float, float]]]) -> tuple[Difference, list[float]]:
    pairs = [pair for window in windows for pair in window]
    apart = [each for each, _ in pairs]
    margins = [margin for _, margin in pairs if margin > 0]
    same = 1 - len(margins) / len(pairs)
    return Difference(name, max(apart), math.fsum(apart) / len(apart), same, max(margins, default=0.0)), apart
