"""Tokenizers: text and back, documents as their own text, and refusals."""

import contextlib
import json
import sys
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.data import DataError, HuggingFaceTokenizer, load_tokenizer
from trainer.data import tokenizers as tokenizers_module
from trainer.data.documents import Delimiters
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


def refuse(message: str, name, *tokens) -> None:
    """Checks that a tokenizer is refused."""
    with pytest.raises(DataError, match=message):
        load_tokenizer(str(name), *tokens)


def test_an_unknown_end_of_document_is_refused(tokenizer_file):
    refuse(r"end_of_document_token='<eot>' is not a token of", tokenizer_file, "<eot>")
    refuse(r"=1000000 is not an id of .*; give one below \d+", tokenizer_file, 10**6)
    tokenizer_file.write_text(tokenizer_file.read_text().replace("<|endoftext|>", "<|stop|>"))
    refuse(r"cannot tell which token ends a document.*set data.end_of_document_token.*<\|stop\|>", tokenizer_file)
    assert load_tokenizer(str(tokenizer_file), "<|stop|>").delimiters.end == 0


@pytest.fixture
def load(tmp_path):
    """Loads a tokenizer of some content, by other delimiters than its own where they are named."""

    def load(content: str, *tokens):
        (tmp_path / "t.json").write_text(content)
        return load_tokenizer(str(tmp_path / "t.json"), *tokens)

    return load


def test_memory_follows_the_tokens_and_not_the_largest_id(tmp_path):
    largest = tokenizers_module._MAX_VOCAB_SIZE - 1
    vocabulary = {"vocab": {"a": 3, "</s>": largest}, "unk_token": "a"}
    (tmp_path / "t.json").write_text(_tokenizer_json(_WORD_LEVEL | vocabulary, added_tokens=[]))
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
    refuse(r'needs tokenizers.*`pip install -e "\.\[data\]"` in the clone', tokenizer_file)
    refuse("missing.json' cannot be read: No such file or directory; give `byte`", "missing.json")  # nor would it help


def test_bytes_may_do_without_delimiters_but_have_no_others():
    for tokens, delimiters in (
        ((256,), (256, 256)),
        (("none",), (None, None)),
        ((None, "none"), (None, 256)),
        (("none", 256), (256, None)),
    ):
        assert load_tokenizer("byte", *tokens).delimiters == delimiters
    refuse(r"end_of_document_token='</s>' has no effect with data.tokenizer=byte", "byte", "</s>")
    refuse(r"begin_of_document_token='<s>' has no effect with data.tokenizer=byte", "byte", None, "<s>")


def test_ids_without_a_tokenizer_have_no_text():
    for call in (lambda t: t.encode("a"), lambda t: t.decode([1]), lambda t: t.encode_documents([b"a"])):
        with pytest.raises(DataError, match=r"cannot (encode|decode): a .bin file .*set data.tokenizer"):
            call(PretokenizedIds(10, Delimiters(9, 9)))


def _added(content: str, number: int, special: bool = True) -> dict:
    return {"id": number, "content": content, "special": special} | dict.fromkeys(
        ("single_word", "lstrip", "rstrip", "normalized"), False
    )


def _tokenizer_json(model: dict, **parts) -> str:
    names = ("truncation", "padding", "normalizer", "pre_tokenizer", "post_processor", "decoder")
    whole = {"version": "1.0", "added_tokens": [_added("</s>", 0)], "model": model}
    return json.dumps(whole | dict.fromkeys(names) | parts)


_WORD_LEVEL = {"type": "WordLevel", "vocab": {"</s>": 0, "a": 1}, "unk_token": "[UNK]"}
_WORD_PIECE = _WORD_LEVEL | {"type": "WordPiece", "continuing_subword_prefix": "##", "max_input_chars_per_word": 100}
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
def test_a_text_that_cannot_be_encoded_is_told_of(load, content, message):
    tokenizer = load(content)
    text = "a" * 60 + "c"
    told = rf"t.json: cannot encode the text 'a{{60}}…', so mend the tokenizer or take another: .*{message}"
    for call in (lambda: tokenizer.encode(text), lambda: tokenizer.encode_documents([b"", text.encode()])):
        with pytest.raises(DataError, match=told):
            call()


