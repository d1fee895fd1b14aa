"""The marks around text, which say without colours what counts in the loss and what is no text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from trainer.show.readable import LeftOut, ReadableSequence, Text
from trainer.show.token_text import TokenText
from trainer.terminal.streams import visible

_COUNTED, _NO_TEXT = "⟪⟫", "⟦⟧"
LINE_END = "↵"
LEGEND = (
    f"{_COUNTED[0]}targets that count in the loss{_COUNTED[1]}, {_NO_TEXT[0]}×2{_NO_TEXT[1]} with another weight than "
    f"1; {_NO_TEXT[0]}special tokens, and what is no text{_NO_TEXT[1]}; {LINE_END} a line's end"
)
# A mark in a text would be taken for one of ours.
_ESCAPED = {ord(mark): f"\\u{ord(mark):04x}" for mark in _COUNTED + _NO_TEXT}


class Marked(NamedTuple):
    """A piece of a shown text."""

    text: str
    """Without control characters but tabs and line ends."""
    token: TokenText | None
    """The token that it is of; None: a mark."""


def marked(shown: Sequence[TokenText | LeftOut], *, with_ids: bool) -> Iterator[Marked]:
    """A text between its marks. Each line has marks of its own, so that it can be read by itself.

    Args:
        shown: from `Text.shown`.
        with_ids: whether ids stand behind the text of their tokens.
    """
    weight = 0.0  # of the mark that is open
    for each in shown:
        own = 0.0 if isinstance(each, LeftOut) else each.weight or 0.0
        if weight and own != weight:
            yield Marked(_COUNTED[1], None)
            weight = 0.0
        if isinstance(each, LeftOut):
            yield Marked(f"\n{_no_text(_describe(each))}\n", None)
            continue
        for line in _lines(each, with_ids):
            if own and not weight:
                weight = own
                yield Marked(_COUNTED[0] + ("" if own == 1 else _no_text(f"×{own:g}")), None)
            yield Marked(line.removesuffix("\n"), each)
            if line.endswith("\n"):
                yield Marked(f"{_COUNTED[1] if weight else ''}\n", None)
                weight = 0.0
    if weight:
        yield Marked(_COUNTED[1], None)


def title_of_sequence(sequence: ReadableSequence, batch_size: int) -> str:
    """The title of a sequence."""
    batch, index = divmod(sequence.number, batch_size)
    num_targets, num_counted = sequence.num_targets, sum(int(text.is_counted.sum()) for text in sequence.texts)
    return (
        f"sequence {index + 1} of batch {batch + 1}: {len(sequence.documents):,} document(s), {num_counted:,} of "
        f"{num_targets:,} targets count in the loss, {sequence.length - num_targets:,} positions of padding"
    )


def title_of_text(text: Text, source: str, num_targets: int) -> str:
    """The title of a document or a branch.

    Args:
        text: the document or branch.
        source: that it comes from.
        num_targets: of the whole document.
    """
    own = int((text.weights == text.weights).sum())  # NaN, which no target has, differs from itself
    where = f"document {text.segment + 1} ({source}): "
    if text.branch:
        where = f"document {text.segment + 1}, branch {text.branch + 1} behind {text.position:,} shared tokens: "
    part = f", a part of {num_targets:,}" if not text.branch and own < num_targets else ""
    return f"{where}{own:,} targets{part}, {int(text.is_counted.sum()):,} count in the loss"


def _lines(token: TokenText, with_ids: bool) -> list[str]:
    """A token's text for each line, which ends with its line end."""
    ids = " ".join(map(str, token.ids))
    text = visible(token.text).translate(_ESCAPED)
    if token.is_special:
        return [_no_text(f"{text} {ids}" if with_ids else text)]
    if with_ids:  # a token isn't divided
        return [text.replace("\n", LINE_END) + _no_text(ids) + ("\n" if "\n" in text else "")]
    return text.replace("\n", f"{LINE_END}\n").splitlines(keepends=True) or [""]


def _describe(left_out: LeftOut) -> str:
    spans = "" if left_out.num_spans < 2 else f" in {left_out.num_spans:,} spans"
    return f"… {left_out.num_tokens:,} tokens left out, of which {left_out.num_counted:,} count{spans} …"


def _no_text(text: str) -> str:
    return f"{_NO_TEXT[0]}{text}{_NO_TEXT[1]}"
