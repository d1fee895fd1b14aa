"""How pre-tokenized `.bin` files store their tokens: nanoGPT's and llm.c's.

nanoGPT writes raw uint16 ids (https://github.com/karpathy/nanoGPT, data/openwebtext/prepare.py). llm.c writes
256 int32 of header – magic, version, number of tokens, zeros – and then the ids, uint16 for GPT-2 and uint32 for
Llama 3 (https://github.com/karpathy/llm.c, dev/data/data_common.py). All are little-endian.
"""

from __future__ import annotations

import string
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import UInt16

from trainer.data.errors import DataError
from trainer.data.files import OpenFile, printable

_HEADER_BYTES = 256 * 4
# Enough to tell ids from other numbers, and read soon even of thousands of files.
NUM_SAMPLED_TOKENS = 2**14
_FEWEST_SAMPLED_TOKENS = 32
# The largest vocabularies have 2^18 ids, so the upper half of a 32-bit id is below 4.
_LARGEST_UPPER_HALF = 3
_TEXT_BYTES = np.frombuffer(string.printable.encode(), np.uint8)


@dataclass(frozen=True)
class BinLayout:
    """How a file stores its tokens.

    Args:
        name: the writer, for people.
        dtype: of one token.
        version: of the header; None: no header.
        end_of_document_id: the token that ends (nanoGPT) or begins (llm.c) a document.
    """

    name: str
    dtype: np.dtype
    version: int | None
    end_of_document_id: int

    @property
    def num_header_bytes(self) -> int:
        return 0 if self.version is None else _HEADER_BYTES


_RAW = BinLayout("raw uint16 (nanoGPT)", np.dtype("<u2"), None, 50_256)
_LAYOUT_OF_MAGIC = {
    20240520: BinLayout("llm.c GPT-2", np.dtype("<u2"), 1, 50_256),
    20240801: BinLayout("llm.c Llama 3", np.dtype("<u4"), 7, 128_000),
}


def read_layout(path: Path) -> BinLayout:
    """Finds out a file's layout from its header.

    Raises:
        DataError: the header is of another version or format, the file's size does not match it, or it can't be read.
    """
    try:
        file = OpenFile(path)
        size = file.stat().st_size
        beginning = file.read(_HEADER_BYTES, offset=0)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}; check the file, or leave it out") from error
    if beginning.startswith(b"\x93NUMPY"):
        raise DataError(
            f"{path}: a file of NumPy's, with a header of its own; write the ids alone: "
            "`np.load(path).astype('<u2').tofile(…)`"
        )
    header = np.frombuffer(beginning, "<i4", count=len(beginning) // 4)
    magic = int(header[0]) if len(header) else 0
    if magic not in _LAYOUT_OF_MAGIC:
        if 20_230_101 <= magic <= 20_291_231 and len(header) == 256 and not header[4:].any():
            raise DataError(
                f"{path}: header magic {magic} is not one of llm.c's token files "
                f"({', '.join(map(str, _LAYOUT_OF_MAGIC))}); give files that its dev/data scripts wrote for training"
            )
        if size % _RAW.dtype.itemsize:
            raise DataError(
                f"{path}: {size:,} bytes is not a whole number of uint16 tokens; "
                "without llm.c's header it would be nanoGPT's, so it was cut short or holds something else"
            )
        return _RAW
    layout = _LAYOUT_OF_MAGIC[magic]
    if size < _HEADER_BYTES:
        raise DataError(
            f"{path}: {size:,} bytes end inside the {_HEADER_BYTES}-byte {layout.name} header; write it again"
        )
    version, num_tokens = int(header[1]), int(header[2])
    if version != layout.version:
        raise DataError(
            f"{path}: version {version} of {layout.name}, expected {layout.version}; write it with a current llm.c"
        )
    expected = _HEADER_BYTES + num_tokens * layout.dtype.itemsize
    if size != expected:
        raise DataError(
            f"{path}: its header promises {num_tokens:,} tokens, which make {expected:,} bytes, but it has {size:,}; "
            "the file was cut short or damaged, write or download it again"
        )
    return layout


def default_end_of_document_id(files: Sequence[Path]) -> int:
    """The end-of-document token of the files' layouts.

    Raises:
        DataError: they differ, or a file's header is wrong.
    """
    first_of_id: dict[int, Path] = {}
    for path in files:
        first_of_id.setdefault(read_layout(path).end_of_document_id, path)
    if len(first_of_id) > 1:
        (one, path), (other, other_path) = first_of_id.items()
        raise DataError(
            f"{path} and {other_path} come from different tokenizers (end-of-document {one} and {other}); "
            "train on the files of one"
        )
    return next(iter(first_of_id))


def describe_assumptions(samples: Mapping[Path, UInt16[np.ndarray, " N"]], end_of_document_id: int) -> Iterator[str]:
    """Lines about what was assumed of files without a header, and warnings about files whose numbers contradict that.

    Args:
        samples: the first `NUM_SAMPLED_TOKENS` tokens of each such file, or all that it has.
        end_of_document_id: the token that separates documents.
    """
    if samples:
        yield (
            f"{_name(list(samples))}: no header, so read as nanoGPT's: uint16 ids, documents ended by "
            f"{end_of_document_id}; ids of another width need llm.c's header"
        )
    doubted: dict[str, list[Path]] = {}
    for path, tokens in samples.items():
        if doubt := _doubt(tokens):
            doubted.setdefault(doubt, []).append(path)
    for doubt, paths in doubted.items():
        yield f"warning: {_name(paths)}: {doubt}; look at what wrote it"


def _doubt(tokens: UInt16[np.ndarray, " N"]) -> str | None:
    """A reason to doubt that these are uint16 ids; None: there is none."""
    if len(tokens) < _FEWEST_SAMPLED_TOKENS:
        return None
    for order, upper, lower in (("little", tokens[1::2], tokens[::2]), ("big", tokens[::2].byteswap(), tokens[1::2])):
        if upper.max() <= _LARGEST_UPPER_HALF < lower.max():
            return f"every second number is at most {upper.max()}, as in {order}-endian ids of 32 or 64 bits"
    if np.isin(tokens.view(np.uint8), _TEXT_BYTES).all():
        return "every byte is one of ASCII text, not half of an id"
    return None


def _name(paths: Sequence[Path]) -> str:
    return printable(paths[0]) + (f" and {len(paths) - 1:,} more" if len(paths) > 1 else "")
