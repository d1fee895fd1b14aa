"""Corpora from text, JSON-lines, Parquet and the standard library: their documents, splits, facts and refusals."""

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

import numpy as np
import pytest

from trainer.config import DataConfig
from trainer.data import DataError, load_corpus
from trainer.data.stdlib import find_stdlib_files
from trainer.data.token_files import TokenFile
from trainer.data.unigram import estimate_unigram_entropy


def texts_of(*documents, tokenizer) -> list[str]:
    return [tokenizer.decode(each.tokens(i).tolist()) for each in documents for i in range(len(each))]


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
    code = f"from {__name__} import _load_when_told; from trainer.config import *; _load_when_told({config!r})"
    command = [sys.executable, "-c", code]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    processes = [subprocess.Popen(command, cwd=Path(__file__).parents[3], **pipes) for _ in range(2)]
    for process in processes:
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        process.stdin.write("go\n")
        process.stdin.flush()
    answers = [process.communicate(timeout=60)[0].split() for process in processes]
    assert sorted(made for made, _ in answers) == ["0", "1"]
    assert {fingerprint for _, fingerprint in answers} == {load_corpus(config, vocab_size=257).fingerprint}


@pytest.fixture(params=["byte", "hugging face"])
def tokenizer(request, tokenizer_file) -> str:
    return "byte" if request.param == "byte" else str(tokenizer_file)


@pytest.mark.parametrize("source", ["text", "jsonl", "parquet"])
def test_documents_come_back_as_written(tmp_path, source, tokenizer, random_texts, load, write_jsonl):
    texts = random_texts(40)
    pattern = _write(tmp_path, source, texts, write_jsonl)
    corpus = load(source, pattern, tokenizer=tokenizer, validation_fraction=0.3)
    train, validation = (texts_of(part, tokenizer=corpus.tokenizer) for part in (corpus.train, corpus.validation))
    assert sorted(train + validation) == sorted(texts)
    assert train == [text for text in texts if text in set(train)]  # In the files' order.
    assert isinstance(corpus.train.arrays[0], TokenFile)
    expected = {
        "num_documents": len(validation),
        "num_tokens": sum(len(corpus.tokenizer.encode(text)) + 1 for text in validation),
        "num_bytes": sum(len(text.encode()) for text in validation),
    }
    assert (corpus.validation.num_bytes, corpus.validation.num_tokens) == (
        expected["num_bytes"],
        expected["num_tokens"],
    )
    summary = json.loads(json.dumps(corpus.summary()))
    assert (summary["source"], summary["fingerprint"]) == (source, corpus.fingerprint)
    assert summary["validation"] == expected


def test_the_split_and_fingerprint_follow_the_text_wherever_it_lies(tmp_path, random_texts, load, write_jsonl):
    texts = random_texts(60)
    for folder in ("here", "there"):
        (tmp_path / folder).mkdir()
        _write(tmp_path / folder, "jsonl", texts, write_jsonl)
    here, there = (load("jsonl", f"{folder}/*", validation_fraction=0.3) for folder in ("here", "there"))
    assert here.fingerprint == there.fingerprint
    validations = [texts_of(corpus.validation, tokenizer=corpus.tokenizer) for corpus in (here, there)]
    assert validations[0] == validations[1]
    assert load("jsonl", "here/*", validation_fraction=0.4).fingerprint != here.fingerprint
    write_jsonl(tmp_path / "there" / "b.jsonl", [*texts[30:-1], texts[-1] + "!"])
    assert load("jsonl", "there/*", validation_fraction=0.3).fingerprint != here.fingerprint


def test_copies_of_a_document_land_on_one_side(tmp_path, random_texts, load, write_jsonl):
    texts = random_texts(30)
    write_jsonl(tmp_path / "a.jsonl", texts * 3)
    corpus = load("jsonl", "a.jsonl", validation_fraction=0.4)
    train, validation = (set(texts_of(part, tokenizer=corpus.tokenizer)) for part in (corpus.train, corpus.validation))
    assert train | validation == set(texts)
    assert not train & validation


