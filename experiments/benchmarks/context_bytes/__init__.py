"""Bytes on the wire for attention over the context axis, against the least that its masks and documents need.

__main__.py   the command: case after case, the table, JSON lines
measure.py    compiles one call's forward and backward for a topology, in a process of its own, and counts
least.py      the least, in closed form, from the mask's intervals and the sharding
"""
