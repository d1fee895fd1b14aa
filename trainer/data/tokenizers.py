"""From text to token ids and back."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from trainer.data.documents import NONE, Delimiters
from trainer.data.files import read_at_most
from trainer.data.partial_characters import (
    byte_level_bytes,
    bytes_at_end,
    keep_characters_apart,
)
from trainer.data.tokenizer_file import (
    CONFIG_NAME,
    MAX_FILE_BYTES,
    read_stated,
    respell,
    stated_token,
    tokens_around_text,
)
from trainer.errors import DataError

# Far above any published one; a table of that many entries is still small.
_MAX_VOCAB_SIZE = 2**24
_NUM_SHOWN_CHARACTERS = 60
# Texts by which published tokenizers name the token that ends a document. DeepSeek's has fullwidth bars.
_END_OF_DOCUMENT_TOKENS = ("<|endoftext|>", "<|end_of_text|>", "<｜end▁of▁sentence｜>", "</s>", "<eos>")


class Tokenizer(Protocol):
    """The tokenizer of a corpus.

    Attributes:
        name: short description for people.
        identity: names the mapping from text to ids; equal only if the mapping is.
        vocab_size: every id is below it, those of the delimiters among them.
        delimiters: the tokens put before and after each document.
    """

    name: str
    identity: str
    vocab_size: int
    delimiters: Delimiters

    def is_skipped(self, token_id: int) -> bool:
        """True if `decode` leaves an id out: special tokens, and ids that are no token."""

    def encode(self, text: str) -> list[int]:
        """Ids of a text; text that spells a delimiter or another special token is text."""

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of ids, without the special tokens. U+FFFD stands for bytes that are no character, or not yet."""

    def num_bytes(self, token_ids: Sequence[int], num_before: int) -> int | None:
        """Bytes of text that tokens stand for, without the first ones, which only precede them; None if unknown."""

    def encode_documents(self, documents: Sequence[bytes]) -> list[np.ndarray]:
        """Ids of several documents in UTF-8, of dtype `token_dtype(vocab_size)`."""


def token_dtype(vocab_size: int) -> np.dtype:
    """Smallest dtype, little-endian on disk, that holds every id."""
    return np.dtype("<u2") if vocab_size <= 2**16 else np.dtype("<u4")


@contextlib.contextmanager
def _refusing(what: str) -> Iterator[None]:
    """Raises a `DataError` that begins with `what` in the place of what the library raises.

    It raises bare Exception, and where its Rust code panics – at a regular expression that takes too long, say – a
    class of its own that is no Exception.
    """
    try:
        yield
    except BaseException as error:
        if isinstance(error, Exception) or type(error).__name__ == "PanicException":
            raise DataError(f"{what}: {error}") from error
        raise


_BYTE_DELIMITERS = Delimiters(256, 256)


class ByteTokenizer:
    """One token for each byte of UTF-8, and one that ends documents: 257 ids, nothing to install.

    Args:
        delimiters: the tokens put before and after each document: either is 256 or None.

    Example:
        >>> ByteTokenizer().encode("né")
        [110, 195, 169]
    """

    name = identity = "byte"
    vocab_size = 257

    def __init__(self, delimiters: Delimiters = _BYTE_DELIMITERS):
        self.delimiters = delimiters

    def is_skipped(self, token_id: int) -> bool:
        return token_id == 256

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, token_ids: Sequence[int]) -> str:
        return self._bytes(token_ids).decode(errors="replace")

    def num_bytes(self, token_ids: Sequence[int], num_before: int) -> int:
        return len(self._bytes(token_ids[num_before:]))

    def encode_documents(self, documents: Sequence[bytes]) -> list[np.ndarray]:
        return [np.frombuffer(document, np.uint8).astype("<u2") for document in documents]

    def _bytes(self, token_ids: Sequence[int]) -> bytes:
        return bytes(i for i in token_ids if not self.is_skipped(i))


