"""Variable tracking: chains of assignments, hidden in the order in which they are made."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from trainer.evaluate.tasks.example import ANSWER_SEPARATOR
from trainer.evaluate.tasks.task import ContextAndQuestions, Draw, HiddenLines, TaskInputs, WrittenQuestion
from trainer.evaluate.tasks.words import draw_letters, draw_numbers

_BEFORE = "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n"
_NUM_LETTERS = 5
_NUM_LETTERS_OF_SHOWN = 3
_NUM_DIGITS = 5


@dataclass(frozen=True)
class VariableTracking:
    """Questions for all variables that have a value. An answered question, on a chain without noise, comes first.

    Args:
        num_hops: assignments from variable to variable in a chain.
    """

    num_hops: int

    @property
    def takes_depth(self) -> bool:
        return False

    def draw_examples(self, inputs: TaskInputs, draws: Sequence[Draw]) -> Iterator[ContextAndQuestions]:
        for draw in draws:
            yield self._hide(inputs, draw.rng).in_haystack(inputs, draw.rng)

    def _hide(self, inputs: TaskInputs, rng: np.random.Generator) -> HiddenLines:
        num_chains, num_names = inputs.num_questions, self.num_hops + 1
        *values, shown_value = draw_numbers(rng, num_chains + 1, _NUM_DIGITS)
        names = [name.upper() for name in draw_letters(rng, num_chains * num_names, _NUM_LETTERS)]
        shown = [name.upper() for name in draw_letters(rng, num_names, _NUM_LETTERS_OF_SHOWN)]
        chains = [names[first : first + num_names] for first in range(0, len(names), num_names)]
        fractions = np.sort(rng.random((num_chains, num_names)), axis=1)
        shown_lines = "".join(line + "\n" for line in _assignments(shown, shown_value))
        answered = f"{_prompt(shown_value, num_names)} {ANSWER_SEPARATOR.join(shown)}\n\n"
        return HiddenLines(
            before=f"{_BEFORE}{shown_lines}{answered}{_BEFORE}",
            lines=tuple(
                line for chain, value in zip(chains, values, strict=True) for line in _assignments(chain, value)
            ),
            fractions=tuple(fractions.ravel().tolist()),
            questions=tuple(
                WrittenQuestion(_prompt(value, num_names), tuple(chain))
                for chain, value in zip(chains, values, strict=True)
            ),
        )


def _assignments(chain: Sequence[str], value: str) -> list[str]:
    sources = [value, *(f"VAR {name}" for name in chain[:-1])]
    return [f"VAR {name} = {source}" for name, source in zip(chain, sources, strict=True)]


def _prompt(value: str, num_names: int) -> str:
    return (
        f"Question: Find all variables that are assigned the value {value} in the text above. Answer: According to the "
        f"chain(s) of variable assignment in the text above, {num_names} variables are assigned the value {value}, "
        "they are:"
    )
