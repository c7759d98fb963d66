"""From rows of a file to rows of the engine, and from their answers to lines of the output.

Conversations are rendered, texts tokenized, adapters found. A row that cannot be run is refused in its place, whatever
it raised. A row with a list of inputs becomes several of the engine, with one index; if one of these cannot be run, the
row is refused as a whole.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from operator import attrgetter
from types import TracebackType
from typing import TYPE_CHECKING, TypeVar, cast

from llm.base.text import clip
from llm.base.types import JsonObject
from llm.calls.arguments import give_adapters
from llm.calls.chat import ChatPrompt
from llm.calls.pooling import asked_text
from llm.engine.engine import Engine
from llm.engine.images import NO_TOWER, with_images
from llm.engine.output import output_without_run
from llm.engine.pooling_rows import PoolingRows, Prefix, Scored, pair_texts
from llm.engine.preprocess import Preprocessor, RowNumbers
from llm.engine.prompts import list_prompts
from llm.engine.rows import AnyRow, RefusedRow
from llm.errors import (
    EngineBusyError,
    EngineClosedError,
    LLMError,
    PromptTooLongError,
    RowError,
    ValidationError,
    is_out_of_memory,
)
from llm.inputs import LoRARequest
from llm.jobs.journal import Ended
from llm.jobs.requests import BatchRows, BatchVectors, PlainRows, PlainVectors, Wanted
from llm.jobs.tables import Read
from llm.outputs import RequestOutput
from llm.text.images import cell_images
from llm.text.replies import ReplyReader, ToolChoice
from llm.text.videos import Frames, cell_videos

if TYPE_CHECKING:
    from llm.llm import LLM

Generating = PlainRows | BatchRows
Pooling = PlainVectors | BatchVectors
Rows = Generating | Pooling
V = TypeVar("V")

logger = logging.getLogger("llm")

# What is about the machine or the engine ends a job; any other exception is the error of the row that raised it.
_OF_MACHINE = (OSError, MemoryError, EngineClosedError, EngineBusyError)


def row_error(error: Exception) -> ValidationError:
    """What a row says that raised this, with its type and place where nothing expected it.

    Raises:
        Exception: `error` itself, if it is about the machine.
    """
    if isinstance(error, _OF_MACHINE) or is_out_of_memory(error):
        raise error
    if isinstance(error, ValidationError):
        return error
    logger.debug("a row raised an exception", exc_info=error)
    if isinstance(error, LLMError):
        return RowError(f"{type(error).__name__}: {error}")
    said = clip(" ".join(str(error).split()))
    return RowError(f"this row raised {type(error).__name__} in {_place(error.__traceback__)}: {said}")


def _place(traceback: TracebackType | None) -> str:
    """The innermost line of this package."""
    place = "an unknown place"
    while traceback is not None:
        name = traceback.tb_frame.f_globals.get("__name__", "")
        if name.startswith("llm."):
            place = f"{name}, line {traceback.tb_lineno}"
        traceback = traceback.tb_next
    return place


@dataclass(frozen=True)
class Maker:
    """Makes the rows of a job; see `llm.jobs.job.JobPlan` for the attributes."""

    rows: Rows
    on_too_long: str
    stride: int

    def make(self, llm: LLM, engine: Engine, numbered: Sequence[tuple[int, Read]]) -> list[AnyRow]:
        """`numbered`: rows of the file with their indices, `stride` apart. The lock of a call is held.

        Those of one index follow each other, in the order of the row's inputs.
        """
        try:
            return self._made(llm, engine, numbered)
        except Exception as error:  # a row can hold anything: the others are made without it
            refused = row_error(error)
        if len(numbered) == 1:
            return [RefusedRow(numbered[0][0], refused)]
        return [row for one in numbered for row in self.make(llm, engine, [one])]

    def _made(self, llm: LLM, engine: Engine, numbered: Sequence[tuple[int, Read]]) -> list[AnyRow]:
        given = [read for _, read in numbered]
        first, preprocessor = numbered[0][0], llm._preprocessor
        if isinstance(self.rows, PlainVectors | BatchVectors):
            rows, adapters = self._pooling(self.rows, given, first, preprocessor)
        else:
            rows, adapters = self._generating(self.rows, given, first, llm)
        made = give_adapters(engine, rows, adapters)
        return [row for own in by_index(made) for row in _all_or_none(own)]

    def _generating(
        self, form: Generating, given: Sequence[Read], first: int, llm: LLM
    ) -> tuple[list[AnyRow], list[LoRARequest | None]]:
        preprocessor = llm._preprocessor
        prompts: list[object] = []
        params, adapters = [], []
        for read in given:
            prompt, own, adapter = None, form.params, None
            try:
                _check_form(form, read)
                request = form.request(read.row)
                prompt, own, adapter = request.prompt, request.params, request.adapter
                images, videos = _media(form, request.media, preprocessor)
                if (images or videos) and request.messages is not None:
                    check_conversation(request.messages)
                    request = request._replace(
                        messages=with_images(cast("list[JsonObject]", request.messages), images, videos)
                    )
                elif (images or videos) and preprocessor.images is not None:
                    prompt = preprocessor.images.prompt_of_row(prompt, images, videos)
                if request.messages is not None:
                    check_conversation(request.messages)
                    options = dict(request.chat)
                    arguments = options.pop("chat_template_kwargs", None) or {}
                    of_processor = options.pop("mm_processor_kwargs", None)
                    if request.choice is not None and request.choice.forces:
                        writing = preprocessor.reply_reader(None, "auto", True, True).writing
                        own = request.choice.constrained_row(own, writing)
                    rendered = preprocessor.chat_prompts(
                        request.messages,
                        options,
                        arguments,
                        None,
                        self.on_too_long,
                        own,
                        llm.get_default_sampling_params,
                        request.choice,
                    )
                    [prompt] = list_prompts(preprocessor.with_processor_options(rendered, of_processor))
            except ValidationError as error:
                prompt = error
            prompts.append(prompt)
            params.append(own)
            adapters.append(adapter)
        numbers = RowNumbers(0, first, self.stride)
        default = llm.get_default_sampling_params
        return preprocessor.checked_rows(prompts, params, default, None, self.on_too_long, numbers), adapters

    def _pooling(
        self, form: Pooling, given: Sequence[Read], first: int, preprocessor: Preprocessor
    ) -> tuple[list[AnyRow], list[LoRARequest | None]]:
        maker = PoolingRows(preprocessor, form.plan)
        listed = [_wanted(form, read, maker, preprocessor) for read in given]
        indices = [first + place * self.stride for place, own in enumerate(listed) for _ in own]
        wanted = [one for own in listed for one in own]
        params = [form.params if isinstance(own, ValidationError) else own.params for own in wanted]
        adapters = [None if isinstance(own, ValidationError) else own.adapter for own in wanted]
        pairs: dict[int, tuple[str, str]] = {}  # by place
        texts: dict[int, object] = {}
        for place, own in enumerate(wanted):
            if isinstance(own, Wanted) and own.second is not None:
                pairs[place] = str(own.prompt), str(own.second)
            else:
                texts[place] = own if isinstance(own, ValidationError) else own.prompt

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


def _media(form: Rows, cells: tuple[object, object], preprocessor: Preprocessor) -> tuple[list[object], list[Frames]]:
    """The images and the videos in cells of a row; raises `ValidationError` where the model reads none."""
    images, videos = cells
    if not isinstance(form, PlainRows | PlainVectors) or (images is None and videos is None):
        return [], []
    if preprocessor.images is None:
        column = "video_column" if images is None else "image_column"
        raise ValidationError(f"{NO_TOWER}; leave {column} out.", parameter=column)
    folder, limits = form.folder, preprocessor.images.limits
    return cell_images(images, folder, limits), cell_videos(videos, folder, limits)


def by_index(rows: Iterable[AnyRow]) -> Iterator[list[AnyRow]]:
    """The engine's rows of each row of the file."""
    return (list(own) for _, own in groupby(rows, attrgetter("index")))


