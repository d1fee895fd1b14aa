"""Checkpoints: saved in the background, verified, read."""
