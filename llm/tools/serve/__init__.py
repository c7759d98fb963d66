"""An endpoint with OpenAI's protocol, for programs that speak nothing else: `python -m llm serve`, `llm.serve`."""
