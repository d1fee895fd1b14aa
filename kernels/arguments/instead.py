"""Errors for arguments that others' attention takes and ours doesn't: each says what to use instead."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from kernels.masks.algebra import NO_BIAS

_P = ParamSpec("_P")
_R = TypeVar("_R")

OF_MASKS = {
    "bias": NO_BIAS,
    "is_causal": "use mask=CausalMask()",
    "local_window_size": "use mask=LocalMask(left, right), or CausalMask() & LocalMask(left, 0)",
}
"""Arguments of `jax.nn.dot_product_attention` in whose place there is a mask."""


def instead_of(**instead: str) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Decorates a function that others call by arguments which it doesn't have: the error says what to use instead.

    Args:
      instead: what to use, by the argument's name.

    >>> @instead_of(is_causal="use mask=CausalMask()")
    ... def attend(query, mask=None): ...
    >>> attend(1, is_causal=True)
    Traceback (most recent call last):
    TypeError: attend() takes no is_causal: use mask=CausalMask()
    """

    def decorate(function: Callable[_P, _R]) -> Callable[_P, _R]:
        taken = instead.keys() & inspect.signature(function).parameters.keys()
        assert not taken, f"{function.__qualname__} takes {taken}"

        @functools.wraps(function)
        def checked(*args: _P.args, **keywords: _P.kwargs) -> _R:
            for name in keywords:
                if name in instead:
                    called = function.__qualname__.removesuffix(".__init__").removesuffix(".__call__")
                    raise TypeError(f"{called}() takes no {name}: {instead[name]}")
            return function(*args, **keywords)

        return checked

    return decorate
