"""What every task keeps to, with every family of tokenizers."""

import re

import numpy as np
import pytest

from tests.trainer.evaluate.tasks.oracle import answer
from tests.trainer.evaluate.tasks.prose import PROSE
from trainer.data import ByteTokenizer
from trainer.errors import UserMistake
from trainer.evaluate.tasks import NOISE, RULER, score
from trainer.evaluate.tasks.haystack import split_lines


def texts_of(tokenizer, example):
    """The context, and each question with its prompt and answer, as a model reads them. Newlines are spaces."""
    context = tokenizer.decode(example.context)
    wholes = [tokenizer.decode([*example.context, *q.prompt, *q.answer]) for q in example.questions]
    prompts = [tokenizer.decode([*example.context, *q.prompt])[len(context) :] for q in example.questions]
    return tuple(" ".join(text.split()) for text in (context, *prompts, *wholes))


@pytest.mark.parametrize("haystack", [NOISE, PROSE], ids=["noise", "prose"])
def test_a_reader_of_the_text_answers_all_and_another_context_answers_none(draw, task, tokenizer, haystack, rng):
    examples = draw(
        task,
        6000,
        num_examples=3,
        num_questions=2,
        tokenizer=tokenizer,
        haystack=haystack,
        seed=int(rng.integers(2**32)),
    )
    num_questions = 1 if task in ("common_words", "frequent_words") else 2
    answers = []
    for example in examples:
        assert len(example.questions) == num_questions
        context, *others = texts_of(tokenizer, example)
        for question, prompt, whole in zip(
            example.questions, others[:num_questions], others[num_questions:], strict=True
        ):
            found = answer(context, prompt)
            assert ", ".join(found) == question.text
            assert whole.endswith(f"{prompt} {question.text}")
            assert score(whole.removeprefix(f"{context} {prompt}"), question) == 1.0
            answers.append((question, question.text))
    for number, (question, _) in enumerate(answers):
        for other, (_, text) in enumerate(answers):
            assert score(text, question) == (number == other)


def check_tokens(tokenizer, examples):
    """Tokens of a context, a prompt and its answer are those that their whole text has."""
    begin = tokenizer.delimiters.begin
    for example in examples:
        assert example.context[0] == begin
        for question in example.questions:
            tokens = [*example.context, *question.prompt, *question.answer]
            assert [begin, *tokenizer.encode(tokenizer.decode(tokens))] == tokens
            assert question.prompt.dtype == question.answer.dtype == example.context.dtype == np.int32


def test_tokens_are_those_of_the_whole_text(draw, task, tokenizer, rng):
    seed = int(rng.integers(2**32))
    check_tokens(tokenizer, draw(task, 6000, num_examples=8, tokenizer=tokenizer, haystack=PROSE, seed=seed))


@pytest.mark.parametrize("family", ["byte", "qwen", "llama2"])  # GPT-2's joins newlines with indentation
def test_tokens_of_indented_text_are_those_of_the_whole_text(draw, tokenizers_by_family, family, rng):
    blocks = [
        "def f():\n"
        + "".join("    " * (1 + n % 2) + "call(that)\n" + "\n" * (n % 3 == 0) for n in range(30))
        + "\n" * k
        for k in rng.integers(0, 4, 20).tolist()
    ]
    examples = draw("niah_multivalue", num_examples=8, tokenizer=tokenizers_by_family[family], haystack="".join(blocks))
    check_tokens(tokenizers_by_family[family], examples)


def test_a_context_is_filled_and_no_more(draw, task, tokenizer, rng):
    # Up to a word of the text. Another word of a list is in it three times. In a coded text of at most 3,600 words, up
    # to nine words are more frequent at once. A byte is the shortest token.
    most_free = {"common_words": 3 * len(" 1234. abcdef"), "frequent_words": 9 * len(" abcdef")}.get(task, 20)
    for length in rng.integers(3500, 20_000, 4).tolist():
        for example in draw(task, length, num_examples=2, num_questions=3, tokenizer=tokenizer, haystack=PROSE):
            assert example.length == length
            asked = max(len(question.prompt) + len(question.answer) for question in example.questions)
            assert 0 <= length - len(example.context) - asked <= most_free


def without_needles(text):
    return [line for line in text.splitlines() if "magic number" not in line and not line.startswith("VAR")]


@pytest.mark.parametrize("haystack", [NOISE, PROSE], ids=["noise", "prose"])
def test_a_seed_makes_the_same_questions_and_text_with_every_tokenizer(draw, task, tokenizers_by_family, haystack, rng):
    seed = int(rng.integers(2**32))
    made = {
        family: draw(task, 5000, num_examples=2, num_questions=2, tokenizer=tokenizer, haystack=haystack, seed=seed)
        for family, tokenizer in tokenizers_by_family.items()
    }
    for number, expected in enumerate(made["byte"]):
        text = ByteTokenizer().decode(expected.context)
        for family, examples in made.items():
            tokenizer, example = tokenizers_by_family[family], examples[number]
            assert (example.task, example.length, example.depth) == (task, 5000, expected.depth)
            assert [question.text for question in example.questions] == [q.text for q in expected.questions]
            prompts = [tokenizer.decode(question.prompt).strip() for question in example.questions]
            assert prompts == [ByteTokenizer().decode(question.prompt) for question in expected.questions]
            if task in ("common_words", "frequent_words") or family == "t5":  # which has no newlines
                continue
            other = tokenizer.decode(example.context)
            hidden = [sorted(set(each.splitlines()) - set(without_needles(each))) for each in (text, other)]
            assert hidden[0] == hidden[1]
            # The last line is cut where the length ends.
            kept = [without_needles(each)[:-1] for each in (text, other)]
            assert kept[0] == kept[1][: len(kept[0])], "a byte is the shortest token"


