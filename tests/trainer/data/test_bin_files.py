"""Pre-tokenized files of nanoGPT, llm.c and NumPy: their documents, and what is wrong with broken ones."""

import gzip
import re
import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.trainer.data.conftest import LLMC_LLAMA3
from trainer.config import DataConfig
from trainer.data import DataError, load_corpus
from trainer.data import bin_files as bin_files_module
from trainer.data.token_files import TokenFile

END = 50_256


@pytest.fixture
def documents(rng) -> list[list[int]]:
    return [rng.integers(0, END, rng.integers(1, 60)).tolist() for _ in range(50)]


@pytest.fixture
def write(tmp_path):
    """Writes token ids as a file without a header."""

    def write(name: str, tokens, dtype: str = "<u2") -> None:
        np.asarray(tokens).astype(dtype).tofile(tmp_path / name)

    return write


def nanogpt(documents, end=END):
    return np.array([token for document in documents for token in (*document, end)])


def llmc(documents, end=END):
    return np.array([token for document in documents for token in (end, *document)])


def contents(*documents) -> list[list[int]]:
    return [each.tokens(i).tolist() for each in documents for i in range(len(each))]


def test_every_writers_documents_are_found(tmp_path, documents, load, write, write_llmc, monkeypatch):
    monkeypatch.setattr(bin_files_module, "_TOKENS_READ_AT_ONCE", 17)  # Documents span reads.
    write("a.bin", nanogpt(documents))
    write_llmc(tmp_path / "b.bin", llmc(documents))
    for name in ("a.bin", "b.bin"):
        corpus = load("bin", name)
        assert sorted(contents(corpus.train, corpus.validation)) == sorted(documents)
        assert isinstance(corpus.train.arrays[0], TokenFile)
        assert corpus.train.num_bytes is None
        assert (corpus.tokenizer.delimiters.end, corpus.tokenizer.vocab_size) == (END, END + 1)
        assert corpus.summary()["tokenizer"] == "pretokenized"


def test_llama_3_files_hold_uint32_and_their_own_end_of_document(tmp_path, load, write_llmc, rng):
    documents = [rng.integers(0, 128_000, 30).tolist() for _ in range(50)]
    documents[3][5] = END  # An ordinary token here.
    write_llmc(tmp_path / "a.bin", llmc(documents, end=128_000), LLMC_LLAMA3)
    corpus = load("bin", "a.bin", validation_fraction=0.3, vocab_size=128_256)
    assert sorted(contents(corpus.train, corpus.validation)) == sorted(documents)


def test_files_of_several_shards_keep_their_documents_apart(load, write, documents):
    write("a_0.bin", nanogpt(documents[:20]))
    write("a_1.bin", nanogpt(documents[20:])[:-1])  # Without the last end-of-document.
    write("v.bin", nanogpt([[5, 6], [7]]))
    corpus = load("bin", "a_*.bin", validation_files=["v.bin"])
    assert contents(corpus.train) == documents
    assert contents(corpus.validation) == [[5, 6], [7]]
    assert corpus.train.num_tokens == sum(len(document) + 1 for document in documents)


def test_the_index_is_made_once_and_again_when_a_file_changes(load, write, documents):
    write("a.bin", nanogpt(documents))
    first = load("bin", "a.bin")
    assert any("finding the documents of" in line for line in load.said)
    assert load("bin", "a.bin").fingerprint == first.fingerprint
    assert not any("finding the documents of" in line for line in load.said)
    write("a.bin", nanogpt([*documents, [1, 2, 3]]))
    second = load("bin", "a.bin")
    assert "finding the documents of" in load.said[-1]
    assert second.fingerprint != first.fingerprint
    assert len(second.train) + len(second.validation) == len(documents) + 1


def test_a_token_past_the_vocabulary_is_refused_with_its_place(tmp_path, documents, load, refuses, write_llmc, rng):
    tokens = llmc(documents)
    index = int(rng.integers(1, len(tokens)))
    tokens[index] = 60_000
    tokens.astype("<u2").tofile(tmp_path / "raw.bin")
    write_llmc(tmp_path / "llmc.bin", tokens)
    for name, header in (("raw.bin", 0), ("llmc.bin", 1024)):
        place = rf"{name}: token 60000 at index {index:,} \(byte {header + 2 * index:,}\)"
        refuses(rf"{place} is outside the vocabulary of 50,304; .*Set model.vocab_size to at least 60001", "bin", name)
    load("bin", "raw.bin", vocab_size=60_001)


