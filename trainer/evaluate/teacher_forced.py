"""Retrieval without decoding: whether each token of an answer is the likeliest, given the right ones before it.

That is exact match of a greedy answer, since up to its first mistake the two are the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool

from trainer.evaluate.forward import TokenForward
from trainer.evaluate.tasks import Example


def score(forward: TokenForward, params: Any, examples: Sequence[Example]) -> list[Bool[np.ndarray, " questions"]]:
    """Asks a model all questions of examples, on its mesh; a run in training may do so at any step.

    Each question reads its context anew, so that one question to an example is cheapest.

    Args:
      forward: of the run, for streams as long as the longest example.
      params: of the model, as `forward.abstract_params`.
      examples: contexts with their questions.

    Returns:
      For each example, which of its questions get exactly the tokens of their answers.
    """
    asked = [(example, question) for example in examples for question in example.questions]
    streams = [
        np.concatenate([example.context, question.prompt, question.answer]).astype(np.int32)
        for example, question in asked
    ]
    losses = forward(params, streams)
    is_right = [
        bool(of_stream.is_likeliest[-len(question.answer) :].all())
        for (_, question), of_stream in zip(asked, losses, strict=True)
    ]
    ends = np.cumsum([len(example.questions) for example in examples])
    return np.split(np.array(is_right, bool), ends[:-1])
