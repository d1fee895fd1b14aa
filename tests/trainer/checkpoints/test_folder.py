"""Entries of `checkpoints/`: foreign ones are left alone, odd metadata is told, and what goes is told."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from layers.pretrained.steps import read_whole
from tests.trainer.checkpoint_files import sign
from trainer.checkpoints.folder import find_damage, read_metadata
from trainer.checkpoints.parameters import FoundCheckpoint, find_newest, restore_params, stream_params
from trainer.checkpoints.training_state import Checkpoints
from trainer.errors import TrainingFailed


def make_state(value: int) -> dict:
    return {"params": {"w": jnp.full((3,), value, jnp.float32)}}


def abstract() -> dict:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), make_state(0))


DATA = {"tokenizer": "byte", "delimiters": [256, 256]}


@pytest.fixture(scope="module")
def two_saved(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("saved") / "checkpoints"
    folder.mkdir()
    checkpoints = Checkpoints(folder, num_kept=2)
    for step in (10, 20):
        checkpoints.save(step, make_state(step), DATA)
    checkpoints.close()
    return folder


@pytest.fixture
def folder(two_saved, tmp_path) -> Path:
    """Checkpoints 10 and 20, to spoil."""
    return Path(shutil.copytree(two_saved, tmp_path / "checkpoints"))


def value_of(params: dict) -> int:
    return int(np.asarray(params["w"])[0])


def add(path: Path, kind: str) -> None:
    """Puts something of somebody's into `checkpoints/`."""
    elsewhere = path.parent.parent / "elsewhere"
    match kind:
        case "file":
            path.write_text("mine")
        case "folder":
            path.mkdir()
            (path / "mine.txt").write_text("mine")
        case "link":
            elsewhere.mkdir(exist_ok=True)
            (elsewhere / "mine.txt").write_text("mine")
            path.symlink_to(elsewhere)
        case "dangling link":
            path.symlink_to(path.parent.parent / "nowhere")
        case "pipe":
            os.mkfifo(path)


FOREIGN = ["note.tmp", "x", os.fsdecode(b"\xff.tmp"), "two\nlines"]
FOREIGN += ["²", "１２", "007", "12 ", "+3", "-3", "1_0", "0", str(10**30), "٣", "x.damaged"]


@pytest.mark.parametrize("kind", ["file", "folder", "link", "dangling link", "pipe"])
def test_what_is_not_the_runs_is_left_alone(folder, kind):
    for name in FOREIGN:
        add(folder / name, kind)
    before = {name: os.lstat(folder / name) for name in FOREIGN}
    checkpoints = Checkpoints(folder, 2)
    assert checkpoints.restore_newest(lambda _: abstract()).step == 20
    assert find_newest(folder).step == 20
    checkpoints.save(30, make_state(30), DATA)
    checkpoints.close()
    assert find_damage(folder / "30") is None
    for name in FOREIGN:
        assert os.path.samestat(os.lstat(folder / name), before[name])
        if kind in ("folder", "link"):
            assert (folder / name / "mine.txt").read_text() == "mine"
    assert (folder / "20").is_dir()
    assert not (folder / "10").exists()


@pytest.mark.parametrize("moved", [10, 20])
def test_a_checkpoint_moved_to_another_disk_and_linked_is_read_and_never_removed(folder, tmp_path, moved):
    (folder / str(moved)).rename(tmp_path / "moved")
    (folder / str(moved)).symlink_to(tmp_path / "moved")
    checkpoints = Checkpoints(folder, 1)
    restored = checkpoints.restore_newest(lambda _: abstract())
    assert (restored.step, value_of(restored.state["params"])) == (20, 20)
    for step in (30, 40):
        checkpoints.save(step, make_state(step), DATA)
    checkpoints.close()
    assert sorted(path.name for path in folder.iterdir()) == sorted([str(moved), "40"])
    assert find_damage(tmp_path / "moved") is None


