"""Corpora from text, JSON-lines, Parquet and the standard library: their documents, splits, facts and refusals."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from trainer.config import DataConfig
from trainer.data import DataError, load_corpus
from trainer.data.stdlib import find_stdlib_files
from trainer.data.token_files import TokenFile
from trainer.data.unigram import estimate_unigram_entropy


def _texts(documents, tokenizer) -> list[str]:
    return [tokenizer.decode(documents.tokens(i).tolist()) for i in range(len(documents))]


def _write(folder, source, texts, write_jsonl):
    """The texts as two files of a source; returns the glob."""
    half = len(texts) // 2
    match source:
        case "text":
            for i, text in enumerate(texts):
                (folder / f"{i:03}.txt").write_bytes(text.encode())
            return "*.txt"
        case "jsonl":
            write_jsonl(folder / "a.jsonl", texts[:half])
            write_jsonl(folder / "b.jsonl", texts[half:])
            return "*.jsonl"
        case "parquet":
            import pyarrow as arrow
            from pyarrow import parquet

            for name, part in (("a", texts[:half]), ("b", texts[half:])):
                table = arrow.table({"id": range(len(part)), "text": part})
                parquet.write_table(table, folder / f"{name}.parquet", row_group_size=7)
            return "*.parquet"


def _load_when_told(config: DataConfig) -> None:
    """Loads a corpus once a line comes in; says whether it made the tokens, and the corpus's fingerprint."""
    print("ready", flush=True)
    sys.stdin.readline()
    told: list[str] = []
    corpus = load_corpus(config, vocab_size=257, on_progress=told.append)
    print(int(any(line.startswith("tokenizing") for line in told)), corpus.fingerprint, flush=True)


def test_processes_that_start_at_once_make_the_tokens_once_and_agree(tmp_path, data_config, write_jsonl, random_texts):
    write_jsonl(tmp_path / "a.jsonl", random_texts(3000))
    config = data_config(source="jsonl", files=["*.jsonl"])
    program = f"from {__name__} import DataConfig, _load_when_told; _load_when_told({config!r})"
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", program],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[3],
        )
        for _ in range(2)
    ]
    for process in processes:
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        process.stdin.write("go\n")
        process.stdin.flush()
    answers = [process.communicate(timeout=60)[0].split() for process in processes]
    assert sorted(made for made, _ in answers) == ["0", "1"]
    assert {fingerprint for _, fingerprint in answers} == {load_corpus(config, vocab_size=257).fingerprint}


@pytest.mark.parametrize("tokenizer", ["byte", "hugging face"])
@pytest.mark.parametrize("source", ["text", "jsonl", "parquet"])
def test_documents_come_back_as_written(
    tmp_path, source, tokenizer, random_texts, data_config, write_jsonl, tokenizer_file
):
    texts = random_texts(40)
    pattern = _write(tmp_path, source, texts, write_jsonl)
    config = data_config(
        source=source,
        files=[pattern],
        tokenizer=None if tokenizer == "byte" else str(tokenizer_file),
        validation_fraction=0.3,
    )
    corpus = load_corpus(config, vocab_size=512)
    train, validation = _texts(corpus.train, corpus.tokenizer), _texts(corpus.validation, corpus.tokenizer)
    assert sorted(train + validation) == sorted(texts)
    assert train == [text for text in texts if text in set(train)]  # In the files' order.
    assert isinstance(corpus.train.arrays[0], TokenFile)
    num_bytes = sum(len(text.encode()) for text in validation)
    assert corpus.validation.num_bytes == num_bytes
    assert corpus.validation.num_tokens == sum(len(corpus.tokenizer.encode(text)) + 1 for text in validation)
    summary = json.loads(json.dumps(corpus.summary()))
    assert summary["source"] == source
    assert summary["fingerprint"] == corpus.fingerprint
    assert summary["validation"] == {
        "num_documents": len(validation),
        "num_tokens": corpus.validation.num_tokens,
        "num_bytes": num_bytes,
    }


def test_the_split_and_fingerprint_follow_the_text_wherever_it_lies(tmp_path, random_texts, data_config, write_jsonl):
    def load(folder: str, validation_fraction: float = 0.3):
        config = data_config(source="jsonl", files=[f"{folder}/*"], validation_fraction=validation_fraction)
        return load_corpus(config, vocab_size=257)

    texts = random_texts(60)
    for folder in ("here", "there"):
        (tmp_path / folder).mkdir()
        _write(tmp_path / folder, "jsonl", texts, write_jsonl)
    here, there = load("here"), load("there")
    assert here.fingerprint == there.fingerprint
    assert _texts(here.validation, here.tokenizer) == _texts(there.validation, there.tokenizer)
    assert load("here", validation_fraction=0.4).fingerprint != here.fingerprint
    write_jsonl(tmp_path / "there" / "b.jsonl", [*texts[30:-1], texts[-1] + "!"])
    assert load("there").fingerprint != here.fingerprint


