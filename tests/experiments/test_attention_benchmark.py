"""The attention benchmark: what its rows say, on shapes small enough for a CPU, and with clocks that are made up."""

import dataclasses
import itertools
import json
import re
import statistics

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.benchmarks.attention import contenders, speed_table
from experiments.benchmarks.attention import measure as measuring
from experiments.benchmarks.attention.__main__ import SUITES, AttentionArguments, Suite, cells, headings, main, measure
from experiments.benchmarks.attention.bounds import count_pairs_within, draw_bounds
from experiments.benchmarks.attention.cases import CASES, Case, describe, make_problem
from experiments.benchmarks.attention.contenders import compile_calls, compile_contender
from experiments.benchmarks.attention.timing import AttentionContender, speed_ratio, time_in_rounds
from experiments.benchmarks.attention.torch_peers import TORCH_PEERS
from kernels import CausalMask, FullMask, LocalMask, PrefixMask, count_allowed_pairs

SMALL = Case(2, 256, 2, 1, 16, CausalMask(), "float32")
PACKED = dataclasses.replace(SMALL, document_length=60, document_spread=0.5)


ONCE = {"num_rounds": 1, "sample_ms": 0, "program_ms": 0}


def rows_of(case: Case, *backends: str, **how) -> list[dict]:
    return measure("small", case, AttentionArguments(backends=backends, **({} if "check" in how else ONCE), **how))


class Device:
    """A clock that stands still but for the runs of its contenders."""

    def __init__(self):
        self.now = 0.0

    def contender(self, *seconds: float) -> AttentionContender:
        """One whose runs take these times, and then the last of them for ever."""
        left = list(seconds)

        def start():
            self.now += left.pop(0) if len(left) > 1 else left[0]

        return AttentionContender("made up", start, lambda result: None, 256, 0.0, 0, clock=lambda: self.now)


def test_a_slow_first_run_does_not_shorten_the_samples():
    contender = Device().contender(5.0, 0.001)
    assert contender.prepare(sample_ms=20) == pytest.approx(0.001)
    assert contender.num_runs == 20
    assert contender.seconds == []


def test_contenders_take_turns_and_a_ratio_is_one_round_over_the_same_round():
    device = Device()
    # From round to round the device slows down; in each of them ours takes half of the time.
    ours, theirs = device.contender(1, 2, 8), device.contender(2, 4, 16)
    time_in_rounds([[ours], [theirs]], 3)
    assert (ours.seconds, theirs.seconds) == ([1, 2, 8], [2, 4, 16])
    assert speed_ratio(theirs.seconds, ours.seconds) == 2
    assert speed_ratio([1, 10, 1], [1, 1, 1]) == 1


def test_rounds_differ_in_their_order_but_a_group_stays_together():
    device, order = Device(), []
    contenders = [device.contender(1) for _ in range(4)]
    for number, contender in enumerate(contenders):
        contender.wait = lambda result, number=number: order.append(number)
    time_in_rounds([contenders[:2], contenders[2:3], contenders[3:]], 20)
    rounds = [tuple(order[i : i + 4]) for i in range(0, 80, 4)]
    assert all(sorted(r) == [0, 1, 2, 3] and r.index(1) == r.index(0) + 1 for r in rounds)
    assert len(set(rounds)) > 1


def test_a_sample_is_as_long_with_several_calls_in_a_program():
    contender = Device().contender(4.0, 2**-8)
    contender.calls_per_program = 4
    assert contender.prepare(sample_ms=1e3 * 2**-6) == 2**-10
    assert contender.num_runs == 4


def test_short_calls_share_a_program_and_the_rest_of_the_row_is_of_one(monkeypatch):
    monkeypatch.setattr(measuring, "_MOST_CALLS", 2)
    arguments = AttentionArguments(backends=("xla",), num_rounds=1, sample_ms=0, program_ms=1e6)
    rows = measure("small", SMALL, arguments)
    assert {row["calls_per_program"] for row in rows} == {2}
    singles = [compile_contender(make_problem(SMALL), "xla", d) for d in measuring.DIRECTIONS]
    assert {row["temporary_bytes"] for row in rows} == {single.temporary_bytes for single in singles}


def test_every_call_of_a_program_has_inputs_of_its_own():
    problem = make_problem(PACKED)
    one = compile_contender(problem, "blockwise", "forward")
    calls = compile_calls(one, problem, "blockwise", "forward", 3)
    assert (calls.calls_per_program, calls.compile_s) == (3, one.compile_s)
    first, *others = calls.start()
    assert first.shape == one.start().shape
    assert all(np.abs(first - other).max() > 0.1 for other in others)
    assert [x.shape for x in others] == [first.shape] * 2


