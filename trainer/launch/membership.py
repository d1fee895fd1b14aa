"""This process among those of its run: from meeting the others to telling them how it ended."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

from trainer.errors import TrainingFailed, UserMistake
from trainer.launch.peer_watch import Farewell, PeerWatch
from trainer.launch.peers import Peers
from trainer.launch.process_exit import FAILED, MISTAKE, PEER_LOST, leave

_OF_FIRST_S = 3.0  # a mistake that all share is known to all at about the same time


class Membership:
    """Keeps the others informed, inside `with`. It ends this process when another one ends before the run is over.

    Args:
      peers: the processes.
    """

    def __init__(self, peers: Peers):
        self.peers, self.watch = peers, PeerWatch(peers)
        self.watch.on_end = self._follow
        self.on_end: Callable[[Farewell], None] = lambda farewell: None
        """Called, from a thread, before this process ends because another one has."""
        self.is_told = False
        """True: process 0 prints the error that ends this process, so that this one needn't."""

    def announce_end(self, farewell: Farewell) -> None:
        """Tells the others that this process is about to end."""
        if self.peers.count > 1:
            self.watch.announce_end(farewell)

    def blame(self) -> None:
        """Waits as long as it takes to find that another process is gone; if one is, this process ends here.

        A collective that breaks off tells nothing of why. The watch knows, some seconds later.
        """
        if self.peers.count > 1:
            self.watch.wait_for_silent()

    def __enter__(self) -> Self:
        self.watch.start()
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.peers.count == 1:
            return
        self.watch.stop()
        if error is None:
            self.watch.announce_end(None)
            return
        status = MISTAKE if isinstance(error, UserMistake) else FAILED
        named = isinstance(error, UserMistake | TrainingFailed)
        message = str(error) if named else f"{type(error).__name__}: {error}"
        self.watch.announce_end(Farewell(status, message))
        if not self.peers.is_first:
            if named:  # the traceback of any other error is this process's to print, and process 0 waits for it
                of_first = self.watch.farewell_of(0, _OF_FIRST_S)
                self.is_told = of_first is not None and of_first.message == message
            return
        # JAX aborts the others as soon as this process is gone, which holds the coordination service.
        latest = time.monotonic() + _OF_FIRST_S
        for index in range(1, self.peers.count):
            self.watch.farewell_of(index, max(0.0, latest - time.monotonic()))

    def _follow(self, index: int, farewell: Farewell) -> None:
        """Ends this process, since another one has ended."""
        message = farewell.message
        if not message.startswith(self.peers.name(index)):
            message = f"{self.peers.name(index)}: {message}"
        ended = Farewell(farewell.status, message)
        is_gone = farewell.status == PEER_LOST
        words = [lambda: self.on_end(ended), lambda: self.watch.announce_end(ended, num_gone=int(is_gone))]
        if self.peers.is_first:
            words.append(lambda: print(f"error: {message}", file=sys.stderr, flush=True))
        leave(farewell.status, *words)


ALONE = Membership(Peers())
"""A process that trains alone."""
