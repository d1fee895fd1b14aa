"""Writes every table of docs/benchmarks.md from the rows that were measured.

    python -m experiments.benchmarks.tables

A table named NAME stands in the page behind a line `<!-- table NAME -->`. The command replaces what is there. A test
fails where the page differs from the rows.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.benchmarks.attention.speed_table import REPOSITORY, latest_rows, read_rows, short_title, speed_cells
from experiments.benchmarks.command_line import read_arguments
from trainer.terminal.streams import reader_may_leave
from trainer.terminal.units import format_seconds

Row = dict[str, Any]
Cells = Sequence[str]

VERSIONS = {
    "jax": "JAX",
    "libtpu": "libtpu",
    "nvidia-cudnn-cu13": "cuDNN",
    "torch": "PyTorch",
    "tokamax": "tokamax",
    "dew-flash-attn-cu13": "dew-flash-attn",
}
"""Names in the rows that have another one by now."""
MASKS = {"16x128_131k": "causal", "window_131k": "window 4,096", "packed_131k": "packed"}
MISSING = "–"


@dataclass(frozen=True)
class TablesArguments:
    """Writes every table of docs/benchmarks.md."""

    results: Path = REPOSITORY / "experiments/benchmarks/results"
    """The folder of the rows."""
    page: Path = REPOSITORY / "docs/benchmarks.md"
    """The page with the tables' markers."""


def markdown(rows: Iterable[Row], headings: Cells, lines: Iterable[Cells]) -> str:
    """A table below the hardware, the versions and the dates of its rows."""
    rows = [row | row.get("versions", {}) for row in rows]
    hardware = sorted({_hardware(row) for row in rows})
    versions = dict.fromkeys(f"{name} {row[key]}" for key, name in VERSIONS.items() for row in rows if key in row)
    dates = sorted({row["date"] for row in rows})
    where = ", ".join([*hardware, *versions, " to ".join(dict.fromkeys((dates[0], dates[-1])))])
    body = [" | ".join(headings), "|".join(["---"] * len(headings)), *map(" | ".join, lines)]
    return "\n".join([f"{where}:", "", *body]) + "\n"


def _hardware(row: Row) -> str:
    """The hardware of a row, in short: "H100" for an NVIDIA H100 80GB HBM3."""
    name = row.get("device") or row.get("topology") or row["cpu"]
    return name.removeprefix("NVIDIA ").partition(" 80GB")[0].replace("(R)", "").removesuffix(" Processor")


def _latest(rows: Iterable[Row], *keys: str) -> list[Row]:
    """The last row of each combination of the keys' values, in the order of the first ones."""
    return list({tuple(str(row.get(key)) for key in keys): row for row in rows}.values())


def _percent(share: float | None) -> str:
    return MISSING if share is None else f"{100 * share:.1f}"


def _giga(size: float | None) -> str:
    return MISSING if size is None else f"{size / 1e9:.1f}"


def attention_speeds(rows: list[Row], windows: Iterable[Row] = (), *, beside_cudnn: bool = True) -> str:
    """The kernels of `mosaic_gpu` beside others. A case of both files counts in the first one."""
    known = {row["case"] for row in rows}
    rows = rows + [row for row in windows if row["case"] not in known]
    headings, lines = speed_cells(rows, "mosaic_gpu", beside_cudnn=beside_cudnn)
    return markdown(latest_rows(rows, "mosaic_gpu").values(), headings, lines)


def regimes(rows: list[Row]) -> str:
    """Sustained speeds and bursts, beside cuDNN through JAX and called directly."""
    backends = {"mosaic_gpu": "ours", "cudnn": "through JAX", "torch_cudnn": "directly"}
    directions = ("forward", "backward")
    timed = {(row["case"], row["rest_ms"], row["direction"], row["backend"]): row for row in rows}
    lines = []
    for case, rest_ms in dict.fromkeys((row["case"], row["rest_ms"]) for row in rows):
        found = [timed[case, rest_ms, direction, backend] for direction in directions for backend in backends]
        speeds = [f"{row['tflops_per_s']:.0f}" for row in found]
        lines.append([short_title(found[0]), "bursts" if rest_ms else "sustained", *speeds])
    names = [
        f"{direction}: {name}" if i == 0 else name
        for direction in directions
        for i, name in enumerate(backends.values())
    ]
    return markdown(rows, ["shape", "regime", *names], lines)


