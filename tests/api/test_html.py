"""What notebooks show: complete, escaped, and nothing that runs or is fetched."""

from __future__ import annotations

import re
from collections.abc import Iterator
from html.parser import HTMLParser

import pytest
from embedded import open_llm, run
from kernel_sets import has_kernels

from llm import LLM, CompletionOutput, Logprob, RequestOutput, RequestOutputs, SamplingParams
from llm.errors import PromptTooLongError

HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(1)>\"'&amp;</td>\u202e\x00\nnext"
ALLOWED = {"table", "thead", "tbody", "tr", "th", "td", "p", "b", "i", "div", "span", "br"}


class Checker(HTMLParser):
    """Fails for a tag or an attribute that could run or fetch something; collects what is shown."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.shown, self.titles, self.open, self.styles = "", [""], [""], [""]
        self.feed(page)
        assert self.open == [""]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in ALLOWED
        for name, value in attrs:
            assert name in ("style", "title")
            assert name == "title" or re.fullmatch(r"[a-z0-9:;%#,.()\- ]*", value or "")
            (self.titles if name == "title" else self.styles).append(value or "")
        if tag != "br":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.shown += data


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with open_llm(max_model_len=128, max_num_seqs=2) as llm:
        yield llm


def hostile_output(error: Exception | None = None) -> RequestOutput:
    logprobs = [{5: Logprob(-0.1, 1, HOSTILE), 6: Logprob(float("-inf"), 2, "<b>")}]
    own = CompletionOutput(0, HOSTILE, [5], -0.1, logprobs, "error" if error else HOSTILE, error=error)
    return RequestOutput("0", HOSTILE, [1], [own])


@pytest.mark.parametrize("error", [None, PromptTooLongError(HOSTILE)])
def test_nothing_that_a_model_or_user_writes_is_markup(error: Exception | None) -> None:
    output = hostile_output(error)
    for page in (output._repr_html_(), output.show()._repr_html_(), RequestOutputs([output])._repr_html_()):
        shown = Checker(page).shown
        assert "<script>alert(1)</script>" in shown and "onerror=alert(1)" in shown
        assert "\x00" not in page and "\u202e" not in page


def test_the_checker_sees_what_runs() -> None:
    for page in (HOSTILE, '<p onclick="x">', '<p style="background:url(x)">', "<a href='x'>", "<p>"):
        with pytest.raises(AssertionError):
            Checker(page)


def test_a_table_of_outputs(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=4)
    outputs = llm.generate(["In the <i>beginning", "x " * 500, [5, 6]], params, on_error="return", use_tqdm=False)
    found = Checker(outputs._repr_html_())
    assert "In the <i>beginning" in found.shown and outputs[0].outputs[0].text in found.shown
    assert "PromptTooLongError" in found.shown and "2 token ids" in found.shown and "1,000 characters" in found.shown
    assert sum("#fde0dd" in style for style in found.styles) == 1
    assert found.shown.endswith("3 outputs, 1 with an error")


def test_many_outputs_are_not_all_shown(llm: LLM) -> None:
    [output] = run(llm, "And", SamplingParams(temperature=0, max_tokens=2))
    many = RequestOutputs([output] * 5000)
    assert len(many._repr_html_()) < 100_000 and len(repr(many)) < 25 * len(repr(output))
    assert Checker(many._repr_html_()).shown.endswith("5,000 outputs, the first 100 are shown")
    assert repr(many).endswith("... 4,980 more]") and repr(many[:3]) == repr(list(many[:3]))


def test_tokens_are_tinted_by_probability(llm: LLM) -> None:
    [output] = run(llm, "In the beginning", SamplingParams(temperature=1, max_tokens=6, logprobs=2, n=2, seed=3))
    found = Checker(output.show().html)
    shades = [float(match[1]) for style in found.styles if (match := re.search(r"rgba\(255,120,0,([0-9.]+)\)", style))]
    positions = [
        (own.token_ids[place], position) for own in output.outputs for place, position in enumerate(own.logprobs or [])
    ]
    probabilities = [2.718281828 ** position[token].logprob for token, position in positions]
    assert shades == pytest.approx([0.75 * (1 - each) for each in probabilities], abs=0.01)
    titles = [title for title in found.titles if title]
    assert all(title.count("\n") + 1 == len(position) for title, (_, position) in zip(titles, positions, strict=True))
    for own in output.outputs:
        assert own.text in found.shown
        assert f"completion {own.index}: {own.finish_reason}" in str(output.show())


def test_without_logprobs_the_text_is_shown(llm: LLM) -> None:
    [output] = run(llm, "In the beginning", SamplingParams(temperature=0, max_tokens=4))
    found = Checker(output._repr_html_())
    assert output.outputs[0].text in found.shown and not any("rgba" in style for style in found.styles)


def test_an_llm_shows_what_it_is(llm: LLM) -> None:
    found = Checker(llm._repr_html_())
    assert "LlamaForCausalLM" in found.shown and f"batch-invariant{has_kernels()}" in found.shown
    for phase, seconds in dict(llm.startup).items():
        assert f"{phase}{seconds:.2f} s" in found.shown
    widths = [float(match[1]) for style in found.styles if (match := re.search("height:14px;width:([0-9.]+)px", style))]
    assert len(widths) == 3 and sum(widths) == pytest.approx(480, abs=0.2)
    with open_llm(max_model_len=64) as other:
        pass
    assert Checker(other._repr_html_()).shown == "LLM(closed)"