class HuggingFaceTokenizer:
    """A Hugging Face `tokenizer.json`, through `tokenizers`.

    The file's own truncation and padding are turned off, and so is its post-processor: packing cuts and delimits
    documents. They begin with the token that the post-processor adds, unless `add_bos_token` in the
    `tokenizer_config.json` beside it says otherwise, as it does for transformers. Byte tokens (`<0xE6>`) are decoded as
    SentencePiece does, a character at a time: an invalid byte is U+FFFD, and the characters beside it stay.

    Args:
        path: the `tokenizer.json`.
        end_of_document_token: text or id of the token that ends a document; `none`: none does; None: the file's own.
        begin_of_document_token: text or id of the token that begins a document; `none`: none does; None: the one that
            the file has put before a text, otherwise the one that ends a document.
        setting: what named the file, for messages.

    Attributes:
        before_text: the tokens, by name and id, that the file has put before a text.

    Raises:
        DataError: the file can't be read or is not a tokenizer, `tokenizers` is not installed, or it has no such token.
    """

    def __init__(
        self,
        path: Path,
        end_of_document_token: str | int | None,
        begin_of_document_token: str | int | None,
        setting: str,
    ):
        try:
            content = read_at_most(path, MAX_FILE_BYTES)
        except OSError as error:
            raise DataError(
                f"{setting}={str(path)!r} cannot be read: {error.strerror}; give `byte` or the path of a "
                "tokenizer.json, which transformers' `save_pretrained` writes for any fast tokenizer"
            ) from error
        if content is None:
            raise DataError(f"{path}: not a Hugging Face tokenizer.json: it has more than {MAX_FILE_BYTES:,} bytes")
        try:
            import tokenizers
        except ImportError as error:
            raise DataError(
                f"{setting}={str(path)!r} needs tokenizers, which is not installed; "
                f'run `pip install -e ".[data]"` in the clone, or use {setting}=byte'
            ) from error
        with _refusing(f"{path}: not a Hugging Face tokenizer.json"):
            _check_continuations(content)
            # `from_buffer` ends the process at a byte that isn't UTF-8: its message can't become Python's text.
            self._tokenizer = tokenizers.Tokenizer.from_str(content.decode())
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = True  # "<|endoftext|>" inside a document is text, not its end.
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        if not vocabulary:
            raise DataError(f"{path}: its vocabulary is empty; train the tokenizer again, or use {setting}=byte")
        self.name = str(path)
        # Releases of the library have changed what a file means, so its version belongs to the identity.
        self.identity = f"tokenizers {tokenizers.__version__} {hashlib.sha256(content).hexdigest()}"
        self.vocab_size = max(vocabulary.values()) + 1
        if self.vocab_size > _MAX_VOCAB_SIZE:
            raise DataError(f"{path}: it has a token {self.vocab_size - 1}; ids may be below {_MAX_VOCAB_SIZE}")
        parts = json.loads(self._tokenizer.to_str())
        stated = read_stated(path)
        special = {i: added.content for i, added in self._tokenizer.get_added_tokens_decoder().items() if added.special}
        end = self._find_end(end_of_document_token, vocabulary, stated, special)
        with _refusing(str(path)):
            self.before_text, named_by = _before_text(parts["post_processor"], stated, vocabulary)
        begin = self._find_begin(begin_of_document_token, vocabulary, named_by, end)
        self.delimiters = Delimiters(begin, end)
        # A set of the skipped ids would take gigabytes where a small vocabulary has one large id.
        self._decoded_ids = frozenset(vocabulary.values()) - special.keys() - {*self.delimiters.ids}
        decoder = parts["decoder"] or {}
        self._decoders = {part["type"] for part in decoder.get("decoders", [decoder]) if part}
        self._tokenizer.post_processor = None  # which changes offsets even where it adds nothing
        # What no text may become. The token of text that the vocabulary lacks stands for text.
        reserved = {*special, *self.delimiters.ids} - ({_unknown_id(parts["model"])} - {*self.delimiters})
        self._is_reserved = np.zeros(self.vocab_size, bool)
        self._is_reserved[list(reserved)] = True

    def is_skipped(self, token_id: int) -> bool:
        return token_id not in self._decoded_ids

    def encode(self, text: str) -> list[int]:
        with _refusing(self._cannot_encode(text)):
            ids = self._tokenizer.encode(text, add_special_tokens=False).ids
            return ids if self._stays_text(ids) else self._encode_literally(text)

    def decode(self, token_ids: Sequence[int]) -> str:
        with _refusing(f"{self.name}: cannot decode tokens"):
            if "ByteFallback" in self._decoders:
                return self._tokenizer.decoder.decode(keep_characters_apart(self._spoken(token_ids)))
            return self._tokenizer.decode([int(i) for i in token_ids if i not in self.delimiters.ids])

    def num_bytes(self, token_ids: Sequence[int], num_before: int) -> int:
        if "ByteLevel" in self._decoders:
            return len(byte_level_bytes(self._spoken(token_ids[num_before:])))
        return self._num_decoded_bytes(token_ids) - self._num_decoded_bytes(token_ids[:num_before])

    def encode_documents(self, documents: Sequence[bytes]) -> list[np.ndarray]:
        texts = [document.decode() for document in documents]
        try:
            with _refusing(f"{self.name}: cannot encode {len(texts):,} documents together"):
                encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        except DataError:
            for text in texts:
                self.encode(text)  # Raises for the one at fault, whose beginning it shows.
            raise
        encoded = [np.array(encoding.ids, token_dtype(self.vocab_size)) for encoding in encodings]
        return [
            ids if self._stays_text(ids) else np.array(self.encode(text), ids.dtype)
            for text, ids in zip(texts, encoded, strict=True)
        ]

    def token(self, token_id: int | None) -> str | None:
        """The name of a token."""
        return None if token_id is None else self._tokenizer.id_to_token(token_id)

    def special_names(self) -> list[str]:
        """The added tokens, by name, that no user's text may become: special ones, and those around documents."""
        added = self._tokenizer.get_added_tokens_decoder()
        return [each.content for i, each in added.items() if each.special or i in self.delimiters.ids]

    def respelled(self, names: Mapping[str, str]) -> tuple[Any, dict[str, str]]:
        """This tokenizer, of the library's class, with other names for some tokens; see `respell`."""
        content, used = respell(self._tokenizer.to_str(), names)
        return type(self._tokenizer).from_str(content), used

    def check_text(self, ids: Sequence[int] | np.ndarray) -> None:
        """Raises ValueError for ids that no text may become."""
        if not self._stays_text(ids):
            token = next(i for i in ids if self._is_reserved[i])
            raise ValueError(
                f"only token {token} ({self.token(token)!r}) can stand for a part of it, and that is special or "
                f"begins or ends documents ({self.delimiters})"
            )

    def _stays_text(self, ids: Sequence[int] | np.ndarray) -> bool:
        return not self._is_reserved[np.asarray(ids, np.int64)].any()

    def _encode_literally(self, text: str) -> list[int]:
        """Ids of a text that the model, or an added token that isn't special, takes for a reserved token."""
        ids = self._literal.encode(text, add_special_tokens=False).ids
        self.check_text(ids)
        return ids

    @functools.cached_property
    def _literal(self) -> Any:
        """The tokenizer for text that spells reserved tokens."""
        names = [self.token(int(i)) for i in np.flatnonzero(self._is_reserved)]
        tokens = [name for name in names if name is not None]
        literal, _ = self.respelled({token: uuid.uuid4().hex for token in tokens})
        literal.encode_special_tokens = True
        return literal

    def _spoken(self, token_ids: Sequence[int]) -> list[str]:
        """The tokens, by name, that `decode` doesn't leave out."""
        tokens = (self._tokenizer.id_to_token(int(i)) for i in token_ids if not self.is_skipped(i))
        return [token for token in tokens if token is not None]

    def _num_decoded_bytes(self, token_ids: Sequence[int]) -> int:
        if "ByteFallback" not in self._decoders:
            return len(self.decode(token_ids).encode())
        # A letter is a byte, too, and unlike a byte may stand alone.
        tokens = ["a" if bytes_at_end([token]) else token for token in self._spoken(token_ids)]
        return len(self._tokenizer.decoder.decode(tokens).encode())

    def _cannot_encode(self, text: str) -> str:
        shown = text if len(text) <= _NUM_SHOWN_CHARACTERS else f"{text[:_NUM_SHOWN_CHARACTERS]}…"
        return f"{self.name}: cannot encode the text {shown!r}, so mend the tokenizer or take another"

    def _find_end(
        self, token: str | int | None, vocabulary: dict[str, int], stated: dict[str, Any], special: dict[int, str]
    ) -> int | None:
        if token is not None:
            return self._find_named("end", token, vocabulary)
        found = [candidate for candidate in _END_OF_DOCUMENT_TOKENS if candidate in vocabulary]
        if len(found) != 1:  # none, or several: Gemma's vocabulary, for one, has HTML's tags
            found = [name for name in found or vocabulary if name == stated_token(stated, "eos_token")] or found
        if len(found) != 1:
            raise DataError(
                f"{self.name}: cannot tell which token ends a document ({' or '.join(found) or 'no usual one'}); "
                "set data.end_of_document_token, to none if there is none. "
                f"Its special tokens: {', '.join([*special.values()][:20]) or 'none'}"
            )
        return vocabulary[found[0]]

    def _find_begin(
        self, token: str | int | None, vocabulary: dict[str, int], named_by: str, end: int | None
    ) -> int | None:
        if token is not None:
            return self._find_named("begin", token, vocabulary)
        if len(self.before_text) > 1 or not vocabulary.items() >= {*self.before_text}:
            names = " ".join(name for name, _ in self.before_text)
            raise DataError(
                f"{self.name}: cannot tell which token begins a document: {named_by} puts {names} before a text, "
                "expected one of its tokens; set data.begin_of_document_token, to none if there is none"
            )
        return self.before_text[0][1] if self.before_text else end

    def _find_named(self, which: str, token: str | int, vocabulary: dict[str, int]) -> int | None:
        """The id of a token that the config names."""
        setting = f"data.{which}_of_document_token"
        if token == NONE:
            return None
        if isinstance(token, str):
            if token not in vocabulary:
                raise DataError(f"{setting}={token!r} is not a token of {self.name}; give one of its tokens or ids")
            return vocabulary[token]
        if not 0 <= token < self.vocab_size:
            raise DataError(f"{setting}={token} is not an id of {self.name}; give one below {self.vocab_size}")
        return token


