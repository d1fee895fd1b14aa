"""The text that tokens add, for every family of tokenizers, on text and on tokens that are none."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

from trainer.data import ByteTokenizer, load_tokenizer
from trainer.sample.text import added_text

SPECIAL = ["<unk>", "<s>", "</s>"]
# ByteLevel's character for each byte that text can have, as the library writes it.
LEVEL = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
BYTE_OF = {
    character: byte
    for text in map(chr, [*range(0xC0), *range(0xC0, 0x800, 0x40), *range(0x800, 0x110000, 0x1000)])
    if not 0xD800 <= ord(text) < 0xE000
    for character, byte in zip(LEVEL.pre_tokenize_str(text)[0][0], text.encode(), strict=True)
}
codecs.register_error("each byte", lambda error: ("\ufffd" * (error.end - error.start), error.end))


def byte_fallback(kind: str) -> Tokenizer:
    words = ["▁", "a", "b", "▁a", "▁b", "ab", "é", "中", ".", "\ufffd", "▁▁"]
    vocabulary = {token: i for i, token in enumerate([*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), *words])}
    merges = [("▁", "a"), ("▁", "b"), ("a", "b"), ("▁", "▁")]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    replace, fallback, fuse = decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()
    if kind == "llama":
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        tokenizer.decoder = decoders.Sequence([replace, fallback, fuse, decoders.Strip(" ", 1, 0)])
    else:
        tokenizer.normalizer = normalizers.Replace(" ", "▁")
        tokenizer.decoder = decoders.Sequence([replace, fallback, fuse])
    return tokenizer


def byte_level() -> Tokenizer:
    # Tokens that hold a character and a part of another, either side, as GPT-2 has them.
    spell = lambda data: "".join(key for byte in data for key, value in BYTE_OF.items() if value == byte)  # noqa: E731
    pieces = [b"a ", "日本".encode()[:4], "日本".encode()[4:], "🙂".encode()[:2], "🙂".encode()[2:], b"b\xe6"]
    vocabulary = {token: i for i, token in enumerate([*SPECIAL, *sorted(BYTE_OF), *map(spell, pieces)])}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>"))
    tokenizer.pre_tokenizer, tokenizer.decoder = LEVEL, decoders.ByteLevel()
    return tokenizer


def words(kind: str) -> Tokenizer:
    texts = {
        "wordpiece": ["the", "cat", "##s", "##\ufffd", ".", "n't", "日", "##本"],
        "metaspace": ["▁the", "▁cat", "s", "▁", ".", "日", "\ufffd"],
        "suffix": ["the</w>", "cat", "s</w>", ".", "日</w>", "\ufffd"],
        "no decoder": ["the", "cat", "日", "\ufffd"],
    }[kind]
    tokenizer = Tokenizer(models.WordLevel({token: i for i, token in enumerate([*SPECIAL, *texts])}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if kind != "no decoder":
        made = {"wordpiece": decoders.WordPiece, "metaspace": decoders.Metaspace, "suffix": decoders.BPEDecoder}
        tokenizer.decoder = made[kind]()
    return tokenizer


@dataclass(frozen=True, repr=False)
class TextCase:
    """A tokenizer, and what is known of it from elsewhere."""

    tokenizer: ByteTokenizer
    library: Tokenizer | None
    to_bytes: Callable[[int], bytes] | None
    """None: its tokens hold whole characters."""
    errors: str = "replace"

    def decode(self, ids: Sequence[int]) -> str:
        """The whole text. The library gives up a run of bytes that holds an invalid one; here only that one is lost."""
        if self.errors == "each byte":
            text = b"".join(map(self.to_bytes, ids)).decode(errors=self.errors)
            return text.removeprefix(" ") if "Strip" in self.library.to_str() else text
        if self.library is None:
            return bytes(i for i in ids if i < 256).decode(errors="replace")
        return self.library.decode(ids)


NAMES = ["byte", "llama", "gemma", "byte level", "wordpiece", "metaspace", "suffix", "no decoder"]


@pytest.fixture(scope="module")
def cases(tmp_path_factory) -> dict[str, TextCase]:
    def case(name: str) -> TextCase:
        if name == "byte":
            return TextCase(load_tokenizer("byte"), None, lambda i: bytes([i]) if i < 256 else b"")
        fallback = name in ("llama", "gemma")
        library = byte_fallback(name) if fallback else byte_level() if name == "byte level" else words(name)
        library.add_special_tokens(SPECIAL)
        path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
        library.save(str(path))

        def of_fallback(i: int) -> bytes:
            token = library.id_to_token(i)
            if token in SPECIAL:
                return b""
            return bytes([int(token[3:5], 16)]) if token.startswith("<0x") else token.replace("▁", " ").encode()

        def of_level(i: int) -> bytes:
            token = library.id_to_token(i)
            return b"" if token in SPECIAL else bytes(BYTE_OF[character] for character in token)

        to_bytes = of_fallback if fallback else of_level if name == "byte level" else None
        return TextCase(load_tokenizer(str(path)), library, to_bytes, "each byte" if fallback else "replace")

    return {name: case(name) for name in NAMES}


def check(case: TextCase, before: list[int], ids: list[int]) -> None:
    whole = case.decode([*before, *ids])
    assert whole == case.tokenizer.decode([*before, *ids])
    assert added_text(before, ids, case.tokenizer) == whole[len(case.decode(before)) :]


CHARACTERS = st.one_of(st.sampled_from("ab ▁é中日本🙂\ufffd.\n"), st.characters(exclude_categories=["Cs"]))
TEXTS = st.text(CHARACTERS, max_size=30)


@pytest.mark.parametrize("name", ["byte", "llama", "gemma", "byte level"])
@given(before=TEXTS, text=TEXTS)
@settings(max_examples=60)
def test_text_that_is_added(name, cases, before, text):
    case = cases[name]
    encode = case.tokenizer.encode
    check(case, [case.tokenizer.delimiters.end, *encode(before)], encode(text))
    ids = encode(text)
    if case.library is not None:
        assert case.decode(ids) == case.library.decode(ids)


@pytest.mark.parametrize("name", NAMES)
@given(data=st.data())
@settings(max_examples=60)
def test_any_tokens_that_are_added(name, cases, data):
    case = cases[name]
    likely = [*range(case.tokenizer.vocab_size)]
    if case.to_bytes is not None:  # bytes that make characters, whole, cut and overlong, more often than others
        wanted = {bytes([byte]) for byte in b"\xe6\x97\xa5\xf0\x9f\x99\x82\xc3\xed\xa0\xc0\xf4\x90\x80a"} | {b""}
        likely = [i for i in likely if case.to_bytes(i) in wanted or len(case.to_bytes(i)) > 1]
    tokens = st.lists(st.one_of(st.sampled_from(likely), st.integers(0, case.tokenizer.vocab_size - 1)), max_size=40)
    check(case, data.draw(tokens), data.draw(tokens))


@pytest.mark.parametrize("name", ["llama", "gemma"])
def test_a_text_that_ends_within_a_character_keeps_those_before_it(name, cases):
    tokenizer = cases[name].tokenizer
    ids = [token for token in tokenizer.encode("日本🙂") if tokenizer.decode([token])]
    assert tokenizer.decode(ids[:-1]) == "日本\ufffd\ufffd\ufffd"
    assert added_text(tokenizer.encode("a"), ids, tokenizer) == "日本🙂"


def test_special_tokens_between_words_change_nothing(cases):
    for name in ("llama", "wordpiece", "metaspace"):
        case = cases[name]
        special, word = case.library.token_to_id("<s>"), case.library.token_to_id("▁a" if name == "llama" else ".")
        check(case, [word, *[special] * 20], [word, *[special] * 20, word])
