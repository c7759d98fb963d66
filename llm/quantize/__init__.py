"""`quantization_report`, `save_quantized`, and the command that fills the README's table."""
