"""From text to token ids and back."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from trainer.data.errors import DataError
from trainer.data.files import read_at_most
from trainer.data.partial_characters import (
    byte_level_bytes,
    bytes_at_end,
    keep_characters_apart,
    num_unfinished_bytes,
)

# Published ones have up to 35 MB.
_MAX_FILE_BYTES = 2**28
# Far above any published one; a table of that many entries is still small.
_MAX_VOCAB_SIZE = 2**24
_NUM_SHOWN_CHARACTERS = 60
# Texts by which published tokenizers name the token that ends a document. DeepSeek's has fullwidth bars.
_END_OF_DOCUMENT_TOKENS = ("<|endoftext|>", "<|end_of_text|>", "<｜end▁of▁sentence｜>", "</s>", "<eos>")


class Tokenizer(Protocol):
    """What a corpus needs of a tokenizer.

    Attributes:
        name: short description for people.
        identity: names the mapping from text to ids; equal only if the mapping is.
        vocab_size: every id is below it, end_of_document_id among them.
        end_of_document_id: the token put before and after each document.
        skipped_ids: what `decode` leaves out: special tokens, and ids that are no token.
    """

    name: str
    identity: str
    vocab_size: int
    end_of_document_id: int
    skipped_ids: frozenset[int]

    def encode(self, text: str) -> list[int]:
        """Ids of a text; text that spells a special token is text."""

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of ids, without the special tokens. U+FFFD stands for bytes that are no character, or not yet."""

    def num_unfinished(self, token_ids: Sequence[int]) -> int:
        """How many U+FFFD at the end of `decode(token_ids)` stand for a character whose other bytes may still come."""

    def num_bytes(self, token_ids: Sequence[int], num_before: int) -> int | None:
        """Bytes of text that tokens stand for, without the first ones, which only precede them; None if unknown."""

    def find_token(self, text: str) -> int | None:
        """Id of the one token, special ones among them, that a text names; None if there is no such."""

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


class ByteTokenizer:
    """One token for each byte of UTF-8, and end-of-document: 257 ids, nothing to install.

    Example:
        >>> ByteTokenizer().encode("né")
        [110, 195, 169]
    """

    name = identity = "byte"
    vocab_size = 257
    end_of_document_id = 256
    skipped_ids = frozenset({end_of_document_id})

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, token_ids: Sequence[int]) -> str:
        return self._bytes(token_ids).decode(errors="replace")

    def num_unfinished(self, token_ids: Sequence[int]) -> int:
        return min(num_unfinished_bytes(self._bytes(token_ids)), 1)

    def num_bytes(self, token_ids: Sequence[int], num_before: int) -> int:
        return len(self._bytes(token_ids[num_before:]))

    def find_token(self, text: str) -> int | None:
        ids = self.encode(text)
        return ids[0] if len(ids) == 1 else None

    def encode_documents(self, documents: Sequence[bytes]) -> list[np.ndarray]:
        return [np.frombuffer(document, np.uint8).astype("<u2") for document in documents]

    def _bytes(self, token_ids: Sequence[int]) -> bytes:
        return bytes(i for i in token_ids if i != self.end_of_document_id)


