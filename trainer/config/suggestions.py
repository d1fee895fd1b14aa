"""Which name somebody meant who mistyped one."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from trainer.config import old_names

# Common words that aren't near ours letter by letter, in lower case with underscores → our field.
OTHER_WORDS = {
    "lr": "optimizer.learning_rate",
    "seq_len": "sequence_length",
    "is_causal": "model.masks",
    "sliding_window": "model.masks",
    "tp": "mesh.tensor",
    "mesh.model": "mesh.tensor",
    **{old.rpartition(".")[2]: new for old, new in old_names.FIELDS.items()},
}

_FEW = 8


def did_you_mean(name: str, candidates: Iterable[str]) -> str:
    """The sentence's tail `; did you mean X?`, or nothing if no candidate is near or the new name of an old one."""
    candidates = list(candidates)
    if (renamed := old_names.new_value(name)) in candidates:
        return f"; did you mean {renamed}?"
    nearest = difflib.get_close_matches(name, candidates, n=1, cutoff=0.6)
    return f"; did you mean {nearest[0]}?" if nearest else ""


def did_you_mean_field(name: str, fields: Iterable[str]) -> str:
    """The same for a field, which may also have been called by a common word for it, or without its section.

    Args:
      name: what was typed: `field`, `section.field` or `--section.field`.
      fields: what there is, in the same form.

    >>> did_you_mean_field("--lr", ["--num-steps", "--optimizer.learning-rate"])
    '; did you mean --optimizer.learning-rate?'
    """
    known = {_field(field): field for field in fields}
    typed = _field(name)
    word = _word(typed)
    ours = OTHER_WORDS.get(typed) or OTHER_WORDS.get(word, "")
    # A config class knows its own fields without their section.
    meant = [ours] if ours in known else [field for field in known if field == _word(ours)]
    meant += [field for field in known if _word(field) == word]
    if candidates := " or ".join(known[field] for field in meant[:2]):
        return f"; did you mean {candidates}?"
    if ours:  # not a field that is spelt like the word by chance
        return ""
    # Of a known section, only the word in it can be wrong.
    section = typed[: -len(word)]
    siblings = {_word(field): field for field in known if section and field.startswith(section)}
    if siblings:
        if near := difflib.get_close_matches(word, siblings, n=1, cutoff=0.6):
            return f"; did you mean {known[siblings[near[0]]]}?"
        if len(siblings) <= _FEW:
            return f"; there are {', '.join(known[field] for field in siblings.values())}"
        return ""
    return did_you_mean(name, known.values())


def _field(name: str) -> str:
    """A field as the config has it, from a flag as it may be typed."""
    return name.lower().removeprefix("--").replace("-", "_")


def _word(field: str) -> str:
    """The name of a field within its section."""
    return field.rpartition(".")[2]
