"""Reads a context as a person would, and answers. It shares nothing with what generates the tasks."""

from __future__ import annotations

import re
from collections import Counter


def read_needles(text: str) -> list[tuple[str, str]]:
    """Keys and values, in order."""
    return re.findall(r"One of the special magic numbers for (\S+) is: (\d{7})\.", text)


def read_assignments(text: str) -> list[tuple[str, str]]:
    """Names, and the names or values that they are assigned, in order."""
    return re.findall(r"VAR ([A-Z]{5}) = (?:VAR )?([A-Z]{5}|\d{5})\b", text)


def read_list(text: str) -> list[str]:
    """The words of the last numbered list."""
    items = re.findall(r"(\d+)\. ([a-z]{6})\b", text.rpartition("Memorize the ones that appear most often.")[2])
    assert [int(number) for number, _ in items] == list(range(1, len(items) + 1))
    return [word for _, word in items]


def read_code(text: str) -> list[str]:
    """The words of a coded text."""
    return text.partition("coded words. ")[2].split()


def answer(context: str, prompt: str) -> list[str]:
    """The expected strings.

    Args:
        context: its text, without what follows.
        prompt: the question's.
    """
    if "special magic" in prompt:
        asked = re.findall(r"[a-z]+-[a-z]+", prompt.partition("?")[0])
        needles = read_needles(context)
        return [value for key in asked for owner, value in needles if owner == key]
    if "variables" in prompt:
        [value] = set(re.findall(r"the value (\d{5})", prompt))
        known = [value]
        for name, source in read_assignments(context):  # none comes before what it is assigned
            known += [name] if source in known else []
        return known[1:]
    if "common words" in prompt:
        counts = Counter(read_list(context))
        common = {word for word, _ in counts.most_common(10)}
        return [word for word in counts if word in common]  # in the order in which they first appear
    assert "frequently appeared words" in prompt
    counts = Counter(read_code(context))
    del counts["..."]
    return [word for word, _ in counts.most_common(3)]
