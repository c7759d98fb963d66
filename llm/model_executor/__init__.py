"""The paths under which plugins written for vLLM find operations and layers: re-exports, one module per path."""
