"""The paths that code written for vLLM imports: thin re-exports, nothing is defined here."""
