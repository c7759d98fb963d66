"""From rows of a file to rows of the engine: conversations rendered, texts tokenized, adapters found.

Owns the order of a batch: a row that cannot be run is refused in its place.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from llm.api.adapters import give_adapters
from llm.api.flow import FlowHost
from llm.api.ranking import asked_text
from llm.base.errors import PromptTooLongError, ValidationError
from llm.base.types import JsonObject
from llm.engine.engine import Engine
from llm.engine.pooler import QWEN3_RERANKER
from llm.engine.pooling_rows import PoolingRows, Prefix
from llm.engine.preprocess import Place, Preprocessor
from llm.engine.rows import AnyRow, RefusedRow
from llm.inputs import LoRARequest
from llm.jobs.requests import BatchRows, PlainRows
from llm.jobs.vectors import BatchVectors, PlainVectors, Wanted

Generating = PlainRows | BatchRows
Pooling = PlainVectors | BatchVectors
Rows = Generating | Pooling
V = TypeVar("V")


@dataclass(frozen=True)
class Maker:
    """Makes the rows of a job; see `llm.jobs.job.JobPlan` for the attributes."""

    rows: Rows
    on_too_long: str
    stride: int

    def make(self, llm: FlowHost, engine: Engine, numbered: Sequence[tuple[int, JsonObject]]) -> list[AnyRow]:
        """`numbered`: rows of the file with their indices, `stride` apart. The lock of a call is held."""
        given = [row for _, row in numbered]
        first, preprocessor = numbered[0][0], llm._preprocessor
        if isinstance(self.rows, PlainVectors | BatchVectors):
            rows, adapters = self._pooling(self.rows, given, first, preprocessor)
        else:
            rows, adapters = self._generating(self.rows, given, first, llm)
        return list(give_adapters(engine, rows, adapters))

    def _generating(
        self, form: Generating, given: Sequence[JsonObject], first: int, llm: FlowHost
    ) -> tuple[list[AnyRow], list[LoRARequest | None]]:
        preprocessor = llm._preprocessor
        prompts: list[object] = []
        params, adapters = [], []
        for row in given:
            prompt, own, adapter = None, form.params, None
            try:
                asked = form.asked(row)
                prompt, own, adapter = asked.prompt, asked.params, asked.adapter
                if asked.messages is not None:
                    options = {name: value for name, value in asked.chat.items() if name != "chat_template_kwargs"}
                    arguments = asked.chat.get("chat_template_kwargs") or {}
                    (prompt,) = preprocessor.render_chat(asked.messages, options, arguments)
            except ValidationError as error:
                prompt = error
            prompts.append(prompt)
            params.append(own)
            adapters.append(adapter)
        place = Place(0, first, self.stride)
        default = llm.get_default_sampling_params
        return preprocessor.checked_rows(prompts, params, default, None, self.on_too_long, place), adapters

    def _pooling(
        self, form: Pooling, given: Sequence[JsonObject], first: int, preprocessor: Preprocessor
    ) -> tuple[list[AnyRow], list[LoRARequest | None]]:
        wanted = [_wanted(form, row, preprocessor) for row in given]
        params = [form.params if isinstance(own, ValidationError) else own.params for own in wanted]
        adapters = [None if isinstance(own, ValidationError) else own.adapter for own in wanted]
        maker = PoolingRows(preprocessor, form.plan)
        pairs: dict[int, tuple[str, str]] = {}  # by place
        texts: dict[int, object] = {}
        for place, own in enumerate(wanted):
            if isinstance(own, Wanted) and own.second is not None:
                pairs[place] = str(own.prompt), own.second
            else:
                texts[place] = own if isinstance(own, ValidationError) else own.prompt
        indices = [first + place * self.stride for place in range(len(wanted))]

        def of(places: Iterable[int], values: Sequence[V]) -> list[V]:
            return [values[place] for place in places]

        rows = maker.checked_texts([*texts.values()], of(texts, params), prefix=Prefix(), indices=of(texts, indices))
        found = dict(zip(texts, rows, strict=True))
        if pairs:
            rows = maker.checked_pairs([*pairs.values()], of(pairs, params), None, of(pairs, indices))
            found |= dict(zip(pairs, rows, strict=True))
        return [self._skipped(found[place]) for place in range(len(wanted))], adapters

    def _skipped(self, row: AnyRow) -> AnyRow:
        if self.on_too_long == "skip" and isinstance(row, RefusedRow) and isinstance(row.error, PromptTooLongError):
            row.finish_reason = "skipped"
        return row


def _wanted(form: Pooling, row: JsonObject, preprocessor: Preprocessor) -> Wanted | ValidationError:
    """What the row asks for; a pair for a reranker that is asked in words is one prompt."""
    try:
        wanted = form.asked(row)
    except ValidationError as error:
        return error
    if wanted.second is None or form.plan.recipe != QWEN3_RERANKER or preprocessor.tokenizer is None:
        return wanted
    text = asked_text(str(wanted.prompt), wanted.second, None)
    (token_ids,) = preprocessor.tokenizer.encode_rendered([text])  # it has its special tokens
    return wanted._replace(prompt={"prompt": text, "prompt_token_ids": token_ids}, second=None)
