"""Makes documents of token ids from files of conversations, in an entry of the token cache.

An entry holds tokens.bin (the ids of all chats, flat), documents.npy (their table), and spans.npy, turn_ends.npy and
chats.npy: see `ChatSpans`. The tokens are those of the rendered text, and no others: a template writes the tokens that
begin and end a chat itself.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from trainer.config import ChatConfig
from trainer.data.chat_encoding import ChatEncoder, EncodedText
from trainer.data.chat_reader import ChatPlace, read_chats
from trainer.data.chat_rendering import RenderedChat, render_chat
from trainer.data.chat_template import ChatTemplate, find_chat_template
from trainer.data.chats import CHAT_DTYPE, ChatSpans, spans_of
from trainer.data.documents import DOCUMENT_DTYPE, Documents, TokenizedFiles
from trainer.data.token_cache import OnProgress, TokenCache, cache_key
from trainer.data.tokenization import TokenizingProgress, chunks, count_noun, document_hash, get_or_tokenize
from trainer.data.tokenizers import HuggingFaceTokenizer, Tokenizer, token_dtype
from trainer.errors import DataError

# Part of every key. It changes with the layout of entries, and with how chats are rendered and encoded.
_ENTRY_FORMAT = 1


class ChatTokenizer:
    """Tokenizes files of conversations by a chat template.

    Args:
        config: the template, what the loss is of, and what becomes of a chat that is too long.
        tokenizer: the tokenizer.

    Raises:
        DataError: there is no template, or the tokenizer has none of its own names of special tokens.
    """

    def __init__(self, config: ChatConfig, tokenizer: Tokenizer):
        if not isinstance(tokenizer, HuggingFaceTokenizer):
            raise DataError(
                f"chats need the special tokens of a tokenizer.json, and data.tokenizer is {tokenizer.name!r}; set it "
                "to the tokenizer.json of a folder with a chat template"
            )
        self._config, self._tokenizer = config, tokenizer
        self._template: ChatTemplate = find_chat_template(Path(tokenizer.name), config.template)
        self._encoder = ChatEncoder(tokenizer)

    def tokenize(self, files: Sequence[Path], cache: TokenCache, on_progress: OnProgress) -> TokenizedFiles:
        """The chats of some files, tokenized unless the cache has them.

        Args:
            files: the files, in order.
            cache: where tokens are kept.
            on_progress: called with a line when tokenizing starts, every few seconds, and when it ends.

        Raises:
            DataError: a row holds no chat, or one that the template refuses, or a file changed while it was read.
        """
        tokenizer = self._tokenizer
        key = cache_key(
            files,
            format=_ENTRY_FORMAT,
            source="chats",
            tokenizer=tokenizer.identity,
            delimiters=tokenizer.delimiters,  # text that spells them has other tokens
            template=self._template.digest,
            loss=self._config.loss,
            too_long=self._config.too_long,
        )

        def write(folder: Path) -> dict[str, Any]:
            return self._write_entry(folder, files, on_progress)

        entry = get_or_tokenize(key, files, tokenizer, cache, write, on_progress)
        tokens = entry.open_tokens("tokens.bin", token_dtype(tokenizer.vocab_size))
        table, spans, turn_ends, chats = (
            entry.load_array(f"{name}.npy") for name in ("documents", "spans", "turn_ends", "chats")
        )
        of_chats = ChatSpans(spans, turn_ends, chats, tuple(files), self._config.too_long)
        documents = Documents((tokens,), table, tokenizer.delimiters, chats=(of_chats,))
        return TokenizedFiles(documents, entry.about["digest"])

    def _write_entry(self, folder: Path, files: Sequence[Path], on_progress: OnProgress) -> dict[str, Any]:
        digest, num_tokens, progress = hashlib.sha256(), 0, TokenizingProgress("chats", on_progress)
        number_of = {path: number for number, path in enumerate(files)}
        documents: list[tuple[int, ...]] = []
        chats: list[tuple[int, ...]] = []
        spans: list[np.ndarray] = []
        turn_ends: list[np.ndarray] = []
        with (folder / "tokens.bin").open("wb") as file:
            for chunk in chunks(self._chats_of(files), lambda item: item[1].num_bytes):
                for (place, chat), tokens in zip(chunk, self._encode(chunk), strict=True):
                    if not len(tokens.ids):
                        raise DataError(f"{place}: the tokenizer makes no token of this chat; drop it")
                    weights, ends = _weigh(chat, tokens)
                    ids = tokens.ids.astype(token_dtype(self._tokenizer.vocab_size))
                    file.write(ids.data)
                    digest.update(ids.data)
                    text_hash = document_hash(self._encoder.restore(chat.protected).encode())
                    documents.append((0, num_tokens, len(ids), chat.num_bytes, text_hash))
                    chats.append((num_tokens, number_of[place.path], place.number, place.is_row))
                    spans.append(spans_of(weights, num_tokens))
                    turn_ends.append(num_tokens + ends)
                    num_tokens += len(ids)
                progress.report(len(chats), num_tokens)
        all_spans, all_ends, table = (
            np.concatenate(spans),
            np.concatenate(turn_ends),
            np.array(documents, DOCUMENT_DTYPE),
        )
        if not all_spans["weight"].any():
            raise DataError(f"{files[0]}: every token in {count_noun(files, 'file')} has weight 0; give one a weight")
        for array in (table["length"], all_spans, all_ends):
            digest.update(array.tobytes())
        digest.update(self._config.too_long.encode())
        np.save(folder / "documents.npy", table)
        np.save(folder / "chats.npy", np.array(chats, CHAT_DTYPE))
        np.save(folder / "spans.npy", all_spans)
        np.save(folder / "turn_ends.npy", all_ends)
        progress.end(len(chats), num_tokens)
        return {"digest": digest.hexdigest()}

    def _chats_of(self, files: Sequence[Path]) -> Iterator[tuple[ChatPlace, RenderedChat]]:
        for path in files:
            num_chats = 0
            for chat in read_chats(path):
                num_chats += 1
                yield chat.place, render_chat(chat, self._template, self._encoder, self._config.loss)
            if not num_chats:
                raise DataError(f"{path} holds no chats; remove it or leave it out of data.files")

    def _encode(self, chunk: Sequence[tuple[ChatPlace, RenderedChat]]) -> list[EncodedText]:
        try:
            return self._encoder.encode([chat.protected for _, chat in chunk])
        except ValueError:
            for place, chat in chunk:  # names the one at fault
                try:
                    self._encoder.encode([chat.protected])
                except ValueError as refused:
                    raise DataError(f"{place}: the chat can't be tokenized: {refused}") from refused
            raise


def _weigh(chat: RenderedChat, tokens: EncodedText) -> tuple[np.ndarray, np.ndarray]:
    """[L] The weights of a chat's tokens, and [E] the places behind the turns that the loss is of.

    A token belongs to a turn if it stands for one of its characters, as it does for transformers.
    """
    weights, ends = np.full(len(tokens.ids), chat.weight, np.float32), []
    for start, stop, weight in chat.turns:
        places = np.flatnonzero(tokens.overlaps(start, stop))
        weights[places] = weight
        if len(places) and weight:
            ends.append(places[-1] + 1)
    return weights, np.array(ends, np.int64)