@pytest.mark.parametrize(
    ("vocabulary", "added", "stated", "outcome"),
    [
        # Of several usual ends, the one stated beside the tokenizer is taken.
        (["</s>", "a", "<eos>"], True, None, r"\(</s> or <eos>\)"),
        (["</s>", "a", "<eos>"], True, "a", r"\(</s> or <eos>\)"),
        (["</s>", "a", "<eos>"], True, 3, r"\(</s> or <eos>\)"),
        (["</s>", "a", "<eos>"], True, {}, r"\(</s> or <eos>\)"),
        (["</s>", "a", "<eos>"], True, "<eos>", 2),
        (["</s>", "a", "<eos>"], True, {"content": "<eos>", "lstrip": False}, 2),
        # Where there is no usual one, too, if it is a token.
        (["a", "<|im_end|>"], False, "<|im_start|>", r"\(no usual one\)"),
        (["a", "<|im_end|>"], False, None, r"\(no usual one\)"),
        (["a", "<|im_end|>"], False, 1, r"\(no usual one\)"),
        (["a", "<|im_end|>"], False, "<|im_end|>", 1),
        # DeepSeek's has fullwidth bars.
        (["a", "\uff5cend\u2581of\u2581sentence\uff5c", "<\uff5cend\u2581of\u2581sentence\uff5c>"], False, None, 2),
    ],
)
def test_the_end_of_a_document_is_a_usual_token_or_the_one_stated(tmp_path, load, vocabulary, added, stated, outcome):
    content = _tokenizer_json(_BPE | {"vocab": {token: number for number, token in enumerate(vocabulary)}})
    content = content if added else json.dumps(json.loads(content) | {"added_tokens": []})
    if stated is not None:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": stated}))
    if isinstance(outcome, int):
        assert load(content).delimiters == (outcome, outcome)
        return
    with pytest.raises(DataError, match=rf"cannot tell which token ends a document {outcome}"):
        load(content)


@pytest.mark.parametrize("stated", ["", "{", "[]", "[" * 100_000])
def test_a_statement_beside_the_tokenizer_that_cannot_be_read_is_refused(tmp_path, load, stated):
    (tmp_path / "tokenizer_config.json").write_text(stated)
    with pytest.raises(DataError, match=r"tokenizer_config.json, which tells .* can't be read: .*; mend it, or move"):
        load(_tokenizer_json(_BPE | {"vocab": {"</s>": 0, "a": 1, "<eos>": 2}}))


_NO_TOKENIZER = "t.json: not a Hugging Face tokenizer.json"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (_tokenizer_json(_BPE | {"vocab": {}}, added_tokens=[]), r"t.json: its vocabulary is empty"),
        (_tokenizer_json(_UNIGRAM | {"vocab": []}, added_tokens=[]), r"t.json: its vocabulary is empty"),
        (
            _tokenizer_json(_BPE, normalizer={"type": "Precompiled", "precompiled_charsmap": "AAAA"}),
            f"{_NO_TOKENIZER}: Precompiled",
        ),
        (
            _tokenizer_json(_BPE, normalizer={"type": "Replace", "pattern": {"Regex": "("}, "content": ""}),
            f"{_NO_TOKENIZER}: .*parenthesis",
        ),
        ("{}", _NO_TOKENIZER),
        ("\0" * 100, _NO_TOKENIZER),
        ("[" * 100_000, _NO_TOKENIZER),
        ("{" + " " * 1000, f"{_NO_TOKENIZER}: it has more than 1,000 bytes"),
        # The library would end the process, not raise.
        (
            _tokenizer_json(_BPE).encode().replace(b"</s>", b"<\xa5>"),
            f"{_NO_TOKENIZER}: 'utf-8' codec can't decode byte",
        ),
        (
            _tokenizer_json(
                _BPE | {"vocab": {"a": 0, "日": 1}, "merges": [["a", "日"]], "continuing_subword_prefix": "##"}
            ),
            f"{_NO_TOKENIZER}: its merge .* without its continuing_subword_prefix '##'",
        ),
    ],
)
def test_odd_tokenizers_are_refused(tmp_path, monkeypatch, content, message):
    if len(content) == 1001:
        monkeypatch.setattr(tokenizers_module, "MAX_FILE_BYTES", 1000)
    (tmp_path / "t.json").write_bytes(content.encode() if isinstance(content, str) else content)
    refuse(message, tmp_path / "t.json")


def test_what_is_no_file_is_no_tokenizer(tmp_path, monkeypatch):
    monkeypatch.setattr(tokenizers_module, "MAX_FILE_BYTES", 1000)
    refuse("cannot be read: Is a directory", tmp_path)
    refuse(r"/dev/zero: not a Hugging Face tokenizer.json: it has more than 1,000 bytes", "/dev/zero")


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
        _BPE | {"vocab": {**_MERGED, **_BYTES}, "merges": _MERGES, "unk_token": "<unk>", "byte_fallback": True},
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
        _BPE | {"vocab": _WORDS},
        decoder={"type": "Fuse"},
        added_tokens=[_added("</s>", 0, special=False), _added("<s>", 1, special=False)],
    ),
}


