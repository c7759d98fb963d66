"""From the texts of a pooling call to checked rows: prompts before texts, pairs of texts, truncation, `PoolingParams`.

All rows are checked before any is run, and one error names all bad ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeGuard

from llm.base.checks import refuse
from llm.engine.boundary import TOKENS, PoolingPlan
from llm.engine.images import PicturesOfCall, content_prompt, joined_media
from llm.engine.preprocess import Preprocessor, raise_refused
from llm.engine.prompts import ParsedPrompt, Tokenization, list_prompts, parse_prompt
from llm.engine.rows import AnyRow, RefusedRow, Row, check_prompt, rows_only
from llm.engine.step import PoolingRow
from llm.errors import PromptTooLongError, ValidationError, nearest
from llm.pooling_params import PoolingParams
from llm.sampling_params import SamplingParams
from llm.text.images import bad_picture
from llm.text.tokenizer import Truncation

Scored = str | Mapping[str, object]
BY_TOKEN = "this model classifies every token, not whole texts; call LLM.encode."


@dataclass(frozen=True)
class Prefix:
    """The prompt that precedes every text of a call: by `name`, one of the model's prompts, or as `text`."""

    name: str | None = None
    text: str | None = None

    def of(self, plan: PoolingPlan) -> str:
        prompts = plan.modules.prompts
        if self.name is not None and self.text is not None:
            refuse("prompt", self.text, "left out where prompt_name is given")
        if self.text is not None:
            return self.text
        name = plan.modules.default_prompt if self.name is None else self.name
        if name is None:
            return ""
        if name not in prompts:
            listed = f"one of the model's prompts, {', '.join(map(repr, prompts))}" if prompts else "None: it has none"
            raise ValidationError(
                f"prompt_name must be {listed}, got {name!r}.{nearest(name, prompts)}",
                parameter="prompt_name",
                value=name,
            )
        return prompts[name]


