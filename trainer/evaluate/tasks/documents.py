"""Training documents: texts of the tasks with their questions and answers at the end."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

from trainer.data import ByteTokenizer
from trainer.errors import UserMistake
from trainer.evaluate.tasks.generate import make_examples
from trainer.files.atomic import write_atomically


def make_documents(
    tasks: Sequence[str],
    *,
    num_documents: int,
    num_bytes: tuple[int, int],
    num_questions: int,
    haystack: str,
    seed: int,
) -> Iterator[str]:
    """Texts of tasks, each followed by its questions with their answers.

    Args:
        tasks: names of tasks, each of which gets an equal share of the documents.
        num_documents: how many.
        num_bytes: least and most bytes of a document in UTF-8. A document is shorter by up to a word of its haystack
            or list, and longer by the questions after the first one. Lengths are uniform in their logarithm.
        num_questions: in each document of a task that can have several.
        haystack: any text. Each document begins elsewhere in it.
        seed: other than that of an evaluation, whose needles would be in the documents, too.

    Raises:
        UserMistake: as `make_examples` does, or the lengths aren't in order, or there are no tasks.
    """
    least, most = num_bytes
    if not tasks or not 0 < least <= most:
        raise UserMistake(
            f"tasks={tuple(tasks)} and num_bytes={num_bytes}: expected at least one task, and first the lower of two "
            "numbers above 0"
        )
    tokenizer = ByteTokenizer()
    for number in range(num_documents):
        rng = np.random.default_rng([seed, number])
        length = round(float(np.exp(rng.uniform(np.log(least), np.log(most)))))
        start = int(rng.integers(max(len(haystack), 1)))
        # A context begins within `length` characters, and has no more than that.
        text = haystack[start : start + 2 * length]
        if len(text) < 2 * length:
            text += "\n" + haystack[: 2 * length - len(text)]
        [example] = make_examples(
            tasks[number % len(tasks)],
            length,
            num_examples=1,
            num_questions=num_questions,
            depths=None,
            tokenizer=tokenizer,
            haystack=text,
            seed=int(rng.integers(2**32)),
        )
        answered = [
            tokenizer.decode([*question.prompt.tolist(), *question.answer.tolist()]) for question in example.questions
        ]
        yield tokenizer.decode(example.context.tolist()) + "\n".join(answered)


def write_documents(path: Path, documents: Iterable[str]) -> None:
    """Writes documents as JSON lines with a field `text`, as `data.source=jsonl` reads them.

    Raises:
        OSError: the file can't be written.
    """
    write_atomically(path, (json.dumps({"text": each}, ensure_ascii=False).encode() + b"\n" for each in documents))
