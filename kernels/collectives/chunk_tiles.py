"""The tiles that chunks are copied in: lines of so many numbers, whatever the tokens and features are."""

LINE = 256
"""Numbers of a line: the most that one copy can be wide."""
TILE_LINES = 32
"""Lines of a tile. A smaller one divides it."""
