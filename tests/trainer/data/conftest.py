"""Small corpora in files."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from trainer.config import DataConfig
from trainer.data import Corpus, DataError, Documents, load_corpus, make_train_iterator
from trainer.data.documents import DOCUMENT_DTYPE, Delimiters
from trainer.data.tokenizers import ByteTokenizer
from trainer.data.unigram import UnigramEstimate

LLMC_GPT2 = (20240520, 1, "<u2")
LLMC_LLAMA3 = (20240801, 7, "<u4")


@pytest.fixture
def data_config(tmp_path: Path) -> Callable[..., DataConfig]:
    """A DataConfig whose token cache is the test's own and whose file globs are relative to the test's folder."""

    def make(**fields) -> DataConfig:
        for name in ("files", "validation_files"):
            fields[name] = tuple(str(tmp_path / pattern) for pattern in fields.get(name, ()))
        return DataConfig(token_cache_dir=str(tmp_path / "cache"), **fields)

    return make


@pytest.fixture
def load(data_config) -> Callable[..., Corpus]:
    """Loads a corpus of the test's folder. `load.said`: the lines told of the last one."""

    def load(source: str, *files: str, vocab_size: int = 50_304, **fields) -> Corpus:
        load.said = []
        config = data_config(source=source, files=files, **fields)
        return load_corpus(config, vocab_size=vocab_size, on_progress=load.said.append)

    return load


@pytest.fixture
def refuses(load) -> Callable[..., None]:
    """Checks that such a corpus is refused with a message."""

    def refuses(message: str, *arguments, **fields) -> None:
        with pytest.raises(DataError, match=message):
            load(*arguments, **fields)

    return refuses


@pytest.fixture
def make_documents() -> Callable[..., Documents]:
    """Documents in memory, from their token lists; end-of-document is 256."""

    def make(token_lists, end_of_document_id: int = 256) -> Documents:
        table = np.zeros(len(token_lists), DOCUMENT_DTYPE)
        table["length"] = [len(tokens) for tokens in token_lists]
        table["start"] = np.cumsum(table["length"]) - table["length"]
        tokens = np.concatenate([np.asarray(tokens, np.uint16) for tokens in token_lists])
        return Documents((tokens,), table, Delimiters(end_of_document_id, end_of_document_id))

    return make


@pytest.fixture
def corpus(rng, make_documents) -> Corpus:
    """Random bytes in memory."""

    def documents(count: int):
        return make_documents([rng.integers(0, 256, n) for n in rng.integers(1, 200, count)])

    return Corpus(
        source="text",
        tokenizer=ByteTokenizer(),
        train=documents(60),
        validation=documents(20),
        fingerprint="f" * 64,
        unigram=UnigramEstimate(5.0, 1000),
    )


@pytest.fixture
def make_iterator(corpus):
    """Training iterators that are closed when the test ends."""
    iterators = []

    def make(corpus=corpus, **options):
        options = {"sequence_length": 64, "batch_size": 4, "seed": 7, "num_prefetch_batches": 3, **options}
        iterators.append(make_train_iterator(corpus, **options))
        return iterators[-1]

    yield make
    for iterator in iterators:
        iterator.close()


@pytest.fixture
def write_jsonl() -> Callable[..., None]:
    def write(path: Path, texts: list[str], field: str = "text") -> None:
        path.write_text("".join(json.dumps({"id": i, field: text}) + "\n" for i, text in enumerate(texts)))

    return write


@pytest.fixture
def write_llmc() -> Callable[..., None]:
    """Write tokens as llm.c does; the header's fields can be spoilt."""

    def write(path: Path, tokens, layout=LLMC_GPT2, *, magic=None, version=None, num_tokens=None) -> None:
        header = np.zeros(256, "<i4")
        header[:3] = (
            layout[0] if magic is None else magic,
            layout[1] if version is None else version,
            len(tokens) if num_tokens is None else num_tokens,
        )
        path.write_bytes(header.tobytes() + np.asarray(tokens, layout[2]).tobytes())

    return write
