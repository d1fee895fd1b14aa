"""Readers: what is in a file comes back or is refused in one message, in bounded memory, whatever the bytes."""

import bz2
import contextlib
import gzip
import io
import json
import lzma
import os
import re
import sys
import tarfile
import tracemalloc
import zipfile

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.data import ByteTokenizer, DataError
from trainer.data import content as content_module
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


@pytest.fixture
def refuses(read):
    """Checks that a content is refused with one message that isn't long."""

    def refuses(message: str, content: bytes, source: str = "jsonl") -> None:
        with pytest.raises(DataError, match=message) as refused:
            read(content, source)
        assert len(str(refused.value)) < 500

    return refuses


def test_numbers_of_any_length_are_no_obstacle(read, refuses):
    for number in ("9" * 5000, "-" + "9" * 100_000, "1e400", "0." + "1" * 5000):
        assert read(b'{"id": %s, "text": "x"}\n' % number.encode()) == [b"x"]
    refuses(r"data:1: field 'text' is a number, expected text", b'{"text": %s}' % (b"9" * 5000))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        *(
            (line, r"data:2: arrays or objects nested too deep")
            for line in (b'{"text": ' + b"[" * 10**5, b'{"a": ' * 10**5)
        ),
        *((line, r"data:2: not valid JSON at column 1") for line in (b"\0{", b"\0", b'\0"\0')),
        (b"7", r"data:2: expected a JSON object, got a number"),
        (b'"text"', r"data:2: expected a JSON object, got text"),
        (b'{"text": {}}', r"data:2: field 'text' is an object, expected text"),
        (
            json.dumps({"x" * 99: 0, **{str(i): 0 for i in range(50)}}).encode(),
            r"no field 'text'; it has x{60}, .*, …\.",
        ),
    ],
)
def test_odd_lines_are_refused(refuses, line, message):
    refuses(message, GOOD + line)


@pytest.mark.parametrize("source", ["jsonl", "text"])
@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-be"])
def test_wide_text_is_refused_with_its_remedy(refuses, encoding, source):
    told = r"data begins as text in UTF-16 or UTF-32 does, expected UTF-8; convert .*`iconv -f utf-16 -t utf-8`"
    refuses(told, '{"text": "é中一"}\n'.encode(encoding), source)


def test_a_text_with_a_nul_is_refused(refuses):
    told = r"data: a NUL byte at offset 1,002, which text in UTF-8 doesn't have; .*`tr -d '\\0'`.*iconv"
    refuses(told, b"text\n" * 200 + b"ab\0" + b"text\n" * 200, "text")


def test_a_byte_order_mark_is_no_part_of_a_text_or_line(read, refuses):
    mark = b"\xef\xbb\xbf"
    assert read(mark + GOOD + mark + GOOD + mark + b"\n") == [b"fine", b"fine"]
    assert read(mark + "é".encode(), "text") == ["é".encode()]
    assert read("é".encode() + mark, "text") == ["é".encode() + mark], "elsewhere it is a character"
    refuses("data:1: byte 0xff at offset 4", mark + b"a\xff", "text")


def _gzip(content: bytes) -> bytes:
    return gzip.compress(content[:3]) + gzip.compress(content[3:])


def _zstandard(content: bytes) -> bytes:
    zstandard = pytest.importorskip("zstandard", reason="reads .zst files")
    skipped = b"\x50\x2a\x4d\x18" + (4).to_bytes(4, "little") + b"skip"
    compress = zstandard.ZstdCompressor(write_content_size=False).compress
    return skipped + compress(content[:3]) + compress(content[3:])


@pytest.mark.parametrize("compress", [_gzip, _zstandard])
def test_compressed_text_is_read(read, refuses, rng, monkeypatch, compress):
    monkeypatch.setattr(content_module, "_ZSTANDARD_BYTES_AT_ONCE", 7)
    monkeypatch.setattr(content_module, "_BUFFER_BYTES", 16)
    texts = ["".join(map(chr, rng.integers(32, 127, length))) for length in (1, 40, 3000)]
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()
    compressed = compress(lines)
    assert read(compressed) == [text.encode() for text in texts]
    assert read(compressed, "text") == [lines]
    for length in {len(compressed) - 1, len(compressed) - 9, *rng.integers(20, len(compressed) - 9, 20).tolist()}:
        with contextlib.suppress(DataError):  # the end may be that of a part
            assert len(read(compressed[:length], "text")[0]) == 3
    refuses(r"data can't be decompressed: .*; write or download it again", compressed[:-1], "text")
    refuses("data can't be decompressed: ", compressed + b"\x01")
    monkeypatch.setattr(readers_module, "_MAX_TEXT_BYTES", len(lines) - 1)
    refuses("data has more than", compressed, "text")


def test_zstandard_that_is_not_installed_is_named_with_its_extra(refuses, monkeypatch):
    monkeypatch.setitem(sys.modules, "zstandard", None)
    refuses(r'data is Zstandard-compressed.*pip install -e "\.\[data\]"', b"\x28\xb5\x2f\xfd" + b"x" * 20)


def _written(write) -> bytes:
    """What a function writes into a file."""
    content = io.BytesIO()
    write(content)
    return content.getvalue()


def _add_to_tar(file) -> None:
    with tarfile.open(fileobj=file, mode="w") as archive:
        archive.addfile(tarfile.TarInfo("a"))


def _add_to_zip(file) -> None:
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("a", "b")


