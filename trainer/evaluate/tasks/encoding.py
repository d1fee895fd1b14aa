"""Tokens of texts that continue another text."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jaxtyping import Int32

from trainer.data import Tokenizer
from trainer.evaluate.tasks.example import ANSWER_SEPARATOR, Question

_WORD = "x"


def encode_document(tokenizer: Tokenizer, text: str) -> Int32[np.ndarray, " T"]:
    """Tokens of a text that begins a document, the token that begins documents included."""
    begin = tokenizer.delimiters.begin
    return np.array([*(() if begin is None else (begin,)), *tokenizer.encode(text)], np.int32)


def encode_lines(tokenizer: Tokenizer, lines: Sequence[str]) -> list[Int32[np.ndarray, " T"]]:
    """Tokens of each text as it is after a newline."""
    return _encode_after(tokenizer, "\n", lines)


def encode_words(tokenizer: Tokenizer, words: Sequence[str]) -> list[Int32[np.ndarray, " T"]]:
    """Tokens of each text as it is after a word. A text begins with white space, so that no token spans both."""
    return _encode_after(tokenizer, _WORD, words)


def encode_question(tokenizer: Tokenizer, prompt: str, expected: Sequence[str]) -> Question:
    """A question that begins a line.

    Prompt and answer are tokenized together, as a model has seen such texts in training. A model would not be able to
    answer by a token that begins in the prompt, so the answer begins before such a token, if there is one.

    Args:
        tokenizer: the model's.
        prompt: ends without white space: most tokenizers join a space to the word after it.
        expected: the strings that the answer consists of.
    """
    text = ANSWER_SEPARATOR.join(expected)
    alone, whole = encode_lines(tokenizer, [prompt, f"{prompt} {text}"])
    shared = min(len(alone), len(whole))
    differs = np.flatnonzero(alone[:shared] != whole[:shared])
    split = int(differs[0]) if len(differs) else shared
    return Question(whole[:split], whole[split:], text)


def _encode_after(tokenizer: Tokenizer, before: str, texts: Sequence[str]) -> list[Int32[np.ndarray, " T"]]:
    """Tokens of each text as they are after another text, which isn't among them.

    SentencePiece's tokenizers put a space before a text. So a text alone has other tokens than one that continues.
    """
    prefix = np.array(tokenizer.encode(before), np.int32)
    after = tokenizer.encode_documents([(before + text).encode() for text in texts])
    encoded = [ids.astype(np.int32) for ids in after]
    # A token may span both texts. Some normalizers drop white space: a text alone is then tokenized as a line is.
    spanned = [number for number, ids in enumerate(encoded) if not np.array_equal(ids[: len(prefix)], prefix)]
    alone = tokenizer.encode_documents([texts[number].encode() for number in spanned]) if spanned else []
    whole = dict(zip(spanned, alone, strict=True))
    return [
        whole[number].astype(np.int32) if number in whole else ids[len(prefix) :] for number, ids in enumerate(encoded)
    ]
