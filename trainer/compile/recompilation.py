"""A jitted function that is compiled ahead of time, recompiles when its arguments change, and reports what changed.

A compiled program checks its arguments itself when it is called, so a call that fits costs no further check. It refuses
a call that doesn't fit before anything is donated. Only then are the arguments compared.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import jax

from trainer.compile.stages import CompileReport, compile_in_stages

_ABSENT = "absent"


@dataclass(frozen=True)
class ArgumentChange:
    """One difference between the arguments of two calls.

    >>> print(ArgumentChange("batch['tokens']", "shape", "(1, 32768)", "(2, 32768)"))
    batch['tokens']: shape (1, 32768) → (2, 32768)
    >>> print(ArgumentChange("chunk_size", "static value", "2048", "1024"))
    chunk_size: static value 2048 → 1024
    """

    argument: str
    """The parameter and the place in its tree, as a Python expression."""
    what: Literal["shape", "dtype", "sharding", "static value", "structure"]
    before: str
    after: str

    def __str__(self) -> str:
        return f"{self.argument}: {self.what} {self.before} → {self.after}"

    def to_json(self) -> dict[str, str]:
        """As a dict of JSON's types."""
        return asdict(self)


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
    static: Mapping[str, Any]


@dataclass(frozen=True)
class _Program:
    compiled: jax.stages.Compiled
    signature: _Signature


class RecompilingFunction:
    """Calls a jitted function through its compiled program, and compiles another program when a call needs one.

    Every program is kept, so that going back to earlier arguments compiles nothing.

    Args:
      jitted: what `jax.jit` returned.
      *args, **kwargs: arguments like those of the first calls, arrays or `jax.ShapeDtypeStruct`s. They are compiled for
        right away.
      name: the function's name in reports.
      on_recompile: called after each further compilation, before its program first runs, with the report and what
        changed since the previous call.
      static_argnames: the static arguments of `jax.jit`. They have to be passed by keyword.

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

    def __init__(
        self,
        jitted: Any,
        *args: Any,
        name: str,
        on_recompile: OnRecompile,
        static_argnames: Sequence[str] = (),
        **kwargs: Any,
    ):
        self._jitted, self._name, self._on_recompile = jitted, name, on_recompile
        self._static_argnames = tuple(static_argnames)
        self._parameters = [
            parameter.name
            for parameter in inspect.signature(jitted).parameters.values()
            if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
        ]
        self._compiling_thread: int | None = None
        self._programs: list[_Program] = []
        self._latest, self.report = self._compile(args, *self._split(kwargs))

    @property
    def is_compiling(self) -> bool:
        """True while some thread is inside a compilation of this function."""
        return self._compiling_thread is not None

    @property
    def is_compiling_here(self) -> bool:
        """True while the calling thread is inside a compilation of this function."""
        return self._compiling_thread == threading.get_ident()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        dynamic, static = self._split(kwargs) if self._static_argnames else (kwargs, {})
        refusal: Exception | None = None
        if not self._static_argnames or not _static_changes(self._latest.signature.static, static):
            try:
                return self._latest.compiled(*args, **dynamic)
            except (TypeError, ValueError) as error:
                refusal = error
        signature = self._signature(args, dynamic, static)
        changes = _find_changes(self._latest.signature, signature)
        if refusal is not None and not changes:
            raise refusal  # the program's own: its arguments are what it was compiled for
        known = (program for program in self._programs if not _find_changes(program.signature, signature))
        program = next(known, None)
        if program is None:
            program, report = self._compile(args, dynamic, static)
            self._on_recompile(report, changes)
        self._latest = program
        return program.compiled(*args, **dynamic)

    def _split(self, kwargs: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Splits keyword arguments into the traced and the static ones."""
        static = {name: kwargs[name] for name in self._static_argnames if name in kwargs}
        return {name: value for name, value in kwargs.items() if name not in static}, static

    def _compile(
        self, args: tuple[Any, ...], dynamic: Mapping[str, Any], static: Mapping[str, Any]
    ) -> tuple[_Program, CompileReport]:
        self._compiling_thread = threading.get_ident()
        try:
            compiled, report = compile_in_stages(self._jitted, *args, name=self._name, **dynamic, **static)
        finally:
            self._compiling_thread = None
        program = _Program(compiled, self._signature(args, dynamic, static, compiled.input_shardings))
        self._programs.append(program)
        return program, report

    def _signature(
        self, args: tuple[Any, ...], dynamic: Mapping[str, Any], static: Mapping[str, Any], *settled: Any
    ) -> _Signature:
        """The signature of a program that takes these arguments.

        Args:
          *settled: the tree of shardings, if known, that the program expects where the arguments leave them open.
        """
        leaves: dict[str, _Leaf] = {}

        def add(path: tuple[Any, ...], leaf: Any, expected: jax.sharding.Sharding | None = None) -> None:
            aval = jax.typeof(leaf)
            leaves[self._name_of(path)] = _Leaf(aval.shape, str(aval.dtype), _bound_sharding(leaf) or expected)

        jax.tree_util.tree_map_with_path(add, (args, dynamic), *settled)
        return _Signature(leaves, jax.tree.structure((args, dynamic)), static)

    def _name_of(self, path: tuple[Any, ...]) -> str:
        """`((0: args or 1: kwargs), which of them, *place in its tree)`, as a Python expression."""
        (group, which, *place) = path
        if group.idx == 1:
            parameter = which.key
        elif which.idx < len(self._parameters):
            parameter = self._parameters[which.idx]
        else:
            parameter = f"args[{which.idx}]"
        return parameter + jax.tree_util.keystr(tuple(place))


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


def _static_changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[ArgumentChange]:
    changes = []
    for name in dict.fromkeys([*before, *after]):
        # 1 == 1.0 == True, but each is traced to its own program.
        old, new = ((name in values, type(values.get(name)), values.get(name)) for values in (before, after))
        if old != new:
            shown = (_shorten(repr(values[name])) if name in values else _ABSENT for values in (before, after))
            changes.append(ArgumentChange(name, "static value", *shown))
    return changes


def _find_changes(before: _Signature, after: _Signature) -> list[ArgumentChange]:
    """The reasons why a program for `before` doesn't serve `after`; none if it does."""
    changes = _static_changes(before.static, after.static)
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