def _arrow(kind: str) -> bytes:
    import pyarrow as arrow

    sink, table = arrow.BufferOutputStream(), arrow.table({"text": ["a"]})
    with getattr(arrow.ipc, f"new_{kind}")(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue().to_pybytes()


_OTHER_FORMATS = {
    "a Parquet file, not text; set data.source=parquet": lambda: _parquet(["a", "b"]),
    "a .npy file of NumPy's, not text; set data.source=bin": lambda: _written(lambda file: np.save(file, np.arange(9))),
    "a ZIP archive": lambda: _written(_add_to_zip),
    "a tar archive": lambda: _written(_add_to_tar),
    "bzip2-compressed, not text; decompress it": lambda: bz2.compress(b"text"),
    "xz-compressed, not text; decompress it": lambda: lzma.compress(b"text"),
    "gzip-compressed, not text": lambda: gzip.compress(b"text"),
    "an Arrow file, not text; write it as Parquet": lambda: _arrow("file"),
    "an Arrow stream, not text; write it as Parquet": lambda: _arrow("stream"),
    "the index of a Megatron .bin, not text": lambda: b"MMIDIDX\0\0" + bytes(20),
}


@pytest.mark.parametrize("told", _OTHER_FORMATS)
def test_other_formats_are_known_by_their_first_bytes(refuses, told):
    content = _OTHER_FORMATS[told]()
    for source in ("text", "jsonl"):
        for data in (content, gzip.compress(content)):
            if not (told.startswith("gzip") and data is content):
                refuses(f"data is {re.escape(told)}.*, or leave it out", data, source)
    if "Parquet file" not in told:
        refuses(f"data is {re.escape(told.partition(',')[0])}.*, not Parquet; ", content, "parquet")


@pytest.mark.parametrize("text", ["PAR1 and PARENTS", "BZh91 is a name", "PK", "ustar " * 60])
def test_text_that_begins_as_a_format_does_is_text(read, text):
    assert read(text.encode(), "text") == [text.encode()]


def test_a_document_has_a_largest_size(read, refuses, monkeypatch):
    monkeypatch.setattr(readers_module, "_MAX_LINE_BYTES", 100)
    monkeypatch.setattr(readers_module, "_MAX_TEXT_BYTES", 100)
    line = b'{"text": "' + b"x" * 87 + b'"}'
    assert len(line) == 99
    assert read(line + b"\n" + line) == [b"x" * 87] * 2
    refuses(r"data:2: the line at offset 100 has more than 100 bytes, the most that one", line + b"\n" + line + b" \n")
    assert read(b"x" * 100, "text") == [b"x" * 100]
    refuses(r"data has more than 100 bytes, the most that one document may have", b"x" * 101, "text")


def test_a_long_line_takes_memory_in_proportion(tmp_path):
    num_bytes = 10_000_000
    line = b'{"text": "' + b"x" * num_bytes + b'"}\n'
    (tmp_path / "a.jsonl").write_bytes(line * 2)
    del line
    tracemalloc.start()
    try:
        cache = TokenCache(tmp_path / "cache")
        tokenize_files([tmp_path / "a.jsonl"], "jsonl", "text", ByteTokenizer(), cache, lambda _: None)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 4 * num_bytes  # As bytes, characters and text, or as text and tokens of two bytes.


def _parquet(array, **columns) -> bytes:
    import pyarrow as arrow
    from pyarrow import parquet

    return _written(lambda file: parquet.write_table(arrow.table({"text": array, **columns}), file))


def test_every_kind_of_text_column_is_read(read):
    import pyarrow as arrow

    texts = ["one", "", "é中", "one"]
    for kind in (arrow.string(), arrow.large_string(), arrow.dictionary(arrow.int32(), arrow.string())):
        array = arrow.array(texts)
        array = array.dictionary_encode() if arrow.types.is_dictionary(kind) else array.cast(kind)
        assert read(_parquet(array), "parquet") == [text.encode() for text in texts]


def test_parquet_that_is_not_what_it_says_is_refused(refuses):
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
        refuses(message, content, "parquet")


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
_FRAGMENTS = [GOOD, b"\n", b"\r\n", b"\0", b"\xff\xfe", b"\xef\xbb\xbf", b'{"text": "', b'"}', b"\\ud800", b"[" * 3000]
_PARTS = _JSON | st.binary(max_size=8) | st.sampled_from([*_FRAGMENTS, b"9" * 5000])


def _assert_documents_or_a_refusal(path, content: bytes, *sources: str) -> None:
    path.write_bytes(content)
    for source in sources:
        try:
            for document in read_documents(path, source, "text"):
                document.decode()
        except DataError as refused:
            message = str(refused)
            assert path.name in message


@settings(max_examples=50)
@given(parts=st.lists(_PARTS, max_size=6))
def test_any_bytes_give_documents_or_a_refusal(tmp_path_factory, parts):
    path = tmp_path_factory.getbasetemp() / "fuzzed"
    _assert_documents_or_a_refusal(path, b"".join(parts), "text", "jsonl")


@settings(max_examples=50)
@given(data=st.data())
def test_damaged_parquet_gives_documents_or_a_refusal(tmp_path_factory, data):
    import pyarrow as arrow

    content = bytearray(_parquet(arrow.array(["one", "two", "é"] * 5), id=range(15)))
    for place in data.draw(st.lists(st.integers(0, len(content) - 1), min_size=1, max_size=4)):
        content[place] ^= data.draw(st.integers(1, 255))
    _assert_documents_or_a_refusal(tmp_path_factory.getbasetemp() / "fuzzed", bytes(content), "parquet")