def test_a_case_is_timed_by_every_backend_that_serves_it_and_the_others_say_why_not():
    chosen = dict.fromkeys((*SUITES["hopper"].backends, *SUITES["triton"].backends))
    others = [name for name in chosen if name not in ("xla", "mosaic_gpu")]
    how = {"num_rounds": 3, "sample_ms": 1, "program_ms": 0}
    rows = measure("small", SMALL, AttentionArguments(backends=("blockwise", "xla", *others), **how))
    refused = {row["backend"]: row["refused"] for row in rows if "refused" in row}
    assert list(refused) == others
    for backend, reason in refused.items():
        assert "runs on gpu" in reason or (backend in TORCH_PEERS and "No module named 'torch'" in reason)
    timed = {(row["backend"], row["direction"]): row for row in rows if "refused" not in row}
    assert set(timed) == {(b, d) for b in ("blockwise", "xla") for d in ("forward", "backward", "forward_backward")}
    assert all(row["speed_ratios"][backend] == 1 for (backend, _), row in timed.items())
    ours = timed["blockwise", "forward"]
    assert ours["speed_ratios"]["xla"] == pytest.approx(1 / timed["xla", "forward"]["speed_ratios"]["blockwise"])
    flops = 4 * 16 * 2 * 2 * count_allowed_pairs(CausalMask(), 256, 256)
    assert ours["tflops_per_s"] == pytest.approx(flops / ours["seconds"] / 1e12)
    assert ours["fastest_s"] <= ours["seconds"] <= ours["slowest_s"]
    assert {"jax", "date", "device", "runs_per_sample", "num_rounds"} <= ours.keys()
    assert ours["calls_per_program"] == 1


def test_a_backend_without_a_backward_is_timed_forward(monkeypatch):
    def no_backward(query, key, value, sinks, segment_ids, problem):
        @jax.custom_vjp
        def attend(query):
            return query

        def refuse(query):
            raise KeyError("has no backward")

        attend.defvjp(refuse, lambda residuals, cotangent: None)
        return attend(query)

    monkeypatch.setitem(contenders.PEERS, "forward_only", no_backward)
    rows = rows_of(SMALL, "forward_only", "blockwise")
    (refused,) = (row for row in rows if "refused" in row)
    assert (refused["direction"], refused["refused"]) == ("forward_backward", "KeyError: 'has no backward'")
    assert [row["direction"] for row in rows if row["backend"] == "forward_only" and "seconds" in row] == ["forward"]
    (errors,) = rows_of(SMALL, "forward_only", check=True)
    assert set(errors["errors"]) == {"output"}
    assert errors["refused"] == "KeyError: 'has no backward'"


def test_packed_documents_count_their_own_pairs_and_xla_refuses_them():
    problem = make_problem(PACKED)
    ids, position = np.asarray(problem.segment_ids), np.arange(256)
    allowed = (ids[:, :, None] == ids[:, None, :]) & (position[:, None] >= position)
    assert problem.num_pairs == 2 * allowed.sum()
    assert statistics.mean(len(set(row)) for row in ids.tolist()) > 1
    assert [row["backend"] for row in rows_of(PACKED, "blockwise", "xla") if "refused" in row] == ["xla"]


