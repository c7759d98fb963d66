"""Sweeps over the inside of a model, each one batched call: the logit lens, and activation patching.

Both stand on captures and interventions of `LLM.generate`. Their tables are pandas DataFrames that show as heat maps in
a notebook.
"""

from __future__ import annotations

import functools
import html
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from llm.base.checks import refuse
from llm.base.optional import optional_package
from llm.errors import ValidationError
from llm.inside.capture import Activations, Capture
from llm.inside.intervention import Intervention
from llm.inside.names import matching
from llm.sampling_params import SamplingParams

if TYPE_CHECKING:
    import pandas

    from llm.llm import LLM
    from llm.outputs import RequestOutput

# Logits behind a prompt, float32 [vocab] -> what is plotted; or (answer, wrong answer), whose logits are compared.
Metric = Callable[[np.ndarray], float] | tuple[str, str] | None
_FIRST = SamplingParams(temperature=0, max_tokens=1)
_CELL = "padding:2px 6px;text-align:center;white-space:pre;color:#000"


def logit_lens(llm: LLM, prompt: object, token: str | int | None = None) -> pandas.DataFrame:
    """See `LLM.logit_lens`.

    The stream behind each layer is put in the place of that behind the last, in a request of its own: so it passes the
    model's own final norm and LM head, whatever these are.
    """
    layers = matching("layers.*.output", llm.sites())
    (plain,) = _run(llm, [prompt], [[]], Capture(layers, "prompt"))
    streams, ids = _captured(plain), plain.prompt_token_ids
    swaps = [[Intervention.replace(layers[-1], streams[name], "prompt")] for name in layers]
    outputs = _run(llm, [ids] * len(layers), swaps, Capture("logits", "prompt"))
    chances = np.stack([_softmax(_captured(output)["logits"]) for output in outputs])
    names, columns = _numbered(llm, ids), [name.rpartition(".")[0] for name in layers]
    if token is not None:
        number = _token_id(llm, token)
        return heat_map(chances[:, :, number], columns, names, f"probability of {_text(llm, number)!r}")
    best = chances.argmax(-1)
    texts = [[_text(llm, int(number)) for number in row] for row in best]
    return heat_map(chances.max(-1), columns, names, "the likeliest next token", texts)


def patch(
    llm: LLM, clean: object, corrupted: object, sites: str | Sequence[str] = "layers.*.output", metric: Metric = None
) -> pandas.DataFrame:
    """See `LLM.patch`."""
    (right, wrong) = _run(llm, [clean, corrupted], [[], []], Capture(matching(sites, llm.sites()), "prompt"))
    length = len(wrong.prompt_token_ids)
    if len(right.prompt_token_ids) != length:
        raise ValidationError(
            f"clean has {len(right.prompt_token_ids)} tokens and corrupted has {length}; patching needs prompts whose "
            "tokens lie in the same places.",
            parameter="corrupted",
        )
    measure, what = _metric(llm, metric, right)
    found = _captured(right)
    cells = [(name, place) for name in found for place in range(length)]
    patches = [[Intervention.replace(name, found[name][place], [place])] for name, place in cells]
    last = Capture("logits", "last")
    ends = _run(llm, [right.prompt_token_ids, wrong.prompt_token_ids], [[], []], last)
    outputs = _run(llm, [wrong.prompt_token_ids] * len(cells), patches, last)
    values = [measure(_captured(output)["logits"][0]) for output in outputs]
    best, worst = (measure(_captured(output)["logits"][0]) for output in ends)
    title = f"{what}; clean {best:.3g}, corrupted {worst:.3g}"
    table = np.array(values).reshape(len(found), length)
    frame = heat_map(table, list(found), _numbered(llm, wrong.prompt_token_ids), title)
    frame.attrs.update(clean=best, corrupted=worst)
    return frame


def heat_map(
    values: np.ndarray,
    rows: Sequence[str],
    columns: Sequence[str],
    title: str,
    texts: Sequence[Sequence[str]] | None = None,
) -> pandas.DataFrame:
    """A DataFrame of the texts if there are some, with `values` in `.attrs["values"]`; else of the values."""
    frame: pandas.DataFrame = _frame_class()(values if texts is None else texts, index=rows, columns=columns)
    frame.attrs.update(values=np.asarray(values).tolist(), title=title)
    return frame


