"""Conversations to texts, with the model's chat template.

Owns what a template may be given, and what becomes of its failures.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping
from typing import Any, cast

from llm.base.checks import refuse
from llm.base.types import JsonObject
from llm.engine.prompts import list_conversations
from llm.errors import LLMError, ValidationError
from llm.replies.choice import ToolChoice
from llm.replies.history import readable, tools_as_text, with_text
from llm.tokenizer import Tokenizer

logger = logging.getLogger("llm")

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
    from llm.chat_template import names_read

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
