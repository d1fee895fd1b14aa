"""The statuses that `python -m trainer` ends with, in one place."""

from __future__ import annotations

COMPLETED = 0
FAILED = 1
MISTAKE = 2
"""In the command, the config or the data."""
PEER_LOST = 69
"""Another process of the run is gone (sysexits.h's EX_UNAVAILABLE): run the same command again."""
STALLED = 70
"""The watchdog ended a run that hung (EX_SOFTWARE): run the same command again."""
PREEMPTED = 75
"""Stopped by a signal (EX_TEMPFAIL): run the same command again."""
INTERRUPTED = 130
"""Stopped by a second Ctrl-C, without saving; what a shell reports for a process that Ctrl-C ended."""
