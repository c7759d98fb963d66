"""The prompt types of `LLM.generate`, under vLLM's names; plain dicts at run time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypedDict

from llm.base.missing import missing_names
from llm.base.types import JsonObject


class _TextPromptBase(TypedDict):
    prompt: str


class TextPrompt(_TextPromptBase, total=False):
    """`{"prompt": "..."}`: text, tokenized with the model's special tokens. Only prompts with equal `cache_salt` share
    cached prefixes."""

    cache_salt: str


class _TokensPromptBase(TypedDict):
    prompt_token_ids: list[int]


class TokensPrompt(_TokensPromptBase, total=False):
    """`{"prompt_token_ids": [...]}`: used as given; an optional `prompt` is only copied to the output."""

    prompt: str
    cache_salt: str


@dataclass
class LoRARequest:
    """An adapter, as in vLLM. Adapters are not supported here: `LLM.generate` refuses them.

    Attributes:
        lora_name, lora_int_id: unique name and number of the adapter.
        lora_path: the adapter's folder.
    """

    lora_name: str
    lora_int_id: int
    lora_path: str = ""


PromptType = str | list[int] | TextPrompt | TokensPrompt
# {"role": ..., "content": text or a list of parts, ...}; a chat template defines the other keys.
ChatMessage = JsonObject

if not TYPE_CHECKING:  # or mypy would take any name
    __getattr__ = missing_names(__name__)
