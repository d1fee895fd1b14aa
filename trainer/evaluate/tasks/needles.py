"""Needles in a haystack: sentences that each give a value of a key."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

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
        rng = draw.rng
        num_asked = inputs.num_questions * self.num_keys
        keys = draw_keys(rng, num_asked + self.num_distractors, inputs.text)
        if keys is None:
            raise UserMistake(
                f"num_questions={inputs.num_questions:,} of {inputs.task} needs {num_asked + self.num_distractors:,} "
                f"keys that the haystack doesn't have; there are at most {len(ADJECTIVES) * len(NOUNS):,}, so ask "
                "fewer questions, or take another haystack"
            )
        numbers = draw_numbers(rng, num_asked * self.num_values + self.num_distractors, _NUM_DIGITS)
        owners = [key for key in keys[:num_asked] for _ in range(self.num_values)] + keys[num_asked:]
        fractions = rng.random(len(numbers))
        # Several values of a key are asked for in the order of the context.
        asked = fractions[: num_asked * self.num_values].reshape(num_asked, self.num_values)
        asked.sort(axis=1)
        if draw.depth is not None:
            asked[:] = draw.depth
        some = "A special magic number is" if len(numbers) == 1 else "Some special magic numbers are"
        them = "the number" if len(numbers) == 1 else "the numbers"
        values: dict[str, list[str]] = {key: [] for key in keys}
        for owner, number in zip(owners, numbers, strict=True):
            values[owner].append(number)
        groups = (keys[first : first + self.num_keys] for first in range(0, num_asked, self.num_keys))
        return HiddenLines(
            before=f"{some} hidden within the following text. Make sure to memorize it. "
            f"I will quiz you about {them} afterwards.\n",
            lines=tuple(
                f"One of the special magic numbers for {owner} is: {number}."
                for owner, number in zip(owners, numbers, strict=True)
            ),
            fractions=tuple(fractions.tolist()),
            questions=tuple(
                WrittenQuestion(_prompt(group, self.num_values), tuple(value for key in group for value in values[key]))
                for group in groups
            ),
        )


def _prompt(keys: Sequence[str], num_values: int) -> str:
    named = keys[0] if len(keys) == 1 else f"{', '.join(keys[:-1])}, and {keys[-1]}"
    if len(keys) * num_values == 1:
        what, them = "What is", f"special magic number for {named} mentioned in the provided text"
        return f"{what} the {them}? The {them} is"
    them = f"special magic numbers for {named} mentioned in the provided text"
    return f"What are all the {them}? The {them} are"
