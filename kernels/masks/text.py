"""Masks read from text: `repr`'s inverse."""

from __future__ import annotations

import ast
import difflib
from typing import Any

from kernels.masks.algebra import Mask, MultiHeadMask
from kernels.masks.shapes import CausalMask, ChunkedCausalMask, FullMask, LocalMask, PrefixMask, ScheduledWindow

PARSABLE_MASKS = {
    mask.__name__: mask
    for mask in (FullMask, CausalMask, LocalMask, ScheduledWindow, ChunkedCausalMask, PrefixMask, MultiHeadMask)
}
"""The masks that `parse_mask` reads, by name."""


def parse_mask(text: str) -> Mask:
    """Reads a mask back from its `repr`, as the command line and `config.json` write it.

    Args:
      text: calls of the mask classes with integers or None, joined by `&`, `|`, `~` and parentheses.

    Raises:
      ValueError: for anything else, naming the part that isn't understood.

    >>> parse_mask("CausalMask() & LocalMask(1023, 0)")
    CausalMask(offset=0) & LocalMask(left=1023, right=0)
    """
    try:
        mask = _evaluate(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, TypeError) as error:
        raise ValueError(f"cannot read the mask {text!r}: {error}") from None
    except (RecursionError, MemoryError):  # the latter from Python's parser
        raise ValueError(f"cannot read the mask {text[:40]!r}…: it is nested too deep") from None
    if not isinstance(mask, Mask):
        raise ValueError(f"cannot read the mask {text!r}: it is {mask!r}, not a mask such as 'CausalMask()'")
    return mask


def _evaluate(node: ast.expr) -> Any:
    match node:
        case ast.Constant(value=int() | None):
            return node.value
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() as value)):
            return -value
        case ast.UnaryOp(op=ast.Invert(), operand=operand):
            return ~_evaluate_mask(operand)
        case ast.BinOp(left=left, op=ast.BitAnd(), right=right):
            return _evaluate_mask(left) & _evaluate_mask(right)
        case ast.BinOp(left=left, op=ast.BitOr(), right=right):
            return _evaluate_mask(left) | _evaluate_mask(right)
        case ast.List(elts=elements) | ast.Tuple(elts=elements):
            return [_evaluate(element) for element in elements]
        case ast.Call(func=ast.Name(id=name), args=args, keywords=keywords) if name in PARSABLE_MASKS:
            named = {keyword.arg: _evaluate(keyword.value) for keyword in keywords if keyword.arg is not None}
            if len(named) == len(keywords):  # each has a name, none twice
                return PARSABLE_MASKS[name](*map(_evaluate, args), **named)
    known, text = ", ".join(sorted(PARSABLE_MASKS)), ast.unparse(node)
    near = difflib.get_close_matches(text.partition("(")[0], PARSABLE_MASKS, n=1)
    raise ValueError(
        f"cannot read {text!r} in a mask; expected {known}, integers, None, &, | and ~"
        + (f"; did you mean {near[0]}?" if near else "")
    )


def _evaluate_mask(node: ast.expr) -> Mask:
    mask = _evaluate(node)
    if not isinstance(mask, Mask):
        raise ValueError(f"cannot read {ast.unparse(node)!r} in a mask: &, | and ~ are for masks")
    return mask
