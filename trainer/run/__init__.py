"""A run: prepared, resumed, looped."""
