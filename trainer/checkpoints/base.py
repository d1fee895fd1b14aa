"""The frozen base of a run with adapters: the folder that it began with, which its checkpoints name by a digest.

A checkpoint holds what trains. Whoever reads it reads the rest from the base, whose digest has to be the same.
"""

from __future__ import annotations

import hashlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax

from layers.pretrained import read_params
from layers.pretrained.folder import CONFIG_NAME, inside, open_tensors
from layers.pretrained.peft import model_folder
from layers.pretrained.table import parameter_shapes
from trainer.compile.out_of_memory import reason_of
from trainer.config import TrainConfig
from trainer.config.init_from import is_workdir
from trainer.errors import UserMistake
from trainer.step.frozen import FROZEN_DTYPE


def require_base(config: TrainConfig) -> None:
    """Refuses adapters without a folder to be the base.

    Raises:
      UserMistake: `init_from` isn't given, or is a run's workdir, whose checkpoints come and go.
    """
    if config.lora.rank is None:
        return
    if config.init_from is None:
        raise UserMistake(
            f"lora.rank={config.lora.rank} trains adapters of a pretrained model; name its folder with init_from, or "
            "leave lora out"
        )
    if is_workdir(Path(config.init_from).expanduser()):
        raise UserMistake(
            f"init_from={config.init_from!r} is a run's workdir, whose checkpoints come and go, and adapters need a "
            "base that stays; export the run first, with python -m trainer.export"
        )


def base_digest(config: TrainConfig) -> str | None:
    """SHA-256 of the base's config.json and weights, which are read for it; None: the run has no adapters.

    Raises:
      UserMistake: the folder can't be read.
    """
    if config.lora.rank is None:
        return None
    folder = _base_folder(config)
    try:
        with open_tensors(folder) as tensors:
            files = sorted({Path(tensor.file.path) for tensor in tensors.values()})
        with ThreadPoolExecutor(8) as executor:  # hashlib lets other threads run
            found = list(executor.map(_sha256, [inside(folder, CONFIG_NAME), *files]))
    except (ValueError, OSError) as refused:
        raise UserMistake(f"init_from={config.init_from!r}: {refused}") from refused
    return hashlib.sha256("".join(found).encode()).hexdigest()


def require_same_base(config: TrainConfig, digest: str | None, checkpoint: Path, base: str | None) -> None:
    """Refuses another base than a checkpoint's.

    Args:
      config: of the run.
      digest: of the base that is there, from `base_digest`.
      checkpoint: its folder.
      base: the digest that it names.

    Raises:
      UserMistake: they differ.
    """
    if digest != base:
        raise UserMistake(
            f"checkpoint {checkpoint} holds adapters of the base with SHA-256 {base}, and the weights in "
            f"{_base_folder(config) if digest else config.init_from} have {digest}; put the base back that the run "
            "began with"
        )


def read_base(config: TrainConfig, shardings: Any) -> Any:
    """Reads the base's parameters: those that `lora` freezes in bfloat16, and the others in the parameters' dtype.

    Args:
      config: of the run.
      shardings: a nested dict of shardings of the model's parameters, without adapters.

    Raises:
      UserMistake: the folder doesn't hold this model's parameters.
    """

    def dtype_of(path: tuple[Any, ...], _: Any) -> Any:
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        return config.model.param_dtype if config.lora.trains(name) else FROZEN_DTYPE

    dtypes = jax.tree_util.tree_map_with_path(dtype_of, parameter_shapes(config.model))
    try:
        return read_params(_base_folder(config), config.model, shardings, dtype=dtypes)
    except (ValueError, OSError) as refused:
        if reason_of(refused) is not None:  # as JAX tells that memory ran out
            raise
        raise UserMistake(f"init_from={config.init_from!r}: {refused}") from refused


def _base_folder(config: TrainConfig) -> Path:
    assert config.init_from is not None, "`require_base` has seen to it"
    return model_folder(Path(config.init_from).expanduser().absolute())


def _sha256(path: Path) -> str:
    with path.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()
