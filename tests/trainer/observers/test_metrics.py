"""TensorBoard shows what metrics.jsonl holds, whatever befell the process, the clock and the disk."""

from __future__ import annotations

import json
import time
import tracemalloc

import numpy as np
import pytest

from trainer.compile.history import Recompile
from trainer.compile.recompilation import ArgumentChange
from trainer.compile.stages import CompileReport
from trainer.observers.metrics import LoggedEntries, MetricsFile, last_logged
from trainer.observers.observer import Evaluated, Evaluation, LogWindow, Observers, PhaseBegun, Start, make_entry
from trainer.observers.tensorboard import TensorBoard

TAGS = {
    "loss": "train/loss",
    "grad_norm": "train/grad_norm",
    "num_targets": "train/num_targets",
    "num_tokens": "train/num_tokens",
    "step_s": "speed/step_s",
    "validation_nats_per_token": "validation/nats_per_token",
}


class Logs(Observers):
    """Both logs of an attempt."""

    def write(self, entries) -> None:
        """Logs entries as a run does, in one window; which of them are evaluations makes no difference to the logs."""
        entries = [
            make_entry(entry["step"], {name: entry[name] for name in entry if name != "step"}) for entry in entries
        ]
        self.observe(LogWindow(0, 0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, entries))


@pytest.fixture
def make_entries(rng: np.random.Generator):
    """Entries of steps; each fourth ends a window and is evaluated."""

    def make(first: int, last: int) -> list[dict[str, float]]:
        entries = []
        for step in range(first, last + 1):
            loss, norm, speed, validation = rng.uniform(0, 9, 4).tolist()
            counts = {name: int(rng.integers(1, 10**6)) for name in ("num_targets", "num_tokens")}
            entries.append({"step": step, "loss": loss, "grad_norm": norm, **counts})
            if step % 4 == 0:
                entries[-1]["step_s"] = speed
                entries.append({"step": step, "validation_nats_per_token": validation})
        return entries

    return make


@pytest.fixture
def start(tmp_path, watched_console):
    """Starts an attempt at the run in `tmp_path`."""

    def start(restored_step: int, reports=()) -> Logs:
        path = tmp_path / "metrics.jsonl"
        logs = Logs(MetricsFile(path, watched_console), TensorBoard(tmp_path / "tensorboard", watched_console))
        logs.observe(Start(restored_step, 100, LoggedEntries(path, restored_step, watched_console), reports))
        return logs

    return start


def read_metrics(folder) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def assert_tensorboard_shows_the_metrics(folder, read_tensorboard) -> None:
    shown = read_tensorboard(folder / "tensorboard")
    expected, times = {}, {}
    for entry in read_metrics(folder):
        for name, value in entry.items():
            if name in TAGS and value is not None:
                expected.setdefault(TAGS[name], {})[entry["step"]] = value
                times.setdefault(TAGS[name], {})[entry["step"]] = entry["time"]
    assert {tag: points for tag, points in shown.items() if not tag.startswith("compile/")} == {
        tag: pytest.approx(points, rel=1e-6) for tag, points in expected.items()
    }
    shown_times = read_tensorboard(folder / "tensorboard", wall_times=True)
    assert {tag: shown_times[tag] for tag in times} == times


def without_times(entries) -> list[dict]:
    return [{name: value for name, value in entry.items() if name != "time"} for entry in entries]


@pytest.mark.parametrize("clock", [0.0, -86_400.0], ids=["steady clock", "clock set back by a day"])
def test_after_every_resumption_tensorboard_shows_the_metrics(
    tmp_path, rng, start, make_entries, read_tensorboard, monkeypatch, clock
):
    real_time, offset, restored = time.time, 0.0, 0
    monkeypatch.setattr(time, "time", lambda: real_time() + offset)
    (tmp_path / "tensorboard").mkdir()
    foreign = tmp_path / "tensorboard" / "events.out.tfevents.1234567890.elsewhere"
    foreign.write_bytes(b"")
    names = [foreign.name]
    for attempt in range(5):
        log = start(restored)
        [ours] = {path.name for path in (tmp_path / "tensorboard").iterdir()} - {*names}
        names.append(ours)
        assert names == sorted(names), "the newest sorts last"
        assert_tensorboard_shows_the_metrics(tmp_path, read_tensorboard)
        assert [entry["step"] for entry in read_metrics(tmp_path) if "loss" in entry] == list(range(1, restored + 1))
        last = restored + int(rng.integers(2, 12))
        entries = make_entries(restored + 1, last)
        log.write(entries[:2])
        log.write(entries[2:])
        assert without_times(read_metrics(tmp_path))[-len(entries) :] == entries
        assert_tensorboard_shows_the_metrics(tmp_path, read_tensorboard)
        assert last_logged(tmp_path / "metrics.jsonl")[0] == last
        restored, offset = int(rng.integers(restored, last + 1)), offset + clock
        if attempt == 2:
            log.close()  # the others are killed
        else:
            events = tmp_path / "tensorboard" / ours
            events.write_bytes(events.read_bytes() + bytes(9))  # amid an event


