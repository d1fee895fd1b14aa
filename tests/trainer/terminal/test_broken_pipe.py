"""A reader that leaves early ends a command quietly."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[3]
QUIET = "from trainer.terminal.streams import reader_may_leave\nimport os, sys\nwith reader_may_leave():\n    "


def start_without_reader(*arguments: str) -> subprocess.Popen[str]:
    """Python, writing to a pipe that nobody reads."""
    reading, writing = os.pipe()
    os.close(reading)
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    process = subprocess.Popen(
        [sys.executable, *arguments], cwd=REPOSITORY, env=buffered, stdout=writing, stderr=subprocess.PIPE, text=True
    )
    os.close(writing)
    return process


def end_of(process: subprocess.Popen[str]) -> tuple[int, str]:
    _, errors = process.communicate(timeout=60)
    return process.returncode, errors


@pytest.mark.parametrize(
    ("unbuffered", "script", "status"),
    [
        ([], "print('held back until the end')", 0),
        (["-u"], "print('written at once')", 0),
        ([], "print('x' * 2**20); raise AssertionError('goes on')", 0),
        ([], "print('held back'); sys.exit(3)", 3),
        ([], "print('held back'); sys.exit(0)", 0),
    ],
)
def test_whoever_leaves_is_not_missed(unbuffered, script, status):
    assert end_of(start_without_reader(*unbuffered, "-c", QUIET + script)) == (status, "")


def test_another_pipe_that_breaks_is_an_error():
    script = QUIET + "reading, writing = os.pipe(); os.close(reading); os.write(writing, b'x')"
    done = subprocess.run([sys.executable, "-c", script], cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 1
    assert "BrokenPipeError" in done.stderr


def test_the_help_of_a_command_may_be_cut_short():
    commands = ("trainer", "trainer.compile")
    started = [start_without_reader("-m", command, "--help") for command in commands]
    assert [end_of(process) for process in started] == [(0, "")] * len(commands)
