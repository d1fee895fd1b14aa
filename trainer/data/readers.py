"""Text and JSON-lines, compressed or not, and Parquet files, as streams of documents.

A reader yields each document's text as valid UTF-8 bytes, in file order, and holds one document (Parquet:
one record batch) in memory at a time. A document has a largest size, so that a file that is not what it
should be ends in a message before it fills the memory.
"""

from __future__ import annotations

import codecs
import functools
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

from trainer.data.content import open_content
from trainer.data.files import OpenFile
from trainer.data.formats import HEAD_BYTES, find_format
from trainer.errors import DataError

# A text file, of which a few copies are in memory while it is tokenized, and a line of JSON, whose text Python holds
# with up to 4 bytes for each character.
_MAX_TEXT_BYTES = 2**30
_MAX_LINE_BYTES = 2**28
_CHECKED_AT_ONCE = 2**20
_NUM_NAMES_SHOWN = 20
_BYTE_ORDER_MARK = codecs.BOM_UTF8
_JSON_NAMES = {
    dict: "an object",
    list: "an array",
    float: "a number",
    int: "a number",
    bool: "a boolean",
    type(None): "null",
}

_Parsed = TypeVar("_Parsed")


class LinePlace(NamedTuple):
    """The place of a line."""

    path: Path
    number: int
    """From 1."""
    offset: int
    """Bytes before it."""

    def __str__(self) -> str:
        return f"{self.path}:{self.number}"


def read_documents(path: Path, source: str, text_field: str) -> Iterator[bytes]:
    """The documents of one file.

    Args:
        path: the file.
        source: `text` (a file is a document), `jsonl` (a line is) or `parquet` (a row is). The first two read through
            gzip and Zstandard.
        text_field: field or column that holds the text; unused by `text`.

    Raises:
        DataError: the file does not hold what its source promises; names file and place.
    """
    match source:
        case "text":
            return read_text(path)
        case "jsonl":
            return read_jsonl(path, text_field)
        case "parquet":
            return read_parquet(path, text_field)
    raise AssertionError(source)


def read_text(path: Path) -> Iterator[bytes]:
    """The whole file as one document: its bytes unchanged, but for a byte order mark before them."""
    with open_content(path) as content:
        data = content.read(_MAX_TEXT_BYTES + 1)
    if len(data) > _MAX_TEXT_BYTES:
        raise DataError(
            f"{path} has more than {_MAX_TEXT_BYTES:,} bytes, the most that one document may have; "
            "cut it into several files"
        )
    if (place := data.find(b"\0")) >= 0:
        raise DataError(
            f"{path}: a NUL byte at offset {place:,}, which text in UTF-8 doesn't have; take it out (`tr -d '\\0'`), "
            "convert the file (UTF-16: `iconv -f utf-16 -t utf-8`), or leave it out"
        )
    if not _is_utf8(data):
        _decode(data, path)
    yield data.removeprefix(_BYTE_ORDER_MARK)


def read_jsonl(path: Path, text_field: str) -> Iterator[bytes]:
    """The text of each line's object. Lines of white space alone separate nothing and are passed over."""
    return read_lines(path, functools.partial(_text_of_line, text_field=text_field))


def read_lines(path: Path, parse: Callable[[bytes, LinePlace], _Parsed | None]) -> Iterator[_Parsed]:
    """What `parse` makes of each line of a file, compressed or not, where that isn't None."""
    offset = number = 0
    with open_content(path) as file:
        while line := file.readline(_MAX_LINE_BYTES + 1):
            number += 1
            if len(line) > _MAX_LINE_BYTES:
                raise DataError(
                    f"{path}:{number}: the line at offset {offset} has more than {_MAX_LINE_BYTES:,} bytes, the "
                    "most that one may have; is this one object to a line? Cut long documents"
                )
            parsed = parse(line, LinePlace(path, number, offset))
            offset += len(line)
            del line  # It may be large, and need not wait here until its text is tokenized.
            if parsed is not None:
                yield parsed
            del parsed


def read_parquet(path: Path, text_field: str) -> Iterator[bytes]:
    """The text of each row."""

    def choose(schema: Any) -> list[str]:
        _check_column(path, schema, text_field)
        return [text_field]

    def texts_of(batch: Any) -> Iterator[Any]:
        import pyarrow as arrow

        # As bytes, because what a file calls text need not be UTF-8.
        return (value.as_py() for value in batch.column(0).cast(arrow.large_binary()))

    for row, value in enumerate(read_parquet_rows(path, choose, texts_of)):
        yield _text_of_row(value, f"{path}: row {row}", text_field)


