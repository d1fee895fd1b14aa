"""Pre-tokenized files: nanoGPT's and llm.c's, their documents, and what is wrong with broken ones."""

from __future__ import annotations

import dataclasses
import gzip
import re
import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.config import DataConfig
from trainer.data import DataError, load_corpus
from trainer.data import bin_files as bin_files_module
from trainer.data.token_files import TokenFile

END = 50_256
LLMC_GPT2 = (20240520, 1, "<u2")
LLMC_LLAMA3 = (20240801, 7, "<u4")


@pytest.fixture
def documents(rng) -> list[list[int]]:
    return [rng.integers(0, END, rng.integers(1, 60)).tolist() for _ in range(50)]


def _nanogpt(documents, end=END):
    return np.array([token for document in documents for token in (*document, end)])


def _llmc(documents, end=END):
    return np.array([token for document in documents for token in (end, *document)])


def _contents(documents) -> list[list[int]]:
    return [documents.tokens(i).tolist() for i in range(len(documents))]


def test_every_writers_documents_are_found(tmp_path, documents, data_config, write_llmc, monkeypatch):
    monkeypatch.setattr(bin_files_module, "_TOKENS_READ_AT_ONCE", 17)  # Documents span reads.
    _nanogpt(documents).astype("<u2").tofile(tmp_path / "a.bin")
    write_llmc(tmp_path / "b.bin", _llmc(documents), LLMC_GPT2)
    corpora = [load_corpus(data_config(source="bin", files=[name]), vocab_size=50_304) for name in ("a.bin", "b.bin")]
    for corpus in corpora:
        assert sorted(_contents(corpus.train) + _contents(corpus.validation)) == sorted(documents)
        assert isinstance(corpus.train.arrays[0], TokenFile)
        assert corpus.train.num_bytes is None
        assert corpus.tokenizer.delimiters.end == END
        assert corpus.tokenizer.vocab_size == END + 1
        assert corpus.summary()["tokenizer"] == "pretokenized"


def test_llama_3_files_hold_uint32_and_their_own_end_of_document(tmp_path, data_config, write_llmc, rng):
    documents = [rng.integers(0, 128_000, 30).tolist() for _ in range(50)]
    documents[3][5] = END  # An ordinary token here.
    write_llmc(tmp_path / "a.bin", _llmc(documents, end=128_000), LLMC_LLAMA3)
    corpus = load_corpus(data_config(source="bin", files=["a.bin"], validation_fraction=0.3), vocab_size=128_256)
    assert sorted(_contents(corpus.train) + _contents(corpus.validation)) == sorted(documents)


def test_files_of_several_shards_keep_their_documents_apart(tmp_path, data_config, documents):
    _nanogpt(documents[:20]).astype("<u2").tofile(tmp_path / "a_0.bin")
    _nanogpt(documents[20:])[:-1].astype("<u2").tofile(tmp_path / "a_1.bin")  # Without the last end-of-document.
    _nanogpt([[5, 6], [7]]).astype("<u2").tofile(tmp_path / "v.bin")
    config = data_config(source="bin", files=["a_*.bin"], validation_files=["v.bin"])
    corpus = load_corpus(config, vocab_size=50_304)
    assert _contents(corpus.train) == documents
    assert _contents(corpus.validation) == [[5, 6], [7]]
    assert corpus.train.num_tokens == sum(len(document) + 1 for document in documents)


def test_a_file_without_end_of_document_is_one_document(tmp_path, data_config, rng):
    # nanoGPT's shakespeare_char: 65 characters, train.bin and val.bin, no delimiter.
    for name in ("train.bin", "val.bin"):
        rng.integers(0, 65, 1000).astype("<u2").tofile(tmp_path / name)
    config = data_config(source="bin", files=["train.bin"], validation_files=["val.bin"], end_of_document_token=65)
    corpus = load_corpus(config, vocab_size=66)
    assert (len(corpus.train), len(corpus.validation), corpus.tokenizer.vocab_size) == (1, 1, 66)


def test_the_index_is_made_once_and_again_when_a_file_changes(tmp_path, data_config, documents):
    path, said = tmp_path / "a.bin", []
    config = data_config(source="bin", files=["a.bin"])
    _nanogpt(documents).astype("<u2").tofile(path)
    first = load_corpus(config, vocab_size=50_304, on_progress=said.append)
    assert load_corpus(config, vocab_size=50_304, on_progress=said.append).fingerprint == first.fingerprint
    assert [line for line in said if "finding the documents of" in line] == [said[1]]
    _nanogpt([*documents, [1, 2, 3]]).astype("<u2").tofile(path)
    said.clear()
    second = load_corpus(config, vocab_size=50_304, on_progress=said.append)
    assert "finding the documents of" in said[-1]
    assert second.fingerprint != first.fingerprint
    assert len(second.train) + len(second.validation) == len(documents) + 1


