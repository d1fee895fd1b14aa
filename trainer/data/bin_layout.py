"""How pre-tokenized files store their tokens: nanoGPT's and llm.c's `.bin`, and NumPy's `.npy`.

nanoGPT writes raw uint16 ids (https://github.com/karpathy/nanoGPT, data/openwebtext/prepare.py). llm.c writes
256 int32 of header – magic, version, number of tokens, zeros – and then the ids, uint16 for GPT-2 and uint32 for
Llama 3 (https://github.com/karpathy/llm.c, dev/data/data_common.py). Both are little-endian. NumPy's header says the
type. Megatron-LM's `.bin` is refused by the index beside it, which alone tells its type and documents.
"""

from __future__ import annotations

import io
import string
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import UInt16

from trainer.data.files import OpenFile, printable
from trainer.data.formats import HEAD_BYTES, NUMPY, find_format
from trainer.errors import DataError

_LLMC_HEADER_BYTES = 256 * 4
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
        num_header_bytes: before the first token.
        end_of_document_id: the token that ends (nanoGPT) or begins (llm.c) a document; None: the writer has none of its
            own.
        is_assumed: whether nothing in the file says that it has this layout.
    """

    name: str
    dtype: np.dtype
    num_header_bytes: int
    end_of_document_id: int | None
    is_assumed: bool = False


_GPT2_END = 50_256
_RAW = BinLayout("raw uint16 (nanoGPT)", np.dtype("<u2"), 0, _GPT2_END, is_assumed=True)
_LAYOUT_AND_VERSION_OF_MAGIC = {
    20240520: (BinLayout("llm.c GPT-2", np.dtype("<u2"), _LLMC_HEADER_BYTES, _GPT2_END), 1),
    20240801: (BinLayout("llm.c Llama 3", np.dtype("<u4"), _LLMC_HEADER_BYTES, 128_000), 7),
}


def read_layout(path: Path) -> BinLayout:
    """Finds out a file's layout from its header, or from the index beside it.

    Raises:
        DataError: it is of another format or version, its size does not match its header, or it can't be read.
    """
    try:
        file = OpenFile(path)
        size = file.stat().st_size
        head = file.read(HEAD_BYTES, offset=0)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}; check the file, or leave it out") from error
    kind = find_format(head)
    if kind is NUMPY:
        return _read_numpy_layout(path, head, size)
    if kind is not None:
        raise DataError(f"{path} is {kind.name}, not token ids; {kind.remedy}, or leave it out")
    if _has_megatron_index(path):
        raise DataError(
            f"{path} is Megatron-LM's, by the index beside it, which tells its type and documents; expected .npy or a "
            ".bin of nanoGPT or llm.c: write its documents as JSON-lines, or as .npy with a token that ends each"
        )
    header = np.frombuffer(head, "<i4", count=min(len(head), _LLMC_HEADER_BYTES) // 4)
    magic = int(header[0]) if len(header) else 0
    if magic in _LAYOUT_AND_VERSION_OF_MAGIC:
        return _read_llmc_layout(path, header, size)
    if 20_230_101 <= magic <= 20_291_231 and len(header) == 256 and not header[4:].any():
        raise DataError(
            f"{path}: header magic {magic} is not one of llm.c's token files "
            f"({', '.join(map(str, _LAYOUT_AND_VERSION_OF_MAGIC))}); give files that its dev/data scripts wrote for "
            "training"
        )
    if size % _RAW.dtype.itemsize:
        raise DataError(
            f"{path}: {size:,} bytes is not a whole number of uint16 tokens; "
            "without llm.c's header it would be nanoGPT's, so it was cut short or holds something else"
        )
    return _RAW


def _has_megatron_index(path: Path) -> bool:
    try:
        return OpenFile(path.with_suffix(".idx")).read(6, offset=0) in (b"MMIDID", b"TNTIDX")
    except OSError:
        return False


def _read_llmc_layout(path: Path, header: np.ndarray, size: int) -> BinLayout:
    layout, expected_version = _LAYOUT_AND_VERSION_OF_MAGIC[int(header[0])]
    if size < layout.num_header_bytes:
        raise DataError(
            f"{path}: {size:,} bytes end inside the {layout.num_header_bytes}-byte {layout.name} header; write it again"
        )
    version, num_tokens = int(header[1]), int(header[2])
    if version != expected_version:
        raise DataError(
            f"{path}: version {version} of {layout.name}, expected {expected_version}; write it with a current llm.c"
        )
    _check_size(path, size, layout, num_tokens)
    return layout


def _read_numpy_layout(path: Path, head: bytes, size: int) -> BinLayout:
    file = io.BytesIO(head)
    try:
        version = np.lib.format.read_magic(file)
        read_header = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
        shape, _, dtype = read_header[version](file)
    except Exception as error:  # the header is Python, of which a damaged one raises whatever Python's parser does
        raise DataError(f"{path}: its .npy header can't be read: {error}; write it again with `np.save`") from error
    if len(shape) != 1 or dtype.kind not in "iu":
        raise DataError(
            f"{path}: an array of {dtype} and shape {shape}, expected integers and one dim: token ids end to end"
        )
    # The larger vocabularies that wider ids are for have different tokens at a document's end.
    layout = BinLayout("NumPy", dtype, file.tell(), _GPT2_END if dtype.itemsize == 2 else None)
    _check_size(path, size, layout, shape[0])
    return layout


def _check_size(path: Path, size: int, layout: BinLayout, num_tokens: int) -> None:
    expected = layout.num_header_bytes + num_tokens * layout.dtype.itemsize
    if size != expected:
        raise DataError(
            f"{path}: its header promises {num_tokens:,} tokens, which make {expected:,} bytes, but it has {size:,}; "
            "the file was cut short or damaged, write or download it again"
        )


def default_end_of_document_id(files: Sequence[Path]) -> int:
    """The end-of-document token of the files' layouts.

    Raises:
        DataError: they differ, a layout has none, or a file's header is wrong.
    """
    first_of_id: dict[int, Path] = {}
    for path in files:
        layout = read_layout(path)
        if layout.end_of_document_id is None:
            raise DataError(
                f"{path} ({layout.name}, {layout.dtype}) doesn't say which token ends a document; set "
                "data.end_of_document_token to its id or to none, or data.tokenizer to what made the file"
            )
        first_of_id.setdefault(layout.end_of_document_id, path)
    if len(first_of_id) > 1:
        (one, path), (other, other_path) = first_of_id.items()
        raise DataError(
            f"{path} and {other_path} come from different tokenizers (end-of-document {one} and {other}); "
            "train on the files of one"
        )
    return next(iter(first_of_id))


def describe_assumptions(
    samples: Mapping[Path, UInt16[np.ndarray, " N"]], end_of_document_id: int | None
) -> Iterator[str]:
    """Lines about what was assumed of files without a header, and warnings about files whose numbers contradict that.

    Args:
        samples: the first `NUM_SAMPLED_TOKENS` tokens of each such file, or all that it has.
        end_of_document_id: the token that separates documents; None: each file is one.
    """
    if samples:
        documents = "each file one text" if end_of_document_id is None else f"documents ended by {end_of_document_id}"
        yield (
            f"{_name(list(samples))}: no header, so read as nanoGPT's: uint16 ids, {documents}; "
            "ids of another width need llm.c's header, or NumPy's"
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
