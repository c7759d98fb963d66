"""From a model name to filled parameters: safetensors only, strict and complete."""
