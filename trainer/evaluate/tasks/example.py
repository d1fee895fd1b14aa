"""A context, the questions about it, and the score of an answer.

Shapes: C tokens of a context, P of a prompt, A of an answer.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Int32

ANSWER_SEPARATOR = ", "
"""Between the expected strings in an answer's text. None of them has it."""


@dataclass(frozen=True)
class Question:
    """A question asked after a context.

    Args:
        prompt: [P] tokens that follow the context.
        answer: [A] tokens that should follow the prompt.
        text: the answer: its expected strings, joined by `", "`.
    """

    prompt: Int32[np.ndarray, " P"]
    answer: Int32[np.ndarray, " A"]
    text: str


@dataclass(frozen=True)
class Example:
    """A context and its questions.

    Args:
        task: the task's name.
        length: most tokens that the context, a prompt and its answer have together.
        depth: fraction of the haystack that precedes the needles asked for; None: they are spread at random.
        context: [C] tokens, first the one that begins a document, where the tokenizer has one.
        questions: each is asked right after the context, without the others.
    """

    task: str
    length: int
    depth: float | None
    context: Int32[np.ndarray, " C"]
    questions: tuple[Question, ...]


def score(decoded_text: str, question: Question) -> float:
    """Fraction of the expected strings that a text includes, in upper or lower case: RULER's string match.

    Args:
        decoded_text: what a model wrote after the prompt.
        question: the question.

    Example:
        >>> question = Question(np.zeros(3, np.int32), np.zeros(9, np.int32), "1234567, 7654321")
        >>> score("It is 7654321.", question)
        0.5
    """
    expected = question.text.lower().split(ANSWER_SEPARATOR)
    return sum(each in decoded_text.lower() for each in expected) / len(expected)
