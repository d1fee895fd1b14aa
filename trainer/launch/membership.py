"""This process among those of its run: it hears how the others fare, and tells them how it ends itself.

JAX notices a process that is gone as well, but ends this one from C++ then, without a word in the record. It comes
second: its limit is longer (`trainer/launch/together.py`).
"""

from __future__ import annotations

import contextlib
import json
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import Self

from trainer.errors import TrainingFailed, UserMistake
from trainer.launch.peers import Peers
from trainer.launch.process_exit import FAILED, MISTAKE, PEER_LOST, leave

SILENT_AFTER_S = 12.0
"""Seconds without a sign of life, after which a process counts as gone."""
_FOUND_AFTER_S = 20.0  # after which all have heard of a process that is gone
_LOOK_EVERY_S = 0.5
_FAREWELL_S = 5.0
# From the time at which all have heard it to the end of process 0, with which JAX aborts whoever is still printing.
_TO_LEAVE_S = 0.5


@dataclass(frozen=True)
class Farewell:
    """Why a process has ended, or is taken to have."""

    status: int
    """Its exit status, which becomes that of the others."""
    message: str


class Membership:
    """Gives signs of life and looks for those of the others, in a thread, inside `with`.

    It ends this process when another one ends before the run is over. Process 0 looks whether each process is alive,
    and tells the others. Process 0 itself holds JAX's coordination service: JAX ends the others within seconds when it
    is gone. The next attempt tells that this one was killed.

    Args:
      peers: the processes.
    """

    def __init__(self, peers: Peers):
        self.peers = peers
        self.on_end: Callable[[Farewell], None] = lambda farewell: None
        """Called, from a thread, before this process ends because another one has."""
        self.on_stop: Callable[[int, str], None] = lambda index, signal: None
        """Called once, from a thread, with the first process that has to stop, and the signal's name."""
        self._signs: dict[int, tuple[str, float]] = {}  # each process's last sign of life, and how long it is the last
        self._awake_s = 0.0
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="peer-watch", daemon=True)

    def announce_stop(self, signal: str) -> None:
        """Tells all processes, this one too, that this one has to stop."""
        self.peers.post(f"news/stop/{self.peers.index}", signal, overwrites=True)

    def announce_end(self, farewell: Farewell | None, num_gone: int = 0) -> None:
        """Tells the others that this process ends. Process 0 waits until they have heard it and had their say.

        Args:
          farewell: why; None: as the run does.
          num_gone: processes that hear nothing any more.
        """
        peers, said = self.peers, "" if farewell is None else json.dumps(asdict(farewell))
        if peers.count == 1:
            return
        with contextlib.suppress(RuntimeError):  # process 0 is gone already
            peers.post(f"news/end/{peers.index}", said, overwrites=True)
            if peers.is_first and farewell is not None:
                deadline = time.monotonic() + _FAREWELL_S
                while len(peers.posted("news/end")) < peers.count - num_gone and time.monotonic() < deadline:
                    time.sleep(_LOOK_EVERY_S / 5)
                time.sleep(_TO_LEAVE_S)

    def blame(self) -> None:
        """Waits as long as it takes to find that another process is gone; if one is, this process ends here.

        A collective that breaks off tells nothing of why.
        """
        if self.peers.count > 1:
            time.sleep(_FOUND_AFTER_S)

    def __enter__(self) -> Self:
        if self.peers.count > 1:
            self._thread.start()
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join()
        if error is None:
            self.announce_end(None)
        else:
            is_named = isinstance(error, UserMistake | TrainingFailed)
            message = str(error) if is_named else f"{type(error).__name__}: {error}"
            self.announce_end(Farewell(MISTAKE if isinstance(error, UserMistake) else FAILED, message))

    def _run(self) -> None:
        is_stopping, last_look, count = False, time.monotonic(), 0
        while not self._closing.wait(_LOOK_EVERY_S):
            # Seconds count while this thread runs: after a suspension everybody has the whole time again.
            now = time.monotonic()
            self._awake_s += min(now - last_look, 2 * _LOOK_EVERY_S)
            last_look, count = now, count + 1
            try:
                self.peers.post(f"alive/{self.peers.index}", str(count), overwrites=True)
                stops, ends = self.peers.posted("news/stop"), self.peers.posted("news/end")
                silent = self._find_silent(ends) if self.peers.is_first else None
            except RuntimeError:  # process 0 is gone, and JAX is about to end this one
                continue
            if stops and not is_stopping:
                is_stopping = True
                threading.Thread(target=self.on_stop, args=min(stops.items()), daemon=True).start()
            early = {index: said for index, said in ends.items() if said and index != self.peers.index}
            if early:
                index, said = min(early.items())
                return self._follow(index, Farewell(**json.loads(said)))
            if silent is not None:
                message = (
                    f"{self.peers.name(silent)} is gone: no sign of life for {SILENT_AFTER_S:.0f} s (killed, or its "
                    "machine or network is down?); run the same command again, with as many processes as there are"
                )
                return self._follow(silent, Farewell(PEER_LOST, message))

    def _find_silent(self, ended: dict[int, str]) -> int | None:
        """A process that has given no sign of life for too long."""
        signs = self.peers.posted("alive")
        for index in range(1, self.peers.count):
            sign = signs.get(index, "")
            before, since = self._signs.get(index, ("none", 0.0))
            if sign != before:
                self._signs[index] = (sign, self._awake_s)
            elif index not in ended and self._awake_s - since > SILENT_AFTER_S:
                return index
        return None

    def _follow(self, index: int, farewell: Farewell) -> None:
        """Ends this process, since another one has ended."""
        message, name = farewell.message, self.peers.name(index)
        ended = Farewell(farewell.status, message if message.startswith(name) else f"{name}: {message}")
        num_gone = int(farewell.status == PEER_LOST)
        words = [lambda: self.on_end(ended), lambda: self.announce_end(ended, num_gone)]
        if self.peers.is_first:
            words.append(lambda: print(f"error: {ended.message}", file=sys.stderr, flush=True))
        leave(farewell.status, *words)


ALONE = Membership(Peers())
"""A process that trains alone."""