class PoolingRows:
    """Makes the rows of calls."""

    def __init__(self, preprocessor: Preprocessor, plan: PoolingPlan) -> None:
        self._preprocessor = preprocessor
        self._plan = plan
        self._limit = preprocessor.config.max_model_len

    def texts(
        self, prompts: object, params: object, tokenization_kwargs: object, *, prefix: Prefix, by_token: bool = False
    ) -> list[Row]:
        """A row per prompt; `by_token`: every token has its own result."""
        rows = self.checked_texts(list_prompts(prompts), params, tokenization_kwargs, prefix=prefix, by_token=by_token)
        raise_refused(rows)
        return rows_only(rows)

    def checked_texts(
        self,
        prompts: Sequence[object],
        params: object,
        tokenization_kwargs: object = None,
        *,
        prefix: Prefix,
        by_token: bool = False,
        indices: Sequence[int] | None = None,
    ) -> list[AnyRow]:
        """As `texts`, with a `RefusedRow` in the place of each bad prompt, which may be the error itself.

        Args:
            indices: of the rows; None: 0, 1, ...
        """
        before = prefix.of(self._plan)
        parsed = [self._parsed(prompt, before) for prompt in prompts]
        asked = self._per_row(params, len(parsed))
        tokenization = Tokenization.of(tokenization_kwargs, self._limit + 1)
        first = self._tokens_of_prefix(before) if not self._plan.modules.includes_prompt else 0
        whole = [item if isinstance(item, ParsedPrompt) else ParsedPrompt(None, [0]) for item in parsed]
        plain = tokenization.add_special_tokens is False
        pictures = PicturesOfCall(self._preprocessor.images, whole, plain=plain)
        encoded = self._preprocessor.tokenize(pictures.parsed, tokenization)
        rows: list[AnyRow] = []
        for place, (text, token_ids, dropped) in enumerate(encoded):
            given, found, own = parsed[place], pictures.parsed[place], asked[place]
            index = place if indices is None else indices[place]
            try:
                error = given if isinstance(given, ValidationError) else found.error
                if error is not None:
                    raise error
                pooling = replace(self._pooling(own, by_token), first=first)
                kept = self._cut(token_ids, text, own, tokenization)
                row = self._row(text, kept, own, pooling, index, dropped + len(token_ids) - len(kept))
                row.cache_salt = found.cache_salt
                pictures.give(row, place)
                rows.append(row)
            except ValidationError as error:
                rows.append(RefusedRow(index, error, text))
        return rows

    def pairs(self, pairs: Sequence[tuple[str, str]], params: object, tokenization_kwargs: object) -> list[Row]:
        """A row per pair of texts, which the tokenizer joins."""
        rows = self.checked_pairs(pairs, params, tokenization_kwargs)
        raise_refused(rows)
        return rows_only(rows)

    def checked_pairs(
        self,
        pairs: Sequence[tuple[str, str]],
        params: object,
        tokenization_kwargs: object = None,
        indices: Sequence[int] | None = None,
    ) -> list[AnyRow]:
        """As `pairs`, with a `RefusedRow` in the place of each bad one; `indices`: of the rows."""
        tokenizer = self._preprocessor.tokenizer
        if tokenizer is None:
            raise ValidationError("pairs of texts need a tokenizer: skip_tokenizer_init=True.", parameter="prompts")
        asked = self._per_row(params, len(pairs))
        tokenization = Tokenization.of(tokenization_kwargs, self._limit + 1)
        rows: list[AnyRow] = []
        for place, (ids, second) in enumerate(tokenizer.encode_pairs(pairs, None)):
            cut, text = self._truncation(asked[place], tokenization), " ".join(pairs[place])
            kept, start, index = ids, second, place if indices is None else indices[place]
            try:
                if cut is not None and len(ids) > cut.limit:
                    ((kept, start),) = tokenizer.encode_pairs([pairs[place]], cut)
                pooling = replace(self._pooling(asked[place], False), second_text=start)
                rows.append(self._row(text, kept, asked[place], pooling, index, len(ids) - len(kept)))
            except ValidationError as error:
                rows.append(RefusedRow(index, error, text))
        return rows

    def whole(self, prompts: Sequence[object], params: object, tokenization_kwargs: object) -> list[Row]:
        """A row per prompt whose text has its special tokens already."""
        given = tokenization_kwargs or {"add_special_tokens": False}
        return self.texts(list(prompts), params, given, prefix=Prefix(text=""))

    def in_words(self, pair: tuple[Scored, Scored], ask: Callable[[str, str], str]) -> ParsedPrompt:
        """The prompt that asks about a pair, for `whole`; raises `ValidationError` where it has no texts."""
        first, second = map(self._prompt, pair)
        if first.text is None or second.text is None:
            raise bad_picture("a pair must have texts, and not token ids")
        return ParsedPrompt(ask(first.text, second.text), None, media=joined_media(first.media, second.media))

    def _prompt(self, prompt: object) -> ParsedPrompt:
        if isinstance(prompt, ParsedPrompt):
            return prompt
        if is_content(prompt):
            return content_prompt(prompt["content"], self._preprocessor.images)
        return parse_prompt(prompt)

    def _parsed(self, prompt: object, before: str) -> ParsedPrompt | ValidationError:
        if isinstance(prompt, ValidationError):
            return prompt
        try:
            parsed = self._prompt(prompt)
        except ValidationError as error:
            return error
        if before and parsed.token_ids is None and parsed.text is not None:
            return parsed._replace(text=before + parsed.text)
        return parsed

    def _per_row(self, params: object, count: int) -> list[PoolingParams]:
        if params is None or isinstance(params, PoolingParams):
            return [params or PoolingParams()] * count
        listed = list(params) if isinstance(params, Sequence) and not isinstance(params, str) else None
        if listed is None or not all(isinstance(item, PoolingParams) for item in listed):
            refuse("pooling_params", params, "a PoolingParams, or a list of one per prompt")
        if len(listed) != count:
            refuse(
                "pooling_params", f"a list of {len(listed)}", f"one PoolingParams, or one for each of {count} prompts"
            )
        return listed

    def _pooling(self, params: PoolingParams, by_token: bool) -> PoolingRow:
        plan = self._plan
        default = plan.modules.normalizes if plan.task == "embed" else True
        activates = default if params.activates is None else params.activates
        kind = TOKENS if by_token else plan.modules.pooling_type
        if plan.task == "classify":
            if plan.by_token and not by_token:
                raise ValidationError(BY_TOKEN, parameter="pooling_task", value=plan.task)
            if params.dimensions is not None:
                refuse("dimensions", params.dimensions, "left out: the model gives classes, no vectors")
            return PoolingRow(kind, activates)
        dimensions = plan.dimensions if params.dimensions is None else params.dimensions
        if dimensions is not None and dimensions > plan.size:
            refuse("dimensions", dimensions, f"at most {plan.size}, as many as the model's vectors have")
        if dimensions is not None and plan.sizes and dimensions not in (*plan.sizes, plan.size):
            refuse("dimensions", dimensions, f"one of the model's matryoshka_dimensions, {sorted(plan.sizes)}")
        return PoolingRow(kind, activates, dimensions)

    def _truncation(self, params: PoolingParams, tokenization: Tokenization) -> Truncation | None:
        asked = params.truncate_prompt_tokens
        if asked is None:
            return tokenization.truncation
        return Truncation(self._limit if asked == -1 else asked, "right")

    def _cut(self, ids: list[int], text: str | None, params: PoolingParams, tokenization: Tokenization) -> list[int]:
        """The tokens of a prompt that is longer than it may be; special tokens at its end stay."""
        cut = self._truncation(params, tokenization)
        tokenizer = self._preprocessor.tokenizer
        if cut is None or len(ids) <= cut.limit:
            return ids
        if text is None or tokenizer is None:
            return ids[: cut.limit]  # what `tokenization` cuts has been cut
        encode = tokenizer.encode_rendered if tokenization.add_special_tokens is False else tokenizer.encode
        return encode([text], cut)[0]

    def _row(
        self,
        text: str | None,
        token_ids: list[int],
        params: PoolingParams,
        pooling: PoolingRow,
        index: int,
        dropped: int,
    ) -> Row:
        check_prompt(token_ids, self._preprocessor.config.vocab_size)
        if len(token_ids) > self._limit:
            raise PromptTooLongError(
                f"the prompt has {len(token_ids)} tokens and max_model_len is {self._limit}; shorten it, or pass "
                "PoolingParams(truncate_prompt_tokens=-1), which keeps its first tokens.",
                num_tokens=len(token_ids),
                limit=self._limit,
            )
        # A cached prefix has no hidden states.
        whole = pooling.kind != "LAST" or bool(params.skip_reading_prefix_cache)
        sampling = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False, skip_reading_prefix_cache=whole)
        return Row(text, token_ids, sampling, 0, index=index, num_dropped_tokens=dropped, pooling=pooling)

    def _tokens_of_prefix(self, before: str) -> int:
        """Where a text begins after `before`: special tokens at the end of `before` alone do not count."""
        tokenizer = self._preprocessor.tokenizer
        if not before or tokenizer is None:
            return 0
        (whole,), (plain,) = tokenizer.encode([before]), tokenizer.encode_rendered([before])
        starts = range(len(whole) - len(plain) + 1)
        start = next((start for start in starts if whole[start : start + len(plain)] == plain), 0)
        return start + len(plain)


