"""Tokens per second of whole training steps, and where a step's time goes."""