def test_copies_of_a_document_land_on_one_side(tmp_path, random_texts, data_config, write_jsonl):
    texts = random_texts(30)
    write_jsonl(tmp_path / "a.jsonl", texts * 3)
    corpus = load_corpus(data_config(source="jsonl", files=["a.jsonl"], validation_fraction=0.4), vocab_size=257)
    train, validation = set(_texts(corpus.train, corpus.tokenizer)), set(_texts(corpus.validation, corpus.tokenizer))
    assert train | validation == set(texts)
    assert not train & validation


def test_validation_files_replace_the_split(tmp_path, random_texts, data_config, write_jsonl):
    texts = random_texts(12)
    write_jsonl(tmp_path / "train.jsonl", texts[:8], field="body")
    write_jsonl(tmp_path / "held.jsonl", texts[8:], field="body")
    config = data_config(source="jsonl", files=["train.*"], validation_files=["held.*"], text_field="body")
    corpus = load_corpus(config, vocab_size=257)
    assert _texts(corpus.train, corpus.tokenizer) == texts[:8]
    assert _texts(corpus.validation, corpus.tokenizer) == texts[8:]


def test_blank_lines_and_empty_documents_hold_nothing(tmp_path, data_config):
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n\n{"text": ""}\n  \n{"text": "two"}')
    (tmp_path / "v.jsonl").write_text('{"text": "three"}\n')
    corpus = load_corpus(data_config(source="jsonl", files=["a.*"], validation_files=["v.*"]), vocab_size=257)
    assert _texts(corpus.train, corpus.tokenizer) == ["one", "two"]


def test_tokens_are_made_once_and_again_when_a_file_changes(tmp_path, random_texts, data_config, write_jsonl):
    texts, said = random_texts(40), []
    write_jsonl(tmp_path / "a.jsonl", texts)
    config = data_config(source="jsonl", files=["a.jsonl"], validation_fraction=0.3)

    def load():
        said.clear()
        return load_corpus(config, vocab_size=257, on_progress=said.append)

    first = load()
    assert said[0].startswith("tokenizing 1 file with byte into")
    assert said[-1].endswith("tokens: done")
    assert load().fingerprint == first.fingerprint
    assert said == []
    write_jsonl(tmp_path / "a.jsonl", [*texts, "one more"])
    assert load().train.num_tokens + load().validation.num_tokens > first.train.num_tokens + first.validation.num_tokens