def _before_text(
    post_processor: Any, stated: dict[str, Any], vocabulary: dict[str, int]
) -> tuple[list[tuple[str, int]], str]:
    """The tokens, by name and id, that a tokenizer's files have put before a text, and which file says so."""
    adds = stated.get("add_bos_token")
    if not isinstance(adds, bool):
        return tokens_around_text(post_processor)[0], "its post-processor"
    bos = str(stated_token(stated, "bos_token"))
    return [(bos, vocabulary.get(bos, -1))] if adds else [], f"add_bos_token in {CONFIG_NAME}"


def _unknown_id(model: dict[str, Any]) -> int | None:
    """The token that a model makes of what its vocabulary lacks."""
    return model["unk_id"] if model["type"] == "Unigram" else model["vocab"].get(model["unk_token"])


class PretokenizedIds:
    """Stands in for the unknown tokenizer of `.bin` files: ids without text.

    Args:
        vocab_size: one more than the largest id in the files.
        delimiters: the tokens that begin and end a document.
    """

    name = identity = "pretokenized"

    def __init__(self, vocab_size: int, delimiters: Delimiters):
        self.vocab_size = vocab_size
        self.delimiters = delimiters

    def is_skipped(self, token_id: int) -> bool:
        return token_id in self.delimiters.ids

    def encode(self, text: str) -> list[int]:
        raise DataError(self._no_text("encode"))

    def decode(self, token_ids: Sequence[int]) -> str:
        raise DataError(self._no_text("decode"))

    def num_bytes(self, token_ids: Sequence[int], num_before: int) -> None:
        return None

    def encode_documents(self, documents: Sequence[bytes]) -> list[np.ndarray]:
        raise DataError(self._no_text("encode"))

    def _no_text(self, verb: str) -> str:
        return (
            f"cannot {verb}: a .bin file does not say which tokenizer made it; set data.tokenizer to its tokenizer.json"
        )


