"""Frequent words: coded words whose frequencies follow a zeta distribution."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int64

from trainer.evaluate.tasks.encoding import encode_document, encode_question, encode_words
from trainer.evaluate.tasks.task import ContextAndQuestions, Draw, TaskInputs, num_tokens_to_ask
from trainer.evaluate.tasks.words import draw_letters

_BEFORE = (
    "Read the following coded text and track the frequency of each coded word. "
    "Find the three most frequently appeared coded words."
)
_PROMPT = (
    "Question: Do not provide any explanation. Please ignore the dots '....'. What are the three most frequently "
    "appeared words in the above coded text? Answer: According to the coded text above, the three most frequently "
    "appeared words are:"
)
_NOISE = "..."
_NUM_LETTERS = 6
_ZETA_2 = np.pi**2 / 6
_NUM_ASKED = 3
MIN_WORDS = 53
"""From this n on, each of the three words asked for is more frequent than the words of all lower ranks."""


@dataclass(frozen=True)
class FrequentWords:
    """One question for the three most frequent words of a text.

    The word of rank k is in the text floor(n / (ζ(2) k²)) times, for the largest n that fits. That of rank 1 is noise:
    three dots.
    """

    @property
    def takes_depth(self) -> bool:
        return False

    def draw_examples(self, inputs: TaskInputs, draws: Sequence[Draw]) -> Iterator[ContextAndQuestions]:
        for draw in draws:
            yield self._draw_example(inputs, draw.rng)

    def _draw_example(self, inputs: TaskInputs, rng: np.random.Generator) -> ContextAndQuestions:
        before = encode_document(inputs.tokenizer, _BEFORE)
        [newline] = encode_words(inputs.tokenizer, ["\n"])
        # At least as many ranks as have a word in a text of one token a word.
        num_ranks = int(np.sqrt((MIN_WORDS + inputs.length) / _ZETA_2))
        words = [_NOISE, *draw_letters(rng, num_ranks - 1, _NUM_LETTERS)]
        question = encode_question(inputs.tokenizer, _PROMPT, words[1 : 1 + _NUM_ASKED])
        num_needed = len(before) + len(newline) + num_tokens_to_ask([question])
        encoded = encode_words(inputs.tokenizer, [" " + word for word in words])
        lengths = np.array([len(ids) for ids in encoded])

        def num_tokens(num_words: int) -> int:
            return int(_counts(num_words, num_ranks) @ lengths)

        inputs.require(num_needed + num_tokens(MIN_WORDS))
        most, over = MIN_WORDS, inputs.length + 1
        while over - most > 1:
            middle = (most + over) // 2
            if num_tokens(middle) <= inputs.length - num_needed:
                most = middle
            else:
                over = middle
        order = rng.permutation(np.repeat(np.arange(num_ranks), _counts(most, num_ranks)))
        # Some tokenizers join dots with a newline, so another word is the last one.
        last = np.flatnonzero(order)[-1]
        order[[last, -1]] = order[[-1, last]]
        return ContextAndQuestions(
            np.concatenate([before, *(encoded[word] for word in order.tolist()), newline]), (question,)
        )


def _counts(num_words: int, num_ranks: int) -> Int64[np.ndarray, " K"]:
    """How often the word of each rank is in a text."""
    return (num_words / _ZETA_2 / np.arange(1, num_ranks + 1) ** 2).astype(np.int64)
