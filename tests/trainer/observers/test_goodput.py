"""Goodput: of all attempts' time, the part that made the steps which the state holds."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from trainer.observers.goodput import UsefulSteps, goodput

PARTS = ("useful_step_s", "lost_step_s", "compile_s", "data_wait_s", "evaluation_s", "checkpoint_s", "other_s")


def make_attempt(started_s: float, unrecorded_s: float = 0.0, **seconds: float) -> dict:
    """An attempt of the record, that began so many seconds after the first."""
    time = (
        dict.fromkeys(("compile_s", "data_wait_s", "step_s", "evaluation_s", "checkpoint_s", "other_s"), 0.0) | seconds
    )
    began = datetime(2026, 1, 1, tzinfo=UTC) + timedelta(seconds=started_s)
    time |= {"total_s": sum(time.values()) + unrecorded_s, "unrecorded_s": unrecorded_s}
    return {"started": began.isoformat(timespec="milliseconds"), "time": time}


def test_three_attempts_add_up():
    """20 steps of 1 s, saved every 5: killed at step 8, again at 13 when the record knew of 11, and then to the end."""
    attempts = [
        make_attempt(0.0, compile_s=10.0, step_s=8.0, other_s=1.0),
        make_attempt(50.0, unrecorded_s=2.0, compile_s=3.0, step_s=6.0),  # steps 6 to 11, and 12 to 13
        make_attempt(61.0, compile_s=3.0, step_s=10.0, data_wait_s=0.5, evaluation_s=2.0, checkpoint_s=1.5),
    ]
    told = goodput(attempts, useful_step_s=20.0)
    assert told["total_s"] == 19.0 + 11.0 + 17.0
    assert told["fraction"] == pytest.approx(20 / 47)
    assert told["lost_step_s"] == 6.0, "steps 6 to 8 and 11 to 13 were made again"
    assert told["downtime_s"] == 31.0, "19 to 50; the third begins as the second ends"
    assert (told["compile_s"], told["num_attempts"]) == (16.0, 3)
    assert sum(told[part] for part in PARTS) == pytest.approx(told["total_s"])


def test_useful_is_each_step_of_the_log_once_without_waits_and_skipped_updates(rng):
    useful, expected, step, num_skipped = UsefulSteps(), 0.0, 0, 0
    for _ in range(10):
        num_steps = int(rng.integers(1, 6))
        skipped = rng.random(num_steps) < 0.3
        step_s, data_wait_s = float(rng.uniform(1, 2)), float(rng.uniform(0, 1))
        for number, is_skipped in enumerate(skipped, 1):
            step, num_skipped = step + 1, num_skipped + int(is_skipped)
            entry = {"step": step, "loss": None if is_skipped else 1.0, "num_skipped": num_skipped}
            useful.add(entry | ({"step_s": step_s, "data_wait_s": data_wait_s} if number == num_steps else {}))
        useful.add({"step": step, "validation_nats_per_token": 1.0})
        expected += (num_steps * step_s - data_wait_s) * (1 - skipped.mean())
    assert useful.seconds == pytest.approx(expected)


def test_a_log_without_counts_of_skipped_updates_has_none():
    useful = UsefulSteps()
    useful.add({"step": 1, "loss": 2.0, "step_s": 3.0})
    assert useful.seconds == 3.0


@pytest.mark.parametrize("strange", [{}, {"time": "long"}, {"started": "yesterday", "time": {"total_s": None}}])
def test_an_attempt_of_somebody_elses_making_counts_as_nothing(strange):
    attempt = make_attempt(0.0, step_s=4.0, compile_s=4.0)
    told = goodput([strange, attempt], useful_step_s=2.0)
    assert (told["fraction"], told["downtime_s"], told["num_attempts"]) == (0.25, 0.0, 2)


def test_no_time_has_no_fraction():
    assert goodput([], 0.0)["fraction"] is None
