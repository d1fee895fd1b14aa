"""Commands to copy for what a user may want to do with a run that has ended."""

from __future__ import annotations

import importlib.util
import os
import shlex
import shutil
import sys

from trainer.config import TrainConfig
from trainer.workdir import Workdir


def next_commands(config: TrainConfig, workdir: Workdir, *, has_checkpoint: bool) -> list[str]:
    """The commands that continue a text, if there is a checkpoint, and that show the curves."""
    python, folder = _python(), shlex.quote(str(workdir.path))
    tensorboard = f"{python} -m tensorboard.main --logdir {shlex.quote(str(workdir.tensorboard))}"
    if importlib.util.find_spec("tensorboard") is None:
        tensorboard = f"{python} -m pip install tensorboard && {tensorboard}"
    if not has_checkpoint or not _can_sample(config):
        return [tensorboard]
    # A .bin file doesn't say which tokenizer made it.
    tokenizer = " --tokenizer tokenizer.json" if config.data.source == "bin" and config.data.tokenizer is None else ""
    return [f'{python} -m trainer.sample --workdir {folder} --prompt "The "{tokenizer}', tensorboard]


def _can_sample(config: TrainConfig) -> bool:
    try:
        config.model.check_looks_back_only()
    except ValueError:
        return False
    return True


def _python() -> str:
    """The command for this Python. `make train` runs it from an environment that may not be active."""
    found = shutil.which("python")
    is_this = found is not None and os.path.abspath(found) == os.path.abspath(sys.executable)
    return "python" if is_this else shlex.quote(sys.executable)