def test_validation_files_replace_the_split(tmp_path, random_texts, load, write_jsonl):
    texts = random_texts(12)
    write_jsonl(tmp_path / "train.jsonl", texts[:8], field="body")
    write_jsonl(tmp_path / "held.jsonl", texts[8:], field="body")
    corpus = load("jsonl", "train.*", validation_files=["held.*"], text_field="body")
    assert texts_of(corpus.train, tokenizer=corpus.tokenizer) == texts[:8]
    assert texts_of(corpus.validation, tokenizer=corpus.tokenizer) == texts[8:]


def test_blank_lines_and_empty_documents_hold_nothing(tmp_path, load):
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n\n{"text": ""}\n  \n{"text": "two"}')
    (tmp_path / "v.jsonl").write_text('{"text": "three"}\n')
    corpus = load("jsonl", "a.*", validation_files=["v.*"])
    assert texts_of(corpus.train, tokenizer=corpus.tokenizer) == ["one", "two"]


def test_tokens_are_made_once_and_again_when_a_file_changes(tmp_path, random_texts, load, write_jsonl):
    texts = random_texts(40)
    write_jsonl(tmp_path / "a.jsonl", texts)
    first = load("jsonl", "a.jsonl", validation_fraction=0.3)
    assert load.said[0].startswith("tokenizing 1 file with byte into")
    assert load.said[-1].endswith("tokens: done")
    assert load("jsonl", "a.jsonl", validation_fraction=0.3).fingerprint == first.fingerprint
    assert load.said == []
    write_jsonl(tmp_path / "a.jsonl", [*texts, "one more"])
    more = load("jsonl", "a.jsonl", validation_fraction=0.3)
    assert more.train.num_tokens + more.validation.num_tokens > first.train.num_tokens + first.validation.num_tokens


@pytest.mark.parametrize("name", ["tokens.bin", "documents.npy", "entry.json"])
@pytest.mark.parametrize("source", ["jsonl", "bin"])
def test_a_damaged_cache_entry_is_made_again(tmp_path, rng, random_texts, load, write_jsonl, source, name):
    options = {"validation_fraction": 0.5}
    if source == "jsonl":
        write_jsonl(tmp_path / "data", random_texts(40))
    else:
        name = name.replace("tokens.bin", "documents.npy")
        rng.permutation(np.arange(2000, dtype="<u2") % 257).tofile(tmp_path / "data")
        options["end_of_document_token"] = 256
    first = load(source, "data", **options)
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
        assert load(source, "data", **options).fingerprint == first.fingerprint
        assert re.search(r"entry of the token cache is damaged \(.+\); it is made again", "\n".join(load.said))
        assert path.read_bytes() == whole or name == "entry.json"


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
    theirs, ours = (load_corpus(DataConfig(tokenizer=name), vocab_size=512) for name in (str(tokenizer_file), "byte"))
    assert theirs.train.num_tokens < ours.train.num_tokens
    validations = [texts_of(corpus.validation, tokenizer=corpus.tokenizer) for corpus in (theirs, ours)]
    assert validations[0] == validations[1]
    assert theirs.fingerprint != ours.fingerprint


def test_what_belongs_to_the_machine_is_no_part_of_the_standard_library(tmp_path):
    kept = ["a.py", "b/c.py", "b/testing.py"]
    left_out = [f"{folder}/x.py" for folder in ("site-packages", "dist-packages", "b/__pycache__", "test", "b/tests")]
    left_out += ["b/c.txt", "idlelib/idle_test/x.py", "_sysconfigdata__linux.py", "config-3.11-x86/x.py"]
    for name in kept + left_out:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x = 1\n")
    (tmp_path / "empty.py").touch()
    (tmp_path / "link.py").symlink_to(tmp_path / "a.py")
    assert [relative for relative, _ in find_stdlib_files(tmp_path)] == kept


