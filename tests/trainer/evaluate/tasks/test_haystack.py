"""Lines of a text, and other lines between them."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.trainer.evaluate.tasks.prose import PROSE
from trainer.data import ByteTokenizer
from trainer.evaluate.tasks.haystack import split_lines, tokenize_haystack

BYTES = ByteTokenizer()
texts = st.text(st.sampled_from("ab.! \n\té中"), max_size=2000) | st.lists(
    st.text(st.sampled_from("ab. é"), max_size=600), max_size=8
).map("\n".join)


@given(texts)
def test_lines_have_all_of_a_text(text):
    lines = list(split_lines(text))
    assert "".join("".join(lines).split()) == "".join(text.split())
    assert all(1 <= len(line) <= 257 and line.endswith("\n") for line in lines)
    if text.endswith("\n") and max(map(len, text.split("\n"))) < 256:
        assert "".join(lines) == text


def test_lines_end_where_no_indented_line_follows_or_after_a_sentence():
    assert list(split_lines("a:\n  b\n\nc\n")) == ["a:\n  b\n\n", "c\n"]
    long = "One two three. Four five" + " six" * 80
    first, second, third = split_lines(long)
    assert (first, second[:13], second[-4:], third[-4:]) == ("One two three.\n", "Four five six", "six\n", "six\n")
    assert [len(line) for line in split_lines("x" * 600)] == [257, 257, 89]
    indented = "x:\n" + "    y = 1\n" * 60
    assert all(line.count("\n") > 20 for line in list(split_lines(indented))[:-1])
    assert "".join(split_lines(indented)) == indented
    spaced = "x:\n" + "    y = 1\n\n  \n" * 60
    assert {line[:9] for line in list(split_lines(spaced))[1:]} == {"    y = 1"}


@settings(max_examples=50)
@given(
    text=texts.filter(lambda text: len(text.strip()) > 3),
    length=st.integers(1, 5000),
    fractions=st.lists(st.floats(0, 1), max_size=5),
    data=st.data(),
)
def test_hidden_lines_are_between_lines_in_order(text, length, fractions, data):
    haystack = tokenize_haystack(text, BYTES, length)
    start = data.draw(st.integers(0, haystack.num_starts - 1))
    num_tokens = data.draw(st.integers(0, length))
    hidden = [np.array([*f"<{number}>\n".encode()], np.int32) for number in range(len(fractions))]
    plain = BYTES.decode(haystack.hide(start, num_tokens, [], []))
    found = BYTES.decode(haystack.hide(start, num_tokens, hidden, fractions))
    lines = list(split_lines(text))
    following = "".join(lines[start:] + lines * (1 + length))[: length + 300]
    assert following.startswith(plain.rstrip("\n"))
    assert len(plain.encode()) <= num_tokens
    order = sorted(range(len(fractions)), key=lambda number: fractions[number])
    without = found
    for number in order:
        before, line, after = without.partition(f"<{number}>\n")
        assert line
        assert not before or before.endswith("\n")
        without = before + after
        assert abs(len(before.encode()) - fractions[number] * len(plain.encode())) <= 257 * 3 / 2
    assert without == plain
    assert [found.index(f"<{number}>") for number in order] == sorted(found.index(f"<{n}>") for n in order)


def test_a_haystack_has_enough_text_after_each_start():
    for length in (10, 1000, 100_000):
        for text in ("a", PROSE, PROSE * 300):
            haystack = tokenize_haystack(text, BYTES, length)
            for start in {0, haystack.num_starts - 1}:
                assert len(haystack.tokens) - haystack.ends[start] >= length - 257
                got = haystack.hide(start, length, [], [])
                assert length - 20 < len(got) <= length