def triton_speeds(rows: list[Row]) -> str:
    """The Triton kernels at 32,768 tokens, with the backward that is their default, beside others."""
    ours = [row for row in rows if row["backend"] == "triton_split" and row["length"] == 32_768]
    timed = {(row["case"], row["direction"]): row for row in ours}
    peers = {"pallas_triton": "× JAX's Pallas", "tokamax_triton": "× tokamax", "cudnn": "× cuDNN"}
    lines = []
    for case in dict.fromkeys(row["case"] for row in ours):
        cells = [short_title(timed[case, "forward"])]
        for row in (timed[case, "forward"], timed[case, "backward"]):
            ratios = row["speed_ratios"]
            cells.append(f"{row['tflops_per_s']:.0f}")
            cells += [f"{ratios[peer]:.2f}" if peer in ratios else MISSING for peer in peers]
        lines.append(cells)
    return markdown(ours, ["shape", "forward", *peers.values(), "backward", *peers.values()], lines)


def blockwise_speeds(rows: list[Row]) -> str:
    """The `blockwise` form, forward and backward, beside XLA's dense attention or cuDNN."""
    rows = [row for row in rows if row["direction"] == "forward_backward"]
    others = {(row["device"], row["case"]): row for row in rows if row["backend"] != "blockwise"}
    lines = []
    for row in rows:
        other = others.get((row["device"], row["case"]))
        if row["backend"] == "blockwise" and other is not None:
            beside = f"{format_seconds(other['seconds'])} ({other['backend']})"
            lines.append([short_title(row), _hardware(row), format_seconds(row["seconds"]), beside])
    return markdown(rows, ["shape", "on", "blockwise", "other"], lines)


def errors(*files: list[Row]) -> str:
    """The greatest errors over those of another system, of the shapes of each file."""
    names = {"cudnn": "cuDNN", "fa3": "FlashAttention-3"}
    columns = (("output",), ("d_query", "d_key", "d_value"), ("d_sinks",))
    lines = []
    for rows in files:
        ours = [row for row in rows if row["backend"] == "mosaic_gpu" and row["error_ratios"]]
        figures = []
        for column in columns:
            ratios = [ratio for row in ours for name, ratio in row["error_ratios"].items() if name in column]
            figures.append(f"{max(ratios):.2f}" if ratios else MISSING)
        shapes = str(len({row["case"] for row in ours}))
        lines.append([names[ours[0]["baseline"]], _hardware(ours[0]), shapes, *figures])
    headings = ["beside", "on", "shapes", "output", "gradients", "sinks' gradient"]
    return markdown([row for rows in files for row in rows], headings, lines)


def training(rows: list[Row], *workloads: str) -> str:
    """Steps on one GPU: the last run of each workload, and the MFU of every run on that run's date."""
    lines, shown = [], []
    for workload in workloads:
        last = [row for row in rows if row["workload"] == workload][-1]
        runs = [row for row in rows if (row["workload"], row["date"]) == (workload, last["date"])]
        mfu = ", ".join(_percent(row["mfu_causal"]) for row in runs)
        size, rate = f"{last['num_parameters'] / 1e6:,.0f}M", f"{last['tokens_per_s']:,.0f}"
        lines.append([workload, size, rate, mfu, _giga(last["device_peak_bytes"])])
        shown += runs
    return markdown(shown, ["workload", "parameters", "tokens/s", "MFU, %", "GB"], lines)


def meshes(rows: list[Row], num_devices: int) -> str:
    """Steps on several GPUs, and their speed over that of one GPU on the same date at the same commit.

    Of each workload and mesh the last run with such a run on one GPU counts. Of workloads that never ran on one GPU,
    the last run counts.
    """
    rows = [row for row in rows if not _is_variant(row)]
    alone: dict[tuple[str, ...], list[float]] = {}
    for row in rows:
        if math.prod(row["mesh"].values()) == 1:
            alone.setdefault(_session(row), []).append(row["tokens_per_s"])
    ran_alone = {workload for workload, *_ in alone}
    together = [row for row in rows if math.prod(row["mesh"].values()) == num_devices]
    beside_one = [row for row in together if _session(row) in alone or row["workload"] not in ran_alone]
    chosen = sorted(_latest(beside_one, "workload", "mesh"), key=lambda row: (row["workload"], _mesh_title(row)))
    lines = []
    for row in chosen:
        one = alone.get(_session(row), [])
        mean = sum(one) / len(one) if one else None
        speeds = [MISSING if mean is None else f"{mean:,.0f}", f"{row['tokens_per_s']:,.0f}"]
        ratio = MISSING if mean is None else f"{row['tokens_per_s'] / mean:.2f}"
        memory = _giga(row.get("device_peak_bytes", row.get("peak_bytes")))
        lines.append([row["workload"], _mesh_title(row), *speeds, ratio, _percent(row.get("mfu_causal")), memory])
    return markdown(chosen, ["workload", "mesh", "one GPU", "all", "×", "MFU, %", "GB"], lines)


