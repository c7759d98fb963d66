"""What uses the public API alone: the benchmark, the doctor, the chat in a terminal, checks of a loaded model."""
