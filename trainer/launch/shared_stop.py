"""Stop signals that all processes of a run obey at the same place."""

from __future__ import annotations

import threading
from collections.abc import Callable

from trainer.launch.peer_watch import PeerWatch
from trainer.launch.peers import Peers
from trainer.launch.signals import StopRequest


class SharedStopRequest(StopRequest):
    """A request to stop that reaches one process is one to all.

    Processes run the same steps, each some ahead of another. If one stopped by itself, the others would wait for its
    part of the next step for ever. So they agree: each counts how often it has asked `requested`, and after a signal
    all stop at the first asking that none of them is past. The main thread only waits while the counts are exchanged,
    by other threads, and never while another process waits for it.

    Args:
      on_request: called in every process with the signal's name and the process that got it (None: this one).
      on_leave: as in `StopRequest`.
      peers: the processes.
      watch: carries the signal to the others.
      owns_process: as in `StopRequest`.
    """

    def __init__(
        self,
        on_request: Callable[[str, str | None], None],
        on_leave: Callable[[], None],
        peers: Peers,
        watch: PeerWatch,
        *,
        owns_process: bool = True,
    ):
        self._peers, self._told = peers, on_request
        announce = watch.announce_stop if peers.count > 1 else lambda signal: on_request(signal, None)
        super().__init__(announce, on_leave, owns_process=owns_process)
        watch.on_stop = self._agree
        self._changed = threading.Condition()
        self._num_asked = 0
        self._is_agreeing = False
        self._last_go: int | None = None
        """How many askings are answered by False; None: all, so far."""

    @property
    def requested(self) -> bool:
        """True: stop now. All processes have to ask at the same places; the answers are the same there."""
        if self._peers.count == 1:
            return super().requested
        with self._changed:
            self._num_asked += 1
            self._changed.wait_for(lambda: not self._is_agreeing)
            return self._last_go is not None and self._num_asked > self._last_go

    def _agree(self, index: int, signal: str) -> None:
        with self._changed:
            self._is_agreeing, num_asked = True, self._num_asked
        self._requested.set()  # whoever waits for a next try waits no longer
        self._told(signal, None if index == self._peers.index else self._peers.name(index))
        counts = self._peers.exchange("stop", str(num_asked))
        with self._changed:
            self._last_go, self._is_agreeing = max(map(int, counts)), False
            self._changed.notify_all()
