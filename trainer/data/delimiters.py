"""The tokens between which a document stands."""

from __future__ import annotations

from typing import NamedTuple

NONE = "none"
"""The value of `data.begin_of_document_token` and `data.end_of_document_token` for no such token."""


class Delimiters(NamedTuple):
    """A document is [begin, …, end] for the model, in training, validation, prompts and samples alike.

    Args:
        begin: id of the first token, which is no target; None: there is none, and the text's first token isn't one.
        end: id of the last token; None: there is none.
    """

    begin: int | None
    end: int | None

    @property
    def ids(self) -> tuple[int, ...]:
        """The tokens, each once."""
        return tuple(dict.fromkeys(token for token in self if token is not None))

    def __str__(self) -> str:
        begin, end = (() if token is None else (str(token),) for token in self)
        return f"[{', '.join((*begin, '…', *end))}]"
