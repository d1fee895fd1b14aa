"""Writes the kernels' table of tunings from the rows that a search has measured.

    python -m experiments.benchmarks.tune_attention.table

A test holds the table to what this command writes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro

import kernels.backends.mosaic_gpu
from experiments.benchmarks.attention.cases import Case
from experiments.benchmarks.attention.speed_table import REPOSITORY, read_rows
from kernels.backends.mosaic_gpu.kinds import Key, mask_family
from kernels.masks import parse_mask
from trainer.process.broken_pipe import reader_may_leave

SECTIONS = {
    "forward": ("FORWARD", "MosaicForwardTuning"),
    "fused": ("FUSED", "MosaicBackwardTuning"),
    "split": ("SPLIT", "MosaicBackwardTuning"),
    "fastest_backward": ("FASTEST_BACKWARD", 'Literal["fused", "split"]'),
}
"""Search → name and type of its rows in the table."""


@dataclass(frozen=True)
class Arguments:
    """Writes the kernels' table of tunings."""

    results: Path = REPOSITORY / "experiments/benchmarks/results/tuning_h200.jsonl"
    """JSON lines of `python -m experiments.benchmarks.tune_attention`. Of a search made twice, the later one counts."""
    table: Path = Path(kernels.backends.mosaic_gpu.__file__).parent / "tuned.py"


def key_of(case: Case) -> Key:
    """The row that a case's winner goes into."""
    return Key(case.head_dim, mask_family(case.mask, packed=case.document_length is not None), case.length)


def render(rows: Iterable[Mapping[str, Any]]) -> str:
    """The table as Python source, formatted as `ruff format` leaves it."""
    winners: dict[str, dict[Key, Mapping[str, Any]]] = {search: {} for search in SECTIONS}
    for row in rows:
        if row["chosen"]:
            family = mask_family(parse_mask(row["mask"]), packed=row["document_length"] is not None)
            winners[row["search"]][Key(row["head_dim"], family, row["length"])] = row
    made = {
        ", ".join([row["device"], f"JAX {row['jax']}", row["date"], *row.get("remarks", ())])
        for table in winners.values()
        for row in table.values()
    }
    sections = [_section(*SECTIONS[search], table) for search, table in winners.items()]
    return _HEADER.format(made="; ".join(sorted(made))) + "".join(sections)


_HEADER = '''"""The best tunings found, written by `python -m experiments.benchmarks.tune_attention`: edit nothing here.

{made}
"""

from typing import Literal

from kernels.backends.mosaic_gpu.kinds import Key
from kernels.tuning import MosaicBackwardTuning, MosaicForwardTuning
'''


def _section(name: str, type_name: str, winners: Mapping[Key, Mapping[str, Any]]) -> str:
    lines = [f"\n{name}: dict[Key, {type_name}] = {{"]
    for key, row in sorted(winners.items()):
        lines.append(f'    Key({key.head_dim}, "{key.family}", {key.length}): {_source(row["tuning"], type_name)},')
    return "\n".join([*lines, "}\n"])


def _source(tuning: Any, type_name: str) -> str:
    if isinstance(tuning, str):
        return f'"{tuning}"'
    return "\n".join([f"{type_name}(", *(f"        {name}={value!r}," for name, value in tuning.items()), "    )"])


def main(arguments: Arguments) -> None:
    """Writes the table."""
    arguments.table.write_text(render(read_rows(arguments.results)), encoding="utf-8")


if __name__ == "__main__":
    with reader_may_leave():
        main(tyro.cli(Arguments))
