"""The prompt types of `LLM.generate`, under vLLM's names; plain dicts at run time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypedDict

from llm.base.checks import check_integer, refuse
from llm.base.types import JsonObject
from llm.base.vllm_paths import missing_names


class _TextPromptBase(TypedDict):
    prompt: str


class _WithImages(TypedDict, total=False):
    multi_modal_data: dict[str, object]
    multi_modal_uuids: dict[str, object]
    mm_processor_kwargs: dict[str, object]


class TextPrompt(_TextPromptBase, _WithImages, total=False):
    """`{"prompt": "..."}`: text, tokenized with the model's special tokens. Only prompts with equal `cache_salt` share
    cached prefixes."""

    cache_salt: str


class _TokensPromptBase(TypedDict):
    prompt_token_ids: list[int]


class TokensPrompt(_TokensPromptBase, _WithImages, total=False):
    """`{"prompt_token_ids": [...]}`: used as given; an optional `prompt` is only copied to the output."""

    prompt: str
    cache_salt: str


@dataclass
class LoRARequest:
    """An adapter for a call or a row, of an `LLM(enable_lora=True)`.

    Attributes:
        lora_name: of the adapter; what it computes depends on its files alone.
        lora_int_id: its number.
        lora_path: its folder in PEFT's layout, or a hub name.
        base_model_name: the model that it is for; not used.
    """

    lora_name: str
    lora_int_id: int
    lora_path: str = ""
    base_model_name: str | None = None

    def __post_init__(self) -> None:
        self.lora_path = str(self.lora_path)
        for name in ("lora_name", "lora_path"):
            if not isinstance(getattr(self, name), str) or not getattr(self, name):
                refuse(name, getattr(self, name), "a text that is not empty")
        check_integer("lora_int_id", self.lora_int_id, 1)


PromptType = str | list[int] | TextPrompt | TokensPrompt
# {"role": ..., "content": text or a list of parts, ...}; a chat template defines the other keys.
ChatMessage = JsonObject

if not TYPE_CHECKING:  # or mypy would take any name
    __getattr__ = missing_names(__name__)
