"""Tokens per second of whole training steps."""
