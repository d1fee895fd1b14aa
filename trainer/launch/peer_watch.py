"""Hears from the other processes: that one has to stop, that one has ended, or nothing at all for too long.

JAX notices a process that is gone as well, but ends this one from C++ then, without a word in the record. It comes
second: its limit is longer (`trainer/launch/connect.py`).
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

from trainer.launch.peers import Peers
from trainer.launch.process_exit import PEER_LOST

SILENT_AFTER_S = 12.0
"""Seconds without a sign of life, after which a process counts as gone."""
_LOOK_EVERY_S = 0.5
# Looks of process 0 after which the others have heard of any that is gone.
_LOOKS_TO_FIND_SILENT = round((SILENT_AFTER_S + 3) / _LOOK_EVERY_S)
_FAREWELL_S = 5.0
# From the time at which all have heard it to the end of process 0, with which JAX aborts whoever is still printing.
_TO_LEAVE_S = 0.5


@dataclass(frozen=True)
class Farewell:
    """Why a process has ended, or is taken to have."""

    status: int
    """Its exit status, which becomes that of the others."""
    message: str


class PeerWatch:
    """Gives signs of life, and looks for those of the others, in a thread.

    Process 0 looks whether each process is alive, and tells the others. Process 0 itself holds JAX's coordination
    service: JAX ends the others within seconds when it is gone. The next attempt tells that this one was killed.

    Args:
      peers: the processes.
    """

    def __init__(self, peers: Peers):
        self._peers = peers
        self.on_end: Callable[[int, Farewell], None] = lambda index, farewell: None
        """Called once, from a thread, with a process that has ended before the run was over. It ends this one."""
        self.on_stop: Callable[[int, str], None] = lambda index, signal: None
        """Called once, from a thread, with the first process that has to stop, and the signal's name."""
        self._signs: dict[int, tuple[str, float]] = {}  # each process's last sign of life, and how long it is the last
        self._awake_s = 0.0
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="peer-watch", daemon=True)

    def start(self) -> None:
        """Begins to look. Does nothing if there are no others."""
        if self._peers.count > 1:
            self._thread.start()

    def stop(self) -> None:
        """Looks no longer."""
        self._closing.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join()

    def announce_stop(self, signal: str) -> None:
        """Tells all processes, this one too, that this one has to stop."""
        self._peers.post(f"news/stop/{self._peers.index}", signal, overwrites=True)

    def announce_end(self, farewell: Farewell | None, num_gone: int = 0) -> None:
        """Tells the others that this process ends. Process 0 waits until they have heard it and had their say.

        Args:
          farewell: why; None: as the run does.
          num_gone: processes that hear nothing any more.
        """
        peers, said = self._peers, "" if farewell is None else json.dumps(asdict(farewell))
        with contextlib.suppress(RuntimeError):  # process 0 is gone already
            peers.post(f"news/end/{peers.index}", said, overwrites=True)
            if peers.is_first and farewell is not None:
                deadline = time.monotonic() + _FAREWELL_S
                while len(peers.posted("news/end")) < peers.count - num_gone and time.monotonic() < deadline:
                    time.sleep(_LOOK_EVERY_S / 5)
                time.sleep(_TO_LEAVE_S)

    def farewell_of(self, index: int, seconds: float) -> Farewell | None:
        """Why a process has ended, if it says so within some seconds."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            with contextlib.suppress(RuntimeError):  # process 0 is gone, and JAX is about to end this one
                if said := self._peers.posted("news/end").get(index):
                    return Farewell(**json.loads(said))
            time.sleep(_LOOK_EVERY_S / 5)
        return None

    def wait_for_silent(self, patience_s: float = 60.0) -> None:
        """Waits until process 0 has looked so often that it would have found any process that is gone.

        Process 0 may stand still meanwhile, as others do on a machine that has too much to do.

        Args:
          patience_s: the longest wait; process 0 itself is gone then, or hangs.
        """
        deadline = time.monotonic() + patience_s
        first_looks = self._looks_of_first()
        while self._looks_of_first() - first_looks < _LOOKS_TO_FIND_SILENT and time.monotonic() < deadline:
            time.sleep(_LOOK_EVERY_S)

    def _looks_of_first(self) -> int:
        """How often process 0 has looked; 0 if it is gone, and JAX is about to end this process."""
        with contextlib.suppress(RuntimeError):
            return int(self._peers.posted("alive").get(0, "0"))
        return 0

    def _run(self) -> None:
        is_stopping, last_look, count = False, time.monotonic(), 0
        while not self._closing.wait(_LOOK_EVERY_S):
            # Seconds count while this thread runs: after a suspension everybody has the whole time again.
            now = time.monotonic()
            self._awake_s += min(now - last_look, 2 * _LOOK_EVERY_S)
            last_look, count = now, count + 1
            try:
                self._peers.post(f"alive/{self._peers.index}", str(count), overwrites=True)
                stops, ends = self._peers.posted("news/stop"), self._peers.posted("news/end")
                silent = self._find_silent(ends) if self._peers.is_first else None
            except RuntimeError:  # process 0 is gone, and JAX is about to end this one
                continue
            if stops and not is_stopping:
                is_stopping = True
                threading.Thread(target=self.on_stop, args=min(stops.items()), daemon=True).start()
            early = {index: said for index, said in ends.items() if said and index != self._peers.index}
            if early:
                index, said = min(early.items())
                self.on_end(index, Farewell(**json.loads(said)))
                return
            if silent is not None:
                message = (
                    f"{self._peers.name(silent)} is gone: no sign of life for {SILENT_AFTER_S:.0f} s (killed, or its "
                    "machine or network is down?); run the same command again, with as many processes as there are"
                )
                self.on_end(silent, Farewell(PEER_LOST, message))
                return

    def _find_silent(self, ended: dict[int, str]) -> int | None:
        """A process that has given no sign of life for too long."""
        signs = self._peers.posted("alive")
        for index in range(1, self._peers.count):
            sign = signs.get(index, "")
            before, since = self._signs.get(index, ("none", 0.0))
            if sign != before:
                self._signs[index] = (sign, self._awake_s)
            elif index not in ended and self._awake_s - since > SILENT_AFTER_S:
                return index
        return None
