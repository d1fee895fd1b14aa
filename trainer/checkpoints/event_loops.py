"""Event loops that finish their tasks before they close.

Orbax writes many arrays at a time in its own event loop, and closes the loop at the first write that fails. The other
writes then have nowhere to report to: TensorStore's threads and asyncio print a traceback or a warning for each of
them, around the run's one message, and files are still being written after the save has failed.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator


class DrainingEventLoop(asyncio.SelectorEventLoop):
    """When it is closed, it first waits for its remaining tasks."""

    def close(self) -> None:
        if not self.is_closed():
            self.run_until_complete(_others_have_ended())
        super().close()


@contextlib.contextmanager
def draining_event_loops() -> Iterator[None]:
    """Makes every new event loop of the process a draining one inside.

    Orbax makes its loops with `asyncio.new_event_loop`, which asks the policy. Policies are deprecated since Python
    3.14 and will be removed in 3.16.
    """
    before = asyncio.get_event_loop_policy()
    asyncio.set_event_loop_policy(_DrainingPolicy())
    try:
        yield
    finally:
        asyncio.set_event_loop_policy(before)


class _DrainingPolicy(asyncio.DefaultEventLoopPolicy):
    def new_event_loop(self) -> asyncio.AbstractEventLoop:
        return DrainingEventLoop()


async def _others_have_ended() -> None:
    await asyncio.sleep(0)  # lets those who wait for a task that has just ended run first
    while others := asyncio.all_tasks() - {asyncio.current_task()}:
        await asyncio.wait(others)
