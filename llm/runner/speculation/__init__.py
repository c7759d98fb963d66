"""Speculative decoding: who drafts tokens, and how many. `logit_rows.py` verifies them; answers do not change."""
