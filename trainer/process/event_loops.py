"""Event loops that finish what was begun in them before they close.

Orbax writes many arrays at a time, in an event loop of its own, and closes that at the first write that fails. The
others then have nowhere to report to: TensorStore's threads and asyncio print a traceback or a warning for each, dozens
around the run's one message, and files are still being written after the save has failed.
"""

from __future__ import annotations

import asyncio


class DrainingEventLoop(asyncio.SelectorEventLoop):
    """Waits, when it is closed, for the tasks that it still has."""

    def close(self) -> None:
        if not self.is_closed():
            self.run_until_complete(_others_have_ended())
        super().close()


def drain_event_loops() -> None:
    """Makes every event loop of the process, from now on, a draining one; calling it again changes nothing.

    Orbax makes its loops by `asyncio.new_event_loop`. What that returns is the policy's to say; policies themselves are
    deprecated since Python 3.14, to go in 3.16.
    """
    asyncio.set_event_loop_policy(_DrainingPolicy())


class _DrainingPolicy(asyncio.DefaultEventLoopPolicy):
    def new_event_loop(self) -> asyncio.AbstractEventLoop:
        return DrainingEventLoop()


async def _others_have_ended() -> None:
    await asyncio.sleep(0)  # whoever waits for a task that has just ended hears of it
    while others := asyncio.all_tasks() - {asyncio.current_task()}:
        await asyncio.wait(others)
