"""The process of a run: its signals, streams, memory and packages."""
