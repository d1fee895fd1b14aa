"""Training documents of the tasks."""

import itertools
import re

import pytest

from tests.trainer.evaluate.tasks.oracle import answer
from tests.trainer.evaluate.tasks.prose import PROSE
from trainer.data.readers import read_jsonl
from trainer.errors import UserMistake
from trainer.evaluate.tasks import RULER, make_documents, write_documents


def make(tasks, num_documents=6, num_bytes=(4000, 9000), num_questions=2, haystack=PROSE * 20, seed=1):
    return make_documents(
        tasks,
        num_documents=num_documents,
        num_bytes=num_bytes,
        num_questions=num_questions,
        haystack=haystack,
        seed=seed,
    )


def questions_of(document):
    """The context, and the questions at the end, each with its answer."""
    begin = "Question: " if "Question: " in document else "What "
    *_, first = [found.start() for found in re.finditer(f"^{begin}", document, re.MULTILINE)]
    lines = document.splitlines()
    asked = list(itertools.takewhile(lambda line: line.startswith(begin), reversed(lines)))[::-1]
    context = "\n".join(lines[: len(lines) - len(asked)])
    assert first == len(document) - len(asked[-1])
    return context, [re.fullmatch(r"(.*(?: is| are|:)) (\d.*|[a-zA-Z]+, .*)", line).groups() for line in asked]


def test_documents_end_in_questions_with_right_answers():
    documents = list(make(list(RULER), num_documents=14))
    for document, task in zip(documents, [*RULER] * 2, strict=True):
        context, asked = questions_of(document)
        assert len(asked) == (1 if task in ("common_words", "frequent_words") else 2)
        for prompt, text in asked:
            assert ", ".join(answer(context, prompt)) == text
    assert len(set(documents)) == 14


def test_documents_have_the_lengths_that_are_asked_for():
    lengths = [len(each.encode()) for each in make(["niah_single"], 200, (1000, 16_000), num_questions=1)]
    assert all(1000 - 20 <= length <= 16_000 for length in lengths)
    assert 70 <= sum(length < 4000 for length in lengths) <= 130, "half of them, in logarithms"


def test_documents_begin_anywhere_in_the_haystack():
    haystack = "\n".join(f"This is line {number}." for number in range(20_000))
    begun = []
    for document in make(["niah_single"], 50, (2000, 2000), haystack=haystack):
        begun.append(int(document.partition("This is line ")[2].partition(".")[0]))
    assert min(begun) < 4000
    assert max(begun) > 16_000


def test_a_seed_makes_the_same_documents_which_the_trainer_reads(tmp_path):
    write_documents(tmp_path / "d.jsonl", make(["niah_multikey", "variable_tracking"], haystack=PROSE + "né 中\n"))
    again = list(make(["niah_multikey", "variable_tracking"], haystack=PROSE + "né 中\n"))
    assert [each.decode() for each in read_jsonl(tmp_path / "d.jsonl", "text")] == again
    assert again != list(make(["niah_multikey", "variable_tracking"], haystack=PROSE + "né 中\n", seed=2))


def test_documents_of_nothing_are_refused():
    for tasks, num_bytes in (([], (10, 20)), (["niah_single"], (20, 10)), (["niah_single"], (0, 10))):
        with pytest.raises(UserMistake, match=r"expected at least one task, and first the lower of two numbers"):
            list(make(tasks, num_bytes=num_bytes))
