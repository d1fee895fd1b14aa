"""The run record: whole at any moment, its times add up, and no attempt is lost."""

from __future__ import annotations

import json
import statistics
import time

import jax
import pytest

from trainer.files.atomic import write_atomically
from trainer.observers.record import RunRecord, describe_devices, measured_memory
from trainer.observers.times import StepTimes, TimeAccount


@pytest.fixture
def make_record(watched_console):
    def make(path, *last_logged) -> RunRecord:
        account = TimeAccount(time.perf_counter())
        return RunRecord(path, ["python", "-m", "trainer"], time.time(), account, watched_console, *last_logged)

    return make


def test_the_parts_of_the_time_sum_to_the_whole():
    account = TimeAccount(time.perf_counter() - 2.0)
    with account.measure("compile"):
        time.sleep(0.02)
    with account.measure("step"):
        time.sleep(0.01)
    with pytest.raises(ZeroDivisionError), account.measure("step"):
        raise ZeroDivisionError
    told = account.to_json()
    total = told.pop("total_s")
    assert sum(told.values()) == pytest.approx(total)
    assert 0.02 <= told["compile_s"] < 1
    assert 0.01 <= told["step_s"] < 1
    assert told["data_wait_s"] == 0
    assert told["other_s"] == pytest.approx(total - told["compile_s"] - told["step_s"])
    assert total >= 2.03


def test_a_new_record_says_what_runs_and_with_what(tmp_path, make_record):
    make_record(tmp_path / "record.json")
    told = json.loads((tmp_path / "record.json").read_text())
    assert told["schema_version"] == 1
    assert told["status"] == "running"
    assert told["command"] == ["python", "-m", "trainer"]
    assert told["versions"]["jax"] == jax.__version__
    assert told["attempts"] == []


def test_an_attempt_is_kept_by_the_next(tmp_path, make_record):
    path = tmp_path / "record.json"
    first = make_record(path)
    first.update(status="preempted", step=7, steps={"median_s": 0.5}, compile={"train_step": {"cache_hit": False}})
    second = make_record(path)
    assert second["steps"] == {"median_s": 0.5}, "the last measured speed stays until there is a newer one"
    second.update(status="failed", step=9, steps={"median_s": 0.25})
    make_record(path)
    told = json.loads(path.read_text())
    assert [(attempt["status"], attempt["step"], attempt["steps"]["median_s"]) for attempt in told["attempts"]] == [
        ("preempted", 7, 0.5),
        ("failed", 9, 0.25),
    ]
    assert told["attempts"][0]["compile"] == {"train_step": {"cache_hit": False}}
    assert told["status"] == "running"


@pytest.mark.parametrize(
    ("fields", "last_logged_step", "step"),
    [
        ({"step": 20, "compile": {}}, 27, 27),  # the record is written every few seconds alone
        ({"step": 20}, 27, 20),  # killed before it cut the log to its own steps
        ({"step": 30, "compile": {}}, 27, 30),  # the log couldn't be written
    ],
)
def test_an_attempt_that_ended_without_a_word_is_told_and_called_killed(
    tmp_path, make_record, watched_console, fields, last_logged_step, step
):
    path = tmp_path / "record.json"
    make_record(path).update(**fields)
    make_record(path, (last_logged_step, time.time() + 30))
    message = f"the last attempt ended without a word at step {step} (killed, or out of memory?)"
    assert watched_console.told == [("warning", message)]
    [attempt] = json.loads(path.read_text())["attempts"]
    assert (attempt["status"], attempt["step"], attempt["message"]) == ("killed", step, message)
    unrecorded_s = attempt["time"].get("unrecorded_s", 0)
    assert unrecorded_s == (pytest.approx(30, abs=1) if "compile" in fields else 0), "up to the last that it logged"
    assert attempt["time"]["total_s"] == pytest.approx(unrecorded_s, abs=1)


