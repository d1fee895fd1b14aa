"""Killed with SIGKILL at random moments and run again, a run ends as if nothing had happened, bit for bit."""

from __future__ import annotations

import random
import secrets
import time
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

NUM_STEPS = 60  # of the tiny config
# Saves every third step, so that kills fall into saves often; logs off that beat.
ARGUMENTS = ("--checkpoint.every-num-steps", 3, "--log-every-num-steps", 4, "--evaluation.every-num-steps", 20)
OPTIMISED = {"XLA_FLAGS": ""}  # as users run it: the last bit is theirs


def final_state(workdir: Path):
    with ocp.StandardCheckpointer() as orbax:
        return orbax.restore(workdir / "checkpoints" / str(NUM_STEPS) / "state")


def kill(process) -> bool:
    """Kills a process at once; whether it was still running."""
    was_running = process.poll() is None
    process.kill()
    process.communicate()
    return was_running


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


def test_kills_leave_no_trace(trainer_command, tmp_path, read_run, read_tensorboard):
    seed = secrets.randbits(32)
    draw = random.Random(seed)
    print(f"kills drawn from seed {seed}")

    whole, killed = tmp_path / "whole", tmp_path / "killed"
    finished = trainer_command.run("--workdir", whole, *ARGUMENTS, **OPTIMISED)
    assert finished.status == 0, finished.errors
    expected_record, expected_steps, expected_evaluations = read_run(whole)
    training_s = sum(expected_record["time"][f"{name}_s"] for name in ("data_wait", "step", "evaluation", "checkpoint"))

    num_kills, num_amid_a_save = 0, 0
    for kind in ("save", "step", "save", "save"):
        process = trainer_command.start("--workdir", killed, *ARGUMENTS, **OPTIMISED)
        match kind:
            case "step":
                wait_for_step(process, killed / "metrics.jsonl", draw.uniform(0, training_s / 4))
            case "save":
                wait_for_save(process, killed / "checkpoints", draw.randint(1, 3), draw.uniform(0, 0.04))
        was_running = kill(process)
        unfinished = [path.name for path in (killed / "checkpoints").glob("*.tmp")]
        last = sum(1 for _ in (killed / "metrics.jsonl").open())
        print(f"kill amid a {kind}: running {was_running}, {last} lines logged, half-written {unfinished}")
        num_kills += was_running
        num_amid_a_save += was_running and bool(unfinished)
    assert num_kills >= 3
    assert num_amid_a_save >= 1

    resumed = trainer_command.run("--workdir", killed, *ARGUMENTS, **OPTIMISED)
    assert resumed.status == 0, resumed.errors
    record, steps, evaluations = read_run(killed)
    assert record["status"] == "completed"
    assert len(record["attempts"]) >= num_kills
    assert [row["step"] for row in steps] == list(range(1, NUM_STEPS + 1))
    assert {attempt["status"] for attempt in record["attempts"]} <= {"killed", "completed"}
    assert record["attempts"][-1]["status"] != "killed" or "the last attempt ended without a word" in resumed.output
    shown = read_tensorboard(killed / "tensorboard")
    for name in ("loss", "z_loss", "grad_norm", "learning_rate", "num_targets"):
        points = {row["step"]: row[name] for row in steps}
        assert shown[f"train/{name}"] == pytest.approx(points, rel=1e-6), name
    points = {row["step"]: row["validation_nats_per_token"] for row in evaluations}
    assert shown["validation/nats_per_token"] == pytest.approx(points, rel=1e-6)
    for name in ("loss", "z_loss", "grad_norm", "learning_rate", "num_targets"):
        assert [row[name] for row in steps] == [row[name] for row in expected_steps], name
    assert evaluations == expected_evaluations
    leaves, expected_leaves = jax.tree.leaves(final_state(killed)), jax.tree.leaves(final_state(whole))
    assert len(leaves) == len(expected_leaves) > 20
    for got, want in zip(leaves, expected_leaves, strict=True):
        assert got.dtype == want.dtype
        assert np.asarray(got).tobytes() == np.asarray(want).tobytes()
    assert not list((killed / "checkpoints").glob("*.tmp"))
