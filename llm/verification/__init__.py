"""Does a loaded model compute what it should: `LLM.verify` and `LLM.selfcheck`."""