@functools.cache
def _frame_class() -> Callable[..., pandas.DataFrame]:
    frames = optional_package("pandas", "pandas")

    class HeatMap(frames.DataFrame):  # type: ignore[name-defined]
        """Parts of it are plain DataFrames."""

        @property
        def _constructor(self) -> Callable[..., pandas.DataFrame]:
            made: Callable[..., pandas.DataFrame] = frames.DataFrame
            return made

        def _repr_html_(self) -> str:
            return _as_html(self)

    return HeatMap


def _as_html(frame: pandas.DataFrame) -> str:
    """Rows from the last layer down to the first; blue above zero and red below, the stronger the further from it."""
    values = np.array(frame.attrs["values"], dtype=float)
    most = max(float(np.abs(values).max(initial=0)), 1e-12)
    heads = "".join(f'<th style="{_CELL}">{html.escape(str(name))}</th>' for name in frame.columns)
    lines = [f'<tr><th style="{_CELL}"></th>{heads}</tr>']
    for row in reversed(range(len(values))):
        cells = []
        for value, shown in zip(values[row], frame.iloc[row], strict=True):
            text = shown if isinstance(shown, str) else f"{value:.2f}"
            colour = f"rgba({'40,90,255' if value >= 0 else '255,80,40'},{0.85 * abs(value) / most:.2f})"
            cells.append(f'<td style="{_CELL};background:{colour}" title="{value:.4g}">{html.escape(text)}</td>')
        lines.append(f'<tr><th style="{_CELL}">{html.escape(str(frame.index[row]))}</th>{"".join(cells)}</tr>')
    table = f'<table style="border-collapse:collapse;background:#fff;font-size:11px">{"".join(lines)}</table>'
    return f"<p>{html.escape(frame.attrs['title'])}</p>{table}"


def _run(
    llm: LLM, prompts: Sequence[object], interventions: Sequence[list[Intervention]], capture: Capture
) -> Sequence[RequestOutput]:
    """The outputs of one call, one token each."""
    params = []
    for own in interventions:
        params.append(_FIRST.clone())
        params[-1].extra_args = {"capture": capture, "interventions": own}
    given = [{"prompt_token_ids": item} if isinstance(item, list) else item for item in prompts]
    return llm.generate(given, params, use_tqdm=False)


def _captured(output: RequestOutput) -> Activations:
    if output.activations is None:
        raise RuntimeError("an output of a request with a capture has no activations")
    return output.activations


def _metric(llm: LLM, metric: Metric, right: RequestOutput) -> tuple[Callable[[np.ndarray], float], str]:
    """What measures logits, and its name."""
    if callable(metric):
        return metric, getattr(metric, "__name__", "metric")
    if metric is None:
        answer = right.outputs[0].token_ids[0]
        return lambda logits: float(np.log(_softmax(logits)[answer])), f"logprob of {_text(llm, answer)!r}"
    if not isinstance(metric, tuple) or len(metric) != 2:
        refuse("metric", metric, "a callable that takes logits, a pair (answer, wrong answer), or None")
    first, second = (_token_id(llm, item) for item in metric)
    what = f"logit of {_text(llm, first)!r} above that of {_text(llm, second)!r}"
    return lambda logits: float(logits[first] - logits[second]), what


def _token_id(llm: LLM, token: str | int) -> int:
    """The id of a text that is one token; of several the first."""
    if isinstance(token, int):
        return token
    ids: list[int] = llm.get_tokenizer().encode(token, add_special_tokens=False)
    if not ids:
        refuse("token", token, "a text that has a token")
    return ids[0]


def _numbered(llm: LLM, ids: Sequence[int]) -> list[str]:
    """The tokens as names of columns, which must differ."""
    return [f"{place} {_text(llm, number)}" for place, number in enumerate(ids)]


def _text(llm: LLM, number: int) -> str:
    tokenizer = llm._open_engine().tokenizer
    return str(number) if tokenizer is None else tokenizer.decode([number], False)


def _softmax(logits: np.ndarray) -> np.ndarray:
    shifted = np.exp(logits.astype(np.float64) - logits.max(-1, keepdims=True))
    return np.asarray(shifted / shifted.sum(-1, keepdims=True))
