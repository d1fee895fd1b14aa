"""Pre-tokenized files: nanoGPT's and llm.c's, their documents, and what is wrong with broken ones."""

from __future__ import annotations

import re

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
        assert corpus.tokenizer.end_of_document_id == END
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
        (_no_documents, r"a.bin holds no token but end-of-document 50256"),
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


def test_an_end_of_document_past_the_vocabulary_is_refused(tmp_path, data_config):
    np.array([1, 2], "<u2").tofile(tmp_path / "a.bin")
    with pytest.raises(
        DataError, match=r"a.bin: its end-of-document token 50256 is outside the vocabulary of 100; .*50257"
    ):
        load_corpus(data_config(source="bin", files=["a.bin"]), vocab_size=100)


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
        r"ids of another width need llm.c's header",
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


def test_a_file_of_numpys_is_refused(tmp_path, data_config):
    np.save(tmp_path / "a.bin.npy", np.arange(100, dtype="<u2"))
    with pytest.raises(DataError, match=r"a.bin.npy: a file of NumPy's, with a header of its own; write the ids alone"):
        load_corpus(data_config(source="bin", files=["a.*"]), vocab_size=50_304)


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
