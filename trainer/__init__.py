"""Trains the GPT of `layers` from one config: `python -m trainer --config experiments/gpt_32k.py`, or `trainer.run`.

`train.py` shows a whole run from top to bottom; read it first.
"""

from __future__ import annotations

import json
import os
import time
from typing import TYPE_CHECKING, Any

from flax_longcontext import require_ours, warn_of_neighbours

if TYPE_CHECKING:
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
    # Imported here: JAX, Flax and Orbax take seconds.
    from trainer.config import TrainConfig
    from trainer.config.file import check_types
    from trainer.config.init_from import with_initial_model
    from trainer.errors import TrainingFailed, UserMistake
    from trainer.launch.launcher import refuse_several
    from trainer.terminal.streams import writable_in_any_encoding
    from trainer.train import train
    from trainer.workdir import claim_workdir

    started = time.perf_counter()
    refuse_several("trainer.run", os.environ)
    if not isinstance(config, TrainConfig):
        raise UserMistake(f"config is of type {type(config).__name__}; expected a trainer.config.TrainConfig")
    check_types(config)
    config = with_initial_model(config)
    with writable_in_any_encoding(), claim_workdir(workdir, config) as folder:
        train(config, folder, command=["trainer.run"], started=started, owns_process=False)
        try:
            return json.loads(folder.record.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise TrainingFailed(f"the run has ended, but its record {folder.record} can't be read: {error}") from error