def test_a_token_past_the_vocabulary_is_refused_with_its_place(tmp_path, data_config, documents, write_llmc, rng):
    tokens = _llmc(documents)
    index = int(rng.integers(1, len(tokens)))
    tokens[index] = 60_000
    tokens.astype("<u2").tofile(tmp_path / "raw.bin")
    write_llmc(tmp_path / "llmc.bin", tokens)
    for name, header in (("raw.bin", 0), ("llmc.bin", 1024)):
        with pytest.raises(
            DataError,
            match=rf"{name}: token 60000 at index {index:,} \(byte {header + 2 * index:,}\) is outside the vocabulary "
            r"of 50,304; .*Set model.vocab_size to at least 60001",
        ):
            load_corpus(data_config(source="bin", files=[name]), vocab_size=50_304)
    load_corpus(data_config(source="bin", files=["raw.bin"]), vocab_size=60_001)


def test_a_tokenizer_that_did_not_make_the_file_is_refused(tmp_path, data_config, tokenizer_file):
    np.array([1, 2, 4000, 0, 5], "<u2").tofile(tmp_path / "a.bin")
    config = data_config(source="bin", files=["a.bin"], tokenizer=str(tokenizer_file))
    with pytest.raises(DataError, match=r"token 4000 at index 2 .*did not make this file"):
        load_corpus(config, vocab_size=50_304)


def _raw(path, write_llmc):
    path.write_bytes(b"\x01\x00\x02")


def _short_header(path, write_llmc):
    path.write_bytes(np.array([20240520, 1, 5], "<i4").tobytes())


def _truncated(path, write_llmc):
    write_llmc(path, [1, 2, 3], num_tokens=4)


def _version(path, write_llmc):
    write_llmc(path, [1, 2, 3], version=2)


def _evaluation(path, write_llmc):
    write_llmc(path, [1, 2, 3], magic=20240522)


def _no_tokens(path, write_llmc):
    write_llmc(path, [])


def _no_documents(path, write_llmc):
    write_llmc(path, [END, END])


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (_raw, r"a.bin: 3 bytes is not a whole number of uint16 tokens; without llm.c's header it would be"),
        (_short_header, r"a.bin: 12 bytes end inside the 1024-byte llm.c GPT-2 header"),
        (
            _truncated,
            r"a.bin: its header promises 4 tokens, which make 1,032 bytes, but it has 1,030; the file was cut short",
        ),
        (_version, r"a.bin: version 2 of llm.c GPT-2, expected 1"),
        (_evaluation, r"a.bin: header magic 20240522 is not one of llm.c's token files \(20240520, 20240801\)"),
        (_no_tokens, r"a.bin has a header but no tokens"),
        (_no_documents, r"a.bin holds no token but those around documents, \[50256, …, 50256\]"),
    ],
)
def test_broken_files_are_refused(tmp_path, data_config, write_llmc, spoil, message):
    spoil(tmp_path / "a.bin", write_llmc)
    with pytest.raises(DataError, match=message):
        load_corpus(data_config(source="bin", files=["a.bin"]), vocab_size=50_304)


def test_files_of_different_tokenizers_are_refused(tmp_path, data_config, write_llmc):
    write_llmc(tmp_path / "a.bin", [END, 1], LLMC_GPT2)
    write_llmc(tmp_path / "b.bin", [128_000, 1], LLMC_LLAMA3)
    with pytest.raises(
        DataError, match=r"a.bin and .*b.bin come from different tokenizers \(end-of-document 50256 and 128000\)"
    ):
        load_corpus(data_config(source="bin", files=["*.bin"]), vocab_size=128_256)


def test_a_delimiter_past_the_vocabulary_is_refused(tmp_path, data_config):
    np.array([1, 2, END], "<u2").tofile(tmp_path / "a.bin")
    with pytest.raises(DataError, match=r"a.bin: token 50256 at index 2 .* is outside the vocabulary of 100; "):
        load_corpus(data_config(source="bin", files=["a.bin"]), vocab_size=100)
    np.array([1, 2], "<u2").tofile(tmp_path / "a.bin")
    for fields in ({"end_of_document_token": 100}, {"begin_of_document_token": 100}):
        with pytest.raises(
            DataError, match=r"a.bin: the token 100 that begins or ends its documents is outside .* of 100; .* 101, or"
        ):
            load_corpus(data_config(source="bin", files=["a.bin"], **fields), vocab_size=100)


