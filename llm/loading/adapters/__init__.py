"""Adapters in PEFT's layout (LoRA): their configuration, their tensors, the layers they change, and merging them."""
