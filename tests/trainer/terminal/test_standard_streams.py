"""A program outlives whoever reads its output."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
import traceback
from pathlib import Path

import pytest
import rich.console

import flax_longcontext
from trainer.terminal.console import Console
from trainer.terminal.streams import outlive_readers, reader_may_leave

SCRIPT = """
import sys
from trainer.terminal.streams import outlive_readers

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
from trainer.terminal.streams import outlive_readers
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


@pytest.mark.parametrize("streams", [outlive_readers, reader_may_leave])
@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "cp1252"])
def test_what_an_encoding_cannot_write_is_written_with_escapes(monkeypatch, streams, encoding):
    output, errors = (io.TextIOWrapper(io.BytesIO(), encoding) for _ in range(2))
    monkeypatch.setattr(sys, "stdout", output)
    monkeypatch.setattr(sys, "stderr", errors)
    with streams():
        print("ctx 4096 → 8192 in /tmp/\udcff")
        Console().note("«→»: \udcff")
        print("error: é→", file=sys.stderr)
    output.flush()
    errors.flush()
    quotes = r"\xab\u2192\xbb" if encoding == "ascii" else r"«\u2192»"
    written = output.buffer.getvalue().decode(encoding)
    assert written == f"ctx 4096 \\u2192 8192 in /tmp/\\udcff\n{quotes}: \\udcff\n"
    letter = r"\xe9" if encoding == "ascii" else "é"
    assert errors.buffer.getvalue().decode(encoding) == f"error: {letter}\\u2192\n"
    assert (sys.stdout, sys.stderr) == (output, errors), "as before"
    assert output.errors == "strict"


@pytest.mark.parametrize("streams", [outlive_readers, reader_may_leave])
def test_standard_error_has_signs_for_control_characters_but_for_those_of_rich(monkeypatch, streams):
    errors = io.StringIO()
    monkeypatch.setattr(sys, "stderr", errors)
    with streams():
        print("error: no column 'a\x1b[31m\rb'", file=sys.stderr)
        sys.stderr.writelines(["\x1b]0;owned\x07\n"])
        traceback.print_exception(ValueError("of\x1b[2J"))
        rich.console.Console(file=sys.stderr, force_terminal=True, _environ={"TERM": "xterm"}).print("[red]own[/]")
    lines = errors.getvalue().splitlines()
    assert lines[:2] == ["error: no column 'a␛[31m␍b'", "␛]0;owned␇"]
    assert lines[2] == "ValueError: of␛[2J"
    assert lines[3] == "\x1b[31mown\x1b[0m"


def test_every_command_guards_its_output():
    # Those are started by a command of ours, which reads what they write.
    workers = {"measure.py", "worker.py"}
    no_command = {"train.py"}  # it says so
    root = Path(__file__).parents[3]
    programs = [path for folder in ("trainer", "experiments") for path in (root / folder).rglob("*.py")]
    programs = [path for path in programs if 'if __name__ == "__main__":' in path.read_text()]
    assert len(programs) > 15
    unguarded = [
        path for path in programs if not re.search(r"with (reader_may_leave|outlive_readers)\(", path.read_text())
    ]
    assert {path.name for path in unguarded} == workers | no_command


def test_whose_packages_python_finds_is_told_in_any_encoding(monkeypatch):
    output = io.TextIOWrapper(io.BytesIO(), "ascii")
    monkeypatch.setattr(sys, "stdout", output)

    def complain(package, importer):
        raise flax_longcontext.ForeignPackage("got /home/é/\udcff\x1b[31m")

    monkeypatch.setattr(flax_longcontext, "require_ours", complain)
    assert flax_longcontext.main() == 1
    output.flush()
    assert output.buffer.getvalue().splitlines()[0] == rb"kernels: got /home/\xe9/\udcff\x1b[31m"


@pytest.mark.parametrize("streams", [outlive_readers, reader_may_leave])
def test_a_traceback_that_ends_a_command_has_signs_for_control_characters(monkeypatch, streams):
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    errors = io.StringIO()
    monkeypatch.setattr(sys, "stderr", errors)
    with pytest.raises(LookupError) as caught, streams():
        raise LookupError("no\x1b[2J")
    sys.excepthook(caught.type, caught.value, caught.tb)  # as Python does at the end
    assert errors.getvalue().startswith("Traceback (most recent call last):\n")
    assert errors.getvalue().endswith("\nLookupError: no␛[2J\n")
