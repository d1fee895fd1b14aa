"""Stops on SIGTERM, Ctrl-C and the loss of the terminal (SIGHUP), even while XLA compiles."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

from trainer.launch.process_exit import INTERRUPTED

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_LAST_WORD_S = 2.0  # a disk or terminal that hangs must not keep a process that has to leave


class StopRequest:
    """Takes the first SIGTERM, SIGHUP or Ctrl-C as a request to stop. A Ctrl-C after that ends the process at once.

    Python runs signal handlers between bytecodes of the main thread, so none would run during a long step or
    compilation. Instead, the interpreter writes each signal's number to a wake-up socket right away, and a thread reads
    it. A process that was started to outlive its terminal (`nohup`) ignores SIGHUP, and continues to. Outside of the
    main thread, where Python can't, no signal is heeded.

    Args:
      on_request: called once, from a thread, with the signal's name.
      on_leave: called, from a thread, before a second Ctrl-C ends the process. It gets two seconds.
      owns_process: whether a second Ctrl-C ends the process; otherwise it raises KeyboardInterrupt.
    """

    def __init__(
        self,
        on_request: Callable[[str], None],
        on_leave: Callable[[], None] = lambda: None,
        *,
        owns_process: bool = True,
    ):
        self._on_request, self._on_leave, self._owns_process = on_request, on_leave, owns_process
        self._num_interrupts = 0
        self._requested = threading.Event()
        self._receiver, self._sender = socket.socketpair()
        self._sender.setblocking(False)
        self._watcher = threading.Thread(target=self._watch, name="stop-request", daemon=True)

    @property
    def requested(self) -> bool:
        return self._requested.is_set()

    def wait(self, seconds: float) -> bool:
        """Waits for a request for at most some seconds, and returns whether there is one."""
        return self._requested.wait(seconds)

    def __enter__(self) -> Self:
        self._handlers: dict[int, Any] = {}
        if threading.current_thread() is threading.main_thread():
            heeded = [number for number in _SIGNALS if number != signal.SIGHUP or not _is_ignored(number)]
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
                answer = threading.Thread(target=self._on_request, args=(signal.Signals(number).name,), daemon=True)
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


def _is_ignored(number: signal.Signals) -> bool:
    return signal.getsignal(number) == signal.SIG_IGN
