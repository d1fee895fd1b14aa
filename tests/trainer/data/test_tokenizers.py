"""Tokenizers: text and back, documents as their own text, and refusals."""

from __future__ import annotations

import contextlib
import json
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.data import ByteTokenizer, DataError, HuggingFaceTokenizer, load_tokenizer
from trainer.data import tokenizers as tokenizers_module
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


def _tokenizer_json(model: dict, **parts) -> str:
    names = ("truncation", "padding", "normalizer", "pre_tokenizer", "post_processor", "decoder")
    end = {"id": 0, "content": "</s>", "special": True}
    end |= dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return json.dumps({"version": "1.0", "added_tokens": [end], "model": model} | dict.fromkeys(names) | parts)


_WORD_LEVEL = {"type": "WordLevel", "vocab": {"</s>": 0, "a": 1}, "unk_token": "[UNK]"}
_WORD_PIECE = _WORD_LEVEL | {
    "type": "WordPiece",
    "continuing_subword_prefix": "##",
    "max_input_chars_per_word": 100,
}
_UNIGRAM = {"type": "Unigram", "vocab": [["</s>", -1.0]], "unk_id": None}
_BPE = {"type": "BPE", "vocab": {"</s>": 0, "a": 1}, "merges": []}
_PANICS = {"type": "Replace", "pattern": {"Regex": "(a+)+$"}, "content": ""}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (_tokenizer_json(_WORD_LEVEL), r"Missing \[UNK\] token"),
        (_tokenizer_json(_WORD_PIECE), r"Missing \[UNK\] token"),
        (_tokenizer_json(_UNIGRAM), r"unk_id"),
        (_tokenizer_json(_BPE, normalizer=_PANICS), r"retry-limit-in-match over"),
    ],
)
def test_a_text_that_cannot_be_encoded_is_told_of(tmp_path, content, message):
    (tmp_path / "t.json").write_text(content)
    tokenizer = load_tokenizer(str(tmp_path / "t.json"))
    text = "a" * 60 + "c"
    for call in (lambda: tokenizer.encode(text), lambda: tokenizer.encode_documents([b"", text.encode()])):
        with pytest.raises(
            DataError,
            match=rf"t.json: cannot encode the text 'a{{60}}…', so mend the tokenizer or take another: .*{message}",
        ):
            call()


def test_of_several_usual_ends_of_a_document_the_one_stated_beside_the_tokenizer_is_taken(tmp_path):
    (tmp_path / "t.json").write_text(_tokenizer_json(_BPE | {"vocab": {"</s>": 0, "a": 1, "<eos>": 2}}))
    ambiguous = r"cannot tell which token ends a document \(</s> or <eos>\)"
    for stated in (None, '{"eos_token": "a"}', "{", "[]", '{"eos_token": 3}', '{"eos_token": {}}', "[" * 100_000):
        if stated is not None:
            (tmp_path / "tokenizer_config.json").write_text(stated)
        with pytest.raises(DataError, match=ambiguous):
            load_tokenizer(str(tmp_path / "t.json"))
    for stated in ("<eos>", {"content": "<eos>", "lstrip": False}):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": stated}))
        assert load_tokenizer(str(tmp_path / "t.json")).end_of_document_id == 2


def test_where_no_usual_end_of_a_document_is_there_the_one_stated_beside_the_tokenizer_is_taken(tmp_path):
    (tmp_path / "t.json").write_text(_tokenizer_json(_BPE | {"vocab": {"a": 0, "<|im_end|>": 1}}, added_tokens=[]))
    for stated in ("<|im_start|>", None, 1):  # none of its tokens
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": stated}))
        with pytest.raises(DataError, match=r"cannot tell which token ends a document \(no usual one\)"):
            load_tokenizer(str(tmp_path / "t.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    assert load_tokenizer(str(tmp_path / "t.json")).end_of_document_id == 1


def test_deepseeks_end_of_a_document_has_fullwidth_bars(tmp_path):
    vocabulary = {"a": 0, "\uff5cend\u2581of\u2581sentence\uff5c": 1, "<\uff5cend\u2581of\u2581sentence\uff5c>": 2}
    (tmp_path / "t.json").write_text(_tokenizer_json(_BPE | {"vocab": vocabulary}, added_tokens=[]))
    assert load_tokenizer(str(tmp_path / "t.json")).end_of_document_id == 2


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (_tokenizer_json(_BPE | {"vocab": {}}, added_tokens=[]), r"t.json: its vocabulary is empty"),
        (_tokenizer_json(_UNIGRAM | {"vocab": []}, added_tokens=[]), r"t.json: its vocabulary is empty"),
        (
            _tokenizer_json(_BPE, normalizer={"type": "Precompiled", "precompiled_charsmap": "AAAA"}),
            r"t.json: not a Hugging Face tokenizer.json: Precompiled",
        ),
        (
            _tokenizer_json(_BPE, normalizer={"type": "Replace", "pattern": {"Regex": "("}, "content": ""}),
            r"t.json: not a Hugging Face tokenizer.json: .*parenthesis",
        ),
        ("\0" * 100, r"t.json: not a Hugging Face tokenizer.json"),
        ("[" * 100_000, r"t.json: not a Hugging Face tokenizer.json"),
        ("{" + " " * 1000, r"t.json: not a Hugging Face tokenizer.json: it has more than 1,000 bytes"),
    ],
)
def test_odd_tokenizers_are_refused(tmp_path, monkeypatch, content, message):
    if len(content) == 1001:
        monkeypatch.setattr(tokenizers_module, "_MAX_FILE_BYTES", 1000)
    (tmp_path / "t.json").write_text(content)
    with pytest.raises(DataError, match=message):
        load_tokenizer(str(tmp_path / "t.json"))


def test_what_is_no_file_is_no_tokenizer(tmp_path, monkeypatch):
    monkeypatch.setattr(tokenizers_module, "_MAX_FILE_BYTES", 1000)
    with pytest.raises(DataError, match="cannot be read: Is a directory"):
        load_tokenizer(str(tmp_path))
    with pytest.raises(DataError, match=r"/dev/zero: not a Hugging Face tokenizer.json: it has more than 1,000 bytes"):
        load_tokenizer("/dev/zero")


@settings(max_examples=60)
@given(data=st.data())
def test_any_tokenizer_serves_or_is_refused(tmp_path_factory, data):
    content = data.draw(
        st.sampled_from([_tokenizer_json(model) for model in (_WORD_LEVEL, _WORD_PIECE, _UNIGRAM, _BPE)])
    )
    start = data.draw(st.integers(0, len(content)))
    stop = data.draw(st.integers(start, min(len(content), start + 10)))
    new = data.draw(st.sampled_from(["", "0", "-1", "99999999999", '"', "{}", "[]", "null", "1e9", "</s>", "\0"]))
    path = tmp_path_factory.getbasetemp() / "fuzzed.json"
    path.write_text(content[:start] + new + content[stop:])
    with contextlib.suppress(DataError):
        tokenizer = load_tokenizer(str(path))
        for ids in tokenizer.encode_documents([b"a", data.draw(st.text(max_size=10)).encode()]):
            assert len(ids) == 0 or ids.max() < tokenizer.vocab_size
            tokenizer.decode(ids.tolist())
