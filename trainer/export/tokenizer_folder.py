"""The tokenizer of a run as a Hugging Face folder: it puts before a text what training put there."""

from __future__ import annotations

import contextlib
import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from layers.pretrained.folder import inside, read_json
from layers.pretrained.save import GENERATION_NAME, TOKENIZER_NAMES
from trainer.data import HuggingFaceTokenizer, Tokenizer
from trainer.data.documents import Delimiters
from trainer.data.tokenizer_file import CONFIG_NAME, set_tokens_before_text, tokens_around_text

_FILE_NAME = "tokenizer.json"
_MAP_NAME = "special_tokens_map.json"


def special_token_ids(delimiters: Delimiters) -> dict[str, int]:
    """The tokens that begin and end documents, as a generation config names them."""
    names = {"bos_token_id": delimiters.begin, "eos_token_id": delimiters.end}
    return {name: token for name, token in names.items() if token is not None}


@contextlib.contextmanager
def tokenizer_folder(tokenizer: Tokenizer | None) -> Iterator[Path | None]:
    """A folder that holds the tokenizer as Hugging Face names its files; None: it is no such tokenizer.

    The files are the tokenizer's own, unless some version of transformers would begin texts otherwise by them than
    documents began: 5 follows the post-processor, 4 also `add_bos_token` for some classes, and for the class of the
    model's family where there is no `tokenizer_config.json`.
    """
    if not isinstance(tokenizer, HuggingFaceTokenizer):
        yield None
        return
    import tokenizers

    path, begin = Path(tokenizer.name).absolute(), tokenizer.delimiters.begin
    begins_as_in_files = _begins_as_in_files(tokenizer)
    wanted = [(tokenizer.token(begin) or "", begin)] if begin is not None else []
    wanted = tokenizer.before_text if begins_as_in_files else wanted
    content = json.loads(tokenizers.Tokenizer.from_file(str(path)).to_str())
    is_wanted = tokens_around_text(content["post_processor"])[0] == wanted
    if path.name == _FILE_NAME and begins_as_in_files and is_wanted and (path.parent / CONFIG_NAME).is_file():
        yield path.parent
        return
    with tempfile.TemporaryDirectory(prefix="trainer-export-") as name:
        folder = Path(name)
        if path.name == _FILE_NAME:
            for each in (*TOKENIZER_NAMES, GENERATION_NAME):
                if (path.parent / each).exists():
                    shutil.copyfile(inside(path.parent, each), folder / each)
        shutil.copyfile(path, folder / _FILE_NAME)
        if not is_wanted:
            set_tokens_before_text(content, wanted)
            _write_json(folder / _FILE_NAME, content)
        _tell_beginning(folder, tokenizer, adds=bool(wanted))
        yield folder


def _begins_as_in_files(tokenizer: HuggingFaceTokenizer) -> bool:
    """True if documents began as the tokenizer's files say that texts do."""
    begin, end = tokenizer.delimiters
    before = [token for _, token in tokenizer.before_text]
    return before == [begin] if before else begin in (None, end)


def _tell_beginning(folder: Path, tokenizer: HuggingFaceTokenizer, *, adds: bool) -> None:
    """Has the files beside a tokenizer.json say what documents began with, and whether texts begin with it."""
    begin, end = tokenizer.delimiters
    bos = {"bos_token": tokenizer.token(begin)}
    if not (folder / CONFIG_NAME).exists():
        eos = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": tokenizer.token(end)}
        _write_json(folder / CONFIG_NAME, eos)
    for file, change in (
        (CONFIG_NAME, {"add_bos_token": adds, **bos}),
        (_MAP_NAME, bos),
        (GENERATION_NAME, {"bos_token_id": begin}),
    ):
        if (folder / file).exists():
            _write_json(folder / file, read_json(folder / file) | change)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False), encoding="utf-8")
