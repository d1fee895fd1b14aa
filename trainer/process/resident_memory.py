"""Resident memory of a process: now, and at its highest."""

from __future__ import annotations

import contextlib
import re
import resource
import sys
from pathlib import Path


def resident_bytes(pid: int | str = "self") -> int | None:
    """What a process has resident now; None where the system doesn't tell (only Linux does), or it has ended."""
    return _from_proc("VmRSS", pid)


def peak_resident_bytes() -> int:
    """The most that this process has had resident, since it started or since `reset_peak`."""
    # getrusage goes on from the peak of the process that started this one, and can't be reset; /proc doesn't, and can.
    peak = _from_proc("VmHWM")
    if peak is not None:
        return peak
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def reset_peak() -> None:
    """Begins the peak anew from what is resident now, where the system lets it (Linux)."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # proc_pid_clear_refs(5)


def _from_proc(name: str, pid: int | str = "self") -> int | None:
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return None
    found = re.search(rf"^{name}:\s+(\d+) kB", status, re.MULTILINE)
    return None if found is None else int(found[1]) * 1024
