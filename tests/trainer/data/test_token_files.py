"""Tokens in files: read exactly, by many threads and of many files; a file that changes ends in one message."""

import dataclasses
import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from trainer.data import token_files as token_files_module
from trainer.data.token_files import open_tokens, reopening_files
from trainer.errors import TrainingFailed


@pytest.fixture
def make_file(tmp_path):
    """A file of uint16 tokens behind some other bytes, opened."""

    def make(tokens, name: str = "a.bin", num_other_bytes: int = 6, open_file=None):
        path = tmp_path / name
        path.write_bytes(b"\xff" * num_other_bytes + np.asarray(tokens, "<u2").tobytes())
        return open_tokens(path, np.dtype("<u2"), offset=num_other_bytes, open_file=open_file or reopening_files())

    return make


def test_slices_are_those_of_the_array(make_file, rng):
    tokens = rng.integers(0, 2**16, 1000)
    file = make_file(tokens)
    assert (len(file), file.itemsize) == (1000, 2)
    for _ in range(50):
        start, stop = rng.integers(-1200, 1200, 2).tolist()
        np.testing.assert_array_equal(file[start:stop], tokens[start:stop])
    np.testing.assert_array_equal(file[:], tokens)


def test_more_files_than_may_be_open_are_read_by_threads(make_file, rng, monkeypatch):
    monkeypatch.setattr(token_files_module, "_MAX_OPEN_FILES", 3)
    open_file, before = reopening_files(), len(os.listdir("/proc/self/fd"))
    contents = rng.integers(0, 2**16, (20, 100))
    files = [make_file(content, f"{i}.bin", open_file=open_file) for i, content in enumerate(contents)]

    def read(choice: int) -> bool:
        return bool((files[choice][10:60] == contents[choice, 10:60]).all())

    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(read, rng.integers(0, 20, 2000).tolist()))
    assert len(os.listdir("/proc/self/fd")) <= before + 3


def _shrink(path):
    os.truncate(path, 20)


def _grow(path):
    with path.open("ab") as file:
        file.write(b"12")


def _overwrite(path):
    with path.open("r+b") as file:
        file.write(b"12")
    os.utime(path, ns=(0, 0))  # A clock that ticks slowly might not show so quick a change.


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_shrink, r"206 bytes before, 20 now\); run the same command"),
        (_grow, r"206 bytes before, 208 now\)"),
        (_overwrite, r"written to\)"),
    ],
)
@pytest.mark.parametrize("part", [slice(0, 3), slice(50, 100)])
def test_a_file_that_changes_is_told_of(make_file, change, message, part):
    file = make_file(range(100))
    file[part]
    change(file.path)
    with pytest.raises(TrainingFailed, match=rf"a.bin was changed while this run was reading it \({message}"):
        file[part]


def test_a_file_replaced_as_a_whole_is_read_on_until_it_must_be_opened_again(make_file, monkeypatch, tmp_path):
    monkeypatch.setattr(token_files_module, "_MAX_OPEN_FILES", 1)
    file = make_file(range(100))
    (tmp_path / "new").write_bytes(b"\0" * 206)
    (tmp_path / "new").replace(file.path)
    assert file[5:8].tolist() == [5, 6, 7]
    make_file([1], "other.bin", open_file=file.open_file)
    with pytest.raises(TrainingFailed, match=r"a.bin was changed"):
        file[5:8]
    file.path.unlink()
    make_file([1], "another.bin", open_file=file.open_file)
    with pytest.raises(TrainingFailed, match=r"a.bin can't be read any more: No such file"):
        file[5:8]


def test_a_token_that_was_not_there_is_told_of(make_file):
    file = dataclasses.replace(make_file([1, 2, 3]), largest_id=3)
    assert file[:].tolist() == [1, 2, 3]
    with pytest.raises(TrainingFailed, match=r"a.bin: a token 3 has appeared .*the largest was 2; it or its disk is"):
        dataclasses.replace(file, largest_id=2)[:]
