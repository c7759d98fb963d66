"""From the user's prompts, conversations and params to checked rows.

All rows are checked before any is run, and one error names all bad ones.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple, cast

from llm.base.checks import refuse
from llm.base.types import JsonObject
from llm.config.engine import ModelConfig, ReasoningConfig
from llm.engine.images import NO_TOWER, PicturesOfCall, PromptImages, no_images, without_images
from llm.engine.prompts import (
    ParsedPrompt,
    PromptMedia,
    Tokenization,
    check_text,
    list_conversations,
    list_prompts,
    parse_prompt,
    with_processor_options,
)
from llm.engine.rows import AnyRow, RefusedRow, Row, RowMaker, refuse_too_long, rows_only
from llm.errors import LLMError, PromptTooLongError, ValidationError
from llm.inputs import TokensPrompt
from llm.inside.names import Site
from llm.inside.request import CAPTURE, INTERVENTIONS, has_inside_args, resolve
from llm.sampling.logits_processors.builtin import find_thinking_ids
from llm.sampling.logits_processors.interface import LogitsProcessor, check_request_processors
from llm.sampling.structured.structure import Structure, StructureCompiler, Vocabulary
from llm.sampling_params import SamplingParams, StructuredOutputsParams
from llm.text.replies import ReplyReader, ToolChoice, readable, tools_as_text, with_text
from llm.text.tokenizer import Tokenizer, Truncation

logger = logging.getLogger("llm")

_MAX_PROBLEMS_LISTED = 10


class RowNumbers(NamedTuple):
    """Which call prompts are of, the index of the first, and how far apart they are."""

    call: int
    first: int
    stride: int = 1


class Preprocessor:
    """Turns prompts and params into rows; several threads may ask it to at once.

    Args:
        tokenizer: None when the engine was built with `skip_tokenizer_init=True`.
        eos_token_ids: the tokens that end an answer of `structured_outputs`.

    Attributes:
        logits_processors: the loaded classes, each of which validates every row's params.
        reasoning: the texts around reasoning where they were given.
        images: reads the pictures of prompts; None: the model has no vision tower.
        sites: the places inside the model, by name.
    """

    def __init__(self, config: ModelConfig, tokenizer: Tokenizer | None, eos_token_ids: Iterable[int] = ()) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self._eos_token_ids = frozenset(eos_token_ids)
        self._structures = StructureCompiler(lambda: Vocabulary(tokenizer, config.vocab_size, eos_token_ids))
        self.logits_processors: Sequence[type[LogitsProcessor]] = ()
        self.reasoning: ReasoningConfig | None = None
        self.images: PromptImages | None = None
        self.sites: Callable[[], Mapping[str, Site]] = dict
        self._call_numbers = count()

    def rows(
        self, prompts: object, params: object, default: Callable[[], SamplingParams], tokenization_kwargs: object = None
    ) -> list[Row]:
        """Validate and tokenize all prompts; raises `ValidationError` that names every bad row."""
        checked = self.checked_rows(list_prompts(prompts), params, default, tokenization_kwargs)
        raise_refused(checked)
        return rows_only(checked)

    def checked_rows(
        self,
        prompts: Sequence[object],
        params: object,
        default: Callable[[], SamplingParams],
        tokenization_kwargs: object = None,
        on_too_long: str = "error",
        numbers: RowNumbers | None = None,
    ) -> list[AnyRow]:
        """As `rows`, with a `RefusedRow` in the place of each bad prompt.

        Args:
            on_too_long: one of `ON_TOO_LONG`.
            numbers: of the prompts, if they are some of those of a longer call; None: they are a call.
        """
        _check_generates(self.config)
        tokenization = Tokenization.of(tokenization_kwargs, self.config.max_model_len)
        parsed = [_parsed_or_refused(prompt) for prompt in prompts]
        per_row = _per_row_params(params, len(parsed), default)
        call, first, stride = numbers or self.new_call()
        maker = RowMaker(self.config, call, on_too_long)
        checked: dict[int, SamplingParams | ValidationError] = {}  # by identity: many rows usually share one object
        rows: list[AnyRow] = []
        parsed = self._without_too_long(parsed, per_row, tokenization, on_too_long)
        pictures = PicturesOfCall(self.images, parsed, plain=tokenization.add_special_tokens is False)
        for offset, (text, token_ids, dropped) in enumerate(self.tokenize(pictures.parsed, tokenization)):
            given, found, index = per_row[offset], pictures.parsed[offset], first + offset * stride
            try:
                if found.error is not None:
                    raise found.error
                row = maker.make(text, token_ids, self._own_params(given, checked), index)
                row.cache_salt = found.cache_salt
                if row.params.inside is not None:
                    row.params.inside = row.params.inside.for_prompt(len(row.token_ids))
                    row.params.inside.check_size(len(row.token_ids), row.params.max_tokens or 0)
                row.num_dropped_tokens += dropped
                pictures.give(row, offset)
                rows.append(row)
            except ValidationError as error:
                skipped = on_too_long == "skip" and isinstance(error, PromptTooLongError)
                rows.append(RefusedRow(index, error, text, "skipped" if skipped else "error"))
        if params is not None and any(map(_is_open, per_row, rows)):
            _note_open_ends()
        return rows

    def new_call(self) -> RowNumbers:
        """Of the prompts of a new call; rows without a seed derive theirs from its number."""
        return RowNumbers(next(self._call_numbers), 0)

    def _own_params(
        self, given: SamplingParams, checked: dict[int, SamplingParams | ValidationError]
    ) -> SamplingParams:
        """A checked copy of `given` for one row."""
        if id(given) not in checked:
            try:
                checked[id(given)] = self._check_params(given.clone())
            except ValidationError as error:
                checked[id(given)] = error
        params = checked[id(given)]
        if isinstance(params, ValidationError):
            raise params
        return params.copy_validated()

    def token_ids(self, prompts: Sequence[object], parameter: str, continuing: bool = False) -> list[list[int]]:
        """Token ids of prompts of any kind; with `continuing`, texts get no special tokens.

        Raises:
            ValidationError: names the first invalid prompt, as one of `parameter`.
        """
        _check_generates(self.config)
        parsed: list[ParsedPrompt] = []
        for index, prompt in enumerate(prompts):
            try:
                parsed.append(parse_prompt(prompt))
            except ValidationError as error:
                raise ValidationError(f"{parameter} {index}: {error}", parameter=parameter, value=prompt) from error
            no_images([parsed[-1].media], "scoring")
            if parsed[-1].cache_salt is not None:
                refuse("cache_salt", parsed[-1].cache_salt, "left out where texts are scored")
        if continuing and self.tokenizer is not None:
            texts = [item.text or "" for item in parsed]
            encoded = self.tokenizer.encode_rendered(texts)
            return [
                ids if item.token_ids is None else item.token_ids for ids, item in zip(encoded, parsed, strict=True)
            ]
        return [ids for _, ids, _ in self.tokenize(parsed, Tokenization())]

    def structure(self, given: StructuredOutputsParams) -> Structure:
        """Compile a constraint; raises `ValidationError` if it is not usable."""
        return self._structures.compile(given)

    def render_chat(
        self,
        messages: object,
        options: Mapping[str, object],
        template_arguments: Mapping[str, object],
        tokenization_kwargs: object = None,
    ) -> list[TokensPrompt]:
        """Render conversations to prompts with the chat template.

        Args:
            options: the renderer's arguments for which `LLM.chat` has parameters.
            template_arguments: further arguments, of the template.
            tokenization_kwargs: of the rendered text, which has its special tokens already.

        Raises:
            ValidationError: `messages` is no conversation, an argument is not the template's, or the template raises.
        """
        conversations, media = self._without_images(messages)
        texts = rendered(self.tokenizer, conversations, options, template_arguments)
        encoded = self._encoded(texts, tokenization_kwargs)
        prompts: list[TokensPrompt] = []
        for text, (ids, _), own in zip(texts, encoded, media, strict=True):
            prompts.append({"prompt": text, "prompt_token_ids": ids})
            if own is not None:
                given = {"image": own.images, "video": own.videos}
                named = {"image": own.uuids, "video": own.video_uuids}
                prompts[-1]["multi_modal_data"] = {kind: items for kind, items in given.items() if items}
                if any(named.values()):
                    prompts[-1]["multi_modal_uuids"] = {kind: list(names) for kind, names in named.items() if names}
        return prompts

    def chat_prompts(
        self,
        messages: object,
        options: Mapping[str, object],
        template_arguments: Mapping[str, object],
        tokenization_kwargs: object,
        on_too_long: str,
        params: object,
        default: Callable[[], SamplingParams],
        choice: ToolChoice | None = None,
    ) -> list[ParsedPrompt]:
        """As `render_chat`, for rows with these params and this choice; conversations that cannot fit are refused."""
        conversations, media = self._without_images(messages)
        texts = rendered(self.tokenizer, conversations, options, template_arguments, choice)
        per_row = _per_row_params(params, len(texts), default)
        tokenization = Tokenization.of(tokenization_kwargs, self.config.max_model_len)
        parsed = [ParsedPrompt(text, None, media=own) for text, own in zip(texts, media, strict=True)]
        parsed = self._without_too_long(parsed, per_row, tokenization, on_too_long)
        is_text = [item.error is None and item.media is None for item in parsed]  # with images it is tokenized later
        if tokenization.truncation is not None and any(media):
            refuse("tokenization_kwargs", "truncation", "left out where conversations have images: they cannot be cut")
        plain = [text for text, own in zip(texts, is_text, strict=True) if own]
        encoded = iter(self._encoded(plain, tokenization_kwargs))
        return [_tokenized(item, *next(encoded)) if own else item for item, own in zip(parsed, is_text, strict=True)]

    def with_processor_options(self, prompts: object, options: object) -> object:
        """The prompts, with `mm_processor_kwargs` where they have images; raises `ValidationError` without a tower."""
        if options and self.images is None:
            refuse("mm_processor_kwargs", options, f"None: {NO_TOWER}")
        return with_processor_options(prompts, options)

    def _without_images(self, messages: object) -> tuple[list[list[JsonObject]], list[PromptMedia | None]]:
        """Conversations, and the images of each."""
        found = [without_images(conversation, self.images) for conversation in list_conversations(messages)]
        return [conversation for conversation, _ in found], [media for _, media in found]

    def _encoded(self, texts: Sequence[str], tokenization_kwargs: object) -> list[tuple[list[int], int]]:
        """(token ids, how many were cut) of rendered conversations."""
        if self.tokenizer is None:
            raise no_tokenizer("chat needs one; give generate() token ids.")
        tokenization = Tokenization.of(tokenization_kwargs, self.config.max_model_len)
        encode = self.tokenizer.encode if tokenization.add_special_tokens else self.tokenizer.encode_rendered
        return _cut_texts(encode, [check_text(text) for text in texts], tokenization.truncation)

    def _without_too_long(
        self,
        parsed: list[ParsedPrompt],
        per_row: Sequence[SamplingParams],
        tokenization: Tokenization,
        on_too_long: str,
    ) -> list[ParsedPrompt]:
        """With those refused whose texts are so long that tokenizing them would take seconds, for nothing."""
        if self.tokenizer is None or tokenization.truncation is not None or on_too_long not in ("error", "skip"):
            return parsed
        limit = self.config.max_model_len
        pairs = zip(parsed, per_row, strict=True)
        return [
            item if own.truncate_prompt_tokens else refuse_too_long(item, self.tokenizer, limit) for item, own in pairs
        ]

    def reply_reader(
        self, chat_template: str | Path | None, tool_parser: str | None, has_tools: bool, forces: bool
    ) -> ReplyReader:
        """Reads the replies to conversations that were rendered with this template; None: the model's.

        `forces`: the reply must be a call.
        """
        if self.tokenizer is None:
            raise no_tokenizer("chat needs one; give generate() token ids.")
        template = self.tokenizer.template_text(chat_template, has_tools)
        return ReplyReader.of(
            self.tokenizer, self._eos_token_ids, template, tool_parser, has_tools, self.reasoning, forces
        )

    def tokenize(
        self, parsed: list[ParsedPrompt], tokenization: Tokenization
    ) -> list[tuple[str | None, list[int], int]]:
        """(text, token ids, how many were cut) of each prompt; one call of the tokenizer for all texts."""
        texts = [item.text for item in parsed if item.token_ids is None and item.text is not None]
        if texts and self.tokenizer is None:
            raise no_tokenizer("text prompts need one; pass prompt_token_ids.")
        encoded: Iterator[tuple[list[int], int]] = iter(())
        if self.tokenizer is not None and texts:
            plain = tokenization.add_special_tokens is False
            encode = self.tokenizer.encode_rendered if plain else self.tokenizer.encode
            encoded = iter(_cut_texts(encode, texts, tokenization.truncation))
        tokenized = []
        for item in parsed:
            if item.token_ids is None:
                tokenized.append((item.text, *next(encoded)))
            else:
                kept = tokenization.cut(item.token_ids)
                tokenized.append((item.text, kept, item.num_dropped_tokens + len(item.token_ids) - len(kept)))
        return tokenized

    def _check_params(self, params: SamplingParams) -> SamplingParams:
        """Check params against the model and the loaded processors; returns them with bad_words as token ids."""
        vocab = self.config.vocab_size
        for name in ("stop_token_ids", "logprob_token_ids", "allowed_token_ids", "logit_bias"):
            for token in getattr(params, name) or ():
                if token >= vocab:
                    refuse(name, token, f"below the vocabulary size {vocab}")
        scored = params.prompt_logprob_token_ids or []
        for token in (token for row in scored for token in row if token >= vocab):
            refuse("prompt_logprob_token_ids", token, f"below the vocabulary size {vocab}")
        limit = self.config.max_logprobs
        if limit != -1 and max(map(len, scored), default=0) > limit:
            refuse("prompt_logprob_token_ids", max(map(len, scored)), f"at most max_logprobs ({limit}) ids in a row")
        for name in ("logprobs", "prompt_logprobs"):
            count = getattr(params, name)
            if count is not None and limit != -1 and not 0 <= count <= limit:
                refuse(name, count, f"at most max_logprobs ({limit})")
        if params.stop_strings and self.tokenizer is None:
            refuse("stop", params.stop, "empty with skip_tokenizer_init=True; use stop_token_ids")
        if not params.spaces_between_special_tokens and not self._writes_no_spaces():
            refuse("spaces_between_special_tokens", False, "True with a tokenizer that has no tokenizer.json")
        if params.structured_outputs is not None:
            params.structure = self._compile_structure(params)
        if has_inside_args(params.extra_args):
            params.inside = resolve(params.extra_args or {}, self.sites())
        params.bad_words_token_ids = self._bad_words(params.bad_words or [])
        params.thinking_token_ids = find_thinking_ids(params, self.tokenizer, self.reasoning)
        check_request_processors(params)
        self._validate_by_processors(params)
        return params

    def _compile_structure(self, params: SamplingParams) -> Structure:
        for name, harmless in (("ignore_eos", False), ("min_tokens", 0)):
            if getattr(params, name) != harmless:
                right = f"{harmless} with structured_outputs, for an answer ends where it is complete"
                refuse(name, getattr(params, name), right)
        if params.structured_outputs is None:
            raise ValueError("there is nothing to compile")
        structure = self._structures.compile(params.structured_outputs)
        self._structures.warn(structure.why_not_guaranteed(params))
        return structure

    def _writes_no_spaces(self) -> bool:
        return self.tokenizer is None or self.tokenizer.is_fast

    def _bad_words(self, words: list[str]) -> list[list[int]]:
        """Token ids of each word, at the beginning of a text and after a space."""
        if not words:
            return []
        if self.tokenizer is None:
            refuse("bad_words", words, "empty with skip_tokenizer_init=True; use logit_bias")
        spellings = [prefix + word.lstrip() for word in words for prefix in ("", " ")]
        encoded = self.tokenizer.encode_rendered([check_text(spelling) for spelling in spellings])
        for index, word in enumerate(words):
            if not encoded[2 * index]:
                refuse("bad_words", word, "words that have a token")
        distinct = dict.fromkeys(tuple(ids) for ids in encoded if ids and max(ids) < self.config.vocab_size)
        return [list(ids) for ids in distinct]

    def _validate_by_processors(self, params: SamplingParams) -> None:
        for processor in self.logits_processors:
            try:
                processor.validate_params(params)
            except ValidationError:
                raise
            except Exception as error:  # usually a KeyError for a key missing in extra_args
                said = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
                raise ValidationError(
                    f"{processor.__name__} refuses the sampling params: {said}", parameter="sampling_params"
                ) from error
        unread = sorted(map(str, (params.extra_args or {}).keys() - {CAPTURE, INTERVENTIONS}))
        if unread and not self.logits_processors and not params.logits_processors:
            logger.warning("extra_args %s are given, and no logits processor is loaded that could read them.", unread)


def _check_generates(config: ModelConfig) -> None:
    if config.runner_type != "generate":
        what = {"embed": "vectors; call embed", "classify": "classes; call classify or score"}[config.convert_type]
        raise ValidationError(
            f"this model generates no text, it gives {what}; runner='generate' loads a model that can generate as one.",
            parameter="runner",
            value=config.runner_type,
        )


_MAX_TOKENS_OF_VLLM = 16


def _is_open(given: SamplingParams, row: AnyRow) -> bool:
    """True if the row would be shorter in vLLM, whose max_tokens has another default."""
    is_free = given.max_tokens is None and given.structured_outputs is None
    return is_free and isinstance(row, Row) and (row.params.max_tokens or 0) > _MAX_TOKENS_OF_VLLM


def _cut_texts(
    encode: Callable[[list[str], Truncation | None], list[list[int]]], texts: list[str], cut: Truncation | None
) -> list[tuple[list[int], int]]:
    """(token ids, how many were cut) of each text; special tokens at the end of one that is cut stay."""
    encoded = encode(texts, None)
    if cut is None:
        return [(ids, 0) for ids in encoded]
    long = [place for place, ids in enumerate(encoded) if len(ids) > cut.limit]
    shorter = dict(zip(long, encode([texts[place] for place in long], cut), strict=True)) if long else {}
    kept = [shorter.get(place, ids) for place, ids in enumerate(encoded)]
    return [(own, len(ids) - len(own)) for own, ids in zip(kept, encoded, strict=True)]


def _tokenized(prompt: ParsedPrompt, token_ids: list[int], dropped: int) -> ParsedPrompt:
    return prompt._replace(token_ids=token_ids, num_dropped_tokens=dropped)


def _parsed_or_refused(prompt: object) -> ParsedPrompt:
    """A prompt that is parsed already, and one in whose place its error stands, keep that."""
    if isinstance(prompt, ParsedPrompt):
        return prompt
    try:
        if isinstance(prompt, ValidationError):
            raise prompt
        return parse_prompt(prompt)
    except ValidationError as error:
        return ParsedPrompt(None, [], error=error)


@functools.cache
def _note_open_ends() -> None:
    """Log the note once per process."""
    logger.warning(
        "max_tokens is not given: an answer ends by itself or where the context does, while vLLM's ends after %d "
        "tokens; pass SamplingParams(max_tokens=...) for shorter ones.",
        _MAX_TOKENS_OF_VLLM,
    )


def _per_row_params(params: object, count: int, default: Callable[[], SamplingParams]) -> list[SamplingParams]:
    if params is None:
        params = default()
    if isinstance(params, SamplingParams):
        return [params] * count
    if not isinstance(params, Sequence) or not all(isinstance(item, SamplingParams) for item in params):
        refuse("sampling_params", type(params).__name__, "a SamplingParams, a list of them, or None")
    if len(params) != count:
        raise ValidationError(
            f"there are {len(params)} sampling_params for {count} prompts; pass one for all, or one for each.",
            parameter="sampling_params",
            value=params,
        )
    return list(params)


def raise_refused(rows: Sequence[AnyRow]) -> None:
    """Raise `ValidationError` that names every row with an error."""
    refused = [row for row in rows if isinstance(row, RefusedRow) and row.finish_reason == "error"]
    if not refused:
        return
    first, *others = refused
    where = f"prompt {first.index}: " if len(rows) > 1 else ""
    listed = ", ".join(str(row.index) for row in others[:_MAX_PROBLEMS_LISTED])
    more = f" (also bad: {listed}{', ...' if others[_MAX_PROBLEMS_LISTED:] else ''})" if others else ""
    error = first.error
    raise ValidationError(f"{where}{error}{more}", parameter=error.parameter, value=error.value) from error


# Arguments of the renderer that are not the template's: they decide what rendering returns.
_RESERVED_FOR_RENDERING = frozenset(
    "conversation messages tokenize padding truncation max_length return_tensors return_dict "
    "return_assistant_tokens_mask tokenizer_kwargs".split()
)


def rendered(
    tokenizer: Tokenizer | None,
    messages: object,
    options: Mapping[str, object],
    template_arguments: Mapping[str, object],
    choice: ToolChoice | None = None,
) -> list[str]:
    """The text of each conversation; see `Preprocessor.render_chat`.

    `choice`: where it forces a call, tools that the template does not show are written into the conversation.
    """
    conversations = [readable(conversation) for conversation in list_conversations(messages)]
    if not isinstance(template_arguments, Mapping):
        refuse("chat_template_kwargs", template_arguments, "a dict of the template's arguments, or None")
    for name in template_arguments:
        if name in options or name in _RESERVED_FOR_RENDERING:
            refuse("chat_template_kwargs", name, "arguments of the template alone")
    if tokenizer is None:
        raise no_tokenizer("chat needs one; give generate() token ids.")
    arguments = {**options, **template_arguments}
    texts = [_render(tokenizer, conversation, arguments) for conversation in conversations]
    tools = cast("list[JsonObject] | None", options.get("tools"))
    if tools and not _shows_tools(tokenizer, conversations[0], arguments, texts[0]):
        if choice is None or not choice.forces:
            right = "left out: this model's chat template does not show tools to the model"
            refuse("tools", "a list", f"{right}; tool_choice='required' works without that")
        text = tools_as_text(tools, choice)
        texts = [_with_text(tokenizer, conversation, arguments, text) for conversation in conversations]
    if template_arguments:
        given = cast("str | None", options.get("chat_template"))  # rendered above
        template = tokenizer.template_text(given, bool(options.get("tools")))
        _warn_of_unread(tuple(sorted(template_arguments)), template)
    return texts


def _render(tokenizer: Tokenizer, conversation: list[JsonObject], arguments: Mapping[str, Any]) -> str:
    try:
        return tokenizer.render_chat(conversation, **arguments)
    except LLMError:
        raise
    except Exception as error:  # a template is the model's own program: it can raise anything
        reason = " ".join(str(error).split())[:200]
        raise ValidationError(
            f"the chat template cannot render these messages ({type(error).__name__}: {reason}).", parameter="messages"
        ) from error


@functools.lru_cache(maxsize=64)
def _warn_of_unread(names: tuple[str, ...], template: str) -> None:
    """Once for many calls with one template."""
    from llm.text.chat_template import names_read

    unread = [name for name in names if name not in names_read(template)]
    if unread:
        logger.warning("chat_template_kwargs %s are given, and the chat template does not read them.", unread)


def _shows_tools(
    tokenizer: Tokenizer, conversation: list[JsonObject], arguments: Mapping[str, object], text: str
) -> bool:
    try:
        without = _render(tokenizer, conversation, {**arguments, "tools": None})
    except ValidationError:  # it reads them
        return True
    return without != text


def _with_text(tokenizer: Tokenizer, conversation: list[JsonObject], arguments: Mapping[str, object], text: str) -> str:
    """The conversation with a text in the system message, or in the user's first where a template shows no other."""
    for role in ("system", "user"):
        try:
            rendered = _render(tokenizer, with_text(conversation, text, role), {**arguments, "tools": None})
        except ValidationError:  # it knows no system messages
            continue
        if text in rendered:
            return rendered
    raise ValidationError(
        "tools must be left out: this model's chat template shows neither tools nor a system message or a user's.",
        parameter="tools",
    )


def no_tokenizer(message: str) -> ValidationError:
    return ValidationError(
        f"there is no tokenizer, for skip_tokenizer_init=True; {message}", parameter="skip_tokenizer_init", value=True
    )
