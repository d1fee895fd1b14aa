"""The documentation's pictures: what they show of the rows, and that the kept ones show the rows that are kept."""

import json
import re

from experiments.benchmarks import plots
from experiments.benchmarks.attention.speed_table import read_rows

KEPT = plots.PlotArguments()


def speed_row(backend, direction="forward", case="a", tflops=100.0, ratios=None):
    row = {"case": case, "batch": 1, "length": 4096, "num_heads": 8, "num_kv_heads": 2, "head_dim": 64}
    row |= {"mask": "CausalMask(offset=0)", "document_length": None, "document_spread": 0.0}
    row |= {"backend": backend, "direction": direction, "seconds": 1.0, "tflops_per_s": tflops}
    return row | {"speed_ratios": ratios or {}}


def trace_row(source, length, first_trace_s, **more):
    row = {"mask": "causal", "source": source, "length": length, "status": "measured"}
    return row | {"first_trace_s": first_trace_s} | more


def drawn_digest(name: str) -> str:
    (found,) = re.findall(r"<dc:description>(\w+)</dc:description>", (KEPT.output / name).read_text())
    return found


def test_the_kept_plots_show_the_rows_that_are_kept():
    again = "make them again: python -m experiments.benchmarks.plots"
    for name, rows in plots.SPEED_PLOTS.items():
        assert drawn_digest(name) == plots.digest(plots.attention_speeds(read_rows(KEPT.results / rows))), again
    seconds = plots.trace_seconds(read_rows(KEPT.results / "compile_time_v5p.jsonl"))
    assert drawn_digest("trace_time.svg") == plots.digest(seconds), again


def test_the_losses_are_those_of_the_record():
    record = json.loads((KEPT.results / "gpt_32k_cpu.json").read_text())
    *_, last = (KEPT.results / "gpt_32k_cpu_metrics.jsonl").read_text().splitlines()
    name = "validation_nats_per_token"
    assert (json.loads(last)["step"], json.loads(last)[name]) == (record["step"], record["evaluation"][name])


def test_the_command_draws_every_picture(tmp_path, capsys):
    plots.main(plots.PlotArguments(output=tmp_path / "new"))
    drawn = {path.name: path for path in (tmp_path / "new").iterdir()}
    assert drawn.keys() == {path.name for path in KEPT.output.iterdir()}
    assert capsys.readouterr().out.split() == [str(drawn[name]) for name in sorted(drawn)]
    assert all(path.stat().st_size < 150_000 for path in drawn.values())


def test_a_contender_is_shown_where_it_took_turns_with_ours():
    """cuDNN was timed in case b too, but with another run of ours; of a measurement made twice the later one counts."""
    rows = [
        speed_row("mosaic_gpu", tflops=1.0, ratios={"cudnn": 1.0, "xla": 2.0}),
        speed_row("mosaic_gpu", tflops=300.04, ratios={"cudnn": 1.5, "mosaic_gpu": 1.0}),
        speed_row("cudnn", tflops=200.0),
        speed_row("xla", tflops=20.0),
        speed_row("mosaic_gpu", case="b", tflops=400.0, ratios={"torch_flex": 2.0}),
        speed_row("cudnn", case="b", tflops=210.0),
        speed_row("torch_flex", case="b", tflops=200.0),
        speed_row("mosaic_gpu", "backward", tflops=250.0),
        speed_row("mosaic_gpu", "forward_backward", tflops=260.0),
        {"case": "c", "backend": "mosaic_gpu", "direction": "forward", "refused": "can't"},
    ]
    title = "1 × 8/2 × 4,096 × 64, causal"
    assert plots.attention_speeds(rows) == {
        "forward": {
            plots.OURS: {"x": [300.0, 400.0], "y": [title, title]},
            "cuDNN": {"x": [200.0], "y": [title]},
            "FlexAttention": {"x": [200.0], "y": [title]},
        },
        "backward": {plots.OURS: {"x": [250.0], "y": [title]}},
    }


def test_every_system_has_a_marker_of_its_own():
    shown = {plots.OURS, "cuDNN", *plots.NEXT.values()}
    assert shown == plots._CONTENDERS.keys()
    assert len(set(plots._CONTENDERS.values())) == len(shown)
    row = speed_row("mosaic_gpu", ratios={"fa3": 1.1})
    assert plots.attention_speeds([row, speed_row("fa3")])["forward"].keys() == {plots.OURS, "FlashAttention-3"}


def test_a_trace_that_was_stopped_is_not_shown():
    rows = [
        trace_row("ours", 8192, 0.06),
        trace_row("ours", 4096, 0.05),
        trace_row("ours", 4096, 0.07),
        trace_row("upstream_lazy", 4096, 0.2, mask="two_masks"),
        trace_row("upstream_lazy", 8192, None, mask="two_masks", status="stopped"),
    ]
    causal, *_, two_masks = plots.trace_seconds(rows).values()
    assert causal == {plots.OURS: {"x": [4096, 8192], "y": [0.05, 0.06]}}
    assert two_masks == {"JAX's lazy masks": {"x": [4096], "y": [0.2]}}


def test_other_figures_have_another_digest():
    series = plots.trace_seconds([trace_row("ours", 4096, 0.05)])
    assert plots.digest(series) != plots.digest(plots.trace_seconds([trace_row("ours", 4096, 0.06)]))