def pair_texts(pairs: Sequence[tuple[Scored, Scored]]) -> list[tuple[str, str]]:
    """Pairs that the tokenizer joins; raises `ValidationError` for one with images."""
    for left, right in pairs:
        if not isinstance(left, str) or not isinstance(right, str):
            raise bad_picture(
                "images are scored by models of vectors and by Qwen3-VL rerankers, of others with chat_template; or "
                "call classify with whole prompts"
            )
    return list(pairs)  # type: ignore[arg-type]


def pair_prompts(first: object, second: object) -> list[tuple[Scored, Scored]]:
    """(first, second) of each pair: one to one, one to many, or many to as many. Prompts with images stay dicts."""
    left, right = (_scored(name, value) for name, value in (("data_1", first), ("data_2", second)))
    if len(left) == 1:
        left = left * len(right)
    if len(left) != len(right):
        raise ValidationError(
            f"there are {len(left)} texts in data_1 and {len(right)} in data_2; pass as many, or one in data_1.",
            parameter="data_2",
            value=len(right),
        )
    return list(zip(left, right, strict=True))


def scored_key(item: Scored) -> str | int:
    """The same for the same text, or the same object."""
    return item if isinstance(item, str) else id(item)


def is_content(prompt: object) -> TypeGuard[Mapping[str, object]]:
    """Whether it is vLLM's `{"content": [part, ...]}`, and no prompt or message."""
    return isinstance(prompt, Mapping) and "content" in prompt and not ({"prompt", "role"} & prompt.keys())


def _scored(name: str, value: object) -> list[Scored]:
    found: list[Scored] = []
    for item in list_prompts(value):
        if is_content(item):
            unknown = next((key for key in item if key != "content"), None)
            if unknown is not None:
                refuse(name, unknown, "a text, or {'content': parts} without other keys")
            found.append(_text_alone(item["content"]) or item)
            continue
        text = item.get("prompt") if isinstance(item, Mapping) else item
        if not isinstance(text, str):
            refuse(name, type(item).__name__, "a text or a list of texts, or of {'content': parts}")
        found.append(item if isinstance(item, Mapping) and item.get("multi_modal_data") is not None else text)
    return found


def _text_alone(parts: object) -> str | None:
    """The text of a content that has texts alone, as `content_prompt` joins them; None: it has other parts."""
    if isinstance(parts, str):
        return parts
    listed = parts if isinstance(parts, list | tuple) else ()
    texts = [part.get("text") for part in listed if isinstance(part, Mapping) and part.get("type") == "text"]
    if len(texts) != len(listed) or not all(isinstance(text, str) for text in texts):
        return None
    return "\n".join(map(str, texts))
