"""Reads the text of an optimized HLO module: its computations, which calls which, and how often.

The format is XLA's own (openxla.org/xla/hlo_to_thunks, xla/hlo/parser): one instruction a line,
`%name = shape opcode(operands), attributes`, inside `%computation (parameters) -> shape { … }`.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

_COMPUTATION = re.compile(r"(ENTRY )?%?([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"(?:ROOT )?%?([\w.\-]+) = (.*)$")
_OPCODE = re.compile(r" ([a-z][\w\-]*)\(")
_ARRAY = re.compile(r"\b([a-z]\w*)\[([\d,<=]*)\]")
# Attributes that name computations. They run once for each run of the instruction, or for each element (to_apply).
_CALLED = re.compile(r"\b(?:calls|to_apply|body|condition|true_computation|false_computation)=%?([\w.\-]+)")
_CALLED_LISTS = re.compile(r"\b(?:called_computations|branch_computations)=\{([^}]*)\}")
_KNOWN_TRIP_COUNT = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')


@dataclass(frozen=True)
class Instruction:
    """One line of a computation."""

    name: str
    shape: str
    """As written: an array, or a tuple of shapes in parentheses."""
    opcode: str
    operands: tuple[str, ...]
    """Names."""
    arguments: str
    """The text between the opcode's parentheses: a constant's value, a parameter's number."""
    attributes: str
    is_root: bool

    def attribute(self, name: str) -> str | None:
        """The name, number or text that an attribute is set to."""
        found = re.search(rf'\b{name}=[%"]?([\w.\-]+)', self.attributes)
        return found[1] if found else None

    @property
    def op_name(self) -> str:
        """Its place in the traced program, such as `jit(f)/transpose(jvp(scope))/add`; may be empty."""
        found = re.search(r'\bop_name="([^"]*)"', self.attributes)
        return found[1] if found else ""

    def called(self) -> Iterator[str]:
        """Names of the computations that it runs."""
        if self.opcode in ("async-update", "async-done"):  # they name what async-start has already run
            return
        yield from _CALLED.findall(self.attributes)
        for names in _CALLED_LISTS.findall(self.attributes):
            yield from (name.strip().lstrip("%") for name in names.split(",") if name.strip())


@dataclass(frozen=True)
class Computation:
    """A function of the module."""

    name: str
    instructions: Mapping[str, Instruction]

    @functools.cached_property
    def root(self) -> Instruction | None:
        return next((instruction for instruction in self.instructions.values() if instruction.is_root), None)


@dataclass(frozen=True)
class Module:
    """A compiled program's HLO."""

    computations: Mapping[str, Computation]
    entry: str

    @property
    def num_instructions(self) -> int:
        return sum(len(computation.instructions) for computation in self.computations.values())

    def runs(self, weigh: Callable[[Computation], int], unknown_trips: int = 1) -> dict[str, tuple[int, bool]]:
        """How often each computation runs, by name.

        Args:
          weigh: says of a computation by itself how much is in it that matters. Of a conditional's branches the one
            with most of that counts as taken.
          unknown_trips: what a loop whose number of trips is known only at run time counts as.

        Returns:
          The number of runs (of what is reached), and whether it is exact: no loop around has unknown trips.
        """

        def called(name: str) -> Iterator[tuple[int | None, str]]:
            """The trips and the name of each computation that counts as called."""
            for instruction in self.computations[name].instructions.values():
                is_loop = instruction.opcode == "while"
                trips = self.trip_count(self.computations[name], instruction) if is_loop else 1
                names = [each for each in instruction.called() if each in self.computations]
                if instruction.opcode == "conditional":
                    names = [max(names, key=weight)]
                yield from ((trips, each) for each in names)

        def known(trips: int | None) -> int:
            return unknown_trips if trips is None else trips

        @functools.cache
        def weight(name: str) -> int:
            of_called = sum(known(trips) * weight(each) for trips, each in called(name))
            return weigh(self.computations[name]) + of_called

        counts: dict[str, tuple[int, bool]] = {}

        def visit(name: str, times: int, is_exact: bool) -> None:
            count, was_exact = counts.get(name, (0, True))
            counts[name] = count + times, was_exact and is_exact
            for trips, each in called(name):
                visit(each, times * known(trips), is_exact and trips is not None)

        visit(self.entry, 1, True)
        return counts

    def trip_count(self, caller: Computation, loop: Instruction) -> int | None:
        """The trips of a `while` loop, or None if they are known only at run time.

        On CPUs and GPUs XLA writes the number down. libtpu doesn't. There, a loop that counts up to a constant is
        recognized, which is what `jax.lax.scan` and `fori_loop` compile to.
        """
        known = _KNOWN_TRIP_COUNT.search(loop.attributes)
        if known:
            return int(known[1])
        condition = self.computations.get(loop.attribute("condition") or "")
        body = self.computations.get(loop.attribute("body") or "")
        initial = caller.instructions.get(loop.operands[0]) if loop.operands else None
        if not (condition and body and condition.root and body.root and initial):
            return None
        compare = condition.root
        if compare.opcode != "compare" or compare.attribute("direction") != "LT":
            return None
        counter = _follow_copies(condition, compare.operands[0])
        limit = _constant(condition, compare.operands[1])
        if counter is None or counter.opcode != "get-tuple-element" or limit is None:
            return None
        index = int(counter.attribute("index") or 0)
        start = _constant(caller, initial.operands[index]) if initial.opcode == "tuple" else None
        step = _step(body, index)
        if start is None or not step:
            return None
        return max(math.ceil((limit - start) / step), 0)


