"""Log files on a disk without room: told once, nothing lost, nothing half-written, and no error."""

from __future__ import annotations

import os

import numpy as np
import pytest

from trainer.files import log_file
from trainer.files.log_file import AppendedLog


def random_entries(rng: np.random.Generator, count: int) -> list[bytes]:
    return [rng.bytes(int(rng.integers(1, 200))).replace(b"\n", b" ") + b"\n" for _ in range(count)]


def test_what_a_full_disk_refuses_is_written_once_there_is_room(tmp_path, rng, watched_console, limit_file_size):
    path = tmp_path / "logs" / "log"
    expected = b"begun\n"
    log = AppendedLog(path, lambda: [b"begun\n"], watched_console)
    for round_ in range(5):
        entries = random_entries(rng, 20)
        log.append(*entries[:5])
        written = expected + b"".join(entries[:5])
        expected += b"".join(entries)
        assert path.read_bytes() == written, "the operating system has it at once"
        watched_console.told.clear()
        with limit_file_size(len(written) + int(rng.integers(0, 100))):
            for entry in entries[5:]:
                log.append(entry)
                assert path.read_bytes().endswith(b"\n"), "no entry is there in part"
                assert expected.startswith(path.read_bytes())
            assert path.read_bytes() != expected, "the limit must have been met"
        warning = f"{path} can't be written: File too large; training goes on, and the next write tries again"
        assert watched_console.told == [("warning", warning)], round_
        log.append()
        assert path.read_bytes() == expected
        assert watched_console.told == [("warning", warning), ("note", f"{path} is written again")]
    log.close()


def test_half_an_entry_that_cannot_be_cut_off_at_once_is_cut_off_later(
    tmp_path, watched_console, limit_file_size, monkeypatch
):
    path = tmp_path / "log"
    log = AppendedLog(path, list, watched_console)
    log.append(b"first\n")

    def fail(*_):
        raise OSError(5, "Input/output error")

    with limit_file_size(9), monkeypatch.context() as patch:
        patch.setattr(os, "ftruncate", fail)
        log.append(b"second\n")
        assert path.read_bytes() == b"first\nsec"
        log.append(b"third\n")
    log.close()
    assert path.read_bytes() == b"first\nsecond\nthird\n"


def test_a_log_that_cannot_even_begin_keeps_the_files_that_it_replaces(tmp_path, watched_console, limit_file_size):
    path, old = tmp_path / "new", tmp_path / "old"
    path.write_bytes(b"before")
    old.write_bytes(b"old")
    with limit_file_size(3):
        log = AppendedLog(path, lambda: [b"content\n"], watched_console, replaces=[old])
        log.append(b"entry\n")
        assert path.read_bytes() == b"before"
        assert sorted(os.listdir(tmp_path)) == ["new", "old"], "nothing half-written stays"
    log.append(b"last\n")
    assert path.read_bytes() == b"content\nentry\nlast\n"
    assert os.listdir(tmp_path) == ["new"]
    assert [name for name, _ in watched_console.told] == ["warning", "note"]


def test_a_log_that_was_removed_is_begun_again(tmp_path, watched_console):
    path = tmp_path / "log"
    log = AppendedLog(path, lambda: [b"first\n"], watched_console)
    path.unlink()
    log.append(b"second\n")
    assert path.read_bytes() == b"second\n"
    assert not watched_console.told


def test_memory_for_what_waits_is_bounded_and_the_loss_is_told(
    tmp_path, rng, watched_console, limit_file_size, monkeypatch
):
    monkeypatch.setattr(log_file, "MAX_WAITING_BYTES", 1000)
    path, entries = tmp_path / "log", random_entries(rng, 100)
    log = AppendedLog(path, list, watched_console)
    with limit_file_size(0):
        for entry in entries:
            log.append(entry)
    log.append()
    written = path.read_bytes()
    assert b"".join(entries).endswith(written)
    assert 700 < len(written) <= 1000
    dropping = ("warning", f"{path}: more than 1.0 kB wait to be written; the oldest are lost")
    assert watched_console.told.count(dropping) == 1


@pytest.mark.parametrize("begun", [True, False])
def test_what_is_lost_in_the_end_is_told(tmp_path, watched_console, limit_file_size, begun):
    path = tmp_path / "log"
    if begun:
        log = AppendedLog(path, lambda: [b"content\n"], watched_console)
    with limit_file_size(3):
        if not begun:
            log = AppendedLog(path, lambda: [b"content\n"], watched_console)
        log.append(b"1\n", b"2\n")
        log.close()
    lost = "its last 2 entries" if begun else "what this attempt logged"
    assert watched_console.told[-1] == ("warning", f"{path} is left without {lost}: File too large")
