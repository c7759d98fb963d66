"""`LLM.compare`: one model in several quantizations, as one table and one picture."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from llm.base.checks import refuse
from llm.base.optional import optional_package
from llm.base.text import show
from llm.output_formats import aligned, html_table
from llm.quantization.on_load import RECIPES
from llm.tools.quantization_report import TextScores, change_interval, measure_speed, perplexity_interval, score_texts

if TYPE_CHECKING:
    import pandas
    from matplotlib.figure import Figure

    from llm.llm import LLM


_QUALITY = ("quantization", "weights", "perplexity", "95% interval", "change", "95% interval")
_HEADINGS = (*_QUALITY, "prefill tok/s", "decode tok/s")


@dataclass(frozen=True)
class Compared:
    """One quantization.

    Attributes:
        quantization: the scheme; of the checkpoint as it is its format, or "none".
        weight_bytes: of all weights.
        perplexity: on the texts, low and high its 95% interval on other texts like these; None: too few tokens.
        change: of the perplexity to that of the first quantization, as a share; low and high its 95% interval.
        prefill, decode: tokens per second of one request; None: not measured.
    """

    quantization: str
    weight_bytes: int
    perplexity: float
    perplexity_low: float | None
    perplexity_high: float | None
    change: float
    change_low: float | None
    change_high: float | None
    prefill: float | None = None
    decode: float | None = None

    def cells(self) -> tuple[str, ...]:
        speeds = ("" if speed is None else f"{speed:,.0f}" for speed in (self.prefill, self.decode))
        return (
            self.quantization,
            f"{self.weight_bytes:,} B",
            f"{self.perplexity:.4f}",
            _range(self.perplexity_low, self.perplexity_high, "{:.3f}"),
            f"{self.change:+.2%}",
            _range(self.change_low, self.change_high, "{:+.2%}"),
            *speeds,
        )


@dataclass(frozen=True)
class Comparison:
    """Several quantizations of one model, in the order asked for. `print` shows a table, a notebook too."""

    rows: tuple[Compared, ...]

    def __str__(self) -> str:
        return "\n".join(aligned([_HEADINGS, *(row.cells() for row in self.rows)]))

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return html_table(_HEADINGS, (row.cells() for row in self.rows))

    def to_pandas(self) -> pandas.DataFrame:
        """A row for each."""
        frames = optional_package("pandas", "pandas")
        return frames.DataFrame([asdict(row) for row in self.rows])

    def plot(self) -> Figure:
        """Perplexity with its interval over the bytes of the weights, and tokens per second, with matplotlib."""
        optional_package("matplotlib", "notebook")
        from matplotlib.figure import Figure

        has_speed = all(row.decode is not None for row in self.rows)
        figure = Figure(figsize=(10 if has_speed else 5, 4), layout="constrained")
        panels = figure.subplots(1, 2 if has_speed else 1, squeeze=False)[0]
        panel = panels[0]
        for row in self.rows:
            low = row.perplexity if row.perplexity_low is None else row.perplexity_low
            high = row.perplexity if row.perplexity_high is None else row.perplexity_high
            size = row.weight_bytes / (1 << 20)
            error = [[row.perplexity - low], [high - row.perplexity]]
            panel.errorbar([size], [row.perplexity], yerr=error, fmt="o", capsize=3)
            panel.annotate(row.quantization, (size, row.perplexity), xytext=(5, 5), textcoords="offset points")
        panel.set(xlabel="weights, MiB", ylabel="perplexity, 95% interval")
        if has_speed:
            panels[1].barh([row.quantization for row in self.rows], [row.decode or 0.0 for row in self.rows])
            panels[1].set(xlabel="tokens/s of one request")
            panels[1].invert_yaxis()
        return figure


def compare(
    open_scheme: Callable[[str | None], LLM], schemes: Sequence[str | None], texts: Sequence[str], speed: bool
) -> Comparison:
    """Measure each scheme; the first is what the others are compared with."""
    if isinstance(schemes, str) or not schemes:
        refuse("schemes", schemes, f"a list of 'none' and names such as {', '.join(RECIPES)}")
    if isinstance(texts, str) or not texts:
        refuse("texts", show(texts), "a list of texts")
    for scheme in schemes:
        if scheme not in (None, "none", *RECIPES):
            refuse("schemes", scheme, f"of 'none', {', '.join(RECIPES)}")
    first: TextScores | None = None
    rows = []
    for scheme in schemes:
        with open_scheme(None if scheme == "none" else scheme) as llm:
            scores = score_texts(llm, texts)
            first = first or scores
            name = scheme if scheme not in (None, "none") else llm.config.model_config.quantization or "none"
            rows.append(_compared(name, llm, first, scores, speed))
    return Comparison(tuple(rows))


def _compared(name: str, llm: LLM, first: TextScores, scores: TextScores, speed: bool) -> Compared:
    low, high = perplexity_interval(scores) or (None, None)
    change = change_interval(first, scores)
    measured = measure_speed(llm) if speed else None
    return Compared(
        name,
        llm.stats().weight_bytes,
        scores.perplexity,
        low,
        high,
        scores.perplexity / first.perplexity - 1,
        None if change is None else change[0] - 1,
        None if change is None else change[1] - 1,
        None if measured is None else measured.prefill,
        None if measured is None else measured.decode,
    )


def _range(low: float | None, high: float | None, form: str) -> str:
    return "" if low is None or high is None else f"{form.format(low)} to {form.format(high)}"
