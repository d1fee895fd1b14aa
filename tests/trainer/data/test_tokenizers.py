"""Tokenizers: text and back, documents as their own text, and refusals."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from trainer.data import ByteTokenizer, DataError, HuggingFaceTokenizer, load_tokenizer
from trainer.data.tokenizers import PretokenizedIds


def test_bytes_go_there_and_back(random_texts):
    tokenizer = load_tokenizer("byte")
    assert (tokenizer.vocab_size, tokenizer.end_of_document_id) == (257, 256)
    for text in random_texts(20):
        ids = tokenizer.encode(text)
        assert ids == list(text.encode())
        assert tokenizer.decode([256, *ids, 256]) == text
        np.testing.assert_array_equal(tokenizer.encode_documents([text.encode()])[0], ids)


def test_hugging_face_text_goes_there_and_back_whole(tokenizer_file, random_texts):
    # The file asks for truncation to 4, padding and a template; none may touch a document.
    tokenizer = load_tokenizer(str(tokenizer_file))
    assert isinstance(tokenizer, HuggingFaceTokenizer)
    texts = [*random_texts(20), "the cat and the hat", "a"]
    for text, ids in zip(texts, tokenizer.encode_documents([text.encode() for text in texts]), strict=True):
        assert ids.tolist() == tokenizer.encode(text)
        assert tokenizer.decode([tokenizer.end_of_document_id, *ids]) == text
        assert 0 <= ids.min() <= ids.max() < tokenizer.vocab_size
        assert tokenizer.end_of_document_id not in ids
    assert len(tokenizer.encode("the cat")) < len("the cat")


def test_a_document_that_spells_end_of_document_does_not_end(tokenizer_file):
    tokenizer = load_tokenizer(str(tokenizer_file))
    ids = tokenizer.encode("a<|endoftext|>b")
    assert tokenizer.end_of_document_id not in ids
    assert tokenizer.decode(ids) == "a<|endoftext|>b"


def test_vocab_size_covers_ids_with_gaps(tokenizer_file):
    import tokenizers

    raw = tokenizers.Tokenizer.from_file(str(tokenizer_file))
    expected = max(raw.get_vocab(with_added_tokens=True).values()) + 1
    assert load_tokenizer(str(tokenizer_file)).vocab_size == expected


@pytest.mark.parametrize("token", ["a", 5])
def test_end_of_document_can_be_named(tokenizer_file, token):
    tokenizer = load_tokenizer(str(tokenizer_file), token)
    assert tokenizer.end_of_document_id == (tokenizer._tokenizer.token_to_id("a") if token == "a" else 5)


@pytest.mark.parametrize(
    ("token", "message"),
    [
        ("<eot>", r"end_of_document_token='<eot>' is not a token of"),
        (10**6, r"=1000000 is not an id of .*; give one below \d+"),
    ],
)
def test_an_unknown_end_of_document_is_refused(tokenizer_file, token, message):
    with pytest.raises(DataError, match=message):
        load_tokenizer(str(tokenizer_file), token)


def test_a_tokenizer_with_no_usual_end_of_document_is_refused(tokenizer_file):
    tokenizer_file.write_text(tokenizer_file.read_text().replace("<|endoftext|>", "<|stop|>"))
    with pytest.raises(
        DataError, match=r"cannot tell which token ends a document.*set data.end_of_document_token.*<\|stop\|>"
    ):
        load_tokenizer(str(tokenizer_file))
    assert load_tokenizer(str(tokenizer_file), "<|stop|>").end_of_document_id == 0


def test_files_that_are_no_tokenizer_are_refused(tmp_path):
    with pytest.raises(DataError, match=r"missing.json' cannot be read: No such file or directory; give `byte`"):
        load_tokenizer(str(tmp_path / "missing.json"))
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(DataError, match=r"other.json: not a Hugging Face tokenizer.json"):
        load_tokenizer(str(tmp_path / "other.json"))


def test_the_missing_library_is_named_with_its_extra(tokenizer_file, monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(DataError, match=r'needs tokenizers.*pip install "flax-longcontext\[data\]"'):
        load_tokenizer(str(tokenizer_file))
    with pytest.raises(DataError, match="cannot be read: No such file"):
        load_tokenizer("missing.json")  # which no installation would help


def test_end_of_document_of_bytes_is_fixed():
    assert load_tokenizer("byte", 256).end_of_document_id == ByteTokenizer.end_of_document_id
    with pytest.raises(DataError, match=r"end_of_document_token='</s>' has no effect with data.tokenizer=byte"):
        load_tokenizer("byte", "</s>")


def test_ids_without_a_tokenizer_have_no_text():
    for call in (lambda t: t.encode("a"), lambda t: t.decode([1]), lambda t: t.encode_documents([b"a"])):
        with pytest.raises(DataError, match=r"cannot (encode|decode): a .bin file .*set data.tokenizer"):
            call(PretokenizedIds(10, 9))