@pytest.mark.parametrize("status", ["completed", "failed", "preempted"])
def test_an_attempt_that_had_its_last_word_is_left_as_it_is(tmp_path, make_record, watched_console, status):
    path = tmp_path / "record.json"
    make_record(path).update(status=status, message="its last word", step=7)
    again = make_record(path, (9, time.time()))
    assert not watched_console.told
    assert again["attempts"] == [json.loads(path.read_text())["attempts"][0]]
    assert (again["attempts"][0]["status"], again["attempts"][0]["message"]) == (status, "its last word")
    assert again["step"] == 7, "until this attempt knows better"


def test_a_record_that_cannot_be_written_is_told_and_written_later(
    tmp_path, make_record, watched_console, limit_file_size
):
    path = tmp_path / "record.json"
    record = make_record(path)
    record.update(step=1)
    with limit_file_size(10):
        record.put(step=2)
        record.update(memory={"host_peak_bytes": 1})
        record.update(message="no room")
        assert [item.name for item in tmp_path.iterdir()] == ["record.json"]
        assert json.loads(path.read_text())["step"] == 1
    record.update(status="completed")
    told = json.loads(path.read_text())
    assert (told["step"], told["message"], told["status"]) == (2, "no room", "completed")
    assert watched_console.told == [
        ("warning", f"{path} can't be written: File too large; training goes on, and the next write tries again"),
        ("note", f"{path} is written again"),
    ]


def test_a_kill_amid_a_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "record.json"
    write_atomically(path, "old")

    def killed(descriptor: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("trainer.files.atomic.os.fsync", killed)
    with pytest.raises(KeyboardInterrupt):
        write_atomically(path, "new, and much longer")
    assert path.read_text() == "old"


@pytest.mark.parametrize("num_windows", [1, 2, 3, 40, 41])
def test_step_times_are_those_of_the_list_of_all_steps_but_the_first_windows(rng, num_windows):
    for _ in range(50):
        windows = [(int(rng.integers(1, 6)), float(rng.uniform(0.1, 9))) for _ in range(num_windows)]
        times = StepTimes()
        for num_steps, seconds in windows:
            times.add_window(num_steps, seconds, num_steps * 100, (0.5 / seconds, 0.75 / seconds))
        steady = windows[1:] or windows
        each = sorted(seconds / num_steps for num_steps, seconds in steady for _ in range(num_steps))
        steady_s = sum(seconds for _, seconds in steady)
        told = times.to_json()
        assert told["num_steps"] == sum(num_steps for num_steps, _ in windows)
        assert told["first_s"] == windows[0][1] / windows[0][0]
        assert told["median_s"] == times.typical_step_s() == statistics.median(each)
        assert told["p90_s"] == each[min(len(each) - 1, int(0.9 * len(each)))]
        assert told["tokens_per_s"] == pytest.approx(100 * len(each) / steady_s)
        assert told["mfu_causal"] == pytest.approx(0.5 * len(steady) / steady_s)
        assert told["mfu_noncausal"] == pytest.approx(0.75 * len(steady) / steady_s)


def test_step_times_take_no_longer_for_windows_of_more_steps():
    times = StepTimes()
    for num_steps, step_s in ((1, 9.0), (10**12, 1.0), (10**12, 2.0), (3, 4.0)):
        times.add_window(num_steps, num_steps * step_s, num_steps, (0.5, 0.5))
    assert (times.typical_step_s(), times.to_json()["p90_s"]) == (2.0, 2.0)


def test_step_times_before_any_step_are_null():
    assert StepTimes().typical_step_s() is None
    assert set(StepTimes().to_json().values()) == {0, None}


def test_devices_and_memory_are_told_in_json():
    devices = jax.devices()
    told = json.loads(json.dumps(describe_devices(devices) | measured_memory(devices[0])))
    assert told["platform"] == devices[0].platform
    assert told["count"] == len(devices)
    assert told["host_peak_bytes"] > 10_000_000