@pytest.mark.parametrize("token", [None, "none"])
def test_without_a_token_to_end_documents_a_file_is_one_text(tmp_path, data_config, rng, token):
    # nanoGPT's shakespeare_char: 65 characters, train.bin and val.bin, no delimiter.
    texts = {name: rng.integers(0, 65, 1000).astype("<u2") for name in ("train.bin", "val.bin")}
    for name, text in texts.items():
        text.tofile(tmp_path / name)
    config = data_config(source="bin", files=["train.bin"], validation_files=["val.bin"], end_of_document_token=token)
    said: list[str] = []
    corpus = load_corpus(config, vocab_size=65, on_progress=said.append)
    assert any("no token 50256 ends a document" in line and "one text" in line for line in said) == (token is None)
    assert corpus.tokenizer.delimiters == (None, None)
    assert corpus.tokenizer.vocab_size == max(text.max() for text in texts.values()) + 1
    for documents, text in ((corpus.train, texts["train.bin"]), (corpus.validation, texts["val.bin"])):
        assert documents.num_tokens == 999
        assert documents.stream(0, 0, 1000).tolist() == text.tolist()
    with pytest.raises(DataError, match=r"token 64 at index \d+ .* is outside the vocabulary of 64"):
        load_corpus(config, vocab_size=64)


def test_one_file_with_a_token_that_ends_documents_makes_it_everybodys(tmp_path, data_config):
    np.array([1, 2, END, 3], "<u2").tofile(tmp_path / "a.bin")
    np.array([4, 5], "<u2").tofile(tmp_path / "v.bin")
    config = data_config(source="bin", files=["a.bin"], validation_files=["v.bin"])
    corpus = load_corpus(config, vocab_size=50_304)
    assert corpus.tokenizer.delimiters == (END, END)
    assert corpus.validation.stream(0, 0, 4).tolist() == [END, 4, 5, END]


def test_a_text_too_short_to_be_learnt_is_refused(tmp_path, data_config):
    for length, message in ((3, "the only document has 3 tokens"), (1, "the only document has 1 tokens")):
        np.arange(length, dtype="<u2").tofile(tmp_path / "a.bin")
        with pytest.raises(DataError, match=message):
            load_corpus(data_config(source="bin", files=["a.bin"]), vocab_size=100)
    for name in ("a.bin", "v.bin"):
        np.arange(1, dtype="<u2").tofile(tmp_path / name)
    with pytest.raises(DataError, match=r"no token to train on follows another"):
        load_corpus(data_config(source="bin", files=["a.bin"], validation_files=["v.bin"]), vocab_size=100)


def test_documents_with_a_token_at_either_end_lose_both(tmp_path, data_config):
    documents = [[5, 6, 7], [8], [9, 10]]
    np.array([token for each in documents for token in (1, *each, 2)], "<u2").tofile(tmp_path / "a.bin")
    config = data_config(
        source="bin",
        files=["a.bin"],
        begin_of_document_token=1,
        end_of_document_token=2,
        validation_fraction=0.4,
    )
    corpus = load_corpus(config, vocab_size=11)
    assert sorted(_contents(corpus.train) + _contents(corpus.validation)) == documents
    assert corpus.train.stream(0, 0, 2).tolist()[0] == 1
    assert corpus.train.stream(0, 0, int(corpus.train.num_targets[0]) + 1).tolist()[-1] == 2
    other = load_corpus(dataclasses.replace(config, begin_of_document_token="none"), vocab_size=11)
    assert other.fingerprint != corpus.fingerprint


def test_an_end_of_document_as_text_needs_the_tokenizer(tmp_path, data_config):
    np.array([1, 2], "<u2").tofile(tmp_path / "a.bin")
    with pytest.raises(DataError, match=r"'</s>' is text, which a .bin file does not know; give its id"):
        load_corpus(data_config(source="bin", files=["a.bin"], end_of_document_token="</s>"), vocab_size=50_304)


# Files without a header are taken for nanoGPT's, which is said, and doubted where the numbers speak against it.


def _said(config, vocab_size: int = 2**18) -> list[str]:
    said: list[str] = []
    load_corpus(config, vocab_size=vocab_size, on_progress=said.append)
    return said


