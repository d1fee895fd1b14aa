"""The tokenizer of a run as it lies on the disk: with the delimiters that its documents had."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from trainer.config import DataConfig
from trainer.data import DataError, load_tokenizer
from trainer.saved_run import load_trained_tokenizer


def _saved(delimiters, **data):
    data = {"files": ("a",), "source": "text", **data}
    return SimpleNamespace(
        config=SimpleNamespace(data=DataConfig(**data)), checkpoint=SimpleNamespace(delimiters=delimiters)
    )


@pytest.fixture
def bos_file(make_tokenizer, tmp_path):
    """A tokenizer.json that puts the token "a" before a text."""
    import tokenizers

    path = make_tokenizer(tmp_path / "tokenizer.json")
    tokenizer = tokenizers.Tokenizer.from_file(str(path))
    begin = tokenizer.token_to_id("a")
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(single="a $A", special_tokens=[("a", begin)])
    tokenizer.save(str(path))
    assert load_tokenizer(str(path)).delimiters.begin == begin
    return str(path)


def test_delimiters_are_those_of_training(bos_file):
    own = load_tokenizer(bos_file).delimiters
    for delimiters in ((7, 8), (None, 8), (7, None), (None, None), own):
        for data in ({"tokenizer": bos_file}, {"source": "bin", "tokenizer": bos_file}):
            loaded = load_trained_tokenizer(_saved(delimiters, **data), None, setting="--tokenizer")
            assert loaded.delimiters == delimiters
        loaded = load_trained_tokenizer(_saved(delimiters, source="bin"), bos_file, setting="--tokenizer")
        assert loaded.delimiters == delimiters


def test_a_tokenizer_without_those_tokens_is_refused(bos_file):
    assert load_trained_tokenizer(_saved((1, 2), source="bin"), None, setting="--tokenizer") is None
    with pytest.raises(DataError, match=r"end_of_document_token=5000 is not an id of"):
        load_trained_tokenizer(_saved((1, 5000), source="bin"), bos_file, setting="--tokenizer")


def test_before_checkpoints_told_delimiters_documents_began_as_they_ended(bos_file):
    end = load_tokenizer(bos_file).delimiters.end
    loaded = load_trained_tokenizer(_saved(None, tokenizer=bos_file), None, setting="--tokenizer")
    assert loaded.delimiters == (end, end)
    loaded = load_trained_tokenizer(
        _saved(None, tokenizer=bos_file, end_of_document_token=9), None, setting="--tokenizer"
    )
    assert loaded.delimiters == (9, 9)
