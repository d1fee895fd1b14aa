"""Tokenizers: text and back, documents as their own text, and refusals."""

from __future__ import annotations

import contextlib
import json
import sys
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.data import ByteTokenizer, DataError, HuggingFaceTokenizer, load_tokenizer
from trainer.data import tokenizers as tokenizers_module
from trainer.data.delimiters import Delimiters
from trainer.data.tokenizers import PretokenizedIds


def test_bytes_go_there_and_back(random_texts):
    tokenizer = load_tokenizer("byte")
    assert (tokenizer.vocab_size, tokenizer.delimiters.end) == (257, 256)
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
        assert tokenizer.decode([tokenizer.delimiters.end, *ids]) == text
        assert 0 <= ids.min() <= ids.max() < tokenizer.vocab_size
        assert tokenizer.delimiters.end not in ids
    assert len(tokenizer.encode("the cat")) < len("the cat")


def test_a_document_that_spells_end_of_document_does_not_end(tokenizer_file):
    tokenizer = load_tokenizer(str(tokenizer_file))
    ids = tokenizer.encode("a<|endoftext|>b")
    assert tokenizer.delimiters.end not in ids
    assert tokenizer.decode(ids) == "a<|endoftext|>b"


def test_vocab_size_covers_ids_with_gaps(tokenizer_file):
    import tokenizers

    raw = tokenizers.Tokenizer.from_file(str(tokenizer_file))
    expected = max(raw.get_vocab(with_added_tokens=True).values()) + 1
    assert load_tokenizer(str(tokenizer_file)).vocab_size == expected


@pytest.mark.parametrize("token", ["a", 5])
def test_end_of_document_can_be_named(tokenizer_file, token):
    tokenizer = load_tokenizer(str(tokenizer_file), token)
    assert tokenizer.delimiters.end == (tokenizer._tokenizer.token_to_id("a") if token == "a" else 5)


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
    assert load_tokenizer(str(tokenizer_file), "<|stop|>").delimiters.end == 0


def test_files_that_are_no_tokenizer_are_refused(tmp_path):
    with pytest.raises(DataError, match=r"missing.json' cannot be read: No such file or directory; give `byte`"):
        load_tokenizer(str(tmp_path / "missing.json"))
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(DataError, match=r"other.json: not a Hugging Face tokenizer.json"):
        load_tokenizer(str(tmp_path / "other.json"))


def test_a_tokenizer_that_is_not_utf_8_is_refused(tmp_path):
    # The library would end the process, not raise.
    (tmp_path / "t.json").write_bytes(_tokenizer_json(_BPE).encode().replace(b"</s>", b"<\xa5>"))
    with pytest.raises(DataError, match=r"t.json: not a Hugging Face tokenizer.json: 'utf-8' codec can't decode byte"):
        load_tokenizer(str(tmp_path / "t.json"))


def test_memory_follows_the_tokens_and_not_the_largest_id(tmp_path):
    largest = tokenizers_module._MAX_VOCAB_SIZE - 1
    (tmp_path / "t.json").write_text(
        _tokenizer_json(_WORD_LEVEL | {"vocab": {"a": 3, "</s>": largest}, "unk_token": "a"}, added_tokens=[])
    )
    tracemalloc.start()
    try:
        tokenizer = load_tokenizer(str(tmp_path / "t.json"))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert tokenizer.vocab_size == largest + 1
    assert [tokenizer.is_skipped(token) for token in (3, 4, largest)] == [False, True, True]
    assert peak < 2 * tokenizer.vocab_size, "bytes: at most a table of flags"


