"""GGUF files: the container, its metadata as a config.json, its tensors under Hugging Face's names, its tokenizer."""
