"""`trainer.run`: a whole run inside of somebody's own Python process."""

from __future__ import annotations

import json
import os
import time
from typing import Any

from trainer.config import TrainConfig
from trainer.config.file import check_types
from trainer.config.init_from import with_initial_model
from trainer.errors import TrainingFailed, UserMistake
from trainer.hosts.launch import refuse_several
from trainer.process.standard_streams import writable_in_any_encoding
from trainer.train import train
from trainer.workdir import claim_workdir


def run_in_process(config: TrainConfig, workdir: str | os.PathLike[str]) -> dict[str, Any]:
    """As `trainer.run`."""
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