class HuggingFaceTokenizer:
    """A Hugging Face `tokenizer.json`, through `tokenizers`.

    The file's own truncation, padding and template (added begin and end tokens) are turned off: documents
    are cut and delimited by packing. Byte tokens (`<0xE6>`) are decoded as SentencePiece does, a character at a time:
    an invalid byte is U+FFFD, and the characters beside it stay.

    Args:
        path: the `tokenizer.json`.
        end_of_document_token: text or id of the token that ends a document; None: the file's own.
        setting: what named the file, for messages.

    Raises:
        DataError: the file can't be read or is not a tokenizer, `tokenizers` is not installed, or it has no such token.
    """

    def __init__(self, path: Path, end_of_document_token: str | int | None, setting: str):
        try:
            content = read_at_most(path, _MAX_FILE_BYTES)
        except OSError as error:
            raise DataError(
                f"{setting}={str(path)!r} cannot be read: {error.strerror}; give `byte` or a tokenizer.json's path"
            ) from error
        if content is None:
            raise DataError(f"{path}: not a Hugging Face tokenizer.json: it has more than {_MAX_FILE_BYTES:,} bytes")
        try:
            import tokenizers
        except ImportError as error:
            raise DataError(
                f"{setting}={str(path)!r} needs tokenizers, which is not installed; "
                f'run `pip install "flax-longcontext[data]"`, or use {setting}=byte'
            ) from error
        with _refusing(f"{path}: not a Hugging Face tokenizer.json"):
            self._tokenizer = tokenizers.Tokenizer.from_buffer(content)
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
        self.end_of_document_id = self._find_end_of_document(end_of_document_token, vocabulary)
        special = {i for i, added in self._tokenizer.get_added_tokens_decoder().items() if added.special}
        spoken = set(vocabulary.values()) - special - {self.end_of_document_id}
        self.skipped_ids = frozenset(range(self.vocab_size)) - spoken
        decoder = json.loads(self._tokenizer.to_str())["decoder"] or {}
        self._decoders = {part["type"] for part in decoder.get("decoders", [decoder]) if part}

    def encode(self, text: str) -> list[int]:
        with _refusing(self._cannot_encode(text)):
            return self._tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, token_ids: Sequence[int]) -> str:
        with _refusing(f"{self.name}: cannot decode tokens"):
            if "ByteFallback" in self._decoders:
                return self._tokenizer.decoder.decode(keep_characters_apart(self._spoken(token_ids)))
            return self._tokenizer.decode([int(i) for i in token_ids if i != self.end_of_document_id])

    def num_unfinished(self, token_ids: Sequence[int]) -> int:
        if "ByteFallback" in self._decoders:  # which makes one U+FFFD of each byte
            return num_unfinished_bytes(bytes_at_end(self._spoken(token_ids)))
        if "ByteLevel" in self._decoders:
            return min(num_unfinished_bytes(byte_level_bytes(self._spoken(token_ids))), 1)
        return 0

    def num_bytes(self, token_ids: Sequence[int], num_before: int) -> int:
        if "ByteLevel" in self._decoders:
            return len(byte_level_bytes(self._spoken(token_ids[num_before:])))
        return self._num_decoded_bytes(token_ids) - self._num_decoded_bytes(token_ids[:num_before])

    def find_token(self, text: str) -> int | None:
        # By its name in the vocabulary; but a byte-level one spells a newline, say, as another character.
        named = self._tokenizer.token_to_id(text)
        ids = self.encode(text) if named is None else [named]
        return ids[0] if len(ids) == 1 else None

    def encode_documents(self, documents: Sequence[bytes]) -> list[np.ndarray]:
        texts = [document.decode() for document in documents]
        try:
            with _refusing(f"{self.name}: cannot encode {len(texts):,} documents together"):
                encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        except DataError:
            for text in texts:
                self.encode(text)  # Raises for the one at fault, whose beginning it shows.
            raise
        return [np.array(encoding.ids, token_dtype(self.vocab_size)) for encoding in encodings]

    def _spoken(self, token_ids: Sequence[int]) -> list[str]:
        """The tokens, by name, that `decode` doesn't leave out."""
        tokens = (self._tokenizer.id_to_token(int(i)) for i in token_ids if i not in self.skipped_ids)
        return [token for token in tokens if token is not None]

    def _num_decoded_bytes(self, token_ids: Sequence[int]) -> int:
        if "ByteFallback" not in self._decoders:
            return len(self.decode(token_ids).encode())
        tokens = self._spoken(token_ids)
        others = [token for token in tokens if not bytes_at_end([token])]
        return len(self._tokenizer.decoder.decode(others).encode()) + len(tokens) - len(others)

    def _cannot_encode(self, text: str) -> str:
        shown = text if len(text) <= _NUM_SHOWN_CHARACTERS else f"{text[:_NUM_SHOWN_CHARACTERS]}…"
        return f"{self.name}: cannot encode the text {shown!r}, so mend the tokenizer or take another"

    def _find_end_of_document(self, token: str | int | None, vocabulary: dict[str, int]) -> int:
        if isinstance(token, int):
            if not 0 <= token < self.vocab_size:
                raise DataError(
                    f"data.end_of_document_token={token} is not an id of {self.name}; give one below {self.vocab_size}"
                )
            return token
        if token is not None:
            if token not in vocabulary:
                raise DataError(
                    f"data.end_of_document_token={token!r} is not a token of {self.name}; give one of its tokens or ids"
                )
            return vocabulary[token]
        found = [candidate for candidate in _END_OF_DOCUMENT_TOKENS if candidate in vocabulary]
        if len(found) != 1:  # none, or several: Gemma's vocabulary, for one, has HTML's tags
            stated = _stated_end_of_text(Path(self.name))
            found = [candidate for candidate in found or vocabulary if candidate == stated] or found
        if len(found) != 1:
            special = [added.content for added in self._tokenizer.get_added_tokens_decoder().values() if added.special]
            raise DataError(
                f"{self.name}: cannot tell which token ends a document ({' or '.join(found) or 'no usual one'}); "
                f"set data.end_of_document_token. Its special tokens: {', '.join(special[:20]) or 'none'}"
            )
        return vocabulary[found[0]]