def test_a_tokenizer_that_did_not_make_the_file_is_refused(refuses, write, tokenizer_file):
    write("a.bin", [1, 2, 4000, 0, 5])
    refuses(r"token 4000 at index 2 .*did not make this file", "bin", "a.bin", tokenizer=str(tokenizer_file))


@pytest.mark.parametrize(
    ("tokens", "spoilt", "message"),
    [
        (None, b"\x01\x00\x02", r"3 bytes is not a whole number of uint16 tokens; without llm.c's header it would be"),
        (None, struct.pack("<3i", 20240520, 1, 5), r"12 bytes end inside the 1024-byte llm.c GPT-2 header"),
        ([1, 2, 3], {"num_tokens": 4}, r"its header promises 4 tokens, which make 1,032 bytes, but it has 1,030"),
        ([1, 2, 3], {"version": 2}, r"version 2 of llm.c GPT-2, expected 1"),
        ([1, 2], {"magic": 20240522}, r"header magic 20240522 is not one of .*token files \(20240520, 20240801\)"),
        ([], {}, r"has a header but no tokens"),
        ([END, END], {}, r"holds no token but those around documents, \[50256, …, 50256\]"),
        # Other formats.
        (None, gzip.compress(bytes(100), mtime=0), r"is gzip-compressed, not token ids; decompress it \(`gunzip`\)"),
        (None, b"\x28\xb5\x2f\xfd" + bytes(20), r"is Zstandard-compressed, not token ids; decompress it"),
        (None, b"PAR1\x15" + bytes(31), r"is a Parquet file, not token ids; set data.source=parquet"),
        (None, b"PK\x03\x04" + bytes(20), r"is a ZIP archive .*, not token ids; unpack it"),
        (None, b"MMIDIDX\0\0\1" + bytes(30), r"is the index of a Megatron .bin, not .*write the documents"),
    ],
)
def test_broken_files_are_refused(tmp_path, refuses, write_llmc, tokens, spoilt, message):
    if tokens is None:
        (tmp_path / "a.bin").write_bytes(spoilt)
    else:
        write_llmc(tmp_path / "a.bin", tokens, **spoilt)
    refuses(rf"a\.bin:? {message}", "bin", "a.bin")


def test_files_of_different_tokenizers_are_refused(tmp_path, refuses, write_llmc):
    write_llmc(tmp_path / "a.bin", [END, 1])
    write_llmc(tmp_path / "b.bin", [128_000, 1], LLMC_LLAMA3)
    told = r"a.bin and .*b.bin come from different tokenizers \(end-of-document 50256 and 128000\)"
    refuses(told, "bin", "*.bin", vocab_size=128_256)


def test_a_delimiter_past_the_vocabulary_is_refused(refuses, write):
    write("a.bin", [1, 2, END])
    refuses(r"a.bin: token 50256 at index 2 .* is outside the vocabulary of 100; ", "bin", "a.bin", vocab_size=100)
    write("a.bin", [1, 2])
    told = r"a.bin: the token 100 that begins or ends its documents is outside .* of 100; .* 101, or"
    for field in ("end_of_document_token", "begin_of_document_token"):
        refuses(told, "bin", "a.bin", vocab_size=100, **{field: 100})


@pytest.mark.parametrize("token", [None, "none", 65])
def test_without_a_token_to_end_documents_a_file_is_one_text(load, refuses, write, rng, token):
    # nanoGPT's shakespeare_char: 65 characters, train.bin and val.bin, no delimiter.
    texts = {name: rng.integers(0, 65, 1000) for name in ("train.bin", "val.bin")}
    for name, text in texts.items():
        write(name, text)
    options = {"validation_files": ["val.bin"], "end_of_document_token": token}
    corpus = load("bin", "train.bin", vocab_size=66, **options)
    assert (len(corpus.train), len(corpus.validation)) == (1, 1)
    if token == 65:
        assert corpus.tokenizer.vocab_size == 66
        return
    assert any("no token 50256 ends a document" in each and "one text" in each for each in load.said) == (token is None)
    assert corpus.tokenizer.delimiters == (None, None)
    assert corpus.tokenizer.vocab_size == max(text.max() for text in texts.values()) + 1
    for documents, text in ((corpus.train, texts["train.bin"]), (corpus.validation, texts["val.bin"])):
        assert documents.num_tokens == 999
        assert documents.stream(0, 0, 1000).tolist() == text.tolist()
    refuses(r"token 64 at index \d+ .* is outside the vocabulary of 64", "bin", "train.bin", vocab_size=64, **options)