def test_a_length_or_depth_changes_no_needle(draw, task):
    short, long = (draw(task, length, num_examples=2, seed=3)[1] for length in (5000, 9000))
    deep = draw(task, 9000, num_examples=2, seed=3, depths=[0.9])[1]
    assert {tuple(q.text for q in example.questions) for example in (short, long, deep)} == {
        tuple(q.text for q in short.questions)
    }


def test_examples_differ_and_come_again(draw, task):
    first, second = (draw(task, 5000, num_examples=3, haystack=PROSE, seed=5) for _ in range(2))
    other = draw(task, 5000, num_examples=3, haystack=PROSE, seed=6)
    for each, again in zip(first, second, strict=True):
        np.testing.assert_array_equal(each.context, again.context)
    assert len({example.questions[0].text for example in [*first, *other]}) == 6


def test_depths_take_turns_where_one_needle_is_asked_for(draw, task):
    examples = draw(task, 5000, num_examples=5, depths=[0.25, 0.75])
    takes_depth = task in ("niah_single", "niah_multikey")
    assert [example.depth for example in examples] == ([0.25, 0.75, 0.25, 0.75, 0.25] if takes_depth else [None] * 5)
    assert [example.depth for example in draw(task, 5000, num_examples=2)] == [None] * 2


@pytest.mark.parametrize("task", ["niah_single", "variable_tracking"])
def test_contexts_begin_at_any_line_of_the_beginning(draw, task, tokenizers_by_family):
    haystack = "\n".join(f"This is line {number}." for number in range(5000))
    begun = {
        family: [
            int(re.findall(r"This is line (\d+)\.", tokenizer.decode(example.context))[0])
            for example in draw(task, 6000, num_examples=60, tokenizer=tokenizer, haystack=haystack)
        ]
        for family, tokenizer in tokenizers_by_family.items()
    }
    last = haystack[:6000].count("\n")
    assert all(0 <= number <= last for number in begun["byte"])
    assert min(begun["byte"]) < last / 5
    assert max(begun["byte"]) > last * 4 / 5
    assert set(map(tuple, begun.values())) == {tuple(begun["byte"])}


class CountingTokenizer(ByteTokenizer):
    """Bytes, and how many of them were encoded."""

    num_encoded = 0

    def encode(self, text):
        self.num_encoded += len(text)
        return super().encode(text)

    def encode_documents(self, documents):
        self.num_encoded += sum(map(len, documents))
        return super().encode_documents(documents)


def test_the_haystack_is_tokenized_once_for_a_million_tokens(draw):
    num_encoded = []
    for num_examples in (1, 9):
        tokenizer = CountingTokenizer()
        examples = draw("niah_multikey", 2**20, num_examples=num_examples, tokenizer=tokenizer, haystack=PROSE * 5000)
        assert {example.length - len(example.context) < 400 for example in examples} == {True}
        num_encoded.append(tokenizer.num_encoded)
    assert num_encoded[0] < 2.5 * 2**20
    assert num_encoded[1] - num_encoded[0] < 8 * 20_000, "needles, questions and the line that is cut"


def test_what_cannot_be_drawn_is_refused(draw):
    with pytest.raises(UserMistake, match=r"no task 'niah'; take one of niah_single, .*, frequent_words"):
        draw("niah")
    for arguments in ({"num_examples": -1}, {"num_questions": 0}, {"length": 0}, {"seed": -1}):
        [(name, value)] = arguments.items()
        with pytest.raises(UserMistake, match=f"{name}={value} must be at least {value + 1}"):
            draw("niah_single", **arguments)
    with pytest.raises(UserMistake, match=r"depth 1.5 is no fraction of a haystack; give depths from 0 to 1"):
        draw("niah_single", depths=[0.0, 1.5])
    with pytest.raises(UserMistake, match=r"haystack, of 0 characters, has no tokens; give a text"):
        draw("niah_single", haystack="")
    with pytest.raises(UserMistake, match=r"num_questions=40,000 of niah_single needs 40,000 keys .* ask fewer"):
        draw("niah_single", num_questions=40_000)


def test_a_length_is_refused_up_to_the_one_that_the_message_names(draw, task, tokenizer):
    with pytest.raises(UserMistake, match=rf"length=10 is too short for {task}, which needs [\d,]+ tokens") as refusal:
        draw(task, 10, tokenizer=tokenizer)
    least = int(str(refusal.value).partition("needs ")[2].partition(" tokens")[0].replace(",", ""))
    with pytest.raises(UserMistake, match="too short"):
        draw(task, least - 1, tokenizer=tokenizer)
    [example] = draw(task, least, tokenizer=tokenizer)
    assert score(example.questions[0].text, example.questions[0]) == 1.0
    with pytest.raises(UserMistake, match="too short"):
        draw(task, 10, tokenizer=tokenizer, num_questions=2)


def test_the_seven_tasks_are_there():
    assert list(RULER) == [
        "niah_single",
        "niah_multikey",
        "niah_multivalue",
        "niah_multiquery",
        "variable_tracking",
        "common_words",
        "frequent_words",
    ]


def test_prose_has_a_line_to_wrap():
    assert max(map(len, PROSE.splitlines())) > max(map(len, split_lines(PROSE)))
