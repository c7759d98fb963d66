"""Recurrent layers whose state is a window or a vector per channel."""