@pytest.mark.parametrize("name", ["tree", "forest", "images", "images_window_1024", "window_4096"])
def test_pairs_within_bounds_are_counted(name):
    rng, length = np.random.default_rng(), 2048
    mask = FullMask() if name.startswith("images") else CausalMask()
    bounds = draw_bounds(name, length, rng)
    index = np.arange(length)
    dense = np.asarray(mask(index[:, None], index)) & np.asarray(bounds.allowed(length, length))
    assert count_pairs_within(bounds, mask, length) == dense.sum()
    assert dense.any(1).all()
    if name == "tree":
        assert not dense[length // 2 + length // 16, length // 2 + length // 16 - 1], "a sibling is seen"


def test_more_keys_and_narrow_values_are_counted_and_served_at_every_length():
    case = dataclasses.replace(SMALL, mask=FullMask(), kv_length=1280, value_dim=8)
    for length in (256, 64):
        problem = make_problem(case, length)
        assert {name: x.shape for name, x in problem.arrays.items()} == {
            "query": (2, length, 2, 16),
            "key": (2, 5 * length, 1, 16),
            "value": (2, 5 * length, 1, 8),
            "d_output": (2, length, 2, 8),
        }
        assert problem.num_pairs == 2 * 2 * length * 5 * length
        assert problem.flops("forward") == 2 * (16 + 8) * problem.num_pairs
        output, gradients = compile_contender(problem, "blockwise", "forward_backward").start()
        assert output.shape == problem.arrays["d_output"].shape
        assert [x.shape for x in gradients] == [problem.arrays[name].shape for name in case.inputs]


def test_more_keys_than_queries_have_no_mask():
    for how in ({"mask": CausalMask()}, {"mask": FullMask(), "document_length": 60}):
        message = r"kv_length=512 needs FullMask\(\) and one document, got .*leave kv_length"
        with pytest.raises(ValueError, match=message):
            dataclasses.replace(SMALL, kv_length=512, **how)


def test_xla_says_that_it_has_no_sinks():
    with pytest.raises(ValueError, match="has no attention sinks"):
        compile_contender(make_problem(dataclasses.replace(SMALL, has_sinks=True)), "xla", "forward")


def test_documents_are_an_input_of_what_is_timed():
    problem = make_problem(PACKED)
    contender = compile_contender(problem, "blockwise", "forward")
    other = dataclasses.replace(problem, segment_ids=jnp.zeros_like(problem.segment_ids))
    program = contenders.lower(problem, "blockwise", "forward").lowered.compile()
    one_document = compile_contender(other, "blockwise", "forward").start()
    np.testing.assert_allclose(program(other.arrays, other.tokens), one_document, rtol=1e-5, atol=1e-5)
    assert np.abs(contender.start() - one_document).max() > 0.1


def test_a_backward_is_the_difference_of_its_round():
    seconds = {row["direction"]: row["seconds"] for row in rows_of(SMALL, "blockwise")}
    assert seconds["backward"] == pytest.approx(seconds["forward_backward"] - seconds["forward"])


def test_dense_attention_is_timed_where_it_fits_and_its_time_is_scaled(monkeypatch):
    clock = itertools.count(1.0)
    monkeypatch.setattr(AttentionContender, "time", lambda *_: next(clock))
    # 2 × 2 heads of 256 × 256 pairs, and four float32 arrays of them.
    rows = rows_of(SMALL, "xla", dense_gigabytes=4.1e-3)
    assert {row["measured_at_length"] for row in rows} == {128}
    forward, backward, both = (row["seconds"] for row in rows)
    # Both are timed after forward: a second later, which counts four times.
    assert (backward, both - forward) == (4, 4)
    assert rows_of(SMALL, "xla", dense_gigabytes=4.2e-3)[0]["measured_at_length"] == 256


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"baseline": "cudnn"}, "baseline='cudnn' is none of the backends blockwise, xla"),
        ({"backends": ("blockwise", "blockwize")}, "unknown backends blockwize; expected some of"),
        ({"cases": ("nosuch",)}, "unknown cases nosuch; expected some of causal"),
    ],
)
def test_arguments_that_cannot_be_meant_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        AttentionArguments(**arguments)


@pytest.mark.parametrize("name", [name for name in CASES if name[0].isdigit()])
def test_a_name_says_what_the_case_is(name):
    shape, *words = name.split("_")
    case = CASES[name]
    batch, heads, length, head_dim = (tuple(map(int, part.split("/"))) for part in shape.split("x"))
    assert batch == (case.batch,)
    assert (heads[0], heads[-1]) == (case.num_heads, case.num_kv_heads)
    assert (length[0], length[-1]) == (case.length, case.num_keys(case.length))
    assert (head_dim[0], head_dim[-1]) == (case.head_dim, case.output_dim)
    assert ("sinks" in words) == case.has_sinks
    assert ("documents" in words) == (case.document_length is not None)
    if case.bounds is not None:
        assert case.bounds == "_".join(words).removeprefix("bounds_")
        return
    left = int(words[words.index("window") + 1]) - 1 if "window" in words else None
    assert case.mask.window == ((None, None) if "full" in words else (left, 0))


def test_a_suite_stands_for_cases_and_backends_that_can_be_replaced():
    hopper = AttentionArguments(suite="hopper").chosen
    assert set(hopper.cases) <= set(CASES)
    assert hopper.baseline == "cudnn"
    fa3 = AttentionArguments(suite="fa3", cases=("1x64/8x16384x64_sinks",)).chosen
    assert fa3 == Suite(("1x64/8x16384x64_sinks",), ("mosaic_gpu", "fa3", "cudnn"), "fa3")
    flex = AttentionArguments(suite="hopper", cases=("gpt2_causal",), backends=("mosaic_gpu", "torch_flex")).chosen
    assert flex == Suite(("gpt2_causal",), ("mosaic_gpu", "torch_flex"), "torch_flex")
    assert AttentionArguments().chosen == Suite(("window_1024",), ("blockwise", "xla"), "xla")


