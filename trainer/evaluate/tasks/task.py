"""What every task is given, and what it gives."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from jaxtyping import Int32

from trainer.data import Tokenizer
from trainer.errors import UserMistake
from trainer.evaluate.tasks.encoding import encode_document, encode_lines, encode_question
from trainer.evaluate.tasks.example import Question
from trainer.evaluate.tasks.haystack import Haystack, tokenize_haystack


class ContextAndQuestions(NamedTuple):
    """An example without its name, length and depth."""

    context: Int32[np.ndarray, " C"]
    questions: tuple[Question, ...]


class Draw(NamedTuple):
    """What one example is drawn from.

    Args:
        rng: the example's own generator.
        depth: of the needles that are asked for; None: for the task to spread.
    """

    rng: np.random.Generator
    depth: float | None


@dataclass(frozen=True)
class TaskInputs:
    """What the examples of one call share.

    Args:
        task: name of the task, for messages.
        length: most tokens that the context, a prompt and its answer have together.
        num_questions: about each context, where the task can have several.
        tokenizer: the model's.
        text: the haystack.
    """

    task: str
    length: int
    num_questions: int
    tokenizer: Tokenizer
    text: str

    @functools.cached_property
    def haystack(self) -> Haystack:
        return tokenize_haystack(self.text, self.tokenizer, self.length)

    def require(self, num_tokens: int) -> None:
        """Raises UserMistake if the length is below some number of tokens."""
        if self.length < num_tokens:
            fewer = ", or ask fewer questions" if self.num_questions > 1 else ""
            raise UserMistake(
                f"length={self.length:,} is too short for {self.task}, which needs {num_tokens:,} tokens of the "
                f"{self.tokenizer.name} tokenizer; take a length of at least that{fewer}"
            )


class RetrievalTask(Protocol):
    """How the examples of a task are drawn.

    Attributes:
        takes_depth: True if its questions each ask for one needle, whose depth can be chosen.
    """

    @property
    def takes_depth(self) -> bool: ...

    def draw_examples(self, inputs: TaskInputs, draws: Sequence[Draw]) -> Iterator[ContextAndQuestions]:
        """One example for each draw.

        Raises:
            UserMistake: the length is too short.
        """


class WrittenQuestion(NamedTuple):
    """The text of a question, and the strings that are expected in the answer."""

    prompt: str
    expected: tuple[str, ...]


@dataclass(frozen=True)
class HiddenLines:
    """Lines to hide in a haystack, and questions about them.

    Args:
        before: text before the haystack. It ends in a newline.
        lines: the lines, without newlines.
        fractions: of the haystack's tokens, the part that is before each line.
        questions: the questions.
    """

    before: str
    lines: tuple[str, ...]
    fractions: tuple[float, ...]
    questions: tuple[WrittenQuestion, ...]

    def in_haystack(self, inputs: TaskInputs, rng: np.random.Generator) -> ContextAndQuestions:
        """Hides the lines in as much of the haystack as the length has room for, from a line drawn at random."""
        before = encode_document(inputs.tokenizer, self.before)
        lines = encode_lines(inputs.tokenizer, [line + "\n" for line in self.lines])
        questions = tuple(encode_question(inputs.tokenizer, *question) for question in self.questions)
        num_needed = len(before) + sum(map(len, lines)) + num_tokens_to_ask(questions)
        inputs.require(num_needed)
        start = int(rng.integers(inputs.haystack.num_starts))
        hidden = inputs.haystack.hide(start, inputs.length - num_needed, lines, self.fractions)
        return ContextAndQuestions(np.concatenate([before, hidden]), questions)


def num_tokens_to_ask(questions: Sequence[Question]) -> int:
    """Tokens of the longest prompt with its answer."""
    return max(len(question.prompt) + len(question.answer) for question in questions)