@pytest.mark.parametrize("kind", _SPELLING)
def test_text_that_spells_a_delimiter_stays_text(load, kind):
    import tokenizers

    tokenizer = load(_SPELLING[kind], "</s>", "<s>")
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


def test_text_that_only_a_delimiter_can_stand_for_is_refused(load, tokenizer_file):
    newline = load_tokenizer(str(tokenizer_file)).encode("\n")[0]
    tokenizer = load_tokenizer(str(tokenizer_file), newline)
    assert tokenizer.decode(tokenizer.encode("the cat")) == "the cat"
    message = rf"cannot encode the text 'a\\nb', .*: only token {newline} \('Ċ'\) can stand for a part of it"
    for call in (lambda: tokenizer.encode("a\nb"), lambda: tokenizer.encode_documents([b"fine", b"a\nb"])):
        with pytest.raises(DataError, match=message):
            call()
    unknown = _tokenizer_json(_WORD_LEVEL | {"vocab": _WORDS, "unk_token": "</s>"}, pre_tokenizer=_SPLIT)
    with pytest.raises(DataError, match=r"only token 0 \('</s>'\) can stand for a part of it"):
        load(unknown).encode("a c")


# What documents begin with.


def _template(*names: str) -> dict:
    single = [{"SpecialToken": {"id": name, "type_id": 0}} for name in names if name in _WORDS]
    single.insert(names.index("$A"), {"Sequence": {"id": "A", "type_id": 0}})
    special = {name: {"id": name, "ids": [_WORDS[name]], "tokens": [name]} for name in names if name in _WORDS}
    return {"type": "TemplateProcessing", "single": single, "pair": [], "special_tokens": special}


_BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": False, "use_regex": True}
_ROBERTA = {"type": "RobertaProcessing", "sep": ["</s>", 0], "cls": ["<s>", 1], "trim_offsets": True}
_ROBERTA |= {"add_prefix_space": False}


def _begun(post_processor: dict | None) -> str:
    return _tokenizer_json(_BPE | {"vocab": _WORDS}, post_processor=post_processor, decoder={"type": "Fuse"})


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
def test_documents_begin_as_the_tokenizer_has_texts_begin(tmp_path, load, post_processor, stated, begin):
    content = _begun(post_processor)
    if stated:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(stated))
    tokenizer = load(content)
    assert tokenizer.delimiters == (begin, 0)
    assert tokenizer.encode("ab") == [3, 4]
    assert tokenizer.decode([begin, 3, 4, 0]) == "ab"
    for token, expected in (("b", 4), (5, 5), ("</s>", 0), ("none", None)):
        assert load(content, None, token).delimiters == (expected, 0)
    own = None if begin == 0 else begin
    assert load(content, "none").delimiters == (own, None)


@pytest.mark.parametrize(
    ("post_processor", "stated", "message"),
    [
        (_template("<s>", "a", "$A"), {}, r"its post-processor puts <s> a before a text, expected one of its tokens"),
        (_ROBERTA | {"cls": ["<s>", 77]}, {}, r"its post-processor puts <s> before a text, expected one of its tokens"),
        (None, {"add_bos_token": True}, r"add_bos_token in .* puts None before a text, expected one"),
        (None, {"add_bos_token": True, "bos_token": "<bos>"}, r"add_bos_token in .* puts <bos> before a text"),
    ],
)
def test_a_beginning_that_is_no_token_is_refused(tmp_path, load, post_processor, stated, message):
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(stated))
    assert load(_begun(post_processor), None, "none").delimiters == (None, 0)
    refuse(rf"cannot tell which token begins a document: {message}", tmp_path / "t.json")
    refuse(r"data.begin_of_document_token='<x>' is not a token of", tmp_path / "t.json", None, "<x>")


@pytest.mark.parametrize(("ids", "tokens"), [([1, 2], ["<s>"]), ([1], ["<s>", "a"])])
def test_a_special_token_of_more_or_fewer_ids_than_names_is_refused(load, ids, tokens):
    added = {"special_tokens": {"<s>": {"id": "<s>", "ids": ids, "tokens": tokens}}}
    message = rf"t.json: its post-processor has {len(ids)} ids for the {len(tokens)} tokens of '<s>'; expected one id"
    with pytest.raises(DataError, match=message):
        load(_begun(_template("<s>", "$A") | added))
