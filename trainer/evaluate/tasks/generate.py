"""Examples of a task, from its name and a seed."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from types import MappingProxyType

import numpy as np

from trainer.data import Tokenizer
from trainer.errors import UserMistake
from trainer.evaluate.tasks.common_words import CommonWords, Repeats
from trainer.evaluate.tasks.example import Example
from trainer.evaluate.tasks.frequent_words import FrequentWords
from trainer.evaluate.tasks.key_values import KeyValues
from trainer.evaluate.tasks.needles import Needles
from trainer.evaluate.tasks.task import Draw, RetrievalTask, TaskInputs
from trainer.evaluate.tasks.variable_tracking import VariableTracking

RULER: Mapping[str, RetrievalTask] = MappingProxyType(
    {
        "niah_single": Needles(),
        "niah_multikey": Needles(num_distractors=3),
        "niah_multivalue": Needles(num_values=4),
        "niah_multiquery": Needles(num_keys=4),
        "variable_tracking": VariableTracking(num_hops=4),
        "common_words": CommonWords(
            num_common=10,
            long=Repeats(common=30, uncommon=3, shown_common=10, shown_uncommon=3, num_shown=40),
            short=Repeats(common=6, uncommon=1, shown_common=3, shown_uncommon=1, num_shown=20),
            min_long=4096,
        ),
        "frequent_words": FrequentWords(),
    }
)
"""RULER's tasks by name, each with its numbers."""
TASKS: Mapping[str, RetrievalTask] = MappingProxyType({**RULER, "key_values": KeyValues()})
"""All tasks by name."""


def make_examples(
    task: str,
    length: int,
    *,
    num_examples: int,
    num_questions: int,
    depths: Sequence[float] | None,
    tokenizer: Tokenizer,
    haystack: str,
    seed: int,
) -> list[Example]:
    """Examples of a task.

    An example depends on the seed, the task and its number among the examples alone. Of several lengths or tokenizers,
    it has the same needles, questions and answers, and its haystack begins at the same line; how far it goes differs.

    A context is filled up to a word of the haystack. A list is filled up to the next words with all their repeats.

    Args:
        task: one of `TASKS`.
        length: most tokens that a context, a prompt and its answer have together.
        num_examples: how many.
        num_questions: about each context, each with needles or a chain of its own. `common_words` and
            `frequent_words` have one question.
        depths: fractions of the haystack from 0 to 1. Example i asks for a needle at depth i modulo their number. The
            needles of several questions are beside each other there. Distractors are spread at random, and so are all
            needles if it is None. Only `niah_single`, `niah_multikey` and `key_values` heed it: a question of the
            other tasks asks for several needles, variables or words.
        tokenizer: the model's.
        haystack: any text, repeated if it is too short. Of a long one, at most the first `2 * length` tokens are used.
            `common_words` and `frequent_words` have no use for it.
        seed: at least 0.

    Returns:
        `num_examples` examples.

    Raises:
        UserMistake: there is no such task, or the length is too short for it, or an argument is out of its range.

    Example:
        >>> from trainer.data import ByteTokenizer
        >>> from trainer.evaluate.tasks import NOISE
        >>> [example] = make_examples(
        ...     "niah_single", 1024, num_examples=1, num_questions=1, depths=[0.5],
        ...     tokenizer=ByteTokenizer(), haystack=NOISE, seed=0,
        ... )
        >>> [question] = example.questions
        >>> question.text in ByteTokenizer().decode(example.context)
        True
    """
    if task not in TASKS:
        raise UserMistake(f"there is no task {task!r}; take one of {', '.join(TASKS)}")
    arguments = {"length": length, "num_questions": num_questions, "num_examples": num_examples, "seed": seed}
    for name, value in arguments.items():
        least = int(name in ("length", "num_questions"))
        if value < least:
            raise UserMistake(f"{name}={value} must be at least {least}")
    wrong = [depth for depth in depths or () if not 0 <= depth <= 1]
    if wrong:
        raise UserMistake(f"depth {wrong[0]} is no fraction of a haystack; give depths from 0 to 1")
    inputs = TaskInputs(task, length, num_questions, tokenizer, haystack)
    draws = []
    for number in range(num_examples):
        depth = depths[number % len(depths)] if depths and TASKS[task].takes_depth else None
        draws.append(Draw(np.random.default_rng([seed, zlib.crc32(task.encode()), number]), depth))
    return [
        Example(task, length, draw.depth, context, questions)
        for draw, (context, questions) in zip(draws, TASKS[task].draw_examples(inputs, draws), strict=True)
    ]
