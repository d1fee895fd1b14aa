"""A workdir is claimed by one run, with a lock that is a file of its own; damage in it is told or mended."""

from __future__ import annotations

import json
import os
import shutil
import stat
import time
from pathlib import Path

import pytest

from kernels import CausalMask
from layers import GPTConfig
from trainer.config import TrainConfig
from trainer.config.file import config_to_json
from trainer.errors import TrainingFailed, UserMistake
from trainer.files.atomic import write_atomically
from trainer.observers.metrics import LoggedEntries, MetricsFile
from trainer.observers.observer import VALIDATION_LOSS, Start
from trainer.observers.record import RunRecord
from trainer.observers.times import TimeAccount
from trainer.saved_run import held_history
from trainer.workdir import claim_workdir

CONFIG = TrainConfig(
    "tiny",
    GPTConfig(vocab_size=260, num_layers=1, width=16, num_heads=2, num_kv_heads=1, head_dim=8, masks=(CausalMask(),)),
    num_steps=200,
    sequence_length=64,
)


def test_the_lock_is_for_its_owner_alone(tmp_path):
    before = os.umask(0)
    try:
        claim_workdir(tmp_path, CONFIG)
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / ".lock").stat().st_mode) == 0o600


@pytest.mark.parametrize("kind", ["link", "dangling link", "folder"])
def test_a_lock_that_is_not_a_file_is_refused(tmp_path, kind):
    lock, elsewhere = tmp_path / "run" / ".lock", tmp_path / "elsewhere"
    lock.parent.mkdir()
    if kind == "link":
        elsewhere.write_text("mine")
    match kind:
        case "link" | "dangling link":
            lock.symlink_to(elsewhere)
        case "folder":
            lock.mkdir()
    with pytest.raises(UserMistake, match=r"/run/\.lock .*; remove it$"):
        claim_workdir(lock.parent, CONFIG)
    assert [path.name for path in lock.parent.iterdir()] == [".lock"]
    assert elsewhere.exists() == (kind == "link")


@pytest.mark.parametrize("kind", ["link", "pipe", "file"])
def test_what_lies_where_a_file_is_written_first_is_not_written_to(tmp_path, kind):
    unfinished, elsewhere = tmp_path / "record.json.tmp", tmp_path / "elsewhere"
    elsewhere.write_text("mine")
    match kind:
        case "link":
            unfinished.symlink_to(elsewhere)
        case "pipe":
            os.mkfifo(unfinished)
        case "file":
            unfinished.write_text("half")
    write_atomically(tmp_path / "record.json", "whole")
    assert not (tmp_path / "record.json").is_symlink()
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"record.json": "whole", "elsewhere": "mine"}


def replace(path: Path, kind: str) -> None:
    """Puts something of another kind in a place."""
    shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    match kind:
        case "folder":
            path.mkdir()
            (path / "mine").write_text("mine")
        case "file":
            path.write_text("mine")
        case "pipe":
            os.mkfifo(path)
        case "dangling link":
            path.symlink_to("nowhere")


@pytest.mark.parametrize(
    ("name", "kind"),
    [(name, kind) for name in ("record.json", "metrics.jsonl", "config.json") for kind in ("folder", "pipe")]
    + [(name, kind) for name in ("checkpoints", "tensorboard") for kind in ("file", "pipe", "dangling link")],
)
def test_what_is_of_another_kind_is_refused_and_left_alone(tmp_path, name, kind):
    replace(tmp_path / name, kind)
    expected = "a folder" if name in ("checkpoints", "tensorboard") else "a file that can be read"
    with pytest.raises(UserMistake, match=f"{name} is not {expected}; put the run's own back, move it elsewhere, or"):
        claim_workdir(tmp_path, CONFIG)
    assert {path.name for path in tmp_path.iterdir()} == {".lock", name}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[]",
        b'\xff{"step": 3}',
        b"[" * 100_000,
        b'{"attempts": null}',
        b'{"attempts": [3]}',
        b'{"step": 1' + b"0" * 5000 + b"}",
        b'{"step": true}',
        b'{"step": -1}',
        b'{"step": 2147483648}',
        b'{"num_skipped_updates": "3"}',
        b'{"steps": {"first_s": NaN}}',
        b'{"attempts": [{"time": {"total_s": 1' + b"0" * 400 + b"}}]}",
        b'{"steps": ' + b"[" * 30 + b"]" * 30 + b"}",
    ],
)
def test_a_damaged_record_is_set_aside(tmp_path, content, watched_console):
    path = tmp_path / "record.json"
    path.write_bytes(content)
    RunRecord(path, ["command"], time.time(), TimeAccount(time.perf_counter()), watched_console)
    message = f"{path} can't be read as a record; it is now record.json.damaged"
    assert watched_console.told == [("warning", message)]
    assert (tmp_path / "record.json.damaged").read_bytes() == content
    assert json.loads(path.read_text())["attempts"] == []


