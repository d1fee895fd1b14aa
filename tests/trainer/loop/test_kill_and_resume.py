"""Killed with SIGKILL at random moments and run again, a run ends as if nothing had happened, bit for bit.

The issue's fifty kills: `pytest tests/trainer/loop/test_kill_and_resume.py --num-kills 50 --timeout 3600`.
"""

import random
import time
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

from tests.seeds import run_seed

STEPS_PER_KILL = 8  # an attempt that is killed gets about five further
# Saves every third step, so that kills fall into saves often; logs off that beat.
ARGUMENTS = ("--checkpoint.every-num-steps", 3, "--log-every-num-steps", 4, "--evaluation.every-num-steps", 20)
OPTIMISED = {"XLA_FLAGS": ""}  # as users run it: the last bit is theirs


def final_state(workdir: Path, num_steps: int):
    with ocp.StandardCheckpointer() as orbax:
        return orbax.restore(workdir / "checkpoints" / str(num_steps) / "state")


def kill(process) -> tuple[bool, str]:
    """Kills a process at once; whether it was still running, and what it printed that wasn't read before."""
    was_running = process.poll() is None
    process.kill()
    return was_running, process.communicate()[0]


def wait_until(process, condition) -> None:
    """Returns when the condition holds, or the process has ended."""
    while process.poll() is None and not condition():
        time.sleep(0.001)


def wait_for_step(process, metrics: Path, seconds: float) -> None:
    """Until a while after the first step of this attempt, told by a change of the metrics log."""
    size = metrics.stat().st_size if metrics.exists() else 0
    wait_until(process, lambda: metrics.exists() and metrics.stat().st_size > size)
    time.sleep(seconds)


def wait_for_save(process, checkpoints: Path, num_saves: int, seconds: float) -> None:
    """Until so many saves have begun, and a moment into the last of them. What an earlier kill left doesn't count."""
    present, num_begun = set(checkpoints.glob("*.tmp")), 0

    def begun() -> bool:
        nonlocal present, num_begun
        before, present = present, set(checkpoints.glob("*.tmp"))
        num_begun += len(present - before)
        return num_begun >= num_saves

    wait_until(process, begun)
    time.sleep(seconds)


def wait_for_restore(process, seconds: float) -> None:
    """Until a moment after the attempt has begun to restore."""
    for line in process.stdout:
        if line.startswith("  workdir: "):
            break
    time.sleep(seconds)


@pytest.mark.full
def test_kills_leave_no_trace(trainer_command, tmp_path, read_run, read_tensorboard, request):
    kinds = ["save", "step", "restore", "save"]
    num_wanted = max(len(kinds), request.config.getoption("--num-kills"))
    num_steps = max(60, STEPS_PER_KILL * num_wanted)
    arguments = (*ARGUMENTS, "--num-steps", num_steps)
    draw = random.Random(run_seed())

    whole, killed = tmp_path / "whole", tmp_path / "killed"
    seldom = ("--checkpoint.every-num-steps", num_steps)  # changes no number, and saves take longer than steps
    finished = trainer_command.run_alone("--workdir", whole, *arguments, *seldom, **OPTIMISED)
    assert finished.status == 0, finished.errors
    expected_record, expected_steps, expected_evaluations = read_run(whole)
    training_s = sum(expected_record["time"][f"{name}_s"] for name in ("data_wait", "step", "evaluation", "checkpoint"))

    begun = time.perf_counter()
    num_kills, num_amid_a_save, num_amid_a_restore = 0, 0, 0
    for kind in kinds + draw.choices(kinds, k=num_wanted - len(kinds)):
        process = trainer_command.start("--workdir", killed, *arguments, **OPTIMISED)
        match kind:
            case "step":
                wait_for_step(process, killed / "metrics.jsonl", draw.uniform(0, training_s / num_wanted))
            case "save":
                # An attempt's first save is a rehearsal.
                wait_for_save(process, killed / "checkpoints", draw.randint(2, 4), draw.uniform(0, 0.04))
            case "restore":
                wait_for_restore(process, draw.uniform(0, 0.4))
        was_running, output = kill(process)
        is_amid_a_restore = kind == "restore" and "resumed at step" not in output
        unfinished = [path.name for path in (killed / "checkpoints").glob("*.tmp")]
        last = sum(1 for _ in (killed / "metrics.jsonl").open())
        print(f"kill amid a {kind}: running {was_running}, {last} lines logged, half-written {unfinished}")
        num_kills += was_running
        num_amid_a_save += was_running and bool(unfinished)
        num_amid_a_restore += was_running and is_amid_a_restore
    print(f"{num_kills} kills, {num_amid_a_save} with a save half-written, {num_amid_a_restore} amid a restore")
    assert num_kills >= num_wanted - 1
    assert num_amid_a_save >= 1
    assert num_amid_a_restore >= (1 if num_wanted >= 20 else 0)

    resumed = trainer_command.run_alone("--workdir", killed, *arguments, **OPTIMISED)
    running_s = time.perf_counter() - begun
    assert resumed.status == 0, resumed.errors
    record, steps, evaluations = read_run(killed)
    assert record["status"] == "completed"
    assert len(record["attempts"]) >= num_kills
    assert [row["step"] for row in steps] == list(range(1, num_steps + 1))
    assert {attempt["status"] for attempt in record["attempts"]} <= {"killed", "completed"}
    assert record["attempts"][-1]["status"] != "killed" or "the last attempt ended without a word" in resumed.output
    shown = read_tensorboard(killed / "tensorboard")
    for name in ("loss", "z_loss", "grad_norm", "learning_rate", "num_targets"):
        points = {row["step"]: row[name] for row in steps}
        assert shown[f"train/{name}"] == pytest.approx(points, rel=1e-6), name
        assert list(points.values()) == [row[name] for row in expected_steps], name
    points = {row["step"]: row["validation_nats_per_token"] for row in evaluations}
    assert shown["validation/nats_per_token"] == pytest.approx(points, rel=1e-6)
    assert evaluations == expected_evaluations
    leaves, expected_leaves = (jax.tree.leaves(final_state(workdir, num_steps)) for workdir in (killed, whole))
    assert len(leaves) == len(expected_leaves) > 20
    for got, want in zip(leaves, expected_leaves, strict=True):
        assert got.dtype == want.dtype
        assert np.asarray(got).tobytes() == np.asarray(want).tobytes()
    assert not list((killed / "checkpoints").glob("*.tmp"))
    assert_goodput_adds_up(record, steps, running_s)
    assert_goodput_adds_up(expected_record, expected_steps, finished.seconds)
    assert record["goodput"]["lost_step_s"] > expected_record["goodput"]["lost_step_s"], "steps were made again"


def assert_goodput_adds_up(record, steps, running_s: float) -> None:
    told = record["goodput"]
    assert told["num_attempts"] == len(record["attempts"]) + 1
    parts = ("useful_step_s", "lost_step_s", "compile_s", "data_wait_s", "evaluation_s", "checkpoint_s", "other_s")
    assert sum(told[part] for part in parts) == pytest.approx(told["total_s"])
    assert told["total_s"] + told["downtime_s"] <= running_s
    assert told["fraction"] == told["useful_step_s"] / told["total_s"]
    useful_s, num_in_window = 0.0, 0
    for row in steps:
        num_in_window += 1
        if "step_s" in row:
            useful_s += num_in_window * row["step_s"] - row["data_wait_s"]
            num_in_window = 0
    assert told["useful_step_s"] == pytest.approx(useful_s), "each step of the log, once"
