"""What the user sees: a plain line for each fact, on a terminal and without one."""

from __future__ import annotations

import dataclasses
import io

import pytest

from trainer.compile.stages import CompileReport, MemoryReport
from trainer.observers.console_lines import ConsoleLines
from trainer.observers.observer import Evaluated, Evaluation, LogWindow, Sampled, Start
from trainer.terminal.console import Console, QuietConsole
from trainer.terminal.units import format_bytes, format_count, format_loss, format_seconds

SPEED = "loss 3.2500  21,845 tokens/s  1.5 s/step  MFU 41.0%  data wait 4.0 ms  3 min 20 s left"
WINDOW = LogWindow(
    step=10,
    num_steps=40,
    loss=3.25,
    step_s=1.5,
    data_wait_s=0.004,
    tokens_per_s=21845.3,
    mfu_causal=0.41,
    left_s=200.0,
)


def test_every_fact_is_a_plain_line(capsys):
    console = Console()
    lines = ConsoleLines(console)
    console.opening("tiny", {"mesh": "data 1", "attention": ["blockwise for 2 layers", "  cudnn passed over: [x] y"]})
    memory = MemoryReport(2_000_000, 1_000, 1_000, 3_000_000, 500, 5_000_000)
    lines.observe(Start(0, 40, [], [CompileReport("train_step", 1.0, 2.0, 62.0, True, memory)]))
    lines.observe(WINDOW)
    lines.observe(dataclasses.replace(WINDOW, mfu_causal=None))
    lines.observe(Evaluated(10, Evaluation(3.125, 4.5, 1000), {}))
    lines.observe(Sampled(10, "The", " cat"))
    console.closing("completed: step 40 of 40", {"written": ["a", "b"]})
    assert capsys.readouterr().out.splitlines() == [
        "tiny",
        "  mesh: data 1",
        "  attention: blockwise for 2 layers",
        "  attention:   cudnn passed over: [x] y",
        "compile train_step: trace 1.0 s, lower 2.0 s, XLA 1 min 2 s (read from the cache)",
        "memory of a step, per device: 5.0 MB at the peak: state and batch 2.0 MB, temporaries 3.0 MB, program 500 B",
        f"step 10/40  {SPEED}",
        f"step 10/40  {SPEED.replace('  MFU 41.0%', '')}",
        "step 10: validation 3.1250 nats/token, 4.5000 bits/byte",
        "step 10: sample: The▸ cat",
        "completed: step 40 of 40",
        "  written: a",
        "  written: b",
    ]


@pytest.mark.parametrize(
    ("seconds", "told"),
    [
        (0, "0.0 ms"),
        (0.9994, "999.4 ms"),
        (0.9996, "1.0 s"),
        (59.94, "59.9 s"),
        (60, "1 min 0 s"),
        (3599.4, "59 min 59 s"),
        (7300, "2 h 1 min"),
    ],
)
def test_seconds_are_told_as_a_person_would(seconds, told):
    assert format_seconds(seconds) == told


@pytest.mark.parametrize(
    ("count", "told"), [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (1_500_000_000, "1.5 GB"), (2.5e15, "2500.0 TB")]
)
def test_bytes_are_told_in_powers_of_1000(count, told):
    assert format_bytes(count) == told


def test_counts_and_losses():
    counts = {0: "0", 999: "999", 22_816: "22.8k", 124_439_808: "124.4M", 3 * 10**9: "3.0B"}
    assert {count: format_count(count) for count in counts} == counts
    assert format_loss(1.0, None) == "1.0000 nats/token"


HOSTILE = "a\x1b]0;owned\x07\x1b[2J\r\x9b31m:bug:[red]\x7fb"
SHOWN = "a␛]0;owned␇␛[2J␍\ufffd31m:bug:[red]␡b"


def test_no_control_character_of_what_others_wrote_reaches_the_output():
    output = io.StringIO()
    console = Console(output)
    console.opening(HOSTILE, {HOSTILE: [HOSTILE, "x"]})
    console.note(HOSTILE)
    console.warning(HOSTILE)
    console.closing(HOSTILE, {"checkpoint": HOSTILE})
    shown = output.getvalue()
    assert shown.count(SHOWN) == 8
    assert not set(shown) & {*map(chr, range(10)), *map(chr, range(11, 32)), *map(chr, range(127, 160))}


def test_a_process_whose_run_another_prints_gives_answers_and_warnings_alone(capsys):
    console = QuietConsole("process 1")
    console.note("x")
    console.opening("x", {"y": "z"})
    console.answer("SIGTERM: finishing")
    console.warning(HOSTILE)
    assert capsys.readouterr().out == f"process 1: SIGTERM: finishing\nprocess 1: warning: {SHOWN}\n"
