"""Qwen 2 VL: its language model, as that of Qwen 2.5 VL."""

from __future__ import annotations

from llm.models.qwen2_5_vl import Qwen2_5_VLForConditionalGeneration


class Qwen2VLForConditionalGeneration(Qwen2_5_VLForConditionalGeneration):
    """The same language model, behind another vision tower."""