@pytest.mark.parametrize("name", ["tokens.bin", "documents.npy", "entry.json"])
@pytest.mark.parametrize("source", ["jsonl", "bin"])
def test_a_damaged_cache_entry_is_made_again(tmp_path, rng, random_texts, data_config, write_jsonl, source, name):
    if source == "jsonl":
        write_jsonl(tmp_path / "data", random_texts(40))
    else:
        name = name.replace("tokens.bin", "documents.npy")
        rng.permutation(np.arange(2000, dtype="<u2") % 257).tofile(tmp_path / "data")
    config = data_config(
        source=source,
        files=["data"],
        validation_fraction=0.5,
        end_of_document_token=256 if source == "bin" else None,
    )
    first, said = load_corpus(config, vocab_size=257), []
    [path] = (tmp_path / "cache").glob(f"*/{name}")
    whole = path.read_bytes()
    bit = int(rng.integers(8 * len(whole)))
    flipped = bytearray(whole)
    flipped[bit // 8] ^= 1 << bit % 8
    for damage in (
        lambda: path.write_bytes(flipped),
        lambda: os.truncate(path, len(whole) // 2),
        lambda: path.write_bytes(b"[" * 100_000),
        path.unlink,
        lambda: (path.unlink(), path.mkdir()),
        lambda: (path.unlink(), os.mkfifo(path)),
        lambda: (shutil.rmtree(path.parent), path.parent.write_text("in the way")),
    ):
        damage()
        said.clear()
        again = load_corpus(config, vocab_size=257, on_progress=said.append)
        assert again.fingerprint == first.fingerprint
        assert re.search(r"entry of the token cache is damaged \(.+\); it is made again", "\n".join(said))
        assert path.read_bytes() == whole or name == "entry.json"


def test_unigram_entropy_is_that_of_the_targets(rng, make_documents):
    lists = [rng.integers(0, 7, n) for n in rng.integers(1, 50, 30)]
    counts = Counter([int(token) for tokens in lists for token in (*tokens, 256)])
    total = sum(counts.values())
    expected = -sum(count / total * math.log(count / total) for count in counts.values())
    estimate = estimate_unigram_entropy(make_documents(lists), vocab_size=300)
    assert estimate.nats_per_token == pytest.approx(expected)
    assert estimate.num_tokens == total


def test_unigram_entropy_of_much_data_is_sampled_evenly(rng, make_documents):
    # The first half is all one token, so a sample from the front alone would be far off.
    lists = [np.zeros(50_000), *(rng.integers(0, 200, n) for n in rng.integers(1, 2000, 50))]
    documents = make_documents(lists)
    exact = estimate_unigram_entropy(documents, vocab_size=257)
    sampled = estimate_unigram_entropy(documents, vocab_size=257, max_tokens=20 * 1024)
    assert sampled.num_tokens == 20 * 1024 < exact.num_tokens
    assert sampled.nats_per_token == pytest.approx(exact.nats_per_token, rel=0.05)


# The standard library.


def test_the_standard_library_is_a_corpus_of_whole_files():
    started = time.monotonic()
    corpus = load_corpus(DataConfig(), vocab_size=512)
    assert time.monotonic() - started < 10
    files = dict(find_stdlib_files())
    texts = {path.read_bytes() for path in files.values()}
    for documents in (corpus.train, corpus.validation):
        assert {documents.tokens(i).astype(np.uint8).tobytes() for i in range(len(documents))} <= texts
    assert corpus.train.num_bytes + corpus.validation.num_bytes == sum(path.stat().st_size for path in files.values())
    assert len(corpus.train) + len(corpus.validation) == len(files)
    assert corpus.train.num_bytes > 5_000_000
    assert 0.005 < len(corpus.validation) / len(files) < 0.15
    assert 2.5 < corpus.unigram_nats_per_token < 4
    assert load_corpus(DataConfig(), vocab_size=257).fingerprint == corpus.fingerprint
    assert load_corpus(DataConfig(validation_fraction=0.1), vocab_size=257).fingerprint != corpus.fingerprint


def test_the_standard_library_can_be_read_with_another_tokenizer(tokenizer_file, tmp_path, monkeypatch):
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path / "lib")})
    (tmp_path / "lib").mkdir()
    for i in range(40):
        (tmp_path / "lib" / f"m{i}.py").write_text(f"the cat = {i}\n")
    corpora = [load_corpus(DataConfig(tokenizer=name), vocab_size=512) for name in (str(tokenizer_file), "byte")]
    assert corpora[0].train.num_tokens < corpora[1].train.num_tokens
    assert _texts(corpora[0].validation, corpora[0].tokenizer) == _texts(corpora[1].validation, corpora[1].tokenizer)
    assert corpora[0].fingerprint != corpora[1].fingerprint


def test_what_belongs_to_the_machine_is_no_part_of_the_standard_library(tmp_path):
    kept = ["a.py", "b/c.py", "b/testing.py"]
    left_out = [
        "b/c.txt",
        "site-packages/x.py",
        "dist-packages/x.py",
        "b/__pycache__/x.py",
        "test/x.py",
        "b/tests/x.py",
        "idlelib/idle_test/x.py",
        "_sysconfigdata__linux.py",
        "config-3.11-x86/x.py",
    ]
    for name in kept + left_out:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x = 1\n")
    (tmp_path / "empty.py").touch()
    (tmp_path / "link.py").symlink_to(tmp_path / "a.py")
    assert [relative for relative, _ in find_stdlib_files(tmp_path)] == kept


def test_a_library_without_sources_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    with pytest.raises(
        DataError, match=rf"no .py files under {tmp_path}; install its library's sources, or set data.source"
    ):
        load_corpus(DataConfig(), vocab_size=257)


def test_loading_a_corpus_starts_no_device_and_needs_no_grain():
    program = (
        "import sys; from trainer.config import DataConfig; from trainer.data import load_corpus;"
        "load_corpus(DataConfig(), vocab_size=257); assert 'grain' not in sys.modules;"
        "import grain; from jax._src import xla_bridge; assert not xla_bridge._backends, xla_bridge._backends"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


# Refusals: each names the file, the place in it, and the remedy.


@pytest.mark.parametrize("field", ["files", "validation_files"])
def test_a_glob_that_matches_nothing_is_refused(tmp_path, data_config, field):
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "folder.md").mkdir()
    config = data_config(source="text", **{"files": ["a.txt"], field: ["*.md"]})
    with pytest.raises(
        DataError, match=rf"data.{field}: '.*\*.md' matches no file \(looked from .*\); correct the path"
    ):
        load_corpus(config, vocab_size=257)


