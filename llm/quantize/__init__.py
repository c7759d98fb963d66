"""`quantization_report`, `save_quantized`, and the command behind the README's table."""
