"""From a model name to filled parameters: safetensors only, strict, complete."""