@pytest.mark.parametrize("content", [b"{}", b'{"steps": 3, "status": [], "attempts": [{}]}'])
def test_a_record_of_few_words_is_an_attempt_all_the_same(tmp_path, content, watched_console):
    path = tmp_path / "record.json"
    path.write_bytes(content)
    RunRecord(path, ["command"], time.time(), TimeAccount(time.perf_counter()), watched_console)
    assert watched_console.told == []
    json.loads(path.read_text())


@pytest.mark.parametrize("hostile", [-1e30, 1e30, 10**30, "3", None, [], {}, True])
@pytest.mark.parametrize("status", ["running", "failed"])
def test_what_no_run_measures_counts_as_no_time(tmp_path, hostile, status, watched_console):
    path = tmp_path / "record.json"
    times = dict.fromkeys(("total_s", "step_s", "compile_s", "data_wait_s", "unrecorded_s"), hostile)
    attempt = {"status": status, "started": "0001-01-01T00:00:00", "updated": "0001-01-01T00:00:00", "compile": {}}
    path.write_text(json.dumps({**attempt, "time": times, "attempts": [{**attempt, "time": times}]}))
    record = RunRecord(path, [], time.time(), TimeAccount(time.perf_counter() - 10.0), watched_console, (3, 1e300))
    record.useful_step_s = 5.0
    record.update()
    written = json.loads(path.read_text(), parse_constant=pytest.fail)
    assert 0.4 < written["goodput"]["fraction"] <= 0.5
    assert 10.0 <= written["goodput"]["total_s"] < 13.0
    assert not any("can't be read" in line for _, line in watched_console.told)


WHOLE = b"""{"step": 1, "loss": 2.5}
{"step": 2, "loss": null}
{"step": 2, "validation_nats_per_token": 3, "validation_digest": "d"}
"""


@pytest.mark.parametrize(
    "bad",
    [
        b"",
        b"[]",
        b'{"loss": 3.0}',
        b'{"step": true}',
        b'{"step": 2.0}',
        b'{"step": -1, "loss": 1.0}',
        b'{"step": 2, "validation_nats_per_token": "low"}',
        b'{"step": 2, "validation_nats_per_token": 3, "validation_digest": 3}',
        b'{"step": 2, "loss": NaN}',
        b'{"step": 2, "loss": 1' + b"0" * 400 + b"}",
        b'{"step": 2, "loss": 1' + b"0" * 5000 + b"}",
        b'\xff\xfe{"step": 2}',
        b"[" * 60_000,
        b"x" * 300_000,
    ],
)
def test_what_is_no_row_of_the_metrics_is_left_out_and_kept_aside(tmp_path, bad, watched_console):
    metrics = tmp_path / "metrics.jsonl"
    content = bad + b"\n" + WHOLE + bad + b"\n" + b'{"step": 3, "loss": 1.0}\n{"step": 4, "lo'
    metrics.write_bytes(content)

    def start() -> list[dict]:
        entries, log = LoggedEntries(metrics, 2, watched_console), MetricsFile(metrics, watched_console)
        logged = list(entries)
        log.observe(Start(2, CONFIG.num_steps, entries, []))
        log.close()
        return logged

    assert [entry["validation_digest"] for entry in start() if VALIDATION_LOSS in entry] == ["d"]
    assert metrics.read_bytes() == WHOLE
    message = f"{metrics}: 2 unreadable lines are left out; metrics.jsonl.damaged has them all"
    assert watched_console.told == [("warning", message)]
    assert (tmp_path / "metrics.jsonl.damaged").read_bytes() == content
    start()
    assert len(watched_console.told) == 1, "the last line of a killed run is no damage"


@pytest.mark.parametrize(
    "content",
    [None, b"", b"null", b"[]", b"{}", b"{", b"\xff", b"[" * 100_000, b'{"name": {"name": ' * 400]
    + [b'{"name": "x", "model": {}, "num_steps": 5, "mesh": %s}' % odd for odd in (b"3", b"[]", b'{"data": []}')],
)
def test_checkpoints_whose_config_cannot_be_read_are_left_alone(tmp_path, content):
    (tmp_path / "checkpoints" / "5").mkdir(parents=True)
    if content is not None:
        (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(UserMistake, match=r"holds checkpoints, but no readable config\.json to tell whose: .*--work"):
        claim_workdir(tmp_path, CONFIG)


def test_a_config_that_an_earlier_version_wrote_lacks_fields(tmp_path):
    held = config_to_json(CONFIG)
    del held["data"]["allow_changed"], held["samples"]
    (tmp_path / "checkpoints" / "5").mkdir(parents=True)
    (tmp_path / "config.json").write_text(json.dumps(held))
    claim_workdir(tmp_path, CONFIG)
    assert json.loads((tmp_path / "config.json").read_text()) == held, "not before the run has resumed"


@pytest.mark.parametrize("history", [None, {"config": 3, "changes": []}])
def test_a_checkpoint_that_tells_no_config_or_an_odd_one(tmp_path, history):
    with pytest.raises(TrainingFailed, match="10 is whole, but this version can't restore it: its config: "):
        held_history(tmp_path / "10", history)