def _session(row: Row) -> tuple[str, ...]:
    return row["workload"], row["date"], row.get("commit", "")


def _is_variant(row: Row) -> bool:
    """True for a run with flags or settings that aren't the defaults."""
    flags = str(row.get("environment")) + str(row.get("remarks"))
    return "xla_flags" in row or any(word in flags for word in ("XLA_FLAGS", "NCCL", "CUDA graphs"))


def _mesh_title(row: Row) -> str:
    """The axes with several devices, and the exchange along `context`."""
    axes = [f"{axis}={size}" for axis, size in row["mesh"].items() if size > 1]
    exchanges = [row["exchange"]] if isinstance(row["exchange"], str) else row["exchange"] or []
    return " ".join([*axes, *exchanges])


def exchanges(rows: list[Row], num_devices: int) -> str:
    """Attention over `context`: each exchange with the sharding that is best for it."""
    rows = [row for row in rows if row["num_devices"] == num_devices and "efficiency" in row]
    last = sorted(_latest(rows, "case", "exchange", "sequence_sharding"), key=lambda row: row["efficiency"])
    # The last row of a case and exchange is that of its best sharding.
    shown = _latest(last, "case", "exchange")
    shown.sort(key=lambda row: (list(MASKS).index(row["case"]), -row["efficiency"]))
    lines = []
    for row in shown:
        # Only old rows were traced. Kernels that read the other GPUs' memory leave no bytes in a trace.
        in_trace = "traced" in row and row["exchange"] not in ("peer", "halo")
        received = f"{row['traced']['received_bytes'] / 1e6:,.0f}" if in_trace else MISSING
        exposed = f"{1e3 * row['exposed_s']:.1f}" if "exposed_s" in row else MISSING
        efficiency = f"{100 * row['efficiency']:.0f}"
        lines.append([MASKS[row["case"]], row["exchange"], row["sequence_sharding"], efficiency, received, exposed])
    return markdown(shown, ["mask", "exchange", "sharding", "%", "MB", "exposed ms"], lines)


def mixtures(rows: list[Row]) -> str:
    """A mixture of experts beside one MLP of the same FLOPs."""
    shown = _latest(rows, "case")
    names = ("forward_s", "backward_s", "dense_forward_s", "dense_backward_s")
    lines = [[row["case"], *(f"{1e3 * row[name]:.2f}" for name in names), f"{row['over_dense']:.2f}"] for row in shown]
    headings = ["case", "forward ms", "backward ms", "MLP forward ms", "MLP backward ms", "× MLP"]
    return markdown(shown, headings, lines)


def compiled_memory(rows: list[Row]) -> str:
    """The memory that a training step needs on TPUs, by their compiler."""
    sizes = ("state_bytes", "temporary_bytes", "needed_bytes")
    lines = [
        [
            row["model"],
            " ".join([row["topology"], *(f"{axis}={size}" for axis, size in row["mesh"].items())]),
            *(_giga(row.get(name)) for name in sizes),
        ]
        for row in rows
    ]
    return markdown(rows, ["model", "devices", "state GB", "temporaries GB", "needed GB"], lines)


