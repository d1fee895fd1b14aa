"""Needles as RULER defines them: how many there are, of which keys, and where they lie."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.trainer.evaluate.tasks.oracle import read_needles
from tests.trainer.evaluate.tasks.prose import PROSE
from trainer.data import ByteTokenizer
from trainer.errors import UserMistake
from trainer.evaluate.tasks import NOISE, score, words
from trainer.evaluate.tasks.haystack import split_lines
from trainer.evaluate.tasks.words import ADJECTIVES, NOUNS

text_of = ByteTokenizer().decode
haystacks = st.sampled_from([NOISE, PROSE])
seeds = st.integers(0, 2**32)


def text_and_needles(example):
    """A context's text, its haystack alone, and the needles."""
    text = text_of(example.context)
    body = text.partition("quiz you about the ")[2].partition("afterwards.\n")[2]
    return body, read_needles(text)


@settings(max_examples=30)
@given(haystack=haystacks, seed=seeds, depth=st.floats(0, 1), length=st.integers(1000, 20_000))
def test_a_single_needle_lies_once_at_its_depth(draw, haystack, seed, depth, length):
    [example] = draw("niah_single", length, haystack=haystack, seed=seed, depths=[depth])
    body, [(key, value)] = text_and_needles(example)
    [question] = example.questions
    assert question.text == value
    prompt = f"special magic number for {key} mentioned in the provided text"
    assert text_of(question.prompt) == f"What is the {prompt}? The {prompt} is"
    needle = f"One of the special magic numbers for {key} is: {value}.\n"
    before, found, after = body.partition(needle)
    assert found
    assert not {key, value} & set((before + after).split())
    assert not before or before.endswith("\n"), "between two lines"
    off = abs(len(before) - depth * len(before + after))
    assert off <= max(map(len, split_lines(haystack))) / 2
    assert text_of(example.context).startswith("A special magic number is hidden within")


@settings(max_examples=30)
@given(
    task=st.sampled_from(["niah_single", "niah_multikey", "niah_multivalue", "niah_multiquery"]),
    haystack=haystacks,
    seed=seeds,
    num_questions=st.integers(1, 5),
)
def test_counts_of_keys_values_and_distractors(draw, task, haystack, seed, num_questions):
    [example] = draw(task, 8000, haystack=haystack, seed=seed, num_questions=num_questions)
    body, needles = text_and_needles(example)
    keys_asked, values_each, distractors = {
        "niah_single": (1, 1, 0),
        "niah_multikey": (1, 1, 3),
        "niah_multivalue": (1, 4, 0),
        "niah_multiquery": (4, 1, 0),
    }[task]
    values_of = Counter(key for key, _ in needles)
    assert len(values_of) == num_questions * keys_asked + distractors
    assert set(values_of.values()) == {values_each}
    assert len({value for _, value in needles}) == len(needles) == body.count("magic number")
    for key, value in needles:
        adjective, noun = key.split("-")
        assert adjective in ADJECTIVES
        assert noun in NOUNS
        assert len(value) == 7
        assert value[0] != "0"
    asked = [
        [key for key in values_of if key in text_of(question.prompt).partition("?")[0]]
        for question in example.questions
    ]
    assert {len(keys) for keys in asked} == {keys_asked}
    assert len({key for keys in asked for key in keys}) == num_questions * keys_asked, "each key is asked for once"
    for keys, question in zip(asked, example.questions, strict=True):
        expected = [value for key, value in needles if key in keys]
        assert sorted(question.text.split(", ")) == sorted(expected)
        if task == "niah_multivalue":
            assert question.text.split(", ") == expected, "in the order of the context"


@pytest.mark.parametrize("depth", [0.0, 0.3, 1.0])
def test_of_several_keys_the_one_asked_for_lies_at_the_depth(draw, depth):
    elsewhere = 0
    for example in draw("niah_multikey", 12_000, haystack=PROSE, depths=[depth], num_examples=8):
        body, needles = text_and_needles(example)
        lines = body.splitlines(keepends=True)
        [asked] = [line for line in lines if f"is: {example.questions[0].text}." in line]
        before = [line for line in lines[: lines.index(asked)] if "magic number" not in line]
        all_lines = [line for line in lines if "magic number" not in line]
        assert abs(len("".join(before)) - depth * len("".join(all_lines))) <= 130
        elsewhere += sum(
            abs(body.index(f"for {key} is") / len(body) - depth) > 0.1 for key, _ in needles if key not in asked
        )
    assert elsewhere > 8, "the distractors are spread"


def test_the_needles_of_several_questions_are_together_at_the_depth(draw):
    [example] = draw("niah_single", 12_000, haystack=PROSE, depths=[0.5], num_questions=6)
    body, needles = text_and_needles(example)
    assert [value for _, value in needles] == [question.text for question in example.questions]
    first = body.index("One of the special")
    last = body.rindex("One of the special")
    assert "\n".join(body[first:last].splitlines()).count("magic") == len(body[first:last].splitlines()) == 5
    assert abs(first / (len(body) - (last - first)) - 0.5) < 0.05


@pytest.mark.parametrize(("task", "num_questions"), [("niah_single", 4), ("niah_multikey", 1), ("niah_multiquery", 1)])
def test_needles_are_spread_over_the_whole_context(draw, task, num_questions):
    depths = []
    for example in draw(task, 20_000, num_examples=50, num_questions=num_questions):
        body, needles = text_and_needles(example)
        depths += [body.index(value) / len(body) for _, value in needles]
    counts = Counter(int(depth * 4) for depth in depths)
    assert len(depths) == 200
    assert all(25 <= counts[quarter] <= 75 for quarter in range(4)), counts


def test_a_key_that_the_haystack_has_is_not_drawn(draw, monkeypatch):
    monkeypatch.setattr(words, "ADJECTIVES", ADJECTIVES[:5])
    monkeypatch.setattr(words, "NOUNS", NOUNS[:4])
    kept, *others = [f"{adjective}-{noun}" for noun in words.NOUNS for adjective in words.ADJECTIVES]
    haystack = " ".join(others)
    for seed in range(3):
        [example] = draw("niah_single", haystack=haystack, seed=seed)
        assert kept in text_of(example.questions[0].prompt)
    with pytest.raises(UserMistake, match=r"of niah_multikey needs 4 keys that the haystack doesn't have"):
        draw("niah_multikey", haystack=haystack)


def test_words_of_keys_are_distinct():
    assert len(set(ADJECTIVES)) == len(ADJECTIVES) > 100
    assert len(set(NOUNS)) == len(NOUNS) > 100
    assert len({f"{adjective}-{noun}" for adjective in ADJECTIVES for noun in NOUNS}) == len(ADJECTIVES) * len(NOUNS)


def test_a_score_is_the_fraction_of_expected_strings(draw):
    [example] = draw("niah_multivalue")
    [question] = example.questions
    values = question.text.split(", ")
    assert len(values) == 4
    for count in range(5):
        assert score(f"They are {' and '.join(values[:count][::-1])}!", question) == count / 4
    [example] = draw("variable_tracking")
    assert score(example.questions[0].text.lower(), example.questions[0]) == 1.0
