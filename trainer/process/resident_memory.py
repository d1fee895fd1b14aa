"""Resident memory of a process, now and at its peak."""

from __future__ import annotations

import contextlib
import re
import resource
import sys
from pathlib import Path


def resident_bytes(pid: int | str = "self") -> int | None:
    """Bytes that a process has resident now; None if it has ended, or the system isn't Linux and can't tell."""
    return _from_proc("VmRSS", pid)


def peak_resident_bytes() -> int:
    """Most bytes that this process has had resident, since it started or since `reset_peak`."""
    # getrusage starts from the peak of the parent process and can't be reset. /proc has neither fault.
    peak = _from_proc("VmHWM")
    if peak is not None:
        return peak
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def reset_peak() -> None:
    """Resets the peak to what is resident now, where the system allows it (Linux)."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # proc_pid_clear_refs(5)


def _from_proc(name: str, pid: int | str = "self") -> int | None:
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return None
    found = re.search(rf"^{name}:\s+(\d+) kB", status, re.MULTILINE)
    return None if found is None else int(found[1]) * 1024