def _all_or_none(rows: list[AnyRow]) -> list[AnyRow]:
    """The engine's rows of one row of the file; if one is refused, that one alone, with its place in the error."""
    place = next((place for place, row in enumerate(rows) if isinstance(row, RefusedRow)), None)
    if place is None or len(rows) == 1:
        return rows
    refused = rows[place]
    if isinstance(refused, RefusedRow):
        refused.error = copy(refused.error)
        refused.error.args = (f"input[{place}]: {refused.error}",)
    return [refused]


def check_conversation(messages: object) -> None:
    if not isinstance(messages, list) or not messages or not all(isinstance(item, Mapping) for item in messages):
        raise ValidationError(
            "messages must be one conversation, a list of {'role': ..., 'content': ...} that is not empty; write a row "
            "for each.",
            parameter="messages",
        )


def fault_of(form: Rows, read: Read) -> str | None:
    """What is wrong with a row of the file before anything is asked of it, with its place; None: nothing."""
    fault = read.fault or form.fault(read.row)
    return None if fault is None else f"{read.place}: {fault}"


def _check_form(form: Rows, read: Read) -> None:
    fault = fault_of(form, read)
    if fault is not None:
        raise ValidationError(f"{fault}.", parameter="input")


def _wanted(
    form: Pooling, read: Read, maker: PoolingRows, preprocessor: Preprocessor
) -> Sequence[Wanted | ValidationError]:
    """What the row asks for; a pair for a reranker that is asked in words is one prompt."""
    try:
        _check_form(form, read)
        return [_prepared(form, own, maker, preprocessor) for own in form.request(read.row)]
    except ValidationError as error:
        return [error]


