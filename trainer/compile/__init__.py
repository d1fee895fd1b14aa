"""Compiling: in timed stages, again when arguments change, and what is told when memory is too small for it."""
