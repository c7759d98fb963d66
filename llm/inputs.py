"""The prompt types that `LLM.generate` takes, under vLLM's names; plain dicts at run time."""

from __future__ import annotations

from typing import TypedDict


class TextPrompt(TypedDict):
    """`{"prompt": "..."}`: text, tokenized with the model's special tokens."""

    prompt: str


class _TokensPromptBase(TypedDict):
    prompt_token_ids: list[int]


class TokensPrompt(_TokensPromptBase, total=False):
    """`{"prompt_token_ids": [...]}`: ids used as they are; an optional `prompt` is only echoed in the output."""

    prompt: str


PromptType = str | list[int] | TextPrompt | TokensPrompt
