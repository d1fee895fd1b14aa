"""Ways to spoil a Hugging Face folder, as anybody may have who wrote it."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tests.layers.pretrained.samples import file_bytes

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
ABSENT = object()


def change_config(folder: Path, **changes: object) -> None:
    """Sets keys of config.json, or takes out those that are `ABSENT`."""
    config = json.loads((folder / "config.json").read_text()) | changes
    kept = {name: value for name, value in config.items() if value is not ABSENT}
    (folder / "config.json").write_text(json.dumps(kept))


def read_header(path: Path) -> tuple[dict[str, Any], bytes]:
    """A safetensors file's header, and the bytes that follow."""
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def change_header(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Changes the header of the folder's one file of tensors."""
    header, data = read_header(folder / WEIGHTS)
    change(header)
    (folder / WEIGHTS).write_bytes(file_bytes(header, data))


def split(folder: Path, change: Callable[[dict[str, str]], object] = lambda file_of: file_of) -> None:
    """Renames the folder's file to one.safetensors, and writes an index for it."""
    (folder / WEIGHTS).rename(folder / "one.safetensors")
    names = read_header(folder / "one.safetensors")[0].keys() - {"__metadata__"}
    index = {"weight_map": change(dict.fromkeys(sorted(names), "one.safetensors"))}
    (folder / INDEX).write_text(json.dumps(index))


def link_out(folder: Path, name: str) -> None:
    """Moves a file out of the folder, and links to it."""
    (folder / name).rename(folder.parent / name)
    (folder / name).symlink_to(folder.parent / name)


def pipe(folder: Path, name: str) -> None:
    """A named pipe in a file's place: opened like a file, it would wait for a writer."""
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)


def booby_trap(folder: Path) -> Path:
    """Adds code that leaves a mark, were it to run: modules, and a pickle.

    Returns:
      Where the mark would be.
    """
    mark = folder.parent / "ran"
    for name in ("json.py", "modeling_llama.py", "configuration_llama.py", "tokenization_llama.py", "setup.py"):
        (folder / name).write_text(f"open({str(mark)!r}, 'w')")

    class Opened:
        def __reduce__(self) -> tuple:
            return open, (str(mark), "w")

    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Opened()))
    return mark


Spoilt = Mapping[str, tuple[Callable[[Path], object], str]]
"""By what is wrong: how to spoil a llama's folder, and what is said of it, as a regular expression."""

CONFIGS: Spoilt = {
    "code to run": (
        lambda folder: change_config(folder, model_type="x", auto_map={"AutoModelForCausalLM": "modeling_llama.Model"}),
        r"'x'; expected one of llama, .*; code of the folder's own, which its auto_map names, is never run",
    ),
    "a family that a terminal obeys": (lambda folder: change_config(folder, model_type="\x1b[2J"), r"'\\x1b\[2J'; exp"),
    "no JSON": (lambda folder: (folder / "config.json").write_text("{"), r"config\.json isn't JSON: "),
    "10 GB of config": (lambda folder: os.truncate(folder / "config.json", 10 * 2**30), "10,737,418,240 bytes; expec"),
    "a config linked out": (lambda folder: link_out(folder, "config.json"), "is a link to .*, out of the folder; copy"),
    "a pipe": (lambda folder: pipe(folder, "config.json"), r"config\.json is not a regular file"),
    "billions of heads": (
        lambda folder: change_config(folder, num_attention_heads=2**30, num_key_value_heads=2**30),
        "num_attention_heads=1073741824; expected at most 4,096",
    ),
}

TOKENIZERS: Spoilt = {
    "a tokenizer linked out": (lambda folder: link_out(folder, "tokenizer.json"), "is a link to .*, out of the folder"),
    "a tokenizer that is a pipe": (lambda folder: pipe(folder, "tokenizer.json"), "json is not a regular file"),
    "its config a pipe": (lambda folder: pipe(folder, "tokenizer_config.json"), "_config.json is not a regular file"),
}

TENSORS: Spoilt = {
    "truncated": (lambda folder: os.truncate(folder / WEIGHTS, 100_000), "bytes of data, but its header describes"),
    "a header of 10 GB": (
        lambda folder: (folder / WEIGHTS).write_bytes(file_bytes(b"{}", length=10 * 2**30)),
        "states a header of 10,737,418,240 bytes; the file has 2 after",
    ),
    "a name that a terminal obeys": (
        lambda folder: change_header(
            folder, lambda header: header.update({"\x1b[2J": header.pop("model.norm.weight")})
        ),
        r"1 missing: model\.norm\.weight; 1 unknown: '\\x1b\[2J'",
    ),
    "an index that leads out": (
        lambda folder: split(folder, lambda file_of: file_of | {"lm_head.weight": "../outside.safetensors"}),
        r"refers to the file '\.\./outside\.safetensors', which is not a plain file name",
    ),
    "an index of long names": (
        lambda folder: split(folder, lambda file_of: file_of | {"lm_head.weight": "a" * 10_000}),
        "llama has no file a{200}: File name too long",
    ),
    "tensors linked out": (lambda folder: link_out(folder, WEIGHTS), "is a link to .*, out of the folder; copy"),
    "pickles alone": (
        lambda folder: (folder / WEIGHTS).unlink(),
        "has neither model.safetensors nor .* save them once",
    ),
}
