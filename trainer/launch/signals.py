"""Stops on SIGTERM, Ctrl-C and the loss of the terminal (SIGHUP), even while XLA compiles; several processes together.

This imports the standard library alone: signals are watched before the seconds that all else takes to import.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

from trainer.launch.membership import ALONE, Membership
from trainer.launch.process_exit import INTERRUPTED

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_LAST_WORD_S = 2.0  # a disk or terminal that hangs must not keep a process that has to leave


class StopRequest:
    """Takes the first SIGTERM, SIGHUP or Ctrl-C as a request to stop. A Ctrl-C after that ends the process at once.

    Python runs signal handlers between bytecodes of the main thread, so none would run during a long step or
    compilation. Instead, the interpreter writes each signal's number to a wake-up socket right away, and a thread reads
    it. A process that was started to outlive its terminal (`nohup`) ignores SIGHUP, and continues to. Outside of the
    main thread, where Python can't, no signal is heeded.

    A request to one process is one to all. They run the same steps, each some ahead of another. If one stopped by
    itself, the others would wait for its part of the next step for ever. So they agree: each counts how often it has
    asked `requested`, and after a signal all stop at the first asking that none of them is past. The main thread only
    waits while the counts are exchanged, by other threads, and never while another process waits for it.

    Args:
      on_request: called once, from a thread, with the signal's name and the process that got it (None: this one).
      on_leave: called, from a thread, before a second Ctrl-C ends the process. It gets two seconds.
      membership: of this process among those of the run.
      owns_process: whether a second Ctrl-C ends the process; otherwise it raises KeyboardInterrupt.
    """

    def __init__(
        self,
        on_request: Callable[[str, str | None], None],
        on_leave: Callable[[], None] = lambda: None,
        membership: Membership = ALONE,
        *,
        owns_process: bool = True,
    ):
        self._on_request, self._on_leave, self._owns_process = on_request, on_leave, owns_process
        self._peers = membership.peers
        self._announce: Callable[[str], None] = lambda signal: on_request(signal, None)
        if self._peers.count > 1:
            self._announce, membership.on_stop = membership.announce_stop, self._agree
        self._num_interrupts = 0
        self._requested = threading.Event()
        self._receiver, self._sender = socket.socketpair()
        self._sender.setblocking(False)
        self._watcher = threading.Thread(target=self._watch, name="stop-request", daemon=True)
        self._changed = threading.Condition()
        self._num_asked = 0
        self._is_agreeing = False
        self._last_go: int | None = None
        """How many askings are answered by False; None: all, so far."""

    @property
    def requested(self) -> bool:
        """True: stop now. All processes have to ask at the same places; the answers are the same there."""
        if self._peers.count == 1:
            return self._requested.is_set()
        with self._changed:
            self._num_asked += 1
            self._changed.wait_for(lambda: not self._is_agreeing)
            return self._last_go is not None and self._num_asked > self._last_go

    def wait(self, seconds: float) -> bool:
        """Waits for a request for at most some seconds, and returns whether there is one."""
        return self._requested.wait(seconds)

    def __enter__(self) -> Self:
        self._handlers: dict[int, Any] = {}
        if threading.current_thread() is threading.main_thread():
            heeded = [each for each in _SIGNALS if each != signal.SIGHUP or signal.getsignal(each) != signal.SIG_IGN]
            self._handlers = {number: signal.signal(number, self._in_main_thread) for number in heeded}
            self._wakeup = signal.set_wakeup_fd(self._sender.fileno(), warn_on_full_buffer=False)
        self._watcher.start()
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._handlers:
            signal.set_wakeup_fd(self._wakeup)
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._sender.close()
        self._watcher.join()
        self._receiver.close()

    def _watch(self) -> None:
        answer: threading.Thread | None = None
        while received := self._receiver.recv(1):
            number = received[0]
            if number not in self._handlers:
                continue
            if answer is None:  # another process's signal may have come before, but not to this one
                self._requested.set()
                # In another thread: it may have to wait for a disk or a terminal, and Ctrl-C must still be heard.
                answer = threading.Thread(target=self._announce, args=(signal.Signals(number).name,), daemon=True)
                answer.start()
            elif number == signal.SIGINT and self._owns_process:
                last_word = threading.Thread(target=self._on_leave, daemon=True)
                last_word.start()
                last_word.join(_LAST_WORD_S)
                os._exit(INTERRUPTED)
        if answer is not None:
            answer.join(_LAST_WORD_S)

    def _in_main_thread(self, number: int, frame: object) -> None:
        """A signal needs a handler of Python's for its number to be written to the wake-up socket."""
        self._num_interrupts += number == signal.SIGINT
        if self._num_interrupts > 1 and not self._owns_process:
            raise KeyboardInterrupt

    def _agree(self, index: int, signal: str) -> None:
        with self._changed:
            self._is_agreeing, num_asked = True, self._num_asked
        self._requested.set()  # whoever waits for a next try waits no longer
        self._on_request(signal, None if index == self._peers.index else self._peers.name(index))
        counts = self._peers.exchange("stop", str(num_asked))
        with self._changed:
            self._last_go, self._is_agreeing = max(map(int, counts)), False
            self._changed.notify_all()