def test_the_missing_library_is_named_with_its_extra(tokenizer_file, monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(DataError, match=r'needs tokenizers.*`pip install -e "\.\[data\]"` in the clone'):
        load_tokenizer(str(tokenizer_file))
    with pytest.raises(DataError, match="cannot be read: No such file"):
        load_tokenizer("missing.json")  # which no installation would help


def test_end_of_document_of_bytes_is_fixed():
    assert load_tokenizer("byte", 256).delimiters.end == ByteTokenizer().delimiters.end
    with pytest.raises(DataError, match=r"end_of_document_token='</s>' has no effect with data.tokenizer=byte"):
        load_tokenizer("byte", "</s>")


def test_ids_without_a_tokenizer_have_no_text():
    for call in (lambda t: t.encode("a"), lambda t: t.decode([1]), lambda t: t.encode_documents([b"a"])):
        with pytest.raises(DataError, match=r"cannot (encode|decode): a .bin file .*set data.tokenizer"):
            call(PretokenizedIds(10, Delimiters(9, 9)))


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
    for stated in (None, '{"eos_token": "a"}', '{"eos_token": 3}', '{"eos_token": {}}'):
        if stated is not None:
            (tmp_path / "tokenizer_config.json").write_text(stated)
        with pytest.raises(DataError, match=ambiguous):
            load_tokenizer(str(tmp_path / "t.json"))
    for stated in ("<eos>", {"content": "<eos>", "lstrip": False}):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": stated}))
        assert load_tokenizer(str(tmp_path / "t.json")).delimiters == (2, 2)
    for stated in ("", "{", "[]", "[" * 100_000):
        (tmp_path / "tokenizer_config.json").write_text(stated)
        with pytest.raises(
            DataError, match=r"tokenizer_config.json, which tells .* can't be read: .*; mend it, or move"
        ):
            load_tokenizer(str(tmp_path / "t.json"))


def test_where_no_usual_end_of_a_document_is_there_the_one_stated_beside_the_tokenizer_is_taken(tmp_path):
    (tmp_path / "t.json").write_text(_tokenizer_json(_BPE | {"vocab": {"a": 0, "<|im_end|>": 1}}, added_tokens=[]))
    for stated in ("<|im_start|>", None, 1):  # none of its tokens
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": stated}))
        with pytest.raises(DataError, match=r"cannot tell which token ends a document \(no usual one\)"):
            load_tokenizer(str(tmp_path / "t.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    assert load_tokenizer(str(tmp_path / "t.json")).delimiters.end == 1


def test_deepseeks_end_of_a_document_has_fullwidth_bars(tmp_path):
    vocabulary = {"a": 0, "\uff5cend\u2581of\u2581sentence\uff5c": 1, "<\uff5cend\u2581of\u2581sentence\uff5c>": 2}
    (tmp_path / "t.json").write_text(_tokenizer_json(_BPE | {"vocab": vocabulary}, added_tokens=[]))
    assert load_tokenizer(str(tmp_path / "t.json")).delimiters.end == 2


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
        monkeypatch.setattr(tokenizers_module, "MAX_FILE_BYTES", 1000)
    (tmp_path / "t.json").write_text(content)
    with pytest.raises(DataError, match=message):
        load_tokenizer(str(tmp_path / "t.json"))


def test_what_is_no_file_is_no_tokenizer(tmp_path, monkeypatch):
    monkeypatch.setattr(tokenizers_module, "MAX_FILE_BYTES", 1000)
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


# Text stays text, whatever the model would make of what spells a special token.

_BYTES = {f"<0x{byte:02X}>": 10 + byte for byte in range(256)}
_WORDS = {"</s>": 0, "<s>": 1, "<unk>": 2, "a": 3, "b": 4, "<": 5, "/": 6, "s": 7, ">": 8, "▁": 9}
_MERGES = [["<", "s"], ["<s", ">"], ["<", "/"], ["</", "s"], ["</s", ">"], ["a", "</s>"]]
_MERGED = {**_WORDS, "<s": 300, "</": 301, "</s": 302, "a</s>": 303}
_SPLIT = {"type": "WhitespaceSplit"}
_FALLBACK = {"type": "Sequence", "decoders": [{"type": "ByteFallback"}, {"type": "Fuse"}]}
_SPELLING = {
    "unigram": _tokenizer_json(
        {"type": "Unigram", "unk_id": 2, "vocab": [[piece, -1.0 - (len(piece) == 1)] for piece in _WORDS]},
        added_tokens=[],
        decoder={"type": "Fuse"},
    ),
    "bpe": _tokenizer_json(
        {"type": "BPE", "vocab": _MERGED, "merges": _MERGES, "unk_token": "<unk>"}, decoder={"type": "Fuse"}
    ),
    "bpe with byte fallback": _tokenizer_json(
        {
            "type": "BPE",
            "vocab": {**_MERGED, **_BYTES},
            "merges": _MERGES,
            "unk_token": "<unk>",
            "byte_fallback": True,
        },
        decoder=_FALLBACK,
    ),
    "bpe that ignores merges": _tokenizer_json(
        {"type": "BPE", "vocab": _WORDS, "merges": [], "ignore_merges": True},
        decoder={"type": "Fuse"},
        pre_tokenizer={"type": "Split", "pattern": {"Regex": "</?s>"}, "behavior": "Isolated", "invert": False},
    ),
    "word piece": _tokenizer_json(
        _WORD_PIECE | {"vocab": {**_WORDS, "##/": 10, "##s": 11, "##>": 12, "##</s>": 13}, "unk_token": "<unk>"},
        pre_tokenizer=_SPLIT,
        decoder={"type": "WordPiece", "prefix": "##", "cleanup": False},
    ),
    "word level": _tokenizer_json(
        _WORD_LEVEL | {"vocab": _WORDS, "unk_token": "<unk>"}, pre_tokenizer=_SPLIT, added_tokens=[]
    ),
    "added tokens that aren't special": _tokenizer_json(
        {"type": "BPE", "vocab": _WORDS, "merges": []},
        decoder={"type": "Fuse"},
        added_tokens=[
            {"id": i, "content": content, "special": False}
            | dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
            for i, content in ((0, "</s>"), (1, "<s>"))
        ],
    ),
}


@pytest.mark.parametrize("kind", _SPELLING)
def test_text_that_spells_a_delimiter_stays_text(tmp_path, kind):
    import tokenizers

    (tmp_path / "t.json").write_text(_SPELLING[kind])
    tokenizer = load_tokenizer(str(tmp_path / "t.json"), "</s>", "<s>")
    assert tokenizer.delimiters == (1, 0)
    plain = tokenizers.Tokenizer.from_str(_SPELLING[kind])
    plain.encode_special_tokens = True
    assert {0, 1} <= set(plain.encode("a </s> b <s> a" if "word" in kind else "b</s>b<s>a").ids), "what is mended"
    texts = ["a </s> b <s>", "</s>", "a </s> a", "<s> a"] if "word" in kind else ["b</s>b", "<s>", "<s>b</s>a</s>"]
    encoded = tokenizer.encode_documents([text.encode() for text in texts])
    for text, ids in zip(texts, encoded, strict=True):
        assert ids.tolist() == tokenizer.encode(text)
        assert not {0, 1} & {*ids.tolist()}
        if kind != "word level":  # which has no token but unknown
            assert tokenizer.decode([1, *ids, 0]) == text
    for text in ("a b s", "ab", "<", "b</", "/s>"):
        assert tokenizer.encode(text) == plain.encode(text).ids
    if kind == "word level":
        assert tokenizer.encode("a </s>") == [3, 2]


def test_text_that_only_a_delimiter_can_stand_for_is_refused(tmp_path, tokenizer_file):
    newline = load_tokenizer(str(tokenizer_file)).encode("\n")[0]
    tokenizer = load_tokenizer(str(tokenizer_file), newline)
    assert tokenizer.decode(tokenizer.encode("the cat")) == "the cat"
    message = (
        rf"cannot encode the text 'a\\nb', .*: only token {newline} \('Ċ'\) can stand for a part of it, and that is"
    )
    for call in (lambda: tokenizer.encode("a\nb"), lambda: tokenizer.encode_documents([b"fine", b"a\nb"])):
        with pytest.raises(DataError, match=message):
            call()
    unknown = _tokenizer_json(_WORD_LEVEL | {"vocab": _WORDS, "unk_token": "</s>"}, pre_tokenizer=_SPLIT)
    (tmp_path / "t.json").write_text(unknown)
    with pytest.raises(DataError, match=r"only token 0 \('</s>'\) can stand for a part of it"):
        load_tokenizer(str(tmp_path / "t.json")).encode("a c")


# What documents begin with.


def _template(*names: str) -> dict:
    single = [{"SpecialToken": {"id": name, "type_id": 0}} for name in names if name in _WORDS]
    single.insert(names.index("$A"), {"Sequence": {"id": "A", "type_id": 0}})
    special = {name: {"id": name, "ids": [_WORDS[name]], "tokens": [name]} for name in names if name in _WORDS}
    return {"type": "TemplateProcessing", "single": single, "pair": [], "special_tokens": special}


_BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": False, "use_regex": True}
_ROBERTA = {"type": "RobertaProcessing", "sep": ["</s>", 0], "cls": ["<s>", 1], "trim_offsets": True}
_ROBERTA |= {"add_prefix_space": False}


@pytest.mark.parametrize(
    ("post_processor", "stated", "begin"),
    [
        (None, {}, 0),  # the token that ends the document before
        (_BYTE_LEVEL, {}, 0),
        (_template("$A"), {}, 0),
        (_template("<s>", "$A"), {}, 1),
        (_template("<s>", "$A", "</s>"), {}, 1),
        (_template("$A", "</s>"), {}, 0),
        (_ROBERTA, {}, 1),
        ({"type": "BertProcessing", "sep": ["</s>", 0], "cls": ["<s>", 1]}, {}, 1),
        ({"type": "Sequence", "processors": [_BYTE_LEVEL, _template("<s>", "$A")]}, {}, 1),
        # What transformers does where tokenizer_config.json says it.
        (_template("<s>", "$A"), {"add_bos_token": False, "bos_token": "<s>"}, 0),
        (_BYTE_LEVEL, {"add_bos_token": True, "bos_token": "<s>"}, 1),
        (None, {"add_bos_token": True, "bos_token": {"content": "<s>", "lstrip": False}}, 1),
        (_template("<s>", "$A"), {"add_bos_token": None, "bos_token": "a"}, 1),
    ],
)
def test_documents_begin_as_the_tokenizer_has_texts_begin(tmp_path, post_processor, stated, begin):
    (tmp_path / "tokenizer.json").write_text(
        _tokenizer_json(_BPE | {"vocab": _WORDS}, post_processor=post_processor, decoder={"type": "Fuse"})
    )
    if stated:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(stated))
    tokenizer = load_tokenizer(str(tmp_path / "tokenizer.json"))
    assert tokenizer.delimiters == (begin, 0)
    assert tokenizer.encode("ab") == [3, 4]
    assert tokenizer.decode([begin, 3, 4, 0]) == "ab"
    for token, expected in (("b", 4), (5, 5), ("</s>", 0), ("none", None)):
        assert load_tokenizer(str(tmp_path / "tokenizer.json"), None, token).delimiters == (expected, 0)
    own = None if begin == 0 else begin
    assert load_tokenizer(str(tmp_path / "tokenizer.json"), "none").delimiters == (own, None)


@pytest.mark.parametrize(
    ("post_processor", "stated", "message"),
    [
        (_template("<s>", "a", "$A"), {}, r"its post-processor puts <s> a before a text, expected one of its tokens"),
        (_ROBERTA | {"cls": ["<s>", 77]}, {}, r"its post-processor puts <s> before a text, expected one of its tokens"),
        (
            None,
            {"add_bos_token": True},
            r"add_bos_token in tokenizer_config.json puts None before a text, expected one",
        ),
        (None, {"add_bos_token": True, "bos_token": "<bos>"}, r"add_bos_token in .* puts <bos> before a text"),
    ],
)
def test_a_beginning_that_is_no_token_is_refused(tmp_path, post_processor, stated, message):
    (tmp_path / "tokenizer.json").write_text(
        _tokenizer_json(_BPE | {"vocab": _WORDS}, post_processor=post_processor, decoder={"type": "Fuse"})
    )
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(stated))
    with pytest.raises(DataError, match=rf"cannot tell which token begins a document: {message}"):
        load_tokenizer(str(tmp_path / "tokenizer.json"))
    assert load_tokenizer(str(tmp_path / "tokenizer.json"), None, "none").delimiters == (None, 0)
    with pytest.raises(DataError, match=r"data.begin_of_document_token='<x>' is not a token of"):
        load_tokenizer(str(tmp_path / "tokenizer.json"), None, "<x>")


@pytest.mark.parametrize(("ids", "tokens"), [([1, 2], ["<s>"]), ([1], ["<s>", "a"])])
def test_a_special_token_of_more_or_fewer_ids_than_names_is_refused(tmp_path, ids, tokens):
    added = {"special_tokens": {"<s>": {"id": "<s>", "ids": ids, "tokens": tokens}}}
    (tmp_path / "t.json").write_text(
        _tokenizer_json(_BPE | {"vocab": _WORDS}, post_processor=_template("<s>", "$A") | added)
    )
    message = rf"t.json: its post-processor has {len(ids)} ids for the {len(tokens)} tokens of '<s>'; expected one id"
    with pytest.raises(DataError, match=message):
        load_tokenizer(str(tmp_path / "t.json"))


def test_bytes_may_do_without_delimiters():
    assert load_tokenizer("byte", "none").delimiters == (None, None)
    assert load_tokenizer("byte", None, "none").delimiters == (None, 256)
    assert load_tokenizer("byte", "none", 256).delimiters == (256, None)
    with pytest.raises(DataError, match=r"begin_of_document_token='<s>' has no effect with data.tokenizer=byte"):
        load_tokenizer("byte", None, "<s>")
