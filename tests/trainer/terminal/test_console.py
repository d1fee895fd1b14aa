"""What the user sees, on a terminal and without one."""

from __future__ import annotations

import dataclasses
import io
import re
import time

import pytest
import rich.console

from trainer.compile.stages import CompileReport, MemoryReport
from trainer.observers.console_lines import ConsoleLines
from trainer.observers.observer import Advanced, Evaluated, Evaluation, LogWindow, Start, Stopped
from trainer.terminal.console import Console
from trainer.terminal.units import format_bytes, format_count, format_loss, format_seconds

SPEED = "loss 3.2500  21,845 tokens/s  1.5 s/step  MFU 41.0%  data wait 4.0 ms  3 min 20 s left"


def make_window(step: int) -> LogWindow:
    return LogWindow(
        step=step,
        num_steps=40,
        loss=3.25,
        step_s=1.5,
        data_wait_s=0.004,
        tokens_per_s=21845.3,
        mfu_causal=0.41,
        left_s=200.0,
    )


def show_a_run(output: rich.console.Console) -> str:
    """Everything that the console can show, in the order of a run."""
    console = Console(output)
    lines = ConsoleLines(console)
    facts = {"mesh": "data 1", "attention": ["blockwise for 2 layers", "  cudnn passed over: [needs] a GPU"]}
    console.description("A GPT for two cores.")
    console.note("tokenizing 3 files")
    console.opening("tiny", facts)
    memory = MemoryReport(2_000_000, 1_000, 1_000, 3_000_000, 500, 5_000_000)
    with console.working("compiling"):
        console.note("a word while it compiles")
    lines.observe(Start(0, 40, [], [CompileReport("train_step", 1.0, 2.0, 62.0, True, memory)]))
    lines.observe(Advanced(5))
    lines.observe(make_window(10))
    console.note("checkpoint 10 is damaged")
    lines.observe(Evaluated(10, Evaluation(3.125, 4.5, 1000), {}))
    lines.observe(make_window(20))
    lines.observe(Stopped())
    lines.observe(Stopped())
    facts = {"written": ["/tmp/run/record.json", "/tmp/run/metrics.jsonl"]}
    console.closing("completed: step 40 of 40", facts)
    return output.file.getvalue()


def test_without_a_terminal_every_fact_is_a_plain_line():
    # Narrower than the lines: a pipe has no width, so nothing may wrap at the one that rich assumes.
    shown = show_a_run(rich.console.Console(file=io.StringIO(), width=40))
    assert shown.splitlines() == [
        "A GPT for two cores.",
        "tokenizing 3 files",
        "tiny",
        "  mesh: data 1",
        "  attention: blockwise for 2 layers",
        "  attention:   cudnn passed over: [needs] a GPU",
        "a word while it compiles",
        "compile train_step: trace 1.0 s, lower 2.0 s, XLA 1 min 2 s (read from the cache)",
        "memory of a step, per device: 5.0 MB at the peak: state and batch 2.0 MB, temporaries 3.0 MB, program 500 B",
        f"step 10/40  {SPEED}",
        "checkpoint 10 is damaged",
        "step 10: validation 3.1250 nats/token, 4.5000 bits/byte",
        f"step 20/40  {SPEED}",
        "completed: step 40 of 40",
        "  written: /tmp/run/record.json",
        "  written: /tmp/run/metrics.jsonl",
    ]
    assert "\x1b" not in shown


def terminal(width: int) -> rich.console.Console:
    return rich.console.Console(file=io.StringIO(), force_terminal=True, width=width, _environ={"TERM": "xterm"})


def visible_lines(shown: str) -> list[str]:
    """What a terminal was sent, without its control codes. A line that was drawn anew is there as often."""
    return re.split(r"[\r\n]+", re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown))


def test_a_terminal_gets_a_panel_and_a_progress_bar():
    shown = show_a_run(terminal(80))
    assert "\x1b" in shown
    assert shown.index("╭─ tiny ") < shown.index("A GPT for two cores.") < shown.index("mesh")
    assert "20/40" in shown
    assert "21,845 tokens/s" in shown
    assert "MFU 41.0%" in shown
    assert "3 min 20 s left" in shown
    assert "cudnn passed over: [needs] a GPU" in shown, "brackets are not markup"
    assert shown.index("validation 3.1250 nats/token") < shown.index("completed: step 40 of 40")