def _prepared(form: Pooling, wanted: Wanted, maker: PoolingRows, preprocessor: Preprocessor) -> Wanted:
    """With a prompt for `PoolingRows`, or a pair of texts."""
    prompt, second = wanted.prompt, wanted.second
    if second is None:
        images, videos = _media(form, wanted.media, preprocessor)
        if (images or videos) and preprocessor.images is not None:
            return wanted._replace(prompt=preprocessor.images.prompt_of_row(prompt, images, videos))
        if isinstance(prompt, ChatPrompt):
            check_conversation(prompt.messages)
            rendered = prompt.options.prompts(preprocessor, prompt.messages)
            given = preprocessor.with_processor_options(rendered, prompt.options.mm_processor_kwargs)
            return wanted._replace(prompt=list_prompts(given)[0])
        return wanted
    pair = cast("Scored", prompt), second
    if not form.plan.recipe:
        pair_texts([pair])
        return wanted
    asked = maker.in_words(pair, partial(asked_text, form.plan.recipe, None))
    if asked.media is None and asked.text is not None and preprocessor.tokenizer is not None:
        (token_ids,) = preprocessor.tokenizer.encode_rendered([asked.text])  # it has its special tokens
        asked = asked._replace(token_ids=token_ids)
    return wanted._replace(prompt=asked, second=None)


class Replies:
    def __init__(self, preprocessor: Preprocessor) -> None:
        self._preprocessor = preprocessor
        self._readers: dict[tuple[bool, bool], ReplyReader] = {}

    def line(self, rows: Rows, row: JsonObject, ended: Ended, model: str) -> tuple[Ended, JsonObject]:
        """The row's line. If it cannot be made of the answer, the row ends with that error."""
        try:
            if ended.output.error is None and isinstance(rows, BatchRows | PlainRows):
                chosen = rows.chosen(row)
                if chosen is not None:
                    self._read(ended.output, *chosen)
            return ended, rows.answer(row, ended, model)
        except Exception as error:
            refused = RefusedRow(ended.output.index, row_error(error), ended.output.prompt)
        ended = Ended(ended.key, output_without_run(refused))
        return ended, rows.answer(row, ended, model)

    def _read(self, output: RequestOutput, choice: ToolChoice, has_tools: bool) -> None:
        """Fill `content`, `reasoning` and `tool_calls` of its completions."""
        kind = choice.forces, has_tools
        if kind not in self._readers:
            self._readers[kind] = self._preprocessor.reply_reader(None, "auto", has_tools, choice.forces)
        self._readers[kind].read([output], choice)
