"""Words that stand beside other words, as simple as retrieval gets: a model of two layers can learn it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from trainer.errors import UserMistake
from trainer.evaluate.tasks.task import ContextAndQuestions, Draw, HiddenLines, TaskInputs, WrittenQuestion
from trainer.evaluate.tasks.words import ADJECTIVES, NOUNS


@dataclass(frozen=True)
class KeyValues:
    """Questions for the word behind a key. Key-value retrieval (arXiv:2307.03172) with words, in a haystack."""

    @property
    def takes_depth(self) -> bool:
        return True

    def draw_examples(self, inputs: TaskInputs, draws: Sequence[Draw]) -> Iterator[ContextAndQuestions]:
        num_lines = inputs.num_questions
        if num_lines > len(NOUNS):
            raise UserMistake(
                f"num_questions={num_lines} of {inputs.task} needs as many keys, and there are {len(NOUNS)}; ask fewer "
                "questions"
            )
        for draw in draws:
            keys = [f"{NOUNS[number]}:" for number in draw.rng.permutation(len(NOUNS))[:num_lines]]
            values = [ADJECTIVES[number] for number in draw.rng.integers(len(ADJECTIVES), size=num_lines)]
            depths = draw.rng.random(num_lines).tolist() if draw.depth is None else [draw.depth] * num_lines
            pairs = list(zip(keys, values, strict=True))
            questions = [pairs[number] for number in draw.rng.permutation(num_lines)]
            yield HiddenLines(
                before="",
                lines=tuple(f"{key} {value}" for key, value in pairs),
                fractions=tuple(depths),
                questions=tuple(WrittenQuestion(key, (value,)) for key, value in questions),
            ).in_haystack(inputs, draw.rng)