def test_an_mfu_that_is_unknown_is_left_out(capsys):
    ConsoleLines(Console()).observe(dataclasses.replace(make_window(10), mfu_causal=None))
    assert capsys.readouterr().out.rstrip() == f"step 10/40  {SPEED.replace('  MFU 41.0%', '')}"


@pytest.mark.parametrize("width", [80, 200])
def test_a_terminal_keeps_a_line_for_each_window_and_evaluation_above_the_bar(width):
    lines = visible_lines(show_a_run(terminal(width)))
    speed = SPEED if width == 200 else "loss 3.2500  21,845 tokens/s  MFU 41.0%  3 min 20 s left"
    kept = [f"step 10/40  {speed}", "step 10: validation 3.1250 nats/token, 4.5000 bits/byte", f"step 20/40  {speed}"]
    assert [line.rstrip() for line in lines if line.startswith("step ")] == kept
    assert any(re.search(r"step .*20/40 .*━.* 3 min 20 s left", line) for line in lines)


def test_nothing_is_wider_than_the_terminal():
    assert [line for line in visible_lines(show_a_run(terminal(80))) if len(line) > 80] == []


def test_something_moves_while_the_main_thread_works_and_is_gone_afterwards():
    output = terminal(80)
    with Console(output).working("compiling"):
        time.sleep(1.1)
    shown = output.file.getvalue()
    spinning = {line[0] for line in visible_lines(shown) if "compiling …" in line}
    assert len(spinning) > 3
    assert "0:00:01" in shown
    assert shown.endswith("\x1b[2K"), "the line is cleared"


def test_a_kill_leaves_a_terminal_its_cursor():
    output = terminal(80)
    console = Console(output)
    console.start_steps(0, 40)
    try:
        shown = output.file.getvalue()
        assert shown.rindex("\x1b[?25h") > shown.rindex("\x1b[?25l")
    finally:
        console.stop_steps()


def test_a_name_is_no_markup():
    output = terminal(80)
    Console(output).opening("[red]name[/x]", {"a": "b"})
    assert "╭─ [red]name[/x] ─" in visible_lines(output.file.getvalue())[0]


def test_a_dumb_terminal_gets_plain_lines():
    dumb = rich.console.Console(file=io.StringIO(), force_terminal=True, width=80, _environ={"TERM": "dumb"})
    shown = show_a_run(dumb)
    assert "╭" not in shown
    assert "compiling" not in shown


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
    assert [format_count(count) for count in (0, 999, 22_816, 124_439_808, 3 * 10**9)] == [
        "0",
        "999",
        "22.8k",
        "124.4M",
        "3.0B",
    ]
    assert format_loss(1.0, None) == "1.0000 nats/token"


HOSTILE = "a\x1b]0;owned\x07\x1b[2J\r\x9b31m:bug:[red]\x7fb"
SHOWN = "a␛]0;owned␇␛[2J␍\ufffd31m:bug:[red]␡b"


def test_no_control_character_of_what_others_wrote_reaches_a_terminal():
    output = terminal(200)
    console = Console(output)
    console.description(HOSTILE)
    console.opening(HOSTILE, {HOSTILE: [HOSTILE, "x"]})
    console.note(HOSTILE)
    console.warning(HOSTILE)
    console.quote("sample: ", HOSTILE)
    with console.working(HOSTILE):
        pass
    with console.loading(HOSTILE):
        pass
    console.closing(HOSTILE, {"checkpoint": HOSTILE})
    shown = output.file.getvalue()
    assert len(re.findall(re.escape(SHOWN), shown)) >= 9
    own = re.sub(r"\x1b\[[0-9;?]*[mhlAK]", "", shown)  # colours, and the line that moves
    assert re.findall(r"[\x00-\x08\x0b-\x0c\x0e-\x1f\x7f-\x9f]", own) == []
    assert "\x1b[2J" not in shown


def test_a_log_file_has_signs_in_messages_and_samples_as_they_are():
    output = rich.console.Console(file=io.StringIO())
    console = Console(output)
    console.warning(HOSTILE)
    console.quote("sample: ", HOSTILE)
    assert output.file.getvalue() == f"warning: {SHOWN}\nsample: {HOSTILE}\n"
