"""Strings and token ids: tokenizers, chat templates, replies and the tool calls in them."""