def test_resuming_keeps_no_list_of_what_was_logged(tmp_path, start, make_entries):
    num_steps = 1500
    entries = [entry for entry in make_entries(1, num_steps) if "loss" in entry]
    start(0).write(entries)
    size = (tmp_path / "metrics.jsonl").stat().st_size
    tracemalloc.start()
    try:
        log = start(num_steps)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    log.close()
    assert last_logged(tmp_path / "metrics.jsonl")[0] == num_steps
    assert peak < size / 2, f"{peak:,} bytes for a log of {size:,}"


def test_a_log_that_begins_late_tells_an_evaluation_of_the_last_step_once(
    tmp_path, start, make_entries, read_tensorboard, limit_file_size
):
    start(0).write(make_entries(1, 3))
    with limit_file_size(10):
        log = start(3)
    log.observe(Evaluated.now(3, Evaluation(2.5, None, 7), "d"))
    log.close()
    assert [entry["step"] for entry in read_metrics(tmp_path)] == [1, 2, 3, 3]
    assert_tensorboard_shows_the_metrics(tmp_path, read_tensorboard)


def test_what_is_not_finite_is_null_and_no_point(tmp_path, start, read_tensorboard):
    start(0).write([{"step": 1, "loss": float("nan"), "grad_norm": float("inf"), "num_targets": 3}])
    [entry] = without_times(read_metrics(tmp_path))
    assert entry == {"step": 1, "loss": None, "grad_norm": None, "num_targets": 3}
    assert_tensorboard_shows_the_metrics(tmp_path, read_tensorboard)


def test_what_earlier_attempts_compiled_is_kept_up_to_the_step_gone_on_from(tmp_path, start, read_tensorboard):
    def report(name: str, seconds: float) -> CompileReport:
        return CompileReport(name, seconds, 0.0, 0.0, False, None)

    def recompile(step: int, seconds: float) -> Recompile:
        return Recompile(
            step, "2026-01-01", report("train_step", seconds), (ArgumentChange("batch", "shape", "2", "3"),)
        )

    log = start(0, [report("init_state", 1.0), report("train_step", 2.0)])
    for step in (3, 6, 9):
        log.observe(recompile(step, 10.0 + step))
    log = start(6, [report("train_step", 3.0)])
    log.observe(recompile(8, 20.0))
    start(8, [report("train_step", 4.0)])
    shown = read_tensorboard(tmp_path / "tensorboard")
    assert shown["compile/init_state/trace_s"] == {0: 1.0}
    assert shown["compile/train_step/trace_s"] == {0: 2.0, 3: 13.0, 6: 3.0, 8: 4.0}
    assert sorted(shown["compile/recompile/text_summary"]) == [3, 6, 8]
    start(0, [report("init_state", 5.0)])
    shown = read_tensorboard(tmp_path / "tensorboard")
    assert shown["compile/init_state/trace_s"] == {0: 5.0}
    assert {tag.split("/")[1] for tag in shown} == {"init_state"}


def test_a_curve_shows_the_sequence_length_of_each_phase(tmp_path, watched_console, read_tensorboard):
    board = TensorBoard(tmp_path, watched_console, [32, 64])
    reports = [CompileReport("train_step", 2.0, 0.0, 0.0, False, None)]
    board.observe(Start(0, 3, [], []))
    for step, phase in enumerate((1, 2, 2), 1):
        if step == 2:
            board.observe(PhaseBegun(1, "phase 2", reports))
        entry = make_entry(step, {"loss": 1.0, "phase": phase})
        board.observe(LogWindow(step, 3, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, [entry]))
        board.observe(Evaluated.now(step, Evaluation(2.5, None, 7), "d", phase))
    shown = read_tensorboard(tmp_path)
    assert shown["phase/sequence_length"] == {1: 32, 2: 64, 3: 64}
    assert shown["compile/train_step/trace_s"] == {1: 2.0}
    assert not [tag for tag in shown if tag.endswith("/phase")]


def test_a_disk_that_fills_and_empties_loses_nothing(
    tmp_path, rng, start, make_entries, read_tensorboard, watched_console, limit_file_size
):
    log, expected = start(0), []
    for window in range(20):
        entries = make_entries(8 * window + 1, 8 * window + 8)
        expected += entries
        if rng.random() < 0.5 and window < 19:
            begun = time.perf_counter()
            with limit_file_size(int(rng.integers(0, 20_000))):
                log.write(entries)
            assert time.perf_counter() - begun < 1
        else:
            log.write(entries)
            assert without_times(read_metrics(tmp_path)) == expected
            assert_tensorboard_shows_the_metrics(tmp_path, read_tensorboard)
    log.close()
    assert without_times(read_metrics(tmp_path)) == expected
    assert_tensorboard_shows_the_metrics(tmp_path, read_tensorboard)


def test_a_file_in_the_place_of_tensorboards_folder_is_told_and_the_metrics_are_written(
    tmp_path, start, make_entries, watched_console
):
    (tmp_path / "tensorboard").write_text("mine")
    log = start(0)
    entries = make_entries(1, 3)
    log.write(entries)
    assert without_times(read_metrics(tmp_path)) == entries
    [(kind, line)] = watched_console.told
    assert kind == "warning"
    assert f"{tmp_path}/tensorboard/events.out.tfevents" in line
    assert "can't be written: File exists" in line
