"""A program outlives whoever reads its output."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import sys
from trainer.process.standard_streams import outlive_readers

with outlive_readers():
    for number in range(3000):
        print(f"line {number}", flush=number % 2 == 0)
        print(f"error {number}", file=sys.stderr)
    sys.stdout.write("in the buffer")
with open(sys.argv[1], "w") as file:
    file.write("done")
"""


@pytest.mark.parametrize("redirection", ["| head -1", ">/dev/full 2>/dev/full", ">&- 2>&-", "2>&1 | head -1", "| cat"])
def test_a_program_ends_well_wherever_its_output_goes(tmp_path, redirection):
    # The shell's status is that of the program, not of who reads.
    line = f'set -o pipefail; "{sys.executable}" -c "$0" {tmp_path}/end {redirection}'
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    root = Path(__file__).parents[3]
    ended = subprocess.run(
        ["bash", "-c", line, SCRIPT], cwd=root, env=buffered, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr
    assert (tmp_path / "end").read_text() == "done"
    assert "Traceback" not in ended.stderr
    assert "Exception ignored" not in ended.stderr
    if redirection == "| cat":
        assert ended.stdout == "".join(f"line {number}\n" for number in range(3000)) + "in the buffer"
        assert ended.stderr == "".join(f"error {number}\n" for number in range(3000))


def test_a_log_file_is_written_further_once_its_disk_has_room(tmp_path, limit_file_size):
    script = """
import resource, sys
from trainer.process.standard_streams import outlive_readers
with outlive_readers():
    print("before", flush=True)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, resource.RLIM_INFINITY))
    for number in range(5):
        print(f"amid {number}", flush=True)
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
    print("after", flush=True)
"""
    with (tmp_path / "log").open("w") as log:
        root = Path(__file__).parents[3]
        assert subprocess.run([sys.executable, "-c", script], cwd=root, stdout=log, check=False).returncode == 0
    text = (tmp_path / "log").read_text()
    assert text.startswith("before\n")
    assert text.endswith("after\n")