def test_a_library_without_sources_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    told = rf"no .py files under {tmp_path}; install its library's sources, or set data.source"
    with pytest.raises(DataError, match=told):
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
def test_a_glob_that_matches_nothing_is_refused(tmp_path, refuses, field):
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "folder.md").mkdir()
    told = rf"data.{field}: '.*\*.md' matches no file \(looked from .*\); correct the path"
    files, options = (["*.md"], {}) if field == "files" else (["a.txt"], {"validation_files": ["*.md"]})
    refuses(told, "text", *files, **options)


@pytest.mark.parametrize("source", ["text", "jsonl", "parquet", "bin"])
def test_an_empty_file_is_refused(tmp_path, refuses, source):
    (tmp_path / "a").write_text("x")
    (tmp_path / "b").touch()
    refuses(r"/b is empty \(0 bytes\); remove it or leave it out of data.files", source, "a", "b")


def test_documents_begin_and_end_as_the_config_says(tmp_path, load, tokenizer_file):
    for number, text in enumerate(["the cat", "a hat", "and the hat"] * 4):
        (tmp_path / f"{number}.txt").write_text(text + str(number))
    fingerprints, streams = set(), set()
    for begin, end in ((None, None), (5, None), ("none", None), (None, "none"), (5, "none")):
        options = {"begin_of_document_token": begin, "end_of_document_token": end, "validation_fraction": 0.3}
        corpus = load("text", "*.txt", tokenizer=str(tokenizer_file), **options)
        # Text that spells them has other tokens, so that entries of the cache are told apart by them.
        assert load.said[0].startswith("tokenizing")
        fingerprints.add(corpus.fingerprint)
        around = [[] if token is None else [token] for token in corpus.tokenizer.delimiters]
        for documents in (corpus.train, corpus.validation):
            stream = documents.stream(0, 0, int(documents.num_targets[0]) + 1).tolist()
            assert stream == [*around[0], *documents.tokens(0).tolist(), *around[1]]
        streams.add(str(stream))
        summary = corpus.summary()
        assert (summary["begin_of_document_id"], summary["end_of_document_id"]) == corpus.tokenizer.delimiters
    assert len(fingerprints) == len(streams) == 5


def test_undecodable_text_is_refused(tmp_path, refuses, tokenizer):
    (tmp_path / "a.txt").write_bytes("é\nok\nlatin ".encode() + b"\xe9 here")
    told = r"a.txt:3: byte 0xe9 at offset 12 is not UTF-8 \(.*\); .* convert the file \(Latin-1"
    refuses(told, "text", "a.txt", tokenizer=tokenizer)


GOOD = b'{"text": "fine"}\n'


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"text": "caf\xe9"}', r"byte 0xe9 at offset 47 is not UTF-8"),
        (b'{"text": ', r"not valid JSON at column \d+: .*; each line must be one JSON object"),
        (b'["text"]', r"expected a JSON object, got an array"),
        (b'{"body": "x", "id": 1}', r"no field 'text'; it has body, id. Set data.text_field"),
        (b'{"text": null}', r"field 'text' is null, expected text"),
        (b'{"text": "a\\ud800"}', r"field 'text' holds a lone surrogate U\+D800 at character 1"),
    ],
)
def test_a_bad_line_is_refused(tmp_path, refuses, line, message):
    (tmp_path / "a.jsonl").write_bytes(GOOD + GOOD + line + b"\n" + GOOD)
    refuses(f"a.jsonl:3: {message}", "jsonl", "a.jsonl")
    assert not list((tmp_path / "cache").glob("*/tokens.bin"))


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"\n \n", r"a.jsonl holds no documents"), (b'{"text": ""}\n', r"a.jsonl: every document in 1 file is empty")],
)
def test_files_without_text_are_refused(tmp_path, refuses, content, message):
    (tmp_path / "a.jsonl").write_bytes(content)
    refuses(message, "jsonl", "a.jsonl")


