"""Records that process 0 is gone, which no process of the run can do.

Process 0 writes the record. When it dies, JAX aborts the others from C++ within seconds, whatever Python does. So
process 1 has a child that outlives it. The child ends the record if nothing answers at process 0's address.

    python -m trainer.hosts.loss_of_first RECORD HOST:PORT NAME
"""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from trainer.files.atomic import write_atomically
from trainer.hosts.peers import Peers

_OVER = b"over"
_ANSWERS_WITHIN_S = 5.0
# A process that was killed may answer until the system has taken it apart.
_ANSWERS_FOR_S = 10.0
_ASKED_EVERY_S = 0.5


@contextlib.contextmanager
def recording_loss_of_first(record: Path, peers: Peers) -> Iterator[None]:
    """If process 0 is lost inside, the record says so within seconds.

    Args:
      record: the run's `record.json`, on a file system that all processes share.
      peers: the processes.
    """
    if peers.index != 1:
        yield
        return
    command = [sys.executable, "-m", __name__, str(record), peers.first_address, peers.name(0)]
    # In a session of its own, so that a Ctrl-C in the terminal doesn't end it.
    child = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
    assert child.stdin is not None
    try:
        yield
    except BaseException:
        # It may come of the loss: an exchange fails before JAX aborts. The child outlives this process, and looks.
        child.stdin.close()
        raise
    with contextlib.suppress(OSError):  # somebody has killed it
        child.stdin.write(_OVER)
        child.stdin.close()
    child.wait()


def end_record(record: Path, first_address: str, name: str) -> None:
    """Ends a record that says `running`, unless process 0 answers, and goes on answering.

    Args:
      record: the run's.
      first_address: HOST:PORT of process 0.
      name: of process 0, for the message.
    """
    if not record.exists():  # process 0 died before it could write one
        return
    deadline = time.monotonic() + _ANSWERS_FOR_S
    while _read(record)["status"] == "running" and _answers(first_address):
        if time.monotonic() > deadline:
            return
        time.sleep(_ASKED_EVERY_S)
    # Its last word may have come after the record was read, and before process 0 stopped answering.
    fields = _read(record)
    if fields["status"] != "running":
        return
    fields |= {
        "status": "failed",
        "message": (
            f"{name} is gone: nothing answers at {first_address}, and JAX has ended the other processes; run the same "
            "command again, with as many processes as there are"
        ),
        "updated": datetime.now(UTC).isoformat(timespec="milliseconds"),
    }
    write_atomically(record, json.dumps(fields, indent=2) + "\n")


def _read(record: Path) -> dict[str, Any]:
    return json.loads(record.read_text(encoding="utf-8"))


def _answers(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=_ANSWERS_WITHIN_S):
            return True
    except OSError:
        return False


def main() -> None:
    """Waits until process 1 says that all is over, or is gone, or fails."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a launcher sends it to all that it has started
    if sys.stdin.buffer.read() != _OVER:
        record, first_address, name = sys.argv[1:]
        end_record(Path(record), first_address, name)


if __name__ == "__main__":
    main()
