"""Shown sequences as a page of HTML, which needs no other file."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from html import escape

from trainer.show.marks import LEGEND, Marked
from trainer.terminal.streams import visible

_NUM_COLORS = 5
_HEAD = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<title>{title}</title>
<style>
body {{ font: 15px/1.5 sans-serif; margin: 2em; color: #222; background: #fff; }}
pre {{ font: 14px/1.6 monospace; padding: .7em; border-left: 5px solid; }}
pre {{ white-space: pre-wrap; overflow-wrap: anywhere; }}
td, th {{ padding: .1em .8em; text-align: right; }} td:first-child, th:first-child {{ text-align: left; }}
h3 {{ font-size: 1em; margin-bottom: 0; }}
.d0 {{ background: #e8f4fb; }} .d1 {{ background: #ecf7e8; }} .d2 {{ background: #fdf6dc; }}
.d3 {{ background: #f8eaf6; }} .d4 {{ background: #efedfb; }}
b {{ font-weight: 600; color: #000; }} i {{ font-style: normal; color: #777; }}
u {{ color: #999; text-decoration: none; }}
.special {{ outline: 1px solid #777; border-radius: 3px; }} .negative {{ background: #f6c8c0; }}
</style>
</head>
<body>
<h1>{title}</h1>
<p>{legend}. Bold: counts in the loss. Red: with a negative weight. A token's id and weight show under the pointer.</p>
"""


def page_head(title: str) -> str:
    """The beginning of a page, up to its first part."""
    return _HEAD.format(title=escape(visible(title)), legend=escape(LEGEND))


def page_end() -> str:
    """The end of a page."""
    return "</body>\n</html>\n"


def html_title(title: str) -> str:
    """The title of a part."""
    return f"<h2>{escape(visible(title))}</h2>\n"


def html_text(title: str, pieces: Iterable[Marked], document: int) -> str:
    """A document under its title.

    Args:
        title: the title.
        pieces: of the document.
        document: which of the sequence's; the next has another colour.
    """
    body = "".join(_elements(pieces))
    # A line end right behind the tag would be lost.
    return f'<h3>{escape(visible(title))}</h3>\n<pre class="d{document % _NUM_COLORS}">\n{body}</pre>\n'


def html_table(rows: Sequence[Sequence[str]]) -> str:
    """A table, whose first row has the titles."""
    lines = []
    for number, row in enumerate(rows):
        tag = "td" if number else "th"
        lines.append("<tr>" + "".join(f"<{tag}>{escape(visible(cell))}</{tag}>" for cell in row) + "</tr>\n")
    return f"<table>\n{''.join(lines)}</table>\n"


def _elements(pieces: Iterable[Marked]) -> Iterator[str]:
    """An element for each token and mark: `b` counts in the loss, `i` doesn't, `u` is a mark."""
    for text, token in pieces:
        if token is None:
            yield f"<u>{escape(text)}</u>"
            continue
        ids = " ".join(map(str, token.ids))
        meaning = "no target" if token.weight is None else f"weight {token.weight:g}"
        classes = [
            name for name, is_so in (("special", token.is_special), ("negative", (token.weight or 0) < 0)) if is_so
        ]
        attributes = f' class="{" ".join(classes)}"' if classes else ""
        tag = "b" if token.weight else "i"
        yield f'<{tag}{attributes} title="id {ids}, {meaning}">{escape(text)}</{tag}>'
