"""A workdir is claimed by one run, with a lock that is a file of its own; damage in it is told or mended."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import shutil
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import rich.console
from jax.sharding import Mesh

from kernels import CausalMask
from layers import GPTConfig
from tests.trainer.checkpoint_files import set_history
from trainer.config import TrainConfig
from trainer.config.file import config_to_json
from trainer.data import Corpus, make_train_iterator
from trainer.data.documents import DOCUMENT_DTYPE, Delimiters, Documents
from trainer.data.tokenizers import ByteTokenizer
from trainer.data.unigram import UnigramEstimate
from trainer.errors import TrainingFailed, UserMistake
from trainer.files.atomic import write_atomically
from trainer.launch.peers import Peers
from trainer.loop.training_loop import TrainingLoop
from trainer.observers.metrics import LoggedEntries, MetricsFile
from trainer.observers.observer import VALIDATION_DIGEST, VALIDATION_LOSS, Start, make_entry
from trainer.observers.record import RunRecord
from trainer.observers.times import TimeAccount
from trainer.terminal.console import Console
from trainer.workdir import claim_workdir

CONFIG = TrainConfig(
    "tiny",
    GPTConfig(vocab_size=260, num_layers=1, width=16, num_heads=2, num_kv_heads=1, head_dim=8, masks=(CausalMask(),)),
    num_steps=200,
    sequence_length=64,
)


def make_batches():
    length = 640
    table = np.zeros(1, DOCUMENT_DTYPE)
    table["length"] = length
    documents = Documents((np.arange(length) % 251,), table, Delimiters(256, 256))
    corpus = Corpus("text", ByteTokenizer(), documents, documents, "f" * 64, UnigramEstimate(5.0, 1))
    return make_train_iterator(corpus, sequence_length=64, batch_size=1, seed=0, num_prefetch_batches=1)


class Watched(Console):
    """Prints nowhere, and keeps the notes and warnings."""

    def __init__(self):
        super().__init__(rich.console.Console(file=io.StringIO()))
        self.notes: list[str] = []

    def note(self, line: str) -> None:
        self.notes.append(line.removeprefix("warning: "))


@dataclasses.dataclass
class Started:
    """A run that has come to its first step."""

    loop: TrainingLoop
    record: dict
    entries: list[dict]
    notes: list[str]


@pytest.fixture(scope="module")
def start() -> Iterator[Callable[[Path], Started]]:
    """Starts a run in a workdir as the command does, but compiles nothing; a few numbers are its state."""

    def compile_nothing(*_: object, with_init: bool, **__: object) -> SimpleNamespace:
        return SimpleNamespace(init_state=(lambda: {"w": jnp.zeros(3)}) if with_init else None, reports=())

    def run(path: Path) -> Started:
        console, account = Watched(), TimeAccount(time.perf_counter())
        workdir = claim_workdir(path, CONFIG)
        console.notes += workdir.notes
        record = RunRecord(workdir.record, ["command"], time.time(), account, console)
        zeros = jnp.zeros(3)
        state = {"w": jax.ShapeDtypeStruct(zeros.shape, zeros.dtype, sharding=zeros.sharding)}
        functions = SimpleNamespace(abstract_state=state, mesh=Mesh(np.array(jax.devices()[:1]), "data"))
        setup = SimpleNamespace(config=CONFIG, batches=make_batches(), functions=functions, validation_digest="d")
        stop = SimpleNamespace(requested=False)
        this = SimpleNamespace(
            console=console, record=record, account=account, stop=stop, stalled=pytest.fail, peers=Peers()
        )
        loop = TrainingLoop(setup, workdir, this)
        try:
            loop.restore()
            loop.compile()
            for _ in range(5):
                next(setup.batches)
            loop.progress.step += 5
            loop.saver.save(loop.snapshot)
            record.update(status="preempted")
        finally:
            loop.close()
        entries = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
        return Started(loop, json.loads((path / "record.json").read_text()), entries, console.notes)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("trainer.loop.training_loop.compile_steps", compile_nothing)
        yield run


@pytest.fixture(scope="module")
def resumed_once(start, tmp_path_factory) -> Path:
    """The workdir of a run with two checkpoints, 5 and 10, and some metrics."""
    path = tmp_path_factory.mktemp("resumed") / "run"
    start(path)
    entries = [make_entry(step, {"loss": 1.0}) for step in range(1, 6)]
    evaluation = make_entry(5, {VALIDATION_LOSS: 1.0}) | {VALIDATION_DIGEST: "d"}
    log = MetricsFile(path / "metrics.jsonl", Watched())
    log.observe(Start(5, CONFIG.num_steps, [*entries, evaluation], []))
    log.close()
    again = Path(shutil.copytree(path, path.with_name("again")))  # whose lock nobody holds
    start(again)
    return again


@pytest.fixture
def workdir(resumed_once, tmp_path) -> Path:
    """A copy to spoil."""
    return Path(shutil.copytree(resumed_once, tmp_path / "run"))


def test_the_lock_is_for_its_owner_alone(tmp_path):
    before = os.umask(0)
    try:
        claim_workdir(tmp_path, CONFIG)
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / ".lock").stat().st_mode) == 0o600


@pytest.mark.parametrize("kind", ["link", "dangling link", "folder", "pipe"])
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
        case "pipe":
            os.mkfifo(lock)
    with pytest.raises(UserMistake, match=r"/run/\.lock .*; remove it$"):
        claim_workdir(lock.parent, CONFIG)
    assert [path.name for path in lock.parent.iterdir()] == [".lock"]
    assert elsewhere.exists() == (kind == "link")


@pytest.mark.parametrize("kind", ["link", "folder", "pipe", "file"])
def test_what_lies_where_a_file_is_written_first_is_not_written_to(tmp_path, kind):
    unfinished, elsewhere = tmp_path / "record.json.tmp", tmp_path / "elsewhere"
    elsewhere.write_text("mine")
    match kind:
        case "link":
            unfinished.symlink_to(elsewhere)
        case "folder":
            unfinished.mkdir()
        case "pipe":
            os.mkfifo(unfinished)
        case "file":
            unfinished.write_text("half")
    write_atomically(tmp_path / "record.json", "whole")
    assert (tmp_path / "record.json").read_text() == "whole"
    assert not (tmp_path / "record.json").is_symlink()
    assert elsewhere.read_text() == "mine"
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"record.json", "elsewhere"} | ({"record.json.tmp.foreign"} if kind == "folder" else set())


def test_files_that_cannot_be_read_are_set_aside(workdir, start, monkeypatch):
    access = os.access  # to root everything is readable
    monkeypatch.setattr(
        "trainer.workdir.os.access", lambda path, mode: path.name != "record.json" and access(path, mode)
    )
    started = start(workdir)
    assert f"{workdir}/record.json is not a file that can be read; it is now record.json.damaged" in started.notes
    assert started.record["attempts"] == []


def test_event_files_of_another_kind_are_left_alone(workdir, start):
    odd = workdir / "tensorboard" / "events.out.tfevents.0999999999.flax-longcontext"
    odd.mkdir()
    os.mkfifo(workdir / "tensorboard" / "events.out.tfevents.2999999999.flax-longcontext")
    assert start(workdir).loop.progress.step == 15
    assert odd.is_dir()


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


def test_an_undamaged_workdir_resumes_without_a_word(workdir, start):
    started = start(workdir)
    assert started.notes == [f"resumed at step 10/200 from {workdir}/checkpoints"]
    assert [entry["step"] for entry in started.entries] == [1, 2, 3, 4, 5, 5]


@pytest.mark.parametrize(
    ("name", "kind"),
    [(name, kind) for name in ("record.json", "metrics.jsonl") for kind in ("folder", "pipe", "dangling link")]
    + [("tensorboard", kind) for kind in ("file", "pipe", "dangling link")],
)
def test_what_is_of_another_kind_is_set_aside(workdir, start, name, kind):
    replace(workdir / name, kind)
    before = os.lstat(workdir / name)
    (workdir / f"{name}.damaged").write_text("an earlier one")
    started = start(workdir)
    expected = "a folder" if name == "tensorboard" else "a file"
    assert f"{workdir / name} is not {expected} that can be read; it is now {name}.damaged-2" in started.notes
    assert os.path.samestat(os.lstat(workdir / f"{name}.damaged-2"), before)
    assert (workdir / f"{name}.damaged").read_text() == "an earlier one"
    assert started.loop.progress.step == 15
    assert started.record["step"] == 10


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"null",
        b"[]",
        b"3",
        b'"x"',
        b"{",
        b'\xff{"step": 3}',
        b"\0" * 4096,
        b"[" * 100_000,
        b'{"attempts": 3}',
        b'{"attempts": null}',
        b'{"attempts": [3]}',
        b'{"attempts": {"a": 1}}',
        b'{"step": 1' + b"0" * 5000 + b"}",
        b'{"step": "3"}',
        b'{"step": null}',
        b'{"step": true}',
        b'{"step": -1}',
        b'{"step": 2147483648}',
        b'{"num_skipped_updates": "3"}',
        b'{"num_skipped_updates": -1}',
        b'{"steps": {"first_s": NaN}}',
        b'{"time": {"total_s": 1e400}}',
        b'{"time": {"total_s": -Infinity}}',
        b'{"attempts": [{"time": {"total_s": 1' + b"0" * 400 + b"}}]}",
        b'{"steps": ' + b"[" * 30 + b"]" * 30 + b"}",
    ],
)
def test_a_damaged_record_is_set_aside(tmp_path, content):
    path = tmp_path / "record.json"
    path.write_bytes(content)
    console = Watched()
    RunRecord(path, ["command"], time.time(), TimeAccount(time.perf_counter()), console)
    assert console.notes == [f"{path} can't be read as a record; it is now record.json.damaged"]
    assert (tmp_path / "record.json.damaged").read_bytes() == content
    assert json.loads(path.read_text())["attempts"] == []


@pytest.mark.parametrize("content", [b"{}", b'{"steps": 3, "status": [], "attempts": [{}]}'])
def test_a_record_of_few_words_is_an_attempt_all_the_same(tmp_path, content):
    path = tmp_path / "record.json"
    path.write_bytes(content)
    console = Watched()
    RunRecord(path, ["command"], time.time(), TimeAccount(time.perf_counter()), console)
    assert console.notes == []
    json.loads(path.read_text())


@pytest.mark.parametrize("hostile", [-1e30, 1e30, 10**30, "3", None, [], {}, True])
@pytest.mark.parametrize("status", ["running", "failed"])
def test_what_no_run_measures_counts_as_no_time(tmp_path, hostile, status):
    path, console = tmp_path / "record.json", Watched()
    times = dict.fromkeys(("total_s", "step_s", "compile_s", "data_wait_s", "unrecorded_s"), hostile)
    attempt = {"status": status, "started": "0001-01-01T00:00:00", "updated": "0001-01-01T00:00:00", "compile": {}}
    path.write_text(json.dumps({**attempt, "time": times, "attempts": [{**attempt, "time": times}]}))
    record = RunRecord(path, [], time.time(), TimeAccount(time.perf_counter() - 10.0), console, (3, 1e300))
    record.useful_step_s = 5.0
    record.update()
    written = json.loads(path.read_text(), parse_constant=pytest.fail)
    assert 0.4 < written["goodput"]["fraction"] <= 0.5
    assert 10.0 <= written["goodput"]["total_s"] < 13.0
    assert not any("can't be read" in note for note in console.notes)


WHOLE = b"""{"step": 1, "loss": 2.5}
{"step": 2, "loss": null}
{"step": 2, "validation_nats_per_token": 3, "validation_digest": "d"}
"""


@pytest.mark.parametrize(
    "bad",
    [
        b"null",
        b"",
        b"3",
        b"[]",
        b"{}",
        b'{"loss": 3.0}',
        b'{"step": null}',
        b'{"step": "2"}',
        b'{"step": true}',
        b'{"step": 2.0}',
        b'{"step": [2]}',
        b'{"step": 2, "validation_nats_per_token": "low"}',
        b'{"step": 2, "loss": {}}',
        b'{"step": 2, "validation_nats_per_token": 3, "validation_digest": 3}',
        b'{"step": -1, "loss": 1.0}',
        b'{"step": 2, "loss": 1' + b"0" * 400 + b"}",
        b'{"step": 2, "loss": NaN}',
        b'{"step": 2, "loss": 1' + b"0" * 5000 + b"}",
        b'\xff\xfe{"step": 2}',
        b"\0" * 100,
        b"[" * 60_000,
        b"x" * 300_000,
    ],
)
def test_what_is_no_row_of_the_metrics_is_left_out_and_kept_aside(tmp_path, bad):
    metrics = tmp_path / "metrics.jsonl"
    content = bad + b"\n" + WHOLE + bad + b"\n" + b'{"step": 3, "loss": 1.0}\n{"step": 4, "lo'
    metrics.write_bytes(content)
    console = Watched()

    def start(console: Watched) -> list[dict]:
        entries, log = LoggedEntries(metrics, 2, console), MetricsFile(metrics, console)
        logged = list(entries)
        log.observe(Start(2, CONFIG.num_steps, entries, []))
        log.close()
        return logged

    entries = start(console)
    assert metrics.read_bytes() == WHOLE
    assert [entry["validation_digest"] for entry in entries if VALIDATION_LOSS in entry] == ["d"]
    assert console.notes == [f"{metrics}: 2 unreadable lines are left out; metrics.jsonl.damaged has them all"]
    assert (tmp_path / "metrics.jsonl.damaged").read_bytes() == content
    again = Watched()
    start(again)
    assert again.notes == [], "the last line of a killed run is no damage"


@pytest.mark.parametrize(
    "content",
    [None, b"", b"null", b"[]", b"{}", b"{", b"\xff", b"[" * 100_000, b'{"name": {"name": ' * 400, "folder", "pipe"]
    + [b'{"name": "x", "model": {}, "num_steps": 5, "mesh": %s}' % odd for odd in (b"3", b"[]", b'{"data": []}')],
)
def test_checkpoints_whose_config_cannot_be_read_are_left_alone(tmp_path, content):
    (tmp_path / "checkpoints" / "5").mkdir(parents=True)
    if isinstance(content, str):
        replace(tmp_path / "config.json", content)
    elif content is not None:
        (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(UserMistake, match=r"holds checkpoints, but no readable config\.json to tell whose: .*--work"):
        claim_workdir(tmp_path, CONFIG)


@pytest.mark.parametrize("kind", ["folder", "pipe", "dangling link"])
def test_a_config_of_another_kind_is_set_aside_where_nothing_has_been_trained(tmp_path, kind):
    replace(tmp_path / "config.json", kind)
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "note.txt").write_text("mine")
    workdir = claim_workdir(tmp_path, CONFIG)
    assert workdir.notes == (f"{tmp_path}/config.json is not a file that can be read; it is now config.json.damaged",)
    assert json.loads(workdir.config.read_text()) == config_to_json(CONFIG)


@pytest.mark.parametrize("kind", ["file", "pipe", "dangling link"])
def test_checkpoints_that_are_not_a_folder_are_not_written_over(tmp_path, kind):
    replace(tmp_path / "checkpoints", kind)
    with pytest.raises(UserMistake, match="checkpoints is not a folder, or a link to one that isn't there; put the"):
        claim_workdir(tmp_path, CONFIG)
    assert {path.name for path in tmp_path.iterdir()} == {".lock", "checkpoints"}


def test_a_config_that_an_earlier_version_wrote_lacks_fields(tmp_path):
    held = config_to_json(CONFIG)
    del held["data"]["allow_changed"], held["samples"]
    (tmp_path / "checkpoints" / "5").mkdir(parents=True)
    (tmp_path / "config.json").write_text(json.dumps(held))
    claim_workdir(tmp_path, CONFIG)
    assert json.loads((tmp_path / "config.json").read_text()) == held, "not before the run has resumed"


@pytest.mark.parametrize("history", [None, {"config": 3, "changes": []}])
def test_a_checkpoint_that_tells_no_config_or_an_odd_one(workdir, start, history):
    set_history(workdir / "checkpoints" / "10", history)
    with pytest.raises(TrainingFailed, match="10 is whole, but this version can't restore it: its config: "):
        start(workdir)