@pytest.mark.parametrize("source", ["text", "jsonl", "parquet", "bin"])
def test_an_empty_file_is_refused(tmp_path, data_config, source):
    (tmp_path / "a").write_text("x")
    (tmp_path / "b").touch()
    with pytest.raises(DataError, match=r"/b is empty \(0 bytes\); remove it or leave it out of data.files"):
        load_corpus(data_config(source=source, files=["a", "b"]), vocab_size=60_000)


def test_documents_begin_and_end_as_the_config_says(tmp_path, data_config, tokenizer_file):
    texts = ["the cat", "a hat", "and the hat"] * 4
    for number, text in enumerate(texts):
        (tmp_path / f"{number}.txt").write_text(text + str(number))
    config = data_config(source="text", files=["*.txt"], tokenizer=str(tokenizer_file), validation_fraction=0.3)
    said: list[str] = []
    fingerprints, streams = set(), []
    for begin, end in ((None, None), (5, None), ("none", None), (None, "none"), (5, "none")):
        corpus = load_corpus(
            dataclasses.replace(config, begin_of_document_token=begin, end_of_document_token=end),
            vocab_size=512,
            on_progress=said.append,
        )
        fingerprints.add(corpus.fingerprint)
        around = [[] if token is None else [token] for token in corpus.tokenizer.delimiters]
        for documents in (corpus.train, corpus.validation):
            tokens = documents.tokens(0).tolist()
            stream = documents.stream(0, 0, int(documents.num_targets[0]) + 1).tolist()
            assert stream == [*around[0], *tokens, *around[1]]
        streams.append(stream)
        summary = corpus.summary()
        assert (summary["begin_of_document_id"], summary["end_of_document_id"]) == corpus.tokenizer.delimiters
    assert len(fingerprints) == len({str(stream) for stream in streams}) == 5
    # Text that spells them has other tokens, so that entries of the cache are told apart by them.
    assert sum(line.startswith("tokenizing") for line in said) == 5


@pytest.mark.parametrize("tokenizer", ["byte", "hugging face"])
def test_undecodable_text_is_refused(tmp_path, data_config, tokenizer, tokenizer_file):
    (tmp_path / "a.txt").write_bytes("é\nok\nlatin ".encode() + b"\xe9 here")
    config = data_config(
        source="text", files=["a.txt"], tokenizer="byte" if tokenizer == "byte" else str(tokenizer_file)
    )
    with pytest.raises(
        DataError, match=r"a.txt:3: byte 0xe9 at offset 12 is not UTF-8 \(.*\); .* convert the file \(Latin-1"
    ):
        load_corpus(config, vocab_size=512)


GOOD = b'{"text": "fine"}\n'


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"text": "caf\xe9"}', r"a.jsonl:3: byte 0xe9 at offset 47 is not UTF-8"),
        (b'{"text": ', r"a.jsonl:3: not valid JSON at column \d+: .*; each line must be one JSON object"),
        (b'["text"]', r"a.jsonl:3: expected a JSON object, got an array"),
        (b'{"body": "x", "id": 1}', r"a.jsonl:3: no field 'text'; it has body, id. Set data.text_field"),
        (b'{"text": null}', r"a.jsonl:3: field 'text' is null, expected text"),
        (b'{"text": "a\\ud800"}', r"a.jsonl:3: field 'text' holds a lone surrogate U\+D800 at character 1"),
    ],
)
def test_a_bad_line_is_refused(tmp_path, data_config, line, message):
    (tmp_path / "a.jsonl").write_bytes(GOOD + GOOD + line + b"\n" + GOOD)
    with pytest.raises(DataError, match=message):
        load_corpus(data_config(source="jsonl", files=["a.jsonl"]), vocab_size=257)
    assert not list((tmp_path / "cache").glob("*/tokens.bin"))


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"\n \n", r"a.jsonl holds no documents"), (b'{"text": ""}\n', r"a.jsonl: every document in 1 file is empty")],
)
def test_files_without_text_are_refused(tmp_path, data_config, content, message):
    (tmp_path / "a.jsonl").write_bytes(content)
    with pytest.raises(DataError, match=message):
        load_corpus(data_config(source="jsonl", files=["a.jsonl"]), vocab_size=257)