def test_an_old_checkpoint_that_has_gone_fails_no_save(folder):
    checkpoints = Checkpoints(folder, 1)
    checkpoints.restore_newest(lambda _: abstract())
    shutil.rmtree(folder / "10")
    checkpoints.save(30, make_state(30), DATA)
    checkpoints.close()
    assert [path.name for path in folder.iterdir()] == ["30"]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "SHA256SUMS is missing, or not a file"),
        ("", "SHA256SUMS is empty"),
        ("no digest\n", "SHA256SUMS can't be read: not enough values"),
        (f"{'0' * 64}  ../20/run.json\n", "../20/run.json is missing"),
        (f"{'0' * 64}  run.json\n", "run.json is not what was written"),
        (f"{'0' * 64}  \x1b[31m\n", r"'\x1b[31m' is missing"),
        (b"\xff\xfe", "SHA256SUMS can't be read: 'utf-8' codec"),
        ("a folder", "SHA256SUMS is missing, or not a file"),
        ("a pipe", "SHA256SUMS is missing, or not a file"),
    ],
)
def test_odd_digests_are_damage(folder, content, reason):
    sums = folder / "20" / "SHA256SUMS"
    sums.unlink()
    if content == "a folder":
        sums.mkdir()
    elif content == "a pipe":
        os.mkfifo(sums)
    elif content is not None:
        sums.write_bytes(content if isinstance(content, bytes) else content.encode())
    assert reason in find_damage(folder / "20")
    assert find_newest(folder).step == 10


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[]",
        b'{"step": 20, "data": {}}',
        b'{"step": 21, "data": {}, "config_history": {}}',
        b'{"step": "20", "data": {}, "config_history": {}}',
        b'{"step": true, "data": {}, "config_history": {}}',
        b'{"step": 1' + b"0" * 5000 + b', "data": {}, "config_history": {}}',
        b"[" * 100_000,
        b'\xff{"step": 20, "data": {}}',
    ],
)
def test_well_signed_metadata_that_is_wrong_is_told_in_one_message(folder, content):
    (folder / "20" / "run.json").write_bytes(content)
    sign(folder / "20")
    assert find_damage(folder / "20") is None
    for read in (lambda: find_newest(folder), lambda: read_metadata(folder / "20")):
        with pytest.raises(TrainingFailed, match=r"20 is whole, but this version can't restore it: its run\.json"):
            read()


@pytest.mark.parametrize(
    ("data", "what"),
    [
        ([], "a tokenizer"),
        (None, "a tokenizer"),
        ({"tokenizer": 3}, "a tokenizer"),
        ({"tokenizer": ["byte"]}, "a tokenizer"),
        ({"tokenizer": "byte", "delimiters": [1]}, "the tokens around documents"),
    ],
)
def test_a_tokenizer_that_cannot_be_told_is_no_traceback(folder, data, what):
    (folder / "20" / "run.json").write_text(json.dumps({"step": 20, "data": data, "config_history": None}))
    sign(folder / "20")
    with pytest.raises(TrainingFailed, match=f"20 is whole, but .* its run.json names {what} by"):
        find_newest(folder)


def stream_whole(found: FoundCheckpoint, abstract_params: dict) -> dict:
    """The parameters as `restore_params` gives them, by way of `stream_params`."""
    params = []
    stream_params(found, abstract_params, lambda arrays: params.append(jax.tree.map(read_whole, arrays)))
    return params[-1]


both_ways = pytest.mark.parametrize("read_params", [restore_params, stream_whole])


@both_ways
def test_a_checkpoint_that_goes_while_it_is_read_is_told(folder, read_params):
    found = find_newest(folder)
    checkpoints = Checkpoints(folder, 1)
    checkpoints.restore_newest(lambda _: abstract())
    checkpoints.save(30, make_state(30), DATA)
    checkpoints.close()
    assert [path.name for path in folder.iterdir()] == ["30"]
    with pytest.raises(TrainingFailed, match="20 was removed while it was being read; run the same command again"):
        read_params(found, abstract()["params"])


@both_ways
def test_the_parameters_are_those_of_the_newest(folder, read_params):
    assert value_of(read_params(find_newest(folder), abstract()["params"])) == 20


@pytest.mark.parametrize("moment", ["before its digests", "amid its digests"])
def test_a_checkpoint_that_goes_while_it_is_looked_at_is_not_called_damaged(folder, monkeypatch, moment):
    def go_on():
        """The run saves the next one, and removes that which is looked at."""
        monkeypatch.undo()
        shutil.copytree(folder / "20", folder / "30")
        (folder / "30" / "run.json").write_text(json.dumps({"step": 30, "data": DATA, "config_history": None}))
        sign(folder / "30")
        shutil.rmtree(folder / "20")

    def look(path):
        if moment == "before its digests":
            go_on()
            return find_damage(path)
        return [find_damage(path), go_on()][0]

    monkeypatch.setattr("trainer.checkpoints.parameters.find_damage", look)
    found = find_newest(folder)
    assert (found.step, found.damaged) == (30, ())


@both_ways
def test_a_checkpoint_of_another_model_is_not_taken_for_one_that_has_gone(folder, read_params):
    held = abstract()["params"]["w"]
    longer = jax.ShapeDtypeStruct((4,), held.dtype, sharding=held.sharding)
    for other in ({"other": held}, {"w": held, "other": held}, {"w": longer}):
        with pytest.raises(TrainingFailed, match="20 is whole, but this version can't restore it"):
            read_params(find_newest(folder), other)


def test_what_the_reader_of_a_stream_raises_is_its_own(folder):
    def use(params: dict) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        stream_params(find_newest(folder), abstract()["params"], use)