def test_parquet_that_cannot_serve_is_refused(tmp_path, refuses, monkeypatch):
    import pyarrow as arrow
    from pyarrow import parquet

    parquet.write_table(arrow.table({"body": ["a", "b", None], "id": [1, 2, 3]}), tmp_path / "a.parquet")
    (tmp_path / "b.parquet").write_bytes(b"not parquet at all")
    refuses(r"a.parquet: no column 'text'; it has body, id. Set data.text_field", "parquet", "a.parquet")
    refuses(r"a.parquet: row 2: column 'body' is null, expected text", "parquet", "a.parquet", text_field="body")
    refuses(r"a.parquet: column 'id' is int64, expected text", "parquet", "a.parquet", text_field="id")
    refuses(r"b.parquet: not readable as Parquet after row 0", "parquet", "b.parquet")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    told = r'a.parquet: reading Parquet needs pyarrow.*`pip install -e "\.\[data\]"` in the clone'
    refuses(told, "parquet", "a.parquet", text_field="body")


def test_a_vocabulary_too_small_for_the_tokenizer_is_refused():
    told = r"byte has 257 ids, more than model.vocab_size=256; set model.vocab_size to at least 257"
    with pytest.raises(DataError, match=told):
        load_corpus(DataConfig(), vocab_size=256)


@pytest.mark.parametrize("fraction", [1e-9, 0.05, 1 - 1e-9])
def test_one_document_is_cut_in_two(tmp_path, load, rng, fraction):
    text = "".join(rng.choice(list("abcdé中"), 1000))
    (tmp_path / "a.txt").write_text(text)
    corpus = load("text", "a.txt", validation_fraction=fraction)
    parts = [bytes(split.tokens(0).tolist()) for split in (corpus.train, corpus.validation)]
    assert b"".join(parts) == text.encode()
    num_bytes = len(text.encode())
    assert len(parts[1]) == min(max(round(fraction * num_bytes), 1), num_bytes - 1)
    assert any("one document" in line for line in load.said)


@pytest.mark.parametrize(("fraction", "num_validation"), [(1e-9, 1), (1 - 1e-9, 2)])
def test_of_few_documents_at_least_one_is_on_each_side(tmp_path, load, fraction, num_validation):
    for name in "abc":
        (tmp_path / f"{name}.txt").write_text(name * 20)
    corpus = load("text", "*.txt", validation_fraction=fraction)
    assert (len(corpus.train), len(corpus.validation)) == (3 - num_validation, num_validation)
    assert len(set(texts_of(corpus.train, corpus.validation, tokenizer=corpus.tokenizer))) == 3
    assert any(f"held out for validation instead: {num_validation}" in line for line in load.said)


def test_what_cannot_be_split_is_refused(tmp_path, refuses):
    (tmp_path / "a.txt").write_text("x")
    refuses("the only document has 1 tokens, too few", "text", "a.txt")
    (tmp_path / "b.txt").write_text("x")
    refuses("all 2 documents are the same text", "text", "*.txt")


def test_a_file_on_both_sides_is_refused(tmp_path, refuses):
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "b.txt").symlink_to(tmp_path / "a.txt")
    told = r"b.txt is in data.files and in data.validation_files \(1 such\)"
    refuses(told, "text", "a.txt", validation_files=["b.txt"])


def test_an_unreadable_file_is_refused(tmp_path, refuses, monkeypatch):
    (tmp_path / "a.txt").write_text("text")
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # Tests may run as root, whom no mode stops.
    refuses(r"a.txt cannot be read: permission denied", "text", "a.txt")


@pytest.mark.parametrize("field", ["files", "validation_files"])
def test_files_have_no_place_in_the_standard_library(field):
    with pytest.raises(ValueError, match=rf"data.{field}='x' has no effect with data.source='stdlib'"):
        DataConfig(**{field: ("x",)})