def read_parquet_rows(
    path: Path, choose: Callable[[Any], list[str]], rows_of: Callable[[Any], Iterator[_Parsed]]
) -> Iterator[_Parsed]:
    """The rows of a file.

    Args:
        path: the file.
        choose: the file's schema → the columns to read; raises DataError where it lacks them.
        rows_of: a record batch → its rows.
    """
    try:
        import pyarrow as arrow
        from pyarrow import parquet
    except ImportError as error:
        raise DataError(
            f"{path}: reading Parquet needs pyarrow, which is not installed; "
            'run `pip install -e ".[data]"` in the clone'
        ) from error
    row = 0
    try:
        head = OpenFile(path).read(HEAD_BYTES, offset=0)  # Refuses what need not end.
        if (kind := find_format(head)) is not None and kind.source != "parquet":
            raise DataError(f"{path} is {kind.name}, not Parquet; {kind.remedy}, or leave it out")
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=1024, columns=choose(file.schema_arrow)):
                for value in rows_of(batch):
                    yield value
                    row += 1
    except (arrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: not readable as Parquet after row {row}: {error}; write the file again") from error


def object_of_line(line: bytes, where: LinePlace, parse_int: Callable[[str], float] = float) -> dict[str, Any] | None:
    """The JSON object of a line, integers as `parse_int` makes them; None: it is white space."""
    line = line.removeprefix(_BYTE_ORDER_MARK)
    if not line or line.isspace():
        return None
    try:
        text = _decode(line, where.path, first_line=where.number, offset=where.offset)
        record = json.loads(text, parse_int=parse_int)
    except json.JSONDecodeError as error:
        raise DataError(
            f"{where}: not valid JSON at column {error.colno}: {error.msg}; each line must be one JSON object"
        ) from error
    except ValueError as error:  # Python makes no integer of more than 4,300 digits
        raise DataError(f"{where}: a number that can't be read: {error}; drop the document") from error
    except RecursionError as error:
        raise DataError(f"{where}: arrays or objects nested too deep to be read; drop the document") from error
    if not isinstance(record, dict):
        raise DataError(f"{where}: expected a JSON object, got {json_name(record)}; each line must be one object")
    return record


def utf8_of_field(text: Any, field: str, place: object) -> bytes:
    """A field's text in UTF-8.

    Raises:
        DataError: it is no text.
    """
    if not isinstance(text, str):
        raise DataError(
            f"{place}: field {field!r} is {json_name(text)}, expected text; fill it in or drop the document"
        )
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"{place}: field {field!r} holds a lone surrogate U+{ord(text[error.start]):04X} at character "
            f"{error.start}, which is not text; repair or drop the document"
        ) from error


def _text_of_line(line: bytes, where: LinePlace, text_field: str) -> bytes | None:
    record = object_of_line(line, where)
    if record is None:
        return None
    if text_field not in record:
        raise DataError(f"{where}: no field {text_field!r}; it has {names_of(list(record))}. Set data.text_field")
    return utf8_of_field(record[text_field], text_field, where)


def check_weight(weight: Any, place: str) -> float:
    """The weight of a loss.

    Raises:
        DataError: it is no number, or none that the step can have in float32.
    """
    if type(weight) not in (int, float):
        raise DataError(f"{place}: field 'weight' is {json_name(weight)}, expected a number")
    if not abs(weight) <= float(np.finfo(np.float32).max):
        raise DataError(f"{place}: weight={weight} is not a finite number in float32; repair or drop it")
    return float(weight)


def json_name(value: Any) -> str:
    """The type of a JSON value, for messages."""
    return _JSON_NAMES.get(type(value), "text")


def _check_column(path: Path, schema: Any, text_field: str) -> None:
    from pyarrow import types

    if (number := schema.names.count(text_field)) != 1:
        has = f"{number} columns" if number else "no column"
        raise DataError(f"{path}: {has} {text_field!r}; it has {names_of(schema.names)}. Set data.text_field")
    column = schema.field(text_field).type
    stored = column.value_type if types.is_dictionary(column) else column
    if not any(is_text(stored) for is_text in (types.is_string, types.is_large_string, types.is_string_view)):
        raise DataError(
            f"{path}: column {text_field!r} is {str(column)[:80]}, expected text (string); "
            "set data.text_field, or write the column as text"
        )


def _text_of_row(value: bytes | None, place: str, text_field: str) -> bytes:
    if value is None:
        raise DataError(f"{place}: column {text_field!r} is null, expected text; fill it in or drop the document")
    try:
        value.decode()
    except UnicodeDecodeError as error:
        raise DataError(
            f"{place}: column {text_field!r} has byte 0x{value[error.start]:02x} at byte {error.start}, which is not "
            f"UTF-8 ({error.reason}); repair or drop the document"
        ) from error
    return value


def _is_utf8(data: bytes) -> bool:
    """A part at a time: the characters of a whole file would take up to four times its size."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    view = memoryview(data)
    try:
        for start in range(0, len(data), _CHECKED_AT_ONCE):
            decoder.decode(view[start : start + _CHECKED_AT_ONCE])
        decoder.decode(b"", final=True)
    except UnicodeDecodeError:
        return False
    return True


def _decode(data: bytes, path: Path, *, first_line: int = 1, offset: int = 0) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        line = first_line + data.count(b"\n", 0, error.start)
        raise DataError(
            f"{path}:{line}: byte 0x{data[error.start]:02x} at offset {offset + error.start} is not UTF-8 "
            f"({error.reason}); if it is text of another encoding, convert the file (Latin-1: "
            "`iconv -f latin1 -t utf-8`), or leave it out"
        ) from error


def names_of(names: Sequence[str]) -> str:
    """Names of fields, for messages."""
    shown = [name[:60] for name in names[:_NUM_NAMES_SHOWN]]
    return ", ".join(shown + ["…"] * (len(names) > _NUM_NAMES_SHOWN)) or "none"