@pytest.mark.parametrize(
    ("dtype", "num_ids", "doubt"),
    [
        ("<u4", 50_257, r"every second number is at most 0, as in little-endian ids of 32 or 64 bits"),
        ("<u4", 2**18, r"every second number is at most [123], as in little-endian ids of 32 or 64 bits"),
        ("<i8", 50_257, r"every second number is at most 0, as in little-endian ids of 32 or 64 bits"),
        (">u4", 2**18, r"every second number is at most [123], as in big-endian ids of 32 or 64 bits"),
    ],
)
def test_ids_of_another_width_without_a_header_are_doubted(tmp_path, data_config, rng, dtype, num_ids, doubt):
    for name in ("a.bin", "b.bin", "v.bin"):
        rng.integers(0, num_ids, 500).astype(dtype).tofile(tmp_path / name)
    said = _said(data_config(source="bin", files=["a.bin", "b.bin"], validation_files=["v.bin"]))
    assumed, warning, *_ = said
    assert re.fullmatch(
        r"\S+a.bin and 1 more: no header, so read as nanoGPT's: uint16 ids, documents ended by 50256; "
        r"ids of another width need llm.c's header, or NumPy's",
        assumed,
    )
    assert re.fullmatch(rf"warning: \S+a.bin and 1 more: {doubt}; look at what wrote it", warning)
    assert sum(line.startswith("warning: ") for line in said) == 2  # And of the validation file.


def test_text_called_bin_is_doubted(tmp_path, data_config):
    for name in ("a.bin", "v.bin"):
        (tmp_path / name).write_text("the cat and the hat\n" * 50)
    said = _said(data_config(source="bin", files=["a.bin"], validation_files=["v.bin"]))
    assert "every byte is one of ASCII text, not half of an id; look at what wrote it" in said[1]


@pytest.mark.parametrize("num_ids", [2, 65, 257, 50_256, 2**16])
def test_uint16_ids_are_not_doubted(tmp_path, data_config, rng, write_llmc, num_ids):
    for name in ("a.bin", "v.bin"):
        rng.integers(0, num_ids, 500).astype("<u2").tofile(tmp_path / name)
    said = _said(data_config(source="bin", files=["a.bin"], validation_files=["v.bin"], end_of_document_token=num_ids))
    assert "no header, so read as nanoGPT's" in said[0]
    assert f"documents ended by {num_ids}" in said[0]
    assert not any("warning" in line for line in said)
    for name in ("a.bin", "v.bin"):
        write_llmc(tmp_path / name, rng.integers(0, num_ids, 500), LLMC_LLAMA3)
    said = _said(data_config(source="bin", files=["a.bin"], validation_files=["v.bin"]))
    assert not any("no header" in line or "warning" in line for line in said)


@pytest.mark.parametrize("dtype", ["<u2", ">u2", "<u4", ">u4", "<i4", "<i8", ">i8", "<u8"])
def test_files_of_numpys_are_read_by_their_header(tmp_path, data_config, rng, dtype):
    largest = 2**16 if dtype.endswith("2") else 2**17
    documents = [rng.integers(END + 1, largest, length).tolist() for length in (5, 1, 30, 2)]
    np.save(tmp_path / "a.npy", _nanogpt(documents).astype(dtype))
    config = data_config(source="bin", files=["a.npy"], validation_fraction=0.4)
    if not dtype.endswith("2"):
        with pytest.raises(
            DataError, match=r"a.npy \(NumPy, .*\) doesn't say which token ends a document; set data.end"
        ):
            load_corpus(config, vocab_size=2**17)
        config = dataclasses.replace(config, end_of_document_token=END)
    said: list[str] = []
    corpus = load_corpus(config, vocab_size=2**17, on_progress=said.append)
    assert sorted(_contents(corpus.train) + _contents(corpus.validation)) == sorted(documents)
    assert not any("no header" in line for line in said)
    stream = corpus.train.stream(0, 0, 3)
    assert stream.dtype == np.int32
    assert stream.tolist() == [END, *_contents(corpus.train)[0], END][:3]


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.ones(9, "<f4"), r"a.npy: an array of float32 and shape \(9,\), expected integers and one dim"),
        (np.ones((3, 3), "<u2"), r"a.npy: an array of uint16 and shape \(3, 3\), expected integers and one dim"),
        (np.array(3, "<u2"), r"a.npy: an array of uint16 and shape \(\), expected"),
        (np.array([1, -5, 2], "<i4"), r"a.npy: token -5 at index 1 is negative, so no token id"),
        (np.array(["a"], object), r"a.npy: an array of object and shape \(1,\), expected integers"),
    ],
)
def test_odd_files_of_numpys_are_refused(tmp_path, data_config, array, message):
    np.save(tmp_path / "a.npy", array)
    with pytest.raises(DataError, match=message):
        load_corpus(data_config(source="bin", files=["a.npy"], end_of_document_token=9), vocab_size=50_304)


