"""Trains the GPT of `layers` from one config: `python -m trainer --config experiments/gpt_32k.py`, or `trainer.run`.

`train.py` shows a whole run from top to bottom; read it first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flax_longcontext import require_ours, warn_of_neighbours

if TYPE_CHECKING:
    import os

    from trainer.config import TrainConfig

require_ours("kernels", "layers", importer=__name__)
warn_of_neighbours(__name__)


def run(config: TrainConfig, workdir: str | os.PathLike[str]) -> dict[str, Any]:
    """Trains in this process, from the workdir's newest checkpoint if there is one.

    Ctrl-C, SIGTERM and SIGHUP let the step under way end and save, where this is called in the main thread; a second
    Ctrl-C raises KeyboardInterrupt, without saving. The watchdog ends the process if the run hangs.

    Args:
      config: the experiment, as a page's `get_config` returns it.
      workdir: the run's folder; made if missing.

    Returns:
      The run's record, as record.json has it. Its `status` is "completed", or "preempted" after a stop signal.

    Raises:
      trainer.errors.UserMistake: config, data, workdir or devices can't be used; a ValueError.
      trainer.errors.TrainingFailed: the run can't go on; a RuntimeError.
    """
    from trainer.in_process import run_in_process  # imports JAX, Flax and Orbax: seconds

    return run_in_process(config, workdir)