def _stated_end_of_text(tokenizer_file: Path) -> str | None:
    """The `eos_token` of the `tokenizer_config.json` beside a tokenizer; None if nothing there says it."""
    try:
        content = read_at_most(tokenizer_file.with_name("tokenizer_config.json"), _MAX_FILE_BYTES)
        stated = json.loads(content or b"")["eos_token"]
        return stated if isinstance(stated, str) else stated["content"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


class PretokenizedIds:
    """Stands in for the unknown tokenizer of `.bin` files: ids without text.

    Args:
        vocab_size: one more than the largest id in the files.
        end_of_document_id: the token that ends a document.
    """

    name = identity = "pretokenized"

    def __init__(self, vocab_size: int, end_of_document_id: int):
        self.vocab_size = vocab_size
        self.end_of_document_id = end_of_document_id
        self.skipped_ids = frozenset({end_of_document_id})

    def encode(self, text: str) -> list[int]:
        raise DataError(self._no_text("encode"))

    def decode(self, token_ids: Sequence[int]) -> str:
        raise DataError(self._no_text("decode"))

    def num_unfinished(self, token_ids: Sequence[int]) -> int:
        raise DataError(self._no_text("decode"))

    def num_bytes(self, token_ids: Sequence[int], num_before: int) -> None:
        return None

    def find_token(self, text: str) -> int | None:
        raise DataError(self._no_text("encode"))

    def encode_documents(self, documents: Sequence[bytes]) -> list[np.ndarray]:
        raise DataError(self._no_text("encode"))

    def _no_text(self, verb: str) -> str:
        return (
            f"cannot {verb}: a .bin file does not say which tokenizer made it; set data.tokenizer to its tokenizer.json"
        )


def load_tokenizer(
    name: str, end_of_document_token: str | int | None = None, *, setting: str = "data.tokenizer"
) -> ByteTokenizer | HuggingFaceTokenizer:
    """The tokenizer of a name: `byte`, or the path of a `tokenizer.json`.

    Args:
        end_of_document_token: text or id of the token that ends a document; None: the tokenizer's own.
        setting: the field or flag that gave the name, for messages.

    Raises:
        DataError: there is no such tokenizer, or it has no such end-of-document token.
    """
    if name != "byte":
        return HuggingFaceTokenizer(Path(name).expanduser(), end_of_document_token, setting)
    if end_of_document_token not in (None, ByteTokenizer.end_of_document_id):
        raise DataError(
            f"data.end_of_document_token={end_of_document_token!r} has no effect with {setting}=byte, "
            f"whose documents end with {ByteTokenizer.end_of_document_id}; leave it unset"
        )
    return ByteTokenizer()