def test_parquet_that_cannot_serve_is_refused(tmp_path, data_config, monkeypatch):
    import pyarrow as arrow
    from pyarrow import parquet

    def load(name, **fields):
        return load_corpus(data_config(source="parquet", files=[name], **fields), vocab_size=257)

    parquet.write_table(arrow.table({"body": ["a", "b", None], "id": [1, 2, 3]}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"a.parquet: no column 'text'; it has body, id. Set data.text_field"):
        load("a.parquet")
    with pytest.raises(DataError, match=r"a.parquet: row 2: column 'body' is null, expected text"):
        load("a.parquet", text_field="body")
    with pytest.raises(DataError, match=r"a.parquet: column 'id' is int64, expected text"):
        load("a.parquet", text_field="id")
    (tmp_path / "b.parquet").write_bytes(b"not parquet at all")
    with pytest.raises(DataError, match=r"b.parquet: not readable as Parquet after row 0"):
        load("b.parquet")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(
        DataError, match=r'a.parquet: reading Parquet needs pyarrow.*`pip install -e "\.\[data\]"` in the clone'
    ):
        load("a.parquet", text_field="body")


def test_a_vocabulary_too_small_for_the_tokenizer_is_refused():
    with pytest.raises(
        DataError, match=r"byte has 257 ids, more than model.vocab_size=256; set model.vocab_size to at least 257"
    ):
        load_corpus(DataConfig(), vocab_size=256)


@pytest.mark.parametrize("fraction", [1e-9, 0.05, 1 - 1e-9])
def test_one_document_is_cut_in_two(tmp_path, data_config, rng, fraction):
    text = "".join(rng.choice(list("abcdé中"), 1000))
    (tmp_path / "a.txt").write_text(text)
    told: list[str] = []
    config = data_config(source="text", files=["a.txt"], validation_fraction=fraction)
    corpus = load_corpus(config, vocab_size=257, on_progress=told.append)
    parts = [bytes(split.tokens(0).tolist()) for split in (corpus.train, corpus.validation)]
    assert b"".join(parts) == text.encode()
    num_bytes = len(text.encode())
    assert len(parts[1]) == min(max(round(fraction * num_bytes), 1), num_bytes - 1)
    assert any("one document" in line for line in told)


@pytest.mark.parametrize(("fraction", "num_validation"), [(1e-9, 1), (1 - 1e-9, 2)])
def test_of_few_documents_at_least_one_is_on_each_side(tmp_path, data_config, fraction, num_validation):
    for name in "abc":
        (tmp_path / f"{name}.txt").write_text(name * 20)
    told: list[str] = []
    config = data_config(source="text", files=["*.txt"], validation_fraction=fraction)
    corpus = load_corpus(config, vocab_size=257, on_progress=told.append)
    texts = [[split.tokens(i).tobytes() for i in range(len(split))] for split in (corpus.train, corpus.validation)]
    assert [len(split) for split in texts] == [3 - num_validation, num_validation]
    assert len({*texts[0], *texts[1]}) == 3
    assert any(f"held out for validation instead: {num_validation}" in line for line in told)


def test_what_cannot_be_split_is_refused(tmp_path, data_config):
    (tmp_path / "a.txt").write_text("x")
    with pytest.raises(DataError, match="the only document has 1 tokens, too few"):
        load_corpus(data_config(source="text", files=["a.txt"]), vocab_size=257)
    (tmp_path / "b.txt").write_text("x")
    with pytest.raises(DataError, match="all 2 documents are the same text"):
        load_corpus(data_config(source="text", files=["*.txt"]), vocab_size=257)


def test_a_file_on_both_sides_is_refused(tmp_path, data_config):
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "b.txt").symlink_to(tmp_path / "a.txt")
    with pytest.raises(DataError, match=r"b.txt is in data.files and in data.validation_files \(1 such\)"):
        load_corpus(data_config(source="text", files=["a.txt"], validation_files=["b.txt"]), vocab_size=257)


def test_an_unreadable_file_is_refused(tmp_path, data_config, monkeypatch):
    (tmp_path / "a.txt").write_text("text")
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # Tests may run as root, whom no mode stops.
    with pytest.raises(DataError, match=r"a.txt cannot be read: permission denied"):
        load_corpus(data_config(source="text", files=["a.txt"]), vocab_size=257)


@pytest.mark.parametrize("field", ["files", "validation_files"])
def test_files_have_no_place_in_the_standard_library(field):
    with pytest.raises(ValueError, match=rf"data.{field}='x' has no effect with data.source='stdlib'"):
        DataConfig(**{field: ("x",)})
