"""Readers: what is in a file comes back or is refused in one message, in bounded memory, whatever the bytes."""

from __future__ import annotations

import io
import json
import os
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.data import ByteTokenizer, DataError
from trainer.data import readers as readers_module
from trainer.data.readers import read_documents
from trainer.data.token_cache import TokenCache
from trainer.data.tokenization import tokenize_files

GOOD = b'{"text": "fine"}\n'


@pytest.fixture
def read(tmp_path):
    """The documents of a file with a content."""

    def read(content: bytes, source: str = "jsonl") -> list[bytes]:
        (tmp_path / "data").write_bytes(content)
        return list(read_documents(tmp_path / "data", source, "text"))

    return read


def test_numbers_of_any_length_are_no_obstacle(read):
    for number in ("9" * 5000, "-" + "9" * 100_000, "1e400", "0." + "1" * 5000):
        assert read(b'{"id": %s, "text": "x"}\n' % number.encode()) == [b"x"]
    with pytest.raises(DataError, match=r"data:1: field 'text' is a number, expected text"):
        read(b'{"text": %s}' % (b"9" * 5000))


def test_a_byte_order_mark_is_no_part_of_a_line(read):
    marked = b"\xef\xbb\xbf" + GOOD
    assert read(marked + marked + b"\xef\xbb\xbf\n") == [b"fine", b"fine"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"text": ' + b"[" * 200_000, r"data:2: arrays or objects nested too deep"),
        (b'{"a": ' * 200_000, r"data:2: arrays or objects nested too deep"),
        (b"\0{", r"data:2: not valid JSON at column 1"),
        (b"\0", r"data:2: not valid JSON at column 1"),
        (b'\0"\0', r"data:2: not valid JSON at column 1"),
        (b"7", r"data:2: expected a JSON object, got a number"),
        (b'"text"', r"data:2: expected a JSON object, got text"),
        (b'{"text": {}}', r"data:2: field 'text' is an object, expected text"),
        (
            json.dumps({"x" * 99: 0, **{str(i): 0 for i in range(50)}}).encode(),
            r"no field 'text'; it has x{60}, .*, …\.",
        ),
    ],
)
def test_odd_lines_are_refused(read, line, message):
    with pytest.raises(DataError, match=message) as refused:
        read(GOOD + line)
    assert len(str(refused.value)) < 500


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-be", "utf-16-le"])
@pytest.mark.parametrize("source", ["jsonl", "text"])
def test_utf_16_is_refused_with_its_remedy(read, encoding, source):
    content = ("" if encoding == "utf-16" else "\ufeff").encode(encoding) + '{"text": "a"}'.encode(encoding)
    with pytest.raises(DataError, match=r"data:1: byte 0xf[ef] at offset 0 is not UTF-8 .*`iconv -f utf-16 -t utf-8`"):
        read(content, source)


def test_a_document_has_a_largest_size(read, monkeypatch):
    monkeypatch.setattr(readers_module, "_MAX_LINE_BYTES", 100)
    monkeypatch.setattr(readers_module, "_MAX_TEXT_BYTES", 100)
    line = b'{"text": "' + b"x" * 87 + b'"}'
    assert len(line) == 99
    assert read(line + b"\n" + line) == [b"x" * 87] * 2
    with pytest.raises(
        DataError, match=r"data:2: the line at offset 100 has more than 100 bytes, the most that one may"
    ):
        read(line + b"\n" + line + b" \n")
    assert read(b"x" * 100, "text") == [b"x" * 100]
    with pytest.raises(DataError, match=r"data has more than 100 bytes, the most that one document may have"):
        read(b"x" * 101, "text")


def test_a_long_line_takes_memory_in_proportion(tmp_path):
    num_bytes = 10_000_000
    line = b'{"text": "' + b"x" * num_bytes + b'"}\n'
    (tmp_path / "a.jsonl").write_bytes(line * 2)
    del line
    tracemalloc.start()
    try:
        tokenize_files(
            [tmp_path / "a.jsonl"], "jsonl", "text", ByteTokenizer(), TokenCache(tmp_path / "cache"), lambda _: None
        )
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 4 * num_bytes  # As bytes, characters and text, or as text and tokens of two bytes.


