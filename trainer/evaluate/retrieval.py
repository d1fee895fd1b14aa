"""Retrieval tasks, answered greedily: examples in, accuracies out."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

from layers import GPTConfig
from trainer.data import Tokenizer
from trainer.evaluate.decoding import ContextDecoder
from trainer.evaluate.results import RETRIEVAL, Line
from trainer.evaluate.tasks import Example, score

# A model may write a few words before the answer, or separate its parts otherwise.
_NUM_MORE_TOKENS = 16


def make_decoder(config: GPTConfig, examples: Sequence[Example], tokenizer: Tokenizer) -> ContextDecoder:
    """A decoder for examples of one length.

    Raises:
      ValueError: a mask of the model looks ahead.
    """
    questions = [question for example in examples for question in example.questions]
    return ContextDecoder(
        config,
        length=max(example.length for example in examples),
        shortest=min(len(example.context) for example in examples),
        num_questions=max(len(example.questions) for example in examples),
        longest_prompt=max(len(question.prompt) for question in questions),
        longest_answer=max(len(question.answer) for question in questions) + _NUM_MORE_TOKENS,
        vocab_size=tokenizer.vocab_size,
    )


def score_example(decoder: ContextDecoder, params: Any, example: Example, tokenizer: Tokenizer) -> list[float]:
    """The scores of the answers to an example's questions, each from 0 to 1.

    Args:
      decoder: from `make_decoder`, of this example and others.
      params: from `decoder.lay_out`.
      example: a context with its questions.
      tokenizer: the model's.
    """
    end, questions = tokenizer.delimiters.end, example.questions

    def text(answer: Sequence[int]) -> str:
        tokens = list(answer)
        return tokenizer.decode(tokens[: tokens.index(end)] if end in tokens else tokens)

    def is_whole(number: int, answer: list[int]) -> bool:
        question = questions[number]
        is_scored = len(answer) >= len(question.answer) and score(text(answer), question) == 1
        return answer[-1] == end or is_scored

    answers = decoder.answer(params, example.context, [question.prompt for question in questions], is_whole)
    return [score(text(answer), question) for answer, question in zip(answers, questions, strict=True)]


def mean_scores(examples: Sequence[Example], scores: Sequence[Sequence[float]]) -> Iterator[Line]:
    """A line for each task, length and depth.

    Args:
      examples: contexts with their questions.
      scores: of the questions of each.
    """
    groups: defaultdict[tuple[str, int, float | None], list[float]] = defaultdict(list)
    for example, of_questions in zip(examples, scores, strict=True):
        groups[example.task, example.length, example.depth] += map(float, of_questions)
    for (task, length, depth), found in groups.items():
        yield Line(RETRIEVAL, length, task, depth, accuracy=sum(found) / len(found), num_examples=len(found))
