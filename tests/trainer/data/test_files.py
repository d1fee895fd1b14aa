"""From globs to files, and bounded reading: links in circles, pipes, devices, files that vanish."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from trainer.data import DataError
from trainer.data.files import OpenFile, find_files, read_at_most
from trainer.data.stdlib import find_stdlib_files


def _find(*patterns) -> list[str]:
    return [str(path) for path in find_files([str(pattern) for pattern in patterns], field="data.files")]


def test_globs_match_what_glob_matches(tmp_path):
    import glob

    for name in ("x.txt", "a/y.txt", "a/b/z.txt", "a/b/.hidden/q.txt", ".h.txt", "ab/w.txt", "[c]/v.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x")
    patterns = ["**", "**/*", "**/*.txt", "a**/*.txt", "**/b/**", "a/**/*.txt", "**/[[]c]/*", "*/*", "**/a/**/*.txt"]
    for pattern in patterns:
        expected = {path for path in glob.glob(str(tmp_path / pattern), recursive=True) if Path(path).is_file()}
        assert _find(tmp_path / pattern) == sorted(expected), pattern


def test_what_is_there_is_meant_by_its_name(tmp_path):
    for name in ("a[1].txt", "a1.txt", "b[1]/x.txt", "b1/y.txt", "c?.txt", "cd.txt", "e[1-3]/f[x]/g.txt", "[!h].txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x")
    for pattern, expected in (
        ("a[1].txt", ["a[1].txt"]),
        ("a[[]1].txt", ["a[1].txt"]),
        ("a1.txt", ["a1.txt"]),
        ("a[12].txt", ["a1.txt"]),
        ("b[1]/*.txt", ["b[1]/x.txt"]),
        ("b[1]/**", ["b[1]/x.txt"]),
        ("**/b[1]/x.txt", ["b[1]/x.txt"]),
        ("*/f[x]/g.txt", ["e[1-3]/f[x]/g.txt"]),
        ("c?.txt", ["c?.txt", "cd.txt"]),  # what matches itself is a glob
        ("[!h].txt", ["[!h].txt"]),
    ):
        assert _find(tmp_path / pattern) == [str(tmp_path / name) for name in expected], pattern


@pytest.mark.timeout(20)
def test_links_in_circles_end(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "x.txt").write_text("x")
    for name in ("one", "two", "three"):  # `glob` would follow them in 3^40 orders.
        (tmp_path / "a" / name).symlink_to(tmp_path)
    (tmp_path / "self.txt").symlink_to(tmp_path / "self.txt")
    assert _find(tmp_path / "**/*.txt") == [str(tmp_path / "a" / "x.txt")]


def test_a_file_of_two_names_and_two_globs_counts_once(tmp_path):
    (tmp_path / "a.txt").write_text("x")
    (tmp_path / "b.txt").symlink_to(tmp_path / "a.txt")
    assert _find(tmp_path / "*.txt", tmp_path / "a*") == [str(tmp_path / "a.txt")]


NOWHERE = "is a link that leads nowhere"


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("/dev/zero", "is a device"),
        ("pipe", "is a pipe"),
        ("folder", "is a folder"),
        ("gone", NOWHERE),
        ("circle", NOWHERE),
    ],
)
def test_what_is_no_file_is_refused_by_its_kind(tmp_path, name, kind):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    (tmp_path / "gone").symlink_to(tmp_path / "nothing")
    (tmp_path / "circle").symlink_to(tmp_path / "circle")
    with pytest.raises(DataError, match=rf"matches no file \(looked from .*; .*{name} {kind}\); correct the path"):
        _find(tmp_path / name)


@pytest.mark.parametrize("error", [PermissionError(13, "Permission denied"), FileNotFoundError(2, "No such file")])
def test_a_file_that_vanishes_or_is_shut_off_is_refused(tmp_path, monkeypatch, error):
    (tmp_path / "a.txt").write_text("x")
    status, num_calls = Path.stat, 0

    def stat(path, **options):
        nonlocal num_calls
        num_calls += path.name == "a.txt"
        if path.name == "a.txt" and num_calls > isinstance(error, FileNotFoundError):
            raise error
        return status(path, **options)

    monkeypatch.setattr(Path, "stat", stat)
    with pytest.raises(DataError, match=r"a.txt cannot be read: (?i:permission denied|no such file); leave it out"):
        _find(tmp_path / "a.txt")


def test_only_files_are_opened(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path, kind in ((tmp_path / "pipe", "a pipe"), (tmp_path, "a folder"), (Path("/dev/zero"), "a device")):
        with pytest.raises(OSError, match=f"it is {kind}, not a file"):
            OpenFile(path)
    (tmp_path / "a").write_bytes(b"0123456789")
    assert OpenFile(tmp_path / "a").read(5, offset=3) == b"34567"
    assert OpenFile(tmp_path / "a").read(5, offset=8) == b"89"


def test_an_open_file_is_closed_with_its_last_user_and_silently_at_the_end(tmp_path):
    (tmp_path / "a").write_bytes(b"x")
    before = os.listdir("/proc/self/fd")
    file = OpenFile(tmp_path / "a")
    assert len(os.listdir("/proc/self/fd")) == len(before) + 1
    del file
    assert os.listdir("/proc/self/fd") == before
    program = "import os, pathlib; from trainer.data.files import OpenFile; os.kept = OpenFile(pathlib.Path('a'))"
    command = [sys.executable, "-c", program]
    environment = os.environ | {"PYTHONPATH": os.getcwd()}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, b"")


def test_no_more_is_read_than_is_wanted(tmp_path):
    (tmp_path / "a").write_bytes(b"0123456789")
    assert read_at_most(tmp_path / "a", 10) == b"0123456789"
    assert read_at_most(tmp_path / "a", 9) is None
    assert read_at_most(Path("/dev/zero"), 1000) is None


def test_a_library_file_that_vanishes_is_left_for_its_reader_to_name(tmp_path, monkeypatch):
    (tmp_path / "a.py").write_text("x = 1\n")
    found = find_stdlib_files(tmp_path)
    (tmp_path / "a.py").unlink()
    assert [relative for relative, _ in found] == ["a.py"]
