"""Writes the kernels' table of tunings from the rows that a search has measured.

    python -m experiments.benchmarks.tune_attention.table

A test holds the table to what this command writes.
"""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import kernels.backends.mosaic_gpu
from experiments.benchmarks.attention.speed_table import REPOSITORY, read_rows
from experiments.benchmarks.command_line import read_arguments
from kernels.backends.mosaic_gpu.tuning import (
    MosaicBackwardTuning,
    MosaicForwardTuning,
    TunedCall,
)
from kernels.masks import parse_mask
from trainer.terminal.streams import reader_may_leave

SECTIONS: dict[str, tuple[str, type | None]] = {
    "forward": ("FORWARD", MosaicForwardTuning),
    "few_blocks": ("FEW_BLOCKS", MosaicForwardTuning),
    "fused": ("FUSED", MosaicBackwardTuning),
    "split": ("SPLIT", MosaicBackwardTuning),
    "fastest_backward": ("FASTEST_BACKWARD", None),
}
"""Search → name of its part of the table, and the class of its tunings (None: the name of a form)."""


@dataclass(frozen=True)
class TableArguments:
    """Writes the kernels' table of tunings."""

    results: Path = REPOSITORY / "experiments/benchmarks/results/tuning_hopper.jsonl"
    """JSON lines of `python -m experiments.benchmarks.tune_attention`. Of a search made twice, the later one counts."""
    table: Path = Path(kernels.backends.mosaic_gpu.__file__).parent / "tuned_tables.py"


def render(rows: Iterable[Mapping[str, Any]]) -> str:
    """The table as Python source, formatted as `ruff format` leaves it."""
    winners: dict[str, dict[TunedCall, Mapping[str, Any]]] = {search: {} for search in SECTIONS}
    forms: dict[str, dict[TunedCall, str]] = {}
    for row in rows:
        if row["chosen"]:
            head_dims = row["head_dim"], row.get("value_dim") or row["head_dim"]
            packed = row["document_length"] is not None
            key = TunedCall.of(parse_mask(row["mask"]), row["length"], head_dims, packed=packed)
            winners[row["search"]][key] = row
            if row["search"] == "fastest_backward":
                forms.setdefault(row["device"], {})[key] = row["tuning"]
    made = {
        ", ".join([row["device"], f"JAX {row['jax']}", row["date"], *row.get("remarks", ())])
        for table in winners.values()
        for row in table.values()
    }
    sections = [_section(*SECTIONS[search], table) for search, table in winners.items()]
    others = _forms_of_devices(forms, {key: row["tuning"] for key, row in winners["fastest_backward"].items()})
    return _HEADER.format(made=textwrap.fill("; ".join(sorted(made)), _LINE_LENGTH)) + "".join(sections) + others


_LINE_LENGTH = 120
_HEADER = '''"""The best tunings found, written by `python -m experiments.benchmarks.tune_attention`: edit nothing here.

{made}

Each key is (head dim, family of the mask, length in tokens), the fields of a `TunedCall`.
"""

from typing import Literal

_Key = tuple[int, Literal["full", "causal", "window", "narrow_window", "packed", "other"], int]
'''


def _section(name: str, tuning_class: Any, winners: Mapping[TunedCall, Mapping[str, Any]]) -> str:
    """One dict, a row a line: a tuning is the values of its fields; their names stand above."""
    if tuning_class is None:
        value_type, names = 'Literal["fused", "split"]', []
    else:
        fields = dataclasses.fields(tuning_class)
        value_type = f"tuple[{', '.join(str(field.type) for field in fields)}]"
        names = [f"    # {line}" for line in textwrap.wrap(", ".join(field.name for field in fields), _LINE_LENGTH - 6)]
    rows = [f"    {_key_source(key)}: {_source(row['tuning'], tuning_class)}," for key, row in sorted(winners.items())]
    return "\n".join([f"\n{name}: dict[_Key, {value_type}] = {{", *names, *rows, "}\n"])


def _forms_of_devices(forms: Mapping[str, Mapping[TunedCall, str]], fastest: Mapping[TunedCall, str]) -> str:
    """Where another form of the backward was the fastest on a kind of device."""
    lines = ["", 'FASTEST_BACKWARD_ON: dict[str, dict[_Key, Literal["fused", "split"]]] = {']
    lines.append("    # Where it is another one on such a GPU.")
    for device, found in sorted(forms.items()):
        if others := {key: form for key, form in found.items() if form != fastest[key]}:
            rows = [f'        {_key_source(key)}: "{form}",' for key, form in sorted(others.items())]
            lines += [f'    "{device}": {{', *rows, "    },"]
    return "\n".join([*lines, "}", ""])


def _key_source(key: TunedCall) -> str:
    return f'({key.head_dim}, "{key.family}", {key.length})'


def _source(tuning: Any, tuning_class: Any) -> str:
    return f'"{tuning}"' if tuning_class is None else repr(dataclasses.astuple(tuning_class(**tuning)))


def main(arguments: TableArguments) -> None:
    """Writes the table."""
    arguments.table.write_text(render(read_rows(arguments.results)), encoding="utf-8")


if __name__ == "__main__":
    with reader_may_leave():
        main(read_arguments(TableArguments))
