"""Needles in a haystack: sentences that each give a value of a key."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from trainer.errors import UserMistake
from trainer.evaluate.tasks.task import ContextAndQuestions, Draw, HiddenLines, TaskInputs, WrittenQuestion
from trainer.evaluate.tasks.words import ADJECTIVES, NOUNS, draw_keys, draw_numbers

_NUM_DIGITS = 7


@dataclass(frozen=True)
class Needles:
    """Questions for the values of some keys.

    Args:
        num_keys: keys that one question asks for.
        num_values: values of each key, each in a needle of its own.
        num_distractors: needles of other keys, which no question asks for, in each context.
    """

    num_keys: int = 1
    num_values: int = 1
    num_distractors: int = 0

    @property
    def takes_depth(self) -> bool:
        return self.num_keys * self.num_values == 1

    def draw_examples(self, inputs: TaskInputs, draws: Sequence[Draw]) -> Iterator[ContextAndQuestions]:
        for draw in draws:
            yield self._hide(inputs, draw).in_haystack(inputs, draw.rng)

    def _hide(self, inputs: TaskInputs, draw: Draw) -> HiddenLines:
        num_asked = inputs.num_questions * self.num_keys
        num_keys = num_asked + self.num_distractors
        keys = draw_keys(draw.rng, num_keys, inputs.text)
        if keys is None:
            raise UserMistake(
                f"num_questions={inputs.num_questions:,} of {inputs.task} needs {num_keys:,} keys that the haystack "
                f"doesn't have; there are at most {len(ADJECTIVES) * len(NOUNS):,}, so ask fewer questions, or take "
                "another haystack"
            )
        num_values_asked = num_asked * self.num_values
        numbers = draw_numbers(draw.rng, num_values_asked + self.num_distractors, _NUM_DIGITS)
        owners = [*np.repeat(keys[:num_asked], self.num_values).tolist(), *keys[num_asked:]]
        fractions = draw.rng.random(len(numbers))
        # The values of a key are asked for in the order of the context.
        fractions[:num_values_asked] = np.sort(fractions[:num_values_asked].reshape(num_asked, -1)).ravel()
        if draw.depth is not None:
            fractions[:num_values_asked] = draw.depth
        needles = list(zip(owners, numbers, strict=True))
        is_one = len(needles) == 1
        return HiddenLines(
            before=f"{'A special magic number is' if is_one else 'Some special magic numbers are'} hidden within the "
            "following text. Make sure to memorize it. I will quiz you about the "
            f"{'number' if is_one else 'numbers'} afterwards.\n",
            lines=tuple(f"One of the special magic numbers for {key} is: {number}." for key, number in needles),
            fractions=tuple(fractions.tolist()),
            questions=tuple(
                self._ask(keys[first : first + self.num_keys], needles) for first in range(0, num_asked, self.num_keys)
            ),
        )

    def _ask(self, keys: Sequence[str], needles: Sequence[tuple[str, str]]) -> WrittenQuestion:
        values = tuple(number for key in keys for owner, number in needles if owner == key)
        named = keys[0] if len(keys) == 1 else f"{', '.join(keys[:-1])}, and {keys[-1]}"
        if len(values) == 1:
            asked = f"special magic number for {named} mentioned in the provided text"
            return WrittenQuestion(f"What is the {asked}? The {asked} is", values)
        asked = f"special magic numbers for {named} mentioned in the provided text"
        return WrittenQuestion(f"What are all the {asked}? The {asked} are", values)
