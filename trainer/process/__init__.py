"""The process that a run lives in: its signals, streams, memory and packages."""