def test_one_file_with_a_token_that_ends_documents_makes_it_everybodys(load, write):
    write("a.bin", [1, 2, END, 3])
    write("v.bin", [4, 5])
    corpus = load("bin", "a.bin", validation_files=["v.bin"])
    assert corpus.tokenizer.delimiters == (END, END)
    assert corpus.validation.stream(0, 0, 4).tolist() == [END, 4, 5, END]


def test_a_text_too_short_to_be_learnt_is_refused(refuses, write):
    for length in (3, 1):
        write("a.bin", range(length))
        refuses(f"the only document has {length} tokens", "bin", "a.bin")
    write("v.bin", [0])
    refuses(r"no token to train on follows another", "bin", "a.bin", validation_files=["v.bin"])


def test_documents_with_a_token_at_either_end_lose_both(load, write):
    documents = [[5, 6, 7], [8], [9, 10]]
    write("a.bin", [token for each in documents for token in (1, *each, 2)])
    options = {"end_of_document_token": 2, "validation_fraction": 0.4}
    corpus = load("bin", "a.bin", begin_of_document_token=1, **options)
    assert sorted(contents(corpus.train, corpus.validation)) == documents
    stream = corpus.train.stream(0, 0, int(corpus.train.num_targets[0]) + 1).tolist()
    assert (stream[0], stream[-1]) == (1, 2)
    assert load("bin", "a.bin", begin_of_document_token="none", **options).fingerprint != corpus.fingerprint


def test_an_end_of_document_as_text_needs_the_tokenizer(refuses, write):
    write("a.bin", [1, 2])
    told = r"'</s>' is text, which a .bin file does not know; give its id"
    refuses(told, "bin", "a.bin", end_of_document_token="</s>")


# Files without a header are taken for nanoGPT's, which is said, and doubted where the numbers speak against it.


@pytest.mark.parametrize(
    ("dtype", "num_ids", "largest", "order"),
    [
        ("<u4", 50_257, "0", "little"),
        ("<u4", 2**18, "[123]", "little"),
        ("<i8", 50_257, "0", "little"),
        (">u4", 2**18, "[123]", "big"),
    ],
)
def test_ids_of_another_width_without_a_header_are_doubted(load, write, rng, dtype, num_ids, largest, order):
    for name in ("a.bin", "b.bin", "v.bin"):
        write(name, rng.integers(0, num_ids, 500), dtype)
    load("bin", "a.bin", "b.bin", validation_files=["v.bin"], vocab_size=2**18)
    assumed, warning, *_ = load.said
    nanogpts = "no header, so read as nanoGPT's: uint16 ids, documents ended by 50256; ids of another width need llm.c"
    assert re.match(rf"\S+a.bin and 1 more: {nanogpts}'s header, or NumPy's", assumed)
    doubt = rf"every second number is at most {largest}, as in {order}-endian ids of 32 or 64 bits"
    assert re.fullmatch(rf"warning: \S+a.bin and 1 more: {doubt}; look at what wrote it", warning)
    assert sum(line.startswith("warning: ") for line in load.said) == 2  # And of the validation file.


def test_text_called_bin_is_doubted(tmp_path, load):
    for name in ("a.bin", "v.bin"):
        (tmp_path / name).write_text("the cat and the hat\n" * 50)
    load("bin", "a.bin", validation_files=["v.bin"])
    assert "every byte is one of ASCII text, not half of an id; look at what wrote it" in load.said[1]


@pytest.mark.parametrize("num_ids", [2, 65, 257, 50_256, 2**16])
def test_uint16_ids_are_not_doubted(tmp_path, load, write, rng, write_llmc, num_ids):
    options = {"validation_files": ["v.bin"], "vocab_size": 2**18}
    for name in ("a.bin", "v.bin"):
        write(name, rng.integers(0, num_ids, 500))
    load("bin", "a.bin", end_of_document_token=num_ids, **options)
    assert "no header, so read as nanoGPT's" in load.said[0]
    assert f"documents ended by {num_ids}" in load.said[0]
    assert not any("warning" in line for line in load.said)
    for name in ("a.bin", "v.bin"):
        write_llmc(tmp_path / name, rng.integers(0, num_ids, 500), LLMC_LLAMA3)
    load("bin", "a.bin", **options)
    assert not any("no header" in line or "warning" in line for line in load.said)