def decoding(rows: list[Row], *shown: tuple[int, int, int | None]) -> str:
    """Microseconds of a decoding step, for some numbers of sequences, prompts and windows, by form of the cache."""
    forms = {
        "per_sequence": "one slab each",
        "unified": "one for all",
        "unified_no_skipping": "nothing skipped",
        "xla_per_sequence": "XLA, each",
        "xla_unified": "XLA, all",
    }
    rows = [row for row in rows if row["num_heads"] == 12]
    last = {(row["num_sequences"], row["prompt"], row["window"], row["form"]): row for row in rows}
    lines = []
    for sequences, prompt, window in shown:
        cells = [last.get((sequences, prompt, window, form)) for form in forms]
        ours = last[sequences, prompt, window, "per_sequence"]
        share = ours["bytes_per_s"] / ours["copy_bytes_per_s"]["torch"]
        title = f"{sequences}×{prompt:,}" + ("" if window is None else f", window {window:,}")
        figures = [MISSING if row is None else f"{1e6 * row['seconds_per_step']:,.0f}" for row in cells]
        lines.append([title, *figures, f"{100 * share:.0f}"])
    used = [row for key, row in last.items() if key[:3] in shown]
    return markdown(used, ["sequences×prompt", *forms.values(), "bandwidth, %"], lines)


def make_train(rows: list[Row], record: Row) -> str:
    """`make train` without an accelerator: the whole command by hand, the rest from its run's record."""
    evaluation = record["evaluation"]
    line = [format_seconds(rows[-1]["seconds"]), format_seconds(record["time"]["step_s"])]
    line.append(_giga(record["memory"]["host_peak_bytes"]))
    line += [f"{evaluation[name]:.2f}" for name in ("validation_nats_per_token", "unigram_nats_per_token")]
    return markdown([rows[-1]], ["in all", "training", "GB", "validation, nats", "unigram, nats"], [line])


def make_tables(results: Path) -> dict[str, str]:
    """The page's tables by name."""

    def read(name: str) -> list[Row]:
        return read_rows(results / f"{name}.jsonl")

    error_files = ("attention_errors_h200", "attention_errors_fa3_h200", "attention_errors_fa3_h100")
    on_h200 = read("train_throughput_h200")
    pages = ("gpt_32k", "gpt_1b_32k", "gpt_128k")
    others = ("124m_32k", "124m_32k_packed", "124m_1m", "1b_32k")
    on_meshes, record = read("train_meshes_h200"), json.loads((results / "gpt_32k_cpu.json").read_text())
    decoded = ((1, 0, None), (8, 512, None), (8, 8192, None), (32, 8192, None), (1, 32768, None), (1, 32768, 1024))
    return {
        "make train": make_train(read("make_train_cpu"), record),
        "hopper": attention_speeds(read("attention_hopper_h200")),
        "regimes": regimes(read("attention_cudnn_h200")),
        "h200": attention_speeds(read("attention_fa3_h200"), read("attention_windows_h200"), beside_cudnn=False),
        "bounds": attention_speeds(read("attention_bounds_h200"), beside_cudnn=False),
        "errors": errors(*map(read, error_files)),
        "triton": triton_speeds(read("attention_triton_h200")),
        "blockwise": blockwise_speeds(read("attention_cpu") + read("attention_h200")),
        "training": training(on_h200, *pages, *others),
        "mixtures": mixtures(read("mixture_h200")),
        "two": meshes(on_meshes, 2),
        "four": meshes(on_meshes, 4),
        "exchanges": exchanges(read("context_attention_h200"), 4),
        "memory": compiled_memory(read("compile_memory_v5p")),
        "decoding": decoding(read("decode_h200"), *decoded),
    }


def replace_tables(page: str, tables: dict[str, str]) -> str:
    """A page with these tables behind their markers.

    Raises:
      ValueError: the page doesn't have the marker of each table once, or has others.
    """
    names = re.findall(r"<!-- table (.+) -->", page)
    if sorted(names) != sorted(tables):
        raise ValueError(
            f"expected a line <!-- table NAME --> for each of {', '.join(tables)}, got {', '.join(names) or 'none'}; "
            "put one where each table belongs"
        )
    return _BLOCK.sub(lambda block: block["marker"] + tables[block["name"]], page)


# A marker's line; then, if the table was written before, the line above it, and its lines, each with a bar.
_BLOCK = re.compile(r"(?P<marker><!-- table (?P<name>.+) -->\n)(?:.+:\n\n(?:.*\|.*\n)+)?")


def main(arguments: TablesArguments) -> None:
    """Rewrites the page."""
    page = replace_tables(arguments.page.read_text(encoding="utf-8"), make_tables(arguments.results))
    arguments.page.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    with reader_may_leave():
        main(read_arguments(TablesArguments))