@pytest.mark.parametrize("how", [{}, {"check": True, "check_length": 64}], ids=repr)
def test_the_command_keeps_its_rows_and_prints_them(how, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(CASES, "small", SMALL)
    output = tmp_path / "new" / "rows.jsonl"
    arguments = AttentionArguments(cases=("small",), backends=("blockwise", "cudnn"), output=output, **ONCE, **how)
    assert main(arguments) == 0
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    assert {row["backend"] for row in rows} == {"blockwise", "cudnn"}
    ours = [row for row in rows if row["backend"] == "blockwise"]
    assert {len(list(cells(row, "blockwise"))) for row in ours} == {len(headings(SMALL, arguments))}
    printed = capsys.readouterr().out
    assert "small" in printed
    assert re.search(r"^cudnn.*: .*runs on gpu, not on cpu$", printed, re.MULTILINE)


def test_a_command_that_measures_nothing_fails(capsys, monkeypatch):
    monkeypatch.setitem(CASES, "small", SMALL)
    assert main(AttentionArguments(cases=("small",), backends=("cudnn",), num_rounds=1)) == 1
    assert "runs on gpu, not on cpu" in capsys.readouterr().out


def test_the_cells_of_a_table_say_what_was_measured():
    row = {"case": "a", "batch": 1, "length": 4096, "num_heads": 8, "num_kv_heads": 2, "head_dim": 64}
    row |= {"mask": repr(LocalMask(1023, 0)), "document_length": None, "document_spread": 0.0, "backend": "mosaic_gpu"}
    row |= {"seconds": 1.0, "direction": "forward"}
    ratios = {"mosaic_gpu": 1.0, "cudnn": 1.256, "xla": 0.1, "torch_flex": 1.6, "tokamax_mosaic": 1.5}
    with_sinks = {"case": "d", "direction": "backward", "has_sinks": True}
    rows = [
        {**row, "tflops_per_s": 1.0, "speed_ratios": {"cudnn": 9.0}},
        {**row, "tflops_per_s": 400.4, "speed_ratios": ratios},
        {**row, "tflops_per_s": 300.6, "speed_ratios": {"cudnn": 0.5}, "direction": "backward"},
        {**row, "tflops_per_s": 9.0, "speed_ratios": {"cudnn": 9.0}, "backend": "cudnn"},
        {**row, "tflops_per_s": 2.0, "speed_ratios": {}, "case": "b", "head_dim": 128},
        {**row, "tflops_per_s": 3.0, "speed_ratios": {"fa3": 1.1, "torch_flash": 1.2}, **with_sinks},
        {"case": "c", "backend": "mosaic_gpu", "direction": "forward", "refused": "can't"},
    ]
    headings, lines = speed_table.speed_cells(rows, "mosaic_gpu")
    assert headings == ["shape", "forward", "× cuDNN", "× next", "backward", "× cuDNN", "× next"]
    assert lines == [
        ["1×8/2×4,096×64, window 1,024", "400", "1.26", "1.50 (tokamax)", "301", "0.50", "–"],
        ["1×8/2×4,096×128, window 1,024", "2", "–", "–", "–", "–", "–"],
        ["1×8/2×4,096×64, window 1,024, sinks", "–", "–", "–", "3", "–", "1.10 (FlashAttention-3)"],
    ]


def test_a_heading_names_the_only_other_system():
    row = {**describe(SMALL), "case": "a", "backend": "mosaic_gpu", "direction": "forward", "seconds": 1.0}
    row |= {"tflops_per_s": 7.0, "speed_ratios": {"cudnn": 2.0, "fa3": 1.1}}
    headings, lines = speed_table.speed_cells([row], "mosaic_gpu", beside_cudnn=False)
    assert headings == ["shape", "forward", "× FlashAttention-3", "backward", "× FlashAttention-3"]
    assert lines == [["2×2/1×256×16", "7", "1.10", "–", "–"]]


def test_a_table_needs_rows_with_a_time():
    refused = {"case": "a", "direction": "forward", "backend": "blockwise", "refused": "can't"}
    with pytest.raises(ValueError, match="no row of backend='blockwise'"):
        speed_table.speed_cells([refused], "blockwise")


def test_a_title_has_what_keys_and_values_have_apart_and_sinks():
    case = dataclasses.replace(SMALL, mask=FullMask(), kv_length=20_000, value_dim=8, has_sinks=True)
    assert speed_table.case_title(describe(case)) == "2 × 2/1 × 256/20,000 × 16/8, no mask, sinks"
    assert speed_table.case_title(describe(SMALL)) == "2 × 2/1 × 256 × 16, causal"
    assert speed_table.short_title(describe(SMALL)) == "2×2/1×256×16"
    assert speed_table.short_title(describe(PACKED)) == "2×2/1×256×16, documents around 60"


def test_a_mask_without_a_name_is_written_out():
    titles = [speed_table.mask_title(mask) for mask in (CausalMask(), FullMask(), CausalMask() & PrefixMask(7))]
    assert titles == ["causal", "no mask", "CausalMask(offset=0) & PrefixMask(length=7)"]