@pytest.mark.parametrize("dtype", ["<u2", ">u2", "<u4", ">u4", "<i4", "<i8", ">i8", "<u8"])
def test_files_of_numpys_are_read_by_their_header(tmp_path, load, refuses, rng, dtype):
    largest = 2**16 if dtype.endswith("2") else 2**17
    documents = [rng.integers(END + 1, largest, length).tolist() for length in (5, 1, 30, 2)]
    np.save(tmp_path / "a.npy", nanogpt(documents).astype(dtype))
    options = {"validation_fraction": 0.4, "vocab_size": 2**17}
    if not dtype.endswith("2"):
        told = r"a.npy \(NumPy, .*\) doesn't say which token ends a document; set data.end"
        refuses(told, "bin", "a.npy", **options)
        options["end_of_document_token"] = END
    corpus = load("bin", "a.npy", **options)
    assert sorted(contents(corpus.train, corpus.validation)) == sorted(documents)
    assert not any("no header" in line for line in load.said)
    stream = corpus.train.stream(0, 0, 3)
    assert stream.dtype == np.int32
    assert stream.tolist() == [END, *contents(corpus.train)[0], END][:3]


ODD_ARRAY = r"an array of {} and shape {}, expected integers and one dim"


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.ones(9, "<f4"), ODD_ARRAY.format("float32", r"\(9,\)")),
        (np.ones((3, 3), "<u2"), ODD_ARRAY.format("uint16", r"\(3, 3\)")),
        (np.array(3, "<u2"), ODD_ARRAY.format("uint16", r"\(\)")),
        (np.array(["a"], object), ODD_ARRAY.format("object", r"\(1,\)")),
        (np.array([1, -5, 2], "<i4"), r"token -5 at index 1 is negative, so no token id"),
    ],
)
def test_odd_files_of_numpys_are_refused(tmp_path, refuses, array, message):
    np.save(tmp_path / "a.npy", array)
    refuses(f"a.npy: {message}", "bin", "a.npy", end_of_document_token=9)


def test_a_damaged_file_of_numpys_is_refused(tmp_path, refuses):
    np.save(tmp_path / "a.npy", np.arange(100, dtype="<u2"))
    content = (tmp_path / "a.npy").read_bytes()
    for damaged, message in (
        (content[:-1], "its header promises 100 tokens"),
        (content[:20], "its .npy header can't be read"),
        (content.replace(b"(100,), }", b"(100,,,,("), "its .npy header can't be read"),
        (content.replace(b"(100,)", b"(-10,)"), "its header promises -10 tokens"),
    ):
        (tmp_path / "a.npy").write_bytes(damaged)
        refuses(rf"a.npy: {message}", "bin", "a.npy")


@pytest.mark.parametrize("magic", [b"MMIDIDX\0\0", b"TNTIDX\0\0"])
def test_megatrons_files_are_refused(tmp_path, load, refuses, write, magic):
    write("a.bin", range(9))
    (tmp_path / "a.idx").write_bytes(magic + bytes(40))
    refuses(r"a.bin is Megatron-LM's, by the index beside it, .*: write its documents as JSON-lines", "bin", "a.bin")
    (tmp_path / "a.idx").write_bytes(b"an index of something else")
    assert load("bin", "a.bin", end_of_document_token=4).train.num_tokens > 0


def test_a_file_that_is_replaced_while_it_is_opened_is_refused(tmp_path, refuses, write, documents, monkeypatch):
    write("a.bin", nanogpt(documents))
    key = bin_files_module.cache_key

    def replace(files, **settings):
        (tmp_path / "new").write_bytes((tmp_path / "a.bin").read_bytes())
        (tmp_path / "new").replace(tmp_path / "a.bin")
        return key(files, **settings)

    monkeypatch.setattr(bin_files_module, "cache_key", replace)
    refuses(r"a.bin was changed while it was opened; run again", "bin", "a.bin")


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
