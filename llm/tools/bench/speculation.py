"""`python -m llm bench --speculation`: one stream with and without drafts, alternating.

What a model answers decides what drafting gives, so answers are forced: greedy tokens are replaced by an answer's (w5
and free), or a JSON schema leaves few (w6). Both runs must give the same tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from random import Random
from statistics import median
from time import perf_counter

import torch

from llm.base.types import JsonObject
from llm.llm import EMBEDDED_MODEL, LLM
from llm.sampling_params import SamplingParams, StructuredOutputsParams
from llm.tools.bench.session import Say, building_shape
from llm.tools.bench.workloads import BenchOptions, draw_tokens

ABOUT = {
    "w5": "a rewritten text: a prompt of 256, 192 new that copy it except for every 24th token",
    "w6": "an answer by JSON schema: up to 160 new",
    "free": "an answer that repeats nothing: a prompt of 128, 128 new",
}
_SCHEMA = {
    "type": "object",
    "properties": {
        "people_mentioned": {
            "type": "array",
            "minItems": 2,
            "maxItems": 2,
            "items": {
                "type": "object",
                "properties": {
                    "full_name": {"type": "string", "maxLength": 12},
                    "occupation": {"enum": ["shepherd", "carpenter", "fisherman", "unknown"]},
                    "is_mentioned_again": {"type": "boolean"},
                },
                "required": ["full_name", "occupation", "is_mentioned_again"],
                "additionalProperties": False,
            },
        }
    },
    "required": ["people_mentioned"],
    "additionalProperties": False,
}


@dataclass(frozen=True)
class SpeculationFigure:
    """Medians of one workload. `drafted` and `accepted`: tokens of a run; `tokens`: all tokens of a run."""

    workload: str
    seconds_without: float
    seconds_with: float
    tokens: int
    drafted: int
    accepted: int

    @property
    def ratio(self) -> float:
        """How many times as fast with drafts."""
        return self.seconds_without / self.seconds_with


def run_speculation_bench(
    options: BenchOptions, say: Say, report: Callable[[SpeculationFigure], None] = lambda figure: None
) -> list[SpeculationFigure]:
    """Measure every workload that the model can run; a shape has no tokenizer, and so no w6."""
    arguments: JsonObject = {"max_model_len": 512, "use_tqdm_on_load": False}
    arguments |= {"speculative_config": "auto", "enable_prefix_caching": False, **options.engine}
    figures = []
    with _open(options, arguments, say) as llm:
        for name in ABOUT if options.shape is None else ("w5", "free"):
            say(name)
            figures.append(_measure(llm, name, options.reps))
            report(figures[-1])
    return figures


def as_object(figures: list[SpeculationFigure]) -> JsonObject:
    """The object that `--json` prints."""
    found = [{**asdict(figure), "about": ABOUT[figure.workload], "ratio": figure.ratio} for figure in figures]
    return {"threads": torch.get_num_threads(), "speculation": found}


def as_line(figure: SpeculationFigure) -> str:
    without, with_drafts = figure.tokens / figure.seconds_without, figure.tokens / figure.seconds_with
    return (
        f"{figure.workload:<5} {without:>8.1f} tok/s without, {with_drafts:>8.1f} with drafts: {figure.ratio:>5.2f}x; "
        f"{figure.accepted} of {figure.drafted} drafts accepted, {figure.tokens} tokens; {ABOUT[figure.workload]}"
    )


@contextmanager
def _open(options: BenchOptions, arguments: JsonObject, say: Say) -> Iterator[LLM]:
    if options.shape is None:
        with LLM(**{"model": options.model or EMBEDDED_MODEL, **arguments}) as llm:
            yield llm
        return
    with building_shape(options, say) as (folder, _):
        llm = LLM(**{"model": folder, "skip_tokenizer_init": True, "load_format": "dummy", **arguments})
    with llm:
        yield llm


def _measure(llm: LLM, name: str, reps: int) -> SpeculationFigure:
    seconds: dict[bool, list[float]] = {False: [], True: []}
    drafted = accepted = tokens = 0
    for rep in range(reps + 1):  # the first one warms up
        outputs = {}
        for drafts in (False, True) if rep % 2 else (True, False):
            before = (llm.stats().drafted_tokens, llm.stats().accepted_tokens)
            took, outputs[drafts] = _run(llm, name, rep, drafts)
            if rep:
                seconds[drafts].append(took)
            if drafts:
                drafted, accepted = llm.stats().drafted_tokens - before[0], llm.stats().accepted_tokens - before[1]
                tokens = len(outputs[True])
        if outputs[True] != outputs[False]:
            raise RuntimeError(f"{name}: the tokens with drafts are not those without")
    return SpeculationFigure(name, median(seconds[False]), median(seconds[True]), tokens, drafted, accepted)


def _run(llm: LLM, name: str, rep: int, drafts: bool) -> tuple[float, list[int]]:
    """(seconds, tokens) of one request."""
    prompt, params, answer = _request(name, rep, llm.config.model_config.vocab_size)
    runner = llm._open_engine().runner
    runner.set_drafting(drafts)
    runner.force_answer(answer)
    try:
        started = perf_counter()
        output = llm.generate([prompt], params, use_tqdm=False)[0]
        return perf_counter() - started, list(output.outputs[0].token_ids)
    finally:
        runner.set_drafting(True)
        runner.force_answer([])


def _request(name: str, rep: int, vocab_size: int) -> tuple[object, SamplingParams, list[int]]:
    """(prompt, parameters, the answer that is forced; empty: none is)."""
    if name == "w6":
        structure = StructuredOutputsParams(json=_SCHEMA)
        return f"{rep} men went up.", SamplingParams(temperature=0.0, max_tokens=160, structured_outputs=structure), []
    random = Random(f"{name}-{rep}")
    if name == "w5":
        prompt = draw_tokens(random, 256, vocab_size)
        answer = prompt[32:224]
        answer[23::24] = draw_tokens(random, len(answer[23::24]), vocab_size)
    else:
        prompt, answer = draw_tokens(random, 128, vocab_size), draw_tokens(random, 128, vocab_size)
    params = SamplingParams(temperature=0.0, max_tokens=len(answer), ignore_eos=True, detokenize=False)
    return {"prompt_token_ids": prompt}, params, answer