def _check_continuations(content: bytes) -> None:
    """Raises ValueError for a BPE whose merges continue a word without the prefix of continuations.

    The library cuts the prefix's length off these tokens, maybe within a character, and then ends the process.
    """
    try:
        model = json.loads(content)["model"]
        prefix, merges = model["continuing_subword_prefix"] or "", model["merges"]
        seconds = [(merge.split(" ") if isinstance(merge, str) else merge)[-1] for merge in merges]
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return  # the library says what it lacks
    for merge, second in zip(merges, seconds, strict=True):
        if not str(second).startswith(prefix):
            raise ValueError(f"its merge {merge!r} continues a word without its continuing_subword_prefix {prefix!r}")


def load_tokenizer(
    name: str,
    end_of_document_token: str | int | None = None,
    begin_of_document_token: str | int | None = None,
    *,
    setting: str = "data.tokenizer",
) -> ByteTokenizer | HuggingFaceTokenizer:
    """The tokenizer of a name: `byte`, or the path of a `tokenizer.json`.

    Args:
        end_of_document_token: text or id of the token that ends a document; `none`: none does; None: the tokenizer's
            own.
        begin_of_document_token: text or id of the token that begins a document; `none`: none does; None: the one that
            the tokenizer puts before a text, or else the one that ends a document.
        setting: the field or flag that gave the name, for messages.

    Raises:
        DataError: there is no such tokenizer, or it has no such tokens.
    """
    if name != "byte":
        return HuggingFaceTokenizer(Path(name).expanduser(), end_of_document_token, begin_of_document_token, setting)
    [own] = ByteTokenizer().delimiters.ids
    for which, token in (("end", end_of_document_token), ("begin", begin_of_document_token)):
        if token not in (None, NONE, own):
            raise DataError(
                f"data.{which}_of_document_token={token!r} has no effect with {setting}=byte, "
                f"whose documents {which} with {own}; leave it unset"
            )
    end = None if end_of_document_token == NONE else own
    begin = end if begin_of_document_token is None else None if begin_of_document_token == NONE else own
    return ByteTokenizer(Delimiters(begin, end))