def test_a_damaged_file_of_numpys_is_refused(tmp_path, data_config):
    np.save(tmp_path / "a.npy", np.arange(100, dtype="<u2"))
    content = (tmp_path / "a.npy").read_bytes()
    for damaged, message in (
        (content[:-1], "its header promises 100 tokens"),
        (content[:20], "its .npy header can't be read"),
        (content.replace(b"(100,), }", b"(100,,,,("), "its .npy header can't be read"),
        (content.replace(b"(100,)", b"(-10,)"), "its header promises -10 tokens"),
    ):
        (tmp_path / "a.npy").write_bytes(damaged)
        with pytest.raises(DataError, match=rf"a.npy: {message}"):
            load_corpus(data_config(source="bin", files=["a.npy"]), vocab_size=50_304)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (gzip.compress(bytes(100), mtime=0), r"a.bin is gzip-compressed, not token ids; decompress it \(`gunzip`\)"),
        (b"\x28\xb5\x2f\xfd" + bytes(20), r"a.bin is Zstandard-compressed, not token ids; decompress it"),
        (b"PAR1\x15" + bytes(31), r"a.bin is a Parquet file, not token ids; set data.source=parquet"),
        (b"PK\x03\x04" + bytes(20), r"a.bin is a ZIP archive .*, not token ids; unpack it"),
        (
            b"MMIDIDX\0\0\1" + bytes(30),
            r"a.bin is the index of a Megatron .bin, not token ids; .* name the .bin beside",
        ),
    ],
)
def test_files_of_other_formats_are_no_ids(tmp_path, data_config, content, message):
    (tmp_path / "a.bin").write_bytes(content)
    with pytest.raises(DataError, match=message):
        load_corpus(data_config(source="bin", files=["a.bin"]), vocab_size=50_304)


def _write_megatron(path, documents, code_and_dtype=(8, "<u2"), *, end=(), sequences_per_document=1, modes=False):
    """Documents as Megatron-LM's IndexedDatasetBuilder writes them."""
    code, dtype = code_and_dtype
    sequences = [part for each in documents for part in np.array_split([*each, *end], sequences_per_document)]
    lengths = np.array([len(sequence) for sequence in sequences], "<i4")
    pointers = (np.cumsum(lengths, dtype="<i8") - lengths) * np.dtype(dtype).itemsize
    boundaries = np.arange(len(documents) + 1, dtype="<i8") * sequences_per_document
    np.concatenate(sequences).astype(dtype).tofile(path.with_suffix(".bin"))
    header = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, code, len(lengths), len(boundaries))
    arrays = (lengths, pointers.astype("<i8"), boundaries, *((np.zeros(len(lengths), "i1"),) if modes else ()))
    path.with_suffix(".idx").write_bytes(header + b"".join(array.tobytes() for array in arrays))


@pytest.mark.parametrize("code_and_dtype", [(8, "<u2"), (4, "<i4"), (5, "<i8")])
@pytest.mark.parametrize("options", [{}, {"end": (2,)}, {"sequences_per_document": 3, "modes": True}])
def test_megatrons_index_tells_the_documents(tmp_path, data_config, rng, code_and_dtype, options):
    documents = [rng.integers(3, 60_000, length).tolist() for length in (5, 1, 30, 2, 400)]
    _write_megatron(tmp_path / "a.bin", documents, code_and_dtype, **options)
    config = data_config(source="bin", files=["a.bin"], validation_fraction=0.4)
    with pytest.raises(
        DataError, match=r"a.bin \(Megatron, .*\) doesn't say which token ends a document; set data.end"
    ):
        load_corpus(config, vocab_size=60_000)
    said: list[str] = []
    for end in (2, "none"):
        config = dataclasses.replace(config, end_of_document_token=end)
        corpus = load_corpus(config, vocab_size=60_000, on_progress=said.append)
        stored = [[*each, *options.get("end", ())] for each in documents] if end == "none" else documents
        assert sorted(_contents(corpus.train) + _contents(corpus.validation)) == sorted(stored)
        assert corpus.tokenizer.delimiters == ((2, 2) if end == 2 else (None, None))
    assert not any("no header" in line for line in said)
    with pytest.raises(DataError, match=r"a.idx is the index of a Megatron .bin, not token ids"):
        load_corpus(dataclasses.replace(config, files=(str(tmp_path / "a.*"),)), vocab_size=60_000)


