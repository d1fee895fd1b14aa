"""A model's folder as Hugging Face lays it out: config.json, and one safetensors file or several and an index.

Names come from files that anybody may have written: none leads out of the folder, and no code in it runs.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from layers.pretrained.safetensors_file import FileTensor, SafetensorsFile

CONFIG_NAME = "config.json"
WEIGHTS_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"

_JSON_LIMIT = 100_000_000  # bytes


def read_config(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """Reads config.json; ValueError if there is none, or it is no JSON object."""
    return read_json(inside(folder, CONFIG_NAME))


@contextlib.contextmanager
def open_tensors(folder: str | os.PathLike[str]) -> Iterator[dict[str, FileTensor]]:
    """Opens the folder's weights as long as the context lasts: tensors by their names, to be read slice by slice.

    Raises:
      ValueError: a file is missing, damaged or outside of the folder, or disagrees with the index.
    """
    with contextlib.ExitStack() as stack:
        if os.path.lexists(Path(folder) / WEIGHTS_NAME):
            yield stack.enter_context(SafetensorsFile(inside(folder, WEIGHTS_NAME))).tensors
            return
        if not os.path.lexists(Path(folder) / INDEX_NAME):
            raise ValueError(
                f"{folder} has neither {WEIGHTS_NAME} nor {INDEX_NAME}; if its weights have another format, save them "
                "once with transformers: AutoModelForCausalLM.from_pretrained(…).save_pretrained(…)"
            )
        file_of = _read_index(inside(folder, INDEX_NAME))
        tensors: dict[str, FileTensor] = {}
        for name in sorted(set(file_of.values())):
            file = stack.enter_context(SafetensorsFile(inside(folder, name)))
            listed = {tensor for tensor, its_file in file_of.items() if its_file == name}
            if differing := sorted(listed ^ set(file.tensors)):
                raise ValueError(
                    f"{file.path} and {INDEX_NAME} disagree on {len(differing)} tensors, {differing[0]!r:.200} among "
                    "them; download the folder again"
                )
            tensors |= file.tensors
        yield tensors


def inside(folder: str | os.PathLike[str], name: str) -> Path:
    """Path of a regular file that lies directly in a folder; its name comes from a source that isn't trusted.

    Raises:
      ValueError: the name is no plain file name, the file isn't there, is of another type, or is a link out of the
        folder.
    """
    # A terminal would obey what isn't printable.
    if name in ("", ".", "..") or any(character in name for character in "/\\") or not name.isprintable():
        raise ValueError(f"{folder} refers to the file {name!r:.200}, which is not a plain file name within it")
    if not os.path.isdir(folder):
        raise ValueError(f"{folder} is not a folder; expected one with a {CONFIG_NAME} and safetensors files")
    path = Path(folder) / name
    try:
        real = path.resolve(strict=True)
    except (OSError, RuntimeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "a link to itself"
        raise ValueError(f"{folder} has no file {name:.200}: {reason}") from error
    if not real.is_relative_to(Path(folder).resolve()):
        raise ValueError(
            f"{path} is a link to {str(real)!r:.500}, out of the folder; copy the folder with its links followed "
            "(cp -rL), or download it with `hf download --local-dir`"
        )
    if not real.is_file():
        raise ValueError(f"{path} is not a regular file; download it again")
    return path


def read_json(path: Path) -> dict[str, Any]:
    """Reads a JSON object of a path from `inside`; ValueError if it is something else, or larger than any such file."""
    if (size := path.stat().st_size) > _JSON_LIMIT:
        raise ValueError(f"{path} has {size:,} bytes; expected JSON of at most {_JSON_LIMIT:,}")
    try:
        value = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} isn't JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path} isn't a JSON object")
    return value


def _read_index(path: Path) -> Mapping[str, str]:
    file_of = read_json(path).get("weight_map")
    if not isinstance(file_of, dict) or not file_of or not all(isinstance(name, str) for name in file_of.values()):
        raise ValueError(f"{path} has no weight_map from tensors' names to files' names")
    return file_of
