"""Speculative decoding: who drafts tokens, and how many. `llm.engine.lines` verifies them; answers do not change."""