def test_another_index_is_another_corpus(tmp_path, data_config):
    tokens = list(range(3, 43))
    config = data_config(source="bin", files=["a.bin"], validation_fraction=0.4, end_of_document_token="none")
    fingerprints = set()
    for length in (10, 20):
        _write_megatron(tmp_path / "a.bin", [tokens[start : start + length] for start in range(0, 40, length)])
        corpus = load_corpus(config, vocab_size=99)
        fingerprints.add(corpus.fingerprint)
        assert len(corpus.train) + len(corpus.validation) == 40 // length
    assert len(fingerprints) == 2


def test_a_damaged_index_is_refused(tmp_path, data_config):
    _write_megatron(tmp_path / "a.bin", [[1, 2, 3], [4, 5]])
    good = (tmp_path / "a.idx").read_bytes()
    config = data_config(source="bin", files=["a.bin"], end_of_document_token=9)

    def spoilt(place: int, new: bytes) -> bytes:
        return good[:place] + new + good[place + len(new) :]

    for content, message in (
        (b"TNTIDX\0\0" + good, r"a.idx is of Megatron's first form; expected MMIDIDX"),
        (good[:20], r"a.idx: 20 bytes end inside the header"),
        (good[:-1], r"a.idx: 2 sequences and 3 boundaries make 82 bytes, but it has 81; it was cut short"),
        (spoilt(9, b"\2"), r"a.idx: version 2 and type 8, expected version 1 and integers"),
        (spoilt(17, b"\7"), r"a.idx: version 1 and type 7, expected version 1 and integers"),
        (spoilt(34, b"\4"), r"a.idx: its sequences don't lie end to end"),
        (spoilt(38, b"\1"), r"a.idx is of 4 tokens, and the .bin beside it has 5; one was cut short"),
        (spoilt(58, b"\3"), r"a.idx: its documents aren't in order"),
        (spoilt(66, b"\3"), r"a.idx: its documents aren't in order"),
    ):
        (tmp_path / "a.idx").write_bytes(content)
        with pytest.raises(DataError, match=message):
            load_corpus(config, vocab_size=99)
    (tmp_path / "a.idx").write_bytes(b"an index of something else")
    assert load_corpus(config, vocab_size=99).train.num_tokens > 0


def test_a_file_that_is_replaced_while_it_is_opened_is_refused(tmp_path, data_config, documents, monkeypatch):
    path = tmp_path / "a.bin"
    _nanogpt(documents).astype("<u2").tofile(path)
    key = bin_files_module.cache_key

    def replace(files, **settings):
        (tmp_path / "new").write_bytes(path.read_bytes())
        (tmp_path / "new").replace(path)
        return key(files, **settings)

    monkeypatch.setattr(bin_files_module, "cache_key", replace)
    with pytest.raises(DataError, match=r"a.bin was changed while it was opened; run again"):
        load_corpus(data_config(source="bin", files=["a.bin"]), vocab_size=50_304)


@settings(max_examples=50)
@given(data=st.data())
def test_any_bytes_give_documents_or_a_refusal(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("fuzzed")
    header = data.draw(
        st.just(b"")
        | st.builds(
            lambda magic, version, count: np.array([magic, version, count] + [0] * 253, "<i4").tobytes(),
            st.sampled_from([20240520, 20240801, 20240522, 0]),
            st.sampled_from([1, 7, -1]),
            st.integers(0, 40) | st.integers(-(2**31), 2**31 - 1),
        )
    )
    (folder / "a.bin").write_bytes(header + data.draw(st.binary(min_size=1, max_size=80)))
    config = DataConfig(
        source="bin",
        files=(str(folder / "a.bin"),),
        validation_fraction=0.5,
        token_cache_dir=str(folder / "cache"),
        end_of_document_token=data.draw(st.none() | st.integers(-2, 2**17)),
    )
    try:
        corpus = load_corpus(config, vocab_size=data.draw(st.sampled_from([257, 50_304, 128_256])))
    except DataError as refused:
        message = str(refused)
        assert "a.bin" in message or "documents" in message
    else:
        assert corpus.train.num_tokens > 0