def parse_module(text: str) -> Module:
    """Reads what `jax.stages.Compiled.as_text` returns."""
    computations: dict[str, Computation] = {}
    entry = ""
    instructions: dict[str, Instruction] = {}
    for line in text.splitlines():
        stripped = line.strip()
        header = _COMPUTATION.match(line)
        if header:
            instructions = {}
            computations[header[2]] = Computation(header[2], instructions)
            entry = header[2] if header[1] else entry
        elif line.startswith(" ") and (parsed := _parse_instruction(stripped)):
            instructions[parsed.name] = parsed
    assert entry, "an HLO module has an entry computation"
    return Module(computations, entry)


def shape_bytes(shape: str) -> int:
    """Bytes of an array, or of all arrays of a tuple.

    >>> shape_bytes("bf16[2,512]{1,0:T(8,128)(2,1)}"), shape_bytes("(f32[4], pred[3])"), shape_bytes("s32[]")
    (2048, 19, 4)
    """
    num_bytes = 0
    for dtype, sizes in _ARRAY.findall(re.sub(r"\{[^{}]*\}", "", shape)):  # without layouts
        bits = re.match(r"[a-z]+(\d+)", "pred8" if dtype == "pred" else dtype)
        count = math.prod(int(size.lstrip("<=")) for size in sizes.split(",") if size)
        num_bytes += math.ceil(int(bits[1]) * count / 8) if bits else 0  # a token or an opaque value takes none
    return num_bytes


def tuple_elements(shape: str) -> list[str]:
    """The shapes that a tuple holds; of an array, the array alone.

    >>> tuple_elements("((f32[4], f32[8]{0}), (f32[16], f32[32]), u32[])")
    ['(f32[4], f32[8]{0})', '(f32[16], f32[32])', 'u32[]']
    """
    return _split(shape[1:-1]) if shape.startswith("(") else [shape]


def _parse_instruction(line: str) -> Instruction | None:
    found = _INSTRUCTION.match(line)
    if found is None:
        return None
    # The shape may contain parentheses (tuples, tiles). It ends before the first opcode after they are closed.
    rest = re.sub(r"/\*.*?\*/", "", found[2])
    end = _end_of_group(rest) if rest.startswith("(") else 0
    opcode = _OPCODE.search(rest, end)
    if opcode is None:
        return None
    close = _end_of_group(rest, opcode.end() - 1)
    arguments = rest[opcode.end() : close - 1]
    operands = tuple(re.findall(r"%([\w.\-]+)", arguments))
    return Instruction(
        name=found[1],
        shape=rest[: opcode.start()],
        opcode=opcode[1],
        operands=operands,
        arguments=arguments,
        attributes=rest[close:],
        is_root=line.startswith("ROOT "),
    )


def _end_of_group(text: str, start: int = 0) -> int:
    """One past the place where the bracket that opens at `start` closes."""
    depth = 0
    for place in range(start, len(text)):
        if text[place] in "([{":
            depth += 1
        elif text[place] in ")]}":
            depth -= 1
            if depth == 0:
                return place + 1
    return len(text)


def _split(text: str) -> list[str]:
    """Splits at the commas outside all brackets."""
    parts, start, depth = [], 0, 0
    for place, character in enumerate(text):
        if character in "([{":
            depth += 1
        elif character in ")]}":
            depth -= 1
        elif character == "," and depth == 0:
            parts.append(text[start:place].strip())
            start = place + 1
    return [*parts, text[start:].strip()]


def _follow_copies(computation: Computation, name: str) -> Instruction | None:
    instruction = computation.instructions.get(name)
    while instruction is not None and instruction.opcode in ("copy", "bitcast", "convert", "reshape"):
        instruction = computation.instructions.get(instruction.operands[0])
    return instruction


def _constant(computation: Computation, name: str) -> int | None:
    instruction = _follow_copies(computation, name)
    if instruction is None or instruction.opcode != "constant" or not re.fullmatch(r"-?\d+", instruction.arguments):
        return None
    return int(instruction.arguments)


def _step(body: Computation, index: int) -> int | None:
    """The constant that a loop's body adds to one element of its tuple; None if it adds something else."""
    assert body.root is not None
    if body.root.opcode != "tuple":
        return None
    add = _follow_copies(body, body.root.operands[index])
    if add is None or add.opcode != "add":
        return None
    for one, other in (add.operands, reversed(add.operands)):
        counter, step = _follow_copies(body, one), _constant(body, other)
        if (
            counter is not None
            and counter.opcode == "get-tuple-element"
            and counter.attribute("index") == str(index)
            and step is not None
        ):
            return step
    return None
