"""The README's table of figures, held to the rows that are kept."""

import re
from pathlib import Path

from experiments.benchmarks.attention.speed_table import latest_rows, read_rows
from trainer.terminal.units import format_seconds

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "experiments/benchmarks/results"


def figures() -> list[str]:
    """The second column of the README's one table."""
    lines = re.findall(r"^\|(.*)\|$", (ROOT / "README.md").read_text(), re.MULTILINE)
    (what, figure, on), _, *rows = ([column.strip() for column in line.split("|")] for line in lines)
    assert (what, figure, on) == ("what", "figure", "on")
    return [row[1] for row in rows]


def test_the_figures_are_those_of_the_rows():
    speeds = latest_rows(read_rows(RESULTS / "attention_hopper_h200.jsonl"), "mosaic_gpu")
    training = {row["workload"]: row for row in read_rows(RESULTS / "train_throughput_h200.jsonl")}
    meshes = read_rows(RESULTS / "train_meshes_h200.jsonl")
    on_gpus = {row["mesh"]["context"]: row for row in meshes if row["workload"] == "gpt_128k"}
    traces = read_rows(RESULTS / "compile_time_v5p.jsonl")
    ours = [row for row in traces if (row["source"], row["mask"], row["length"]) == ("ours", "causal", 131_072)]
    (trace_s,) = (row["first_trace_s"] for row in ours)

    def faster(case: str, direction: str, than: str) -> str:
        return f"{speeds[case, direction]['speed_ratios'][than]:.2f} ×"

    measured = [
        faster("1x16x32768x128", "forward", "cudnn") + " cuDNN's speed",
        faster("1x16x32768x128", "backward", "cudnn") + " cuDNN's speed",
        faster("1x16x32768x128_documents", "forward", "torch_flex") + " FlexAttention's speed",
        f"{round(training['gpt_32k']['tokens_per_s'], -2):,.0f} tokens/s",
        f"{100 * training['gpt_1b_32k']['mfu_causal']:.1f} % MFU",
        f"{on_gpus[2]['tokens_per_s'] / on_gpus[1]['tokens_per_s']:.2f} × one GPU's speed",
        f"{trace_s:.2f} s",
        format_seconds(read_rows(RESULTS / "make_train_cpu.jsonl")[-1]["seconds"]),
    ]
    assert figures() == measured
    assert len(figures()) <= 8


def test_the_lead_of_cudnn_called_directly_is_that_of_the_rows():
    rows = read_rows(RESULTS / "attention_cudnn_h200.jsonl")
    leads = [row["speed_ratios"]["cudnn"] for row in rows if row["backend"] == "torch_cudnn"]
    assert (
        f"(called directly it is up to {max(leads) - 1:.0%} faster)".replace("%", " %")
        in (ROOT / "README.md").read_text()
    )


def test_the_machine_that_traced_is_the_one_of_the_rows():
    rows = read_rows(RESULTS / "compile_time_v5p.jsonl")
    [(cpu, jax, libtpu, date)] = {(row["cpu"], row["jax"], row["libtpu"], row["date"]) for row in rows}
    lines = (ROOT / "docs/profile_compile_time.md").read_text().splitlines()
    (paragraph,) = [line for line in lines if "results/compile_time_v5p.jsonl" in line]
    assert f"Two cores of an {cpu.replace('(R)', '').removesuffix(' Processor')}, " in paragraph
    assert f"JAX {jax}, libtpu {libtpu}, {date} (" in paragraph
