"""Log files on a disk without room: told once, nothing lost, nothing half-written, and no error."""

from __future__ import annotations

import os

import numpy as np
import pytest

from trainer.files.log_file import AppendedLog


def random_entries(rng: np.random.Generator, count: int) -> list[bytes]:
    return [rng.bytes(int(rng.integers(1, 200))).replace(b"\n", b" ") + b"\n" for _ in range(count)]


def test_what_a_full_disk_refuses_is_written_once_there_is_room(tmp_path, rng, watched_console, limit_file_size):
    path = tmp_path / "logs" / "log"
    expected = b"begun\n"
    log = AppendedLog(path, watched_console, lambda: [b"begun\n"])
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


def test_a_log_that_cannot_even_begin_keeps_what_it_replaces(tmp_path, watched_console, limit_file_size):
    path = tmp_path / "log"
    path.write_bytes(b"before")
    with limit_file_size(3):
        log = AppendedLog(path, watched_console, lambda: [b"content\n"])
        log.append(b"entry\n")
        assert path.read_bytes() == b"before"
        assert os.listdir(tmp_path) == ["log"], "nothing half-written stays"
    log.append(b"last\n")
    assert path.read_bytes() == b"content\nentry\nlast\n"
    assert [name for name, _ in watched_console.told] == ["warning", "note"]


def test_a_log_that_was_removed_is_begun_again(tmp_path, watched_console):
    path = tmp_path / "log"
    log = AppendedLog(path, watched_console, lambda: [b"first\n"])
    path.unlink()
    log.append(b"second\n")
    assert path.read_bytes() == b"second\n"
    assert not watched_console.told


@pytest.mark.parametrize("begun", [True, False])
def test_what_is_lost_in_the_end_is_told(tmp_path, watched_console, limit_file_size, begun):
    path = tmp_path / "log"
    if begun:
        log = AppendedLog(path, watched_console, lambda: [b"content\n"])
    with limit_file_size(3):
        if not begun:
            log = AppendedLog(path, watched_console, lambda: [b"content\n"])
        log.append(b"1\n", b"2\n")
        log.close()
    lost = "its last 2 entries" if begun else "what this attempt logged"
    assert watched_console.told[-1] == ("warning", f"{path} is left without {lost}: File too large")
