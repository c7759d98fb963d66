"""`LLM.expert_load()`: tokens per expert and layer as a table, a DataFrame, and a heat map in a notebook."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from llm.engine.calibrate import run_texts
from llm.engine.engine import Engine
from llm.errors import LLMError, ValidationError

if TYPE_CHECKING:
    import pandas

_CELL, _LABEL_WIDTH = 10, 260


@dataclass(frozen=True)
class ExpertLoad:
    """How many tokens went to each expert.

    Attributes:
        tokens: by the dotted path of each layer of experts, in the order of the experts.
    """

    tokens: dict[str, tuple[int, ...]]

    def imbalance(self, layer: str) -> float:
        """The tokens of the layer's busiest expert over those of its average one; 1: all have the same."""
        counts = self.tokens[layer]
        return max(counts) * len(counts) / max(1, sum(counts))

    def unused(self, layer: str) -> int:
        """How many experts of the layer no token went to."""
        return self.tokens[layer].count(0)

    def __str__(self) -> str:
        width = max(map(len, self.tokens))
        lines = [
            f"{layer.ljust(width)}  {self.imbalance(layer):9.2f}  {self.unused(layer):6}  {' '.join(map(str, counts))}"
            for layer, counts in self.tokens.items()
        ]
        return "\n".join([f"{'layer'.ljust(width)}  imbalance  unused  tokens of each expert", *lines])

    __repr__ = __str__

    def to_dataframe(self) -> pandas.DataFrame:
        """A pandas DataFrame: one row per layer, one column per expert."""
        try:
            import pandas
        except ImportError as error:
            raise LLMError("to_dataframe() needs pandas; pip install pandas.") from error
        return pandas.DataFrame.from_dict(self.tokens, orient="index")

    def _repr_html_(self) -> str:
        """An SVG heat map, one row per layer: the darker, the more tokens; experts without a token are red."""
        parts = []
        for row, (layer, counts) in enumerate(self.tokens.items()):
            top, most = row * (_CELL + 2), max(1, *counts)
            label = html.escape(f"{layer} ({self.imbalance(layer):.2f})")
            parts.append(f'<text x="0" y="{top + _CELL}" font-size="10">{label}</text>')
            for expert, count in enumerate(counts):
                shade = round(235 - 200 * count / most)
                colour = f"rgb({shade},{shade},255)" if count else "#e34a33"
                parts.append(
                    f'<rect x="{_LABEL_WIDTH + expert * _CELL}" y="{top}" width="{_CELL}" height="{_CELL}" '
                    f'fill="{colour}"><title>expert {expert}: {count} tokens</title></rect>'
                )
        width = _LABEL_WIDTH + _CELL * max(map(len, self.tokens.values()))
        height = len(self.tokens) * (_CELL + 2)
        return f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}">{"".join(parts)}</svg>'


def measure_load(engine: Engine, texts: Sequence[str]) -> ExpertLoad:
    """Run `texts` and count; `ValidationError` for a model without experts."""
    if isinstance(texts, str) or not texts:
        raise ValidationError(f"texts must be a list of texts, got {texts!r}.", parameter="texts", value=texts)
    engine.runner.start_counting_experts()
    try:
        run_texts(engine, texts, "texts")
    finally:
        counts = engine.runner.stop_counting_experts()
    if not counts:
        raise ValidationError("this model has no layers of experts.", parameter="texts", value=None)
    return ExpertLoad({name: tuple(tokens) for name, tokens in counts.items()})
