"""Which `tokenizer.json` is meant by a folder, by another file of a tokenizer, or by a name on the Hub."""

from __future__ import annotations

import os
import re
from pathlib import Path

from trainer.errors import DataError

# The other files of a tokenizer in published folders: SentencePiece's, tiktoken's and transformers' own.
_OTHER_FILE = re.compile(
    r".+\.(model|tiktoken|spm)|vocab\.(json|txt)|merges\.txt|(tokenizer_)?config\.json|(special|added)_tokens(_map)?\.json"
)
_EXPECTED = "give `byte` or a tokenizer.json's path"


def require_tokenizer_file(path: Path, setting: str) -> None:
    """Refuses what isn't a `tokenizer.json` by its path alone.

    Args:
        path: what was named. Files of unknown names pass.
        setting: the field or flag that named it, for messages.

    Raises:
        DataError: says which file was meant, or how to make one.
    """
    named = f"{setting}={str(path)!r}"
    if os.path.isdir(path):
        raise DataError(f"{named} cannot be read: Is a directory; {_remedy(path)}")
    if os.path.isfile(path):
        if _OTHER_FILE.fullmatch(path.name):
            raise DataError(f"{named} is not a Hugging Face tokenizer.json; {_remedy(path.parent)}")
    elif not os.path.lexists(path):
        raise DataError(f"{named} cannot be read: No such file or directory; {_remedy_where_missing(path)}")


def _remedy(folder: Path) -> str:
    beside = folder / "tokenizer.json"
    if os.path.isfile(beside):
        return f"did you mean {beside}?"
    if not any(map(_OTHER_FILE.fullmatch, os.listdir(folder) if os.access(folder, os.R_OK) else ())):
        return _EXPECTED
    return (
        f"{_EXPECTED}; transformers makes one of the files there: from transformers import AutoTokenizer; "
        f"AutoTokenizer.from_pretrained({str(folder)!r}).save_pretrained({str(folder)!r})"
    )


def _remedy_where_missing(path: Path) -> str:
    if path.name == "tokenizer.json" and os.path.isdir(path.parent):
        return _remedy(path.parent)
    if re.fullmatch(r"[\w.-]+(/[\w.-]+)?", str(path)) and path.suffix != ".json":
        return f"{_EXPECTED}; a model's of the Hub: hf download {path} tokenizer.json --local-dir DIR"
    return _EXPECTED