def _parquet(array, **columns) -> bytes:
    import pyarrow as arrow
    from pyarrow import parquet

    content = io.BytesIO()
    parquet.write_table(arrow.table({"text": array, **columns}), content)
    return content.getvalue()


def test_every_kind_of_text_column_is_read(read):
    import pyarrow as arrow

    texts = ["one", "", "é中", "one"]
    for kind in (arrow.string(), arrow.large_string(), arrow.dictionary(arrow.int32(), arrow.string())):
        array = arrow.array(texts)
        array = array.dictionary_encode() if arrow.types.is_dictionary(kind) else array.cast(kind)
        assert read(_parquet(array), "parquet") == [text.encode() for text in texts]


def test_parquet_that_is_not_what_it_says_is_refused(read):
    import pyarrow as arrow

    offsets = arrow.py_buffer(b"".join(place.to_bytes(4, "little") for place in (0, 2, 4)))
    latin = arrow.Array.from_buffers(arrow.string(), 2, [None, offsets, arrow.py_buffer(b"ok\xe9x")])
    whole = _parquet(arrow.array(["some text"] * 1000))
    for content, message in (
        (_parquet(latin), r"data: row 1: column 'text' has byte 0xe9 at byte 0, which is not UTF-8"),
        (_parquet(arrow.array([[1], [2]])), r"data: column 'text' is list<.*>, expected text \(string\)"),
        (_parquet(arrow.array([{"a": "b"}])), r"data: column 'text' is struct<a: string>, expected text"),
        (_parquet(arrow.array([b"bytes"])), r"data: column 'text' is binary, expected text"),
        (_parquet(arrow.nulls(3)), r"data: column 'text' is null, expected text"),
        (_parquet(arrow.array(["a", None])), r"data: row 1: column 'text' is null, expected text"),
        (whole[:-1], r"data: not readable as Parquet after row 0"),
        (whole[: len(whole) // 2], r"data: not readable as Parquet after row 0"),
    ):
        with pytest.raises(DataError, match=message):
            read(content, "parquet")


@pytest.mark.parametrize("source", ["text", "jsonl", "parquet"])
def test_what_cannot_be_opened_is_refused(tmp_path, source):
    os.mkfifo(tmp_path / "pipe")
    for name, message in (("pipe", "it is a pipe"), (".", "it is a folder|Is a directory"), ("none", "No such file")):
        with pytest.raises(DataError, match=message):
            list(read_documents(tmp_path / name, source, "text"))


# Whatever the bytes: documents, or the documented refusal.

_JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["text", "a", ""]), inner, max_size=3),
    max_leaves=5,
).map(lambda value: json.dumps(value).encode())
_PARTS = (
    _JSON
    | st.binary(max_size=8)
    | st.sampled_from(
        [
            GOOD,
            b"\n",
            b"\r\n",
            b"\0",
            b"\xff\xfe",
            b"\xef\xbb\xbf",
            b'{"text": "',
            b'"}',
            b"\\ud800",
            b"[" * 3000,
            b"9" * 5000,
        ]
    )
)


@settings(max_examples=50)
@given(parts=st.lists(_PARTS, max_size=6))
def test_any_bytes_give_documents_or_a_refusal(tmp_path_factory, parts):
    path = tmp_path_factory.getbasetemp() / "fuzzed"
    path.write_bytes(b"".join(parts))
    for source in ("text", "jsonl"):
        try:
            for document in read_documents(path, source, "text"):
                document.decode()
        except DataError as refused:
            message = str(refused)
            assert "fuzzed" in message


@settings(max_examples=50)
@given(data=st.data())
def test_damaged_parquet_gives_documents_or_a_refusal(tmp_path_factory, data):
    import pyarrow as arrow

    path = tmp_path_factory.getbasetemp() / "fuzzed"
    content = bytearray(_parquet(arrow.array(["one", "two", "é"] * 5), id=range(15)))
    for place in data.draw(st.lists(st.integers(0, len(content) - 1), min_size=1, max_size=4)):
        content[place] ^= data.draw(st.integers(1, 255))
    path.write_bytes(content)
    try:
        for document in read_documents(path, "parquet", "text"):
            document.decode()
    except DataError as refused:
        message = str(refused)
        assert "fuzzed" in message
