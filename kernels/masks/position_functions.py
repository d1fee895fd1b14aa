"""Functions of positions that users give to `MaskFn`: checks of their results, and of the arrays that they capture.

A function may read anything: closures, globals, attributes. All of it shows in what JAX traces of the function, so
the trace alone shows what the function computes at a moment.
"""

from __future__ import annotations

import hashlib
import types
from collections.abc import Callable, Hashable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Literal

from kernels.masks.intervals import TileKind, array_namespace

_TRACED = (jax.ShapeDtypeStruct((2, 1), np.int32), jax.ShapeDtypeStruct((1, 3), np.int32))
_BOOLEAN_REMEDY = "compare, as in `kv_pos <= q_pos` or `x != 0`"
_KIND_REMEDY = "TileKind.EMPTY, PARTIAL or FULL for each rectangle"


class FunctionTrace(NamedTuple):
    """The trace of a function `fn(q_pos, kv_pos)`.

    Attributes:
      captures: it captures arrays; a kernel can't look these up.
      digest: of all that it computes, the contents of captured arrays included; None if it can't be known.
    """

    captures: bool
    digest: bytes | None


def trace(fn: Callable[[Any, Any], Any], name: str) -> FunctionTrace:
    """Traces a function of positions, which errors call by `name`; checks what it captures and returns."""
    try:
        # Through a new function each time: JAX remembers the trace of one that it has seen.
        closed = jax.make_jaxpr(lambda q_pos, kv_pos: fn(q_pos, kv_pos))(*_TRACED)
    except Exception as error:
        raise ValueError(
            f"{name} can't be traced: write its function with operators and jax.numpy, and make arrays that it looks "
            f"positions up in jax.numpy's (jnp.asarray); it raised {type(error).__name__}: {error}"
        ) from error
    if len(closed.out_avals) != 1:
        raise ValueError(f"{name} must return one array of booleans, got {len(closed.out_avals)} arrays")
    (result,) = closed.out_avals
    _check(name, result, np.bool_, _BOOLEAN_REMEDY, np.broadcast_shapes(*(x.shape for x in _TRACED)))
    constants = list(_constants(closed))
    if any(isinstance(constant, jax.core.Tracer) for constant in constants):
        raise ValueError(
            f"{name} captures an array that is being traced, but a mask is static: capture one from outside of "
            "jax.jit, or tell documents apart by query_segment_ids and key_value_segment_ids, which are traced"
        )
    return FunctionTrace(bool(constants), _digest(closed, constants))


def booleans(result: Any, q_pos: Any, kv_pos: Any, name: str) -> Any:
    """A function's result for some pairs, checked and broadcast over all of them."""
    shape = np.broadcast_shapes(np.shape(q_pos), np.shape(kv_pos))
    _check(name, result, np.bool_, _BOOLEAN_REMEDY, shape)
    if np.shape(result) == shape:
        return result
    # The form of a full mask, which is known to compile in every kernel.
    return (q_pos == q_pos) & (kv_pos == kv_pos) & result


def tile_kinds(result: Any, shape: tuple[int, ...], name: str) -> Any:
    """A function's result for some rectangles, checked (values only if not traced) and broadcast over all of them."""
    _check(name, result, np.integer, _KIND_REMEDY, shape)
    if not isinstance(result, jax.core.Tracer):
        known = np.asarray(result)
        if known.size and not TileKind.EMPTY <= known.min() <= known.max() <= TileKind.FULL:
            raise ValueError(f"{name} must return 0 to 2, got {known.min()} to {known.max()}; {_KIND_REMEDY}")
    return array_namespace(result).broadcast_to(result, shape)


def identity(fn: Any) -> Hashable:
    """Equal for the same function object, and for the same method of the same object: no `__eq__` of a user's."""
    if isinstance(fn, types.MethodType):
        return id(fn.__self__), id(fn.__func__)
    return id(fn)


def _check(name: str, result: Any, kind: type, remedy: str, shape: tuple[int, ...]) -> None:
    """Checks dtype and shape of an array, of what JAX knows of one, or of a Python number."""
    dtype = result.dtype if hasattr(result, "dtype") else np.asarray(result).dtype
    expected = "booleans" if kind is np.bool_ else "integers"
    if not np.issubdtype(dtype, kind):
        raise ValueError(f"{name} must return {expected}, got {dtype}; {remedy}")
    try:
        fits = np.broadcast_shapes(np.shape(result), shape) == shape
    except ValueError:
        fits = False
    if not fits:
        raise ValueError(
            f"{name} must return a shape that broadcasts to {shape}, its arguments', got {np.shape(result)}"
        )


def _constants(closed: ClosedJaxpr) -> Iterator[Any]:
    """Arrays that a trace holds, those of functions that it calls included; scalar operands don't count."""
    yield from closed.consts
    # With `jax_use_simplified_jaxpr_constants` they are operands, whose contents the trace's text leaves out.
    operands = [*closed.jaxpr.outvars, *(operand for equation in closed.jaxpr.eqns for operand in equation.invars)]
    yield from (x.val for x in operands if isinstance(x, Literal) and np.ndim(x.val))
    for equation in closed.jaxpr.eqns:
        for inner in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda x: isinstance(x, ClosedJaxpr)):
            if isinstance(inner, ClosedJaxpr):
                yield from _constants(inner)


def _digest(closed: ClosedJaxpr, constants: list[Any]) -> bytes | None:
    text = str(closed)
    if " at 0x" in text:
        # Something of Python's, which the text names by its address only.
        return None
    digest = hashlib.sha256(text.encode())
    for constant in constants:
        array = np.asarray(constant)
        digest.update(f"{array.dtype}{array.shape}".encode() + array.tobytes())
    return digest.digest()
