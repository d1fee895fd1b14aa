"""A jitted function that is compiled ahead of time, recompiles when its arguments change, and reports what changed.

A compiled program checks its arguments itself when it is called, so a call that fits costs no further check. It refuses
a call that doesn't fit before anything is donated. Only then are the arguments compared.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax

from trainer.compile.stages import CompileReport, Lowering, compile_lowering, lower_in_stages

_ABSENT = "absent"


@dataclass(frozen=True)
class ArgumentChange:
    """One difference between the arguments of two calls.

    >>> print(ArgumentChange("batch['tokens']", "shape", "(1, 32768)", "(2, 32768)"))
    batch['tokens']: shape (1, 32768) → (2, 32768)
    """

    argument: str
    """The parameter and the place in its tree, as a Python expression."""
    what: Literal["shape", "dtype", "sharding", "structure"]
    before: str
    after: str

    def __str__(self) -> str:
        return f"{self.argument}: {self.what} {self.before} → {self.after}"


OnRecompile = Callable[[CompileReport, Sequence[ArgumentChange]], None]


@dataclass(frozen=True)
class _Leaf:
    """The properties of one array that a program is compiled for. Weak types make no difference."""

    shape: tuple[int, ...]
    dtype: str
    sharding: jax.sharding.Sharding | None
    """None: any sharding will do, since the argument isn't bound to devices or the program doesn't read it."""

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


@dataclass(frozen=True)
class _Signature:
    leaves: Mapping[str, _Leaf]
    """By name."""
    tree: jax.tree_util.PyTreeDef


@dataclass(frozen=True)
class _Program:
    compiled: jax.stages.Compiled
    signature: _Signature


class RecompilingFunction:
    """Calls a jitted function through its compiled program, and compiles another program when a call needs one.

    Every program is kept, so that going back to earlier arguments compiles nothing.

    Args:
      jitted: what `jax.jit` returned, without static arguments.
      *args: arguments like those of the first calls, arrays or `jax.ShapeDtypeStruct`s. They are compiled for right
        away.
      name: the function's name in reports.
      on_recompile: called after each further compilation, before its program first runs, with the report and what
        changed since the previous call.
      lowering: of the function with these arguments, if there is one already.

    Raises:
      ValueError: in a call, that an array is bound to another sharding than the one that the jitted function declares
        for it (`in_shardings`).

    >>> double = RecompilingFunction(
    ...     jax.jit(lambda x: 2 * x), 1.0, name="double", on_recompile=lambda report, changes: print(*changes)
    ... )
    >>> int(double(3))
    x: dtype float32 → int32
    6
    """

    def __init__(self, jitted: Any, *args: Any, name: str, on_recompile: OnRecompile, lowering: Lowering | None = None):
        self._jitted, self._name, self._on_recompile = jitted, name, on_recompile
        self._parameters = list(inspect.signature(jitted).parameters)
        self.is_compiling = False
        """True while some thread is inside a compilation of this function. Any thread may ask."""
        self._programs: list[_Program] = []
        self._latest, self.report = self._compile(args, lowering)

    def __call__(self, *args: Any) -> Any:
        try:
            return self._latest.compiled(*args)
        except (TypeError, ValueError) as error:
            refusal = error
        signature = self._signature(args)
        changes = _find_changes(self._latest.signature, signature)
        if not changes:
            raise refusal  # the program's own: its arguments are what it was compiled for
        known = (program for program in self._programs if not _find_changes(program.signature, signature))
        program = next(known, None)
        if program is None:
            program, report = self._compile(args)
            self._on_recompile(report, changes)
        self._latest = program
        return program.compiled(*args)

    def _compile(self, args: tuple[Any, ...], lowering: Lowering | None = None) -> tuple[_Program, CompileReport]:
        self.is_compiling = True
        try:
            lowering = lower_in_stages(self._jitted, *args) if lowering is None else lowering
            compiled, report = compile_lowering(lowering, name=self._name)
        finally:
            self.is_compiling = False
        expected, _ = compiled.input_shardings
        program = _Program(compiled, self._signature(args, expected))
        self._programs.append(program)
        return program, report

    def _signature(self, args: tuple[Any, ...], *settled: Any) -> _Signature:
        """The signature of a program that takes these arguments.

        Args:
          *settled: the tree of shardings, if known, that the program expects where the arguments leave them open.
        """
        leaves: dict[str, _Leaf] = {}

        def add(path: tuple[Any, ...], leaf: Any, expected: jax.sharding.Sharding | None = None) -> None:
            aval = jax.typeof(leaf)
            which, *place = path
            name = self._parameters[which.idx] + jax.tree_util.keystr(tuple(place))
            leaves[name] = _Leaf(aval.shape, str(aval.dtype), _bound_sharding(leaf) or expected)

        jax.tree_util.tree_map_with_path(add, args, *settled)
        return _Signature(leaves, jax.tree.structure(args))


def summarize(changes: Sequence[ArgumentChange], limit: int = 3) -> str:
    """Changes in one line. Arguments that changed alike share one mention.

    >>> shape = ("shape", "(1, 32)", "(2, 32)")
    >>> summarize([ArgumentChange(name, *shape) for name in ("batch['positions']", "batch['tokens']", "n")])
    "batch['positions'] and 2 more: shape (1, 32) → (2, 32)"
    """
    arguments: dict[tuple[str, str, str], list[str]] = {}
    for change in changes:
        arguments.setdefault((change.what, change.before, change.after), []).append(change.argument)
    parts = [
        f"{first}{f' and {len(rest)} more' if rest else ''}: {what} {before} → {after}"
        for (what, before, after), (first, *rest) in arguments.items()
    ]
    return "; ".join(parts[:limit] + (["…"] if len(parts) > limit else []))


def _bound_sharding(leaf: Any) -> jax.sharding.Sharding | None:
    """The sharding that an argument is bound to; None for a NumPy array, a number or an array that was never placed."""
    if isinstance(leaf, jax.Array) and not leaf.committed:
        return None
    return getattr(leaf, "sharding", None)


def _find_changes(before: _Signature, after: _Signature) -> list[ArgumentChange]:
    """The reasons why a program for `before` doesn't serve `after`; none if it does."""
    changes = []
    for name in dict.fromkeys([*before.leaves, *after.leaves]):
        old, new = before.leaves.get(name), after.leaves.get(name)
        if old is None or new is None:
            changes.append(ArgumentChange(name, "structure", str(old or _ABSENT), str(new or _ABSENT)))
            continue
        if old.shape != new.shape:
            changes.append(ArgumentChange(name, "shape", str(old.shape), str(new.shape)))
        if old.dtype != new.dtype:
            changes.append(ArgumentChange(name, "dtype", old.dtype, new.dtype))
        if not _same_sharding(old, new):
            changes.append(ArgumentChange(name, "sharding", *_describe_shardings(old.sharding, new.sharding)))
    if not changes and before.tree != after.tree:  # `None` for an empty list, a tuple for a list
        changes.append(ArgumentChange("arguments", "structure", _shorten(str(before.tree)), _shorten(str(after.tree))))
    return changes


def _same_sharding(old: _Leaf, new: _Leaf) -> bool:
    if old.sharding is None or new.sharding is None or len(old.shape) != len(new.shape):
        return True
    return old.sharding.is_equivalent_to(new.sharding, len(old.shape))


def _describe_shardings(*both: jax.sharding.Sharding | None) -> list[str]:
    """Describes both shardings: by their specs alone if they are of one mesh."""
    named = [sharding for sharding in both if isinstance(sharding, jax.sharding.NamedSharding)]
    if len(named) == 2 and named[0].mesh == named[1].mesh and named[0].spec != named[1].spec:
        return [str(sharding.spec) for sharding in named]
    return [_shorten(str(sharding)) for sharding in both]


def _shorten(text: str, limit: int = 200) -> str:
    """The text in one line, cut after `limit` characters."""
    text = " ".join(text.split())
    return text if len(text) <= limit else f"{text[: limit - 1]}…"
