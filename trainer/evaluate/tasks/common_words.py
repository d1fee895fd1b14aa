"""Common words: a numbered list in which ten words are more frequent than all others."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from trainer.evaluate.tasks.encoding import encode_document, encode_lines, encode_question, encode_words
from trainer.evaluate.tasks.example import ANSWER_SEPARATOR
from trainer.evaluate.tasks.task import ContextAndQuestions, Draw, TaskInputs, num_tokens_to_ask
from trainer.evaluate.tasks.words import NUM_SYLLABIC_WORDS, syllabic_word

_BEFORE = (
    "Below is a numbered list of words. In these words, some appear more often than others. "
    "Memorize the ones that appear most often.\n"
)
_NUMBERS_AT_ONCE = 4096


@dataclass(frozen=True)
class Repeats:
    """How often words are in a list.

    Args:
        common: each of the common words.
        uncommon: each of the others.
        shown_common: each of the common words in the answered list.
        shown_uncommon: each of the others there.
        num_shown: words of the answered list.
    """

    common: int
    uncommon: int
    shown_common: int
    shown_uncommon: int
    num_shown: int


@dataclass(frozen=True)
class CommonWords:
    """One question for the most common words of a list. An answered question, on a short list, comes first.

    Args:
        num_common: common words.
        long: for contexts of `min_long` tokens or more, if no more than half of the list is common words.
        short: for other contexts.
        min_long: tokens.
    """

    num_common: int
    long: Repeats
    short: Repeats
    min_long: int

    @property
    def takes_depth(self) -> bool:
        return False

    def draw_examples(self, inputs: TaskInputs, draws: Sequence[Draw]) -> Iterator[ContextAndQuestions]:
        numbers = _encode_numbers(inputs)
        for draw in draws:
            yield self._draw_example(inputs, draw.rng, numbers)

    def _draw_example(
        self, inputs: TaskInputs, rng: np.random.Generator, numbers: Sequence[np.ndarray]
    ) -> ContextAndQuestions:
        words = rng.permutation(NUM_SYLLABIC_WORDS).tolist()
        question = encode_question(inputs.tokenizer, self._prompt, self._spell(words[: self.num_common]))
        [newline] = encode_words(inputs.tokenizer, ["\n"])
        number_ends = np.cumsum([len(number) for number in numbers])
        for repeats in (self.long, self.short) if inputs.length >= self.min_long else (self.short,):
            before = encode_document(inputs.tokenizer, self._answered_list(repeats, words, rng) + _BEFORE)
            num_needed = len(before) + len(newline) + num_tokens_to_ask([question])
            num_common_items = self.num_common * repeats.common
            most = min((len(numbers) - num_common_items) // repeats.uncommon, len(words) - repeats.num_shown)
            spelled = self._spell(words[: self.num_common + most])
            encoded = encode_words(inputs.tokenizer, [" " + word for word in spelled])
            lengths = np.array([len(ids) for ids in encoded])
            # Tokens of the list with 1, 2, … uncommon words.
            num_tokens = (
                number_ends[num_common_items + repeats.uncommon * np.arange(1, most + 1) - 1]
                + repeats.common * lengths[: self.num_common].sum()
                + repeats.uncommon * np.cumsum(lengths[self.num_common :])
            )
            num_uncommon = int(np.searchsorted(num_tokens, inputs.length - num_needed, side="right"))
            if num_uncommon * repeats.uncommon >= num_common_items:
                break
        if not num_uncommon:
            inputs.require(num_needed + int(num_tokens[0]))
        order = self._shuffle(repeats.common, repeats.uncommon, num_uncommon, rng)
        items = itertools.chain.from_iterable(
            (number, encoded[word]) for number, word in zip(numbers, order.tolist(), strict=False)
        )
        return ContextAndQuestions(np.concatenate([before, *items, newline]), (question,))

    @property
    def _prompt(self) -> str:
        return (
            f"Question: What are the {self.num_common} most common words in the above list? Answer: "
            f"The top {self.num_common} words that appear most often in the list are:"
        )

    def _shuffle(self, common: int, uncommon: int, num_uncommon: int, rng: np.random.Generator) -> np.ndarray:
        """Indices of the words of a list, in which the common ones, from 0 on, first appear in their order."""
        repeats = np.repeat([common, uncommon], [self.num_common, num_uncommon])
        order = rng.permutation(np.repeat(np.arange(len(repeats)), repeats))
        _, first = np.unique(order, return_index=True)
        names = np.arange(len(repeats))
        names[np.argsort(first[: self.num_common])] = np.arange(self.num_common)
        return names[order]

    def _answered_list(self, repeats: Repeats, words: Sequence[int], rng: np.random.Generator) -> str:
        """A short list of other words, the question and its answer."""
        shown = self._spell(words[len(words) - repeats.num_shown :])
        num_uncommon = repeats.num_shown - self.num_common
        order = self._shuffle(repeats.shown_common, repeats.shown_uncommon, num_uncommon, rng)
        items = " ".join(f"{number}. {shown[word]}" for number, word in enumerate(order.tolist(), 1))
        return f"{_BEFORE}{items}\n{self._prompt} {ANSWER_SEPARATOR.join(shown[: self.num_common])}\n\n"

    @staticmethod
    def _spell(words: Sequence[int]) -> list[str]:
        return [syllabic_word(word) for word in words]


def _encode_numbers(inputs: TaskInputs) -> list[np.ndarray]:
    """Tokens of the numbers of a list's items, as many as a context may have."""
    encoded = encode_lines(inputs.tokenizer, ["1."])
    num_tokens = 0
    while num_tokens < inputs.length:
        first = len(encoded) + 1
        batch = encode_words(inputs.tokenizer, [f" {number}." for number in range(first, first + _NUMBERS_AT_ONCE)])
        encoded += batch
        num_tokens += sum(len(number) + 1 for number in batch)  # a word has at least one token
    return encoded
