"""The token cache: built once, whole or absent, by one builder at a time, and never stale."""

import errno
import fcntl
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.data import DataError
from trainer.data import token_cache as token_cache_module
from trainer.data.token_cache import Entry, TokenCache, cache_key


def _write(content: str, log: list[str] | None = None):
    def build(folder: Path) -> dict:
        if log is not None:
            log.append(content)
        (folder / "content").write_text(content)
        return {"wrote": content}

    return build


def _content(entry: Entry) -> str:
    content = (entry.folder / "content").read_text()
    assert entry.about == {"wrote": content}
    return content


def test_an_entry_is_built_once(tmp_path):
    cache, log = TokenCache(tmp_path / "deep" / "cache"), []
    for _ in range(3):
        assert _content(cache.get_or_build("key", _write("one", log))) == "one"
    assert _content(cache.get_or_build("other", _write("two", log))) == "two"
    assert log == ["one", "two"]


def test_a_failed_build_leaves_nothing(tmp_path):
    cache = TokenCache(tmp_path)

    def fail(folder: Path) -> dict:
        (folder / "content").write_text("half")
        raise DataError("bad file")

    with pytest.raises(DataError, match="bad file"):
        cache.get_or_build("key", fail)
    assert [path.name for path in tmp_path.iterdir()] == ["key.lock"]
    assert _content(cache.get_or_build("key", _write("whole"))) == "whole"


def _build_slowly(directory: str) -> None:
    def build(folder: Path) -> dict:
        (folder / "content").write_text("half")
        time.sleep(60)
        return {}

    TokenCache(Path(directory)).get_or_build("key", build)


def test_a_killed_builder_leaves_no_entry_and_no_lock(tmp_path):
    process = multiprocessing.get_context("spawn").Process(target=_build_slowly, args=(str(tmp_path),))
    process.start()
    while not (tmp_path / "key.partial" / "content").exists():
        assert process.is_alive()
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    assert not (tmp_path / "key").exists()
    assert _content(TokenCache(tmp_path).get_or_build("key", _write("whole"))) == "whole"
    assert not (tmp_path / "key.partial").exists()


def test_a_folder_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(DataError, match=r"token cache .*file/cache cannot be written.*set data.token_cache_dir"):
        TokenCache(tmp_path / "file" / "cache").get_or_build("key", _write("x"))


def test_keys_tell_files_and_settings_apart(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("one")
    key = cache_key([path], tokenizer="byte")
    assert key == cache_key([path], tokenizer="byte")
    others = {key, cache_key([path], tokenizer="other")}
    os.utime(path, ns=(0, 0))
    others.add(cache_key([path], tokenizer="byte"))
    path.write_text("three")
    os.utime(path, ns=(0, 0))
    others.add(cache_key([path], tokenizer="byte"))
    assert len(others) == 4


def test_a_damaged_entry_in_use_is_replaced_without_waiting(tmp_path):
    cache = TokenCache(tmp_path)
    entry = cache.get_or_build("key", _write("one"))
    tokens = entry.open_tokens("content", np.dtype("u1"))
    os.truncate(entry.folder / "entry.json", 5)
    assert _content(cache.get_or_build("key", _write("two"))) == "two"
    assert tokens[:].tobytes() == b"one"


def test_hashes_of_many_chunks_tell_every_byte(tmp_path, rng, monkeypatch):
    monkeypatch.setattr(token_cache_module, "_CHUNK_BYTES", 100)
    path, data = tmp_path / "a", bytearray(rng.bytes(1234))
    path.write_bytes(data)
    whole = token_cache_module._measure(path)
    assert whole == token_cache_module._measure(path)
    for place in rng.integers(0, 1234, 20).tolist():
        path.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
        assert token_cache_module._measure(path) != whole
    path.write_bytes(data[:-1])
    assert token_cache_module._measure(path)["num_bytes"] == 1233


def _last_used(folder: Path, seconds: float) -> None:
    os.utime(folder / "entry.json", (seconds, seconds))


def _names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_the_cache_is_held_to_its_size(tmp_path):
    said: list[str] = []
    roomy = TokenCache(tmp_path)
    for age, key in enumerate("abcde"):
        folder = roomy.get_or_build(key, _write("x" * 1000)).folder
        _last_used(folder, 1000.0 - age)
    (tmp_path / "a foreign folder").mkdir()
    (tmp_path / "a foreign folder" / "file").write_text("x" * 5000)
    one = sum(path.stat().st_size for path in folder.iterdir())
    roomy.get_or_build("e", _write("never"))  # Used just now.
    _last_used(tmp_path / "d", 0.0)
    limited = TokenCache(tmp_path, max_bytes=3.5 * one, on_progress=said.append)
    limited.get_or_build("f", _write("x" * 1000))
    assert _names(tmp_path) == {"a", "a.lock", "e", "e.lock", "f", "f.lock", "a foreign folder"}
    assert [line.split()[1] for line in said] == [str(tmp_path / key) for key in "dcb"]
    assert "the cache is held to" in said[0]
    assert "(data.token_cache_gib)" in said[0]


def _use_an_entry(directory: str) -> None:
    entry = TokenCache(Path(directory)).get_or_build("used", _write("x" * 1000))
    tokens = entry.open_tokens("content", np.dtype("u1"))
    del entry  # The tokens keep it.
    print(len(tokens), flush=True)
    sys.stdin.readline()


def test_what_a_process_uses_or_builds_is_not_removed(tmp_path):
    tiny = TokenCache(tmp_path, max_bytes=0)
    program = f"from {__name__} import _use_an_entry; _use_an_entry({str(tmp_path)!r})"
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=Path(__file__).parents[3]
    ) as user:
        assert user.stdout.readline() == b"1000\n"
        for name in ("building", "killed"):
            (tmp_path / f"{name}.lock").touch()
            (tmp_path / f"{name}.partial").mkdir()
        with (tmp_path / "building.lock").open() as builder:
            fcntl.flock(builder, fcntl.LOCK_EX)
            mine = tiny.get_or_build("mine", _write("x"))
            in_use = {"used", "used.lock", "mine", "mine.lock"}
            assert _names(tmp_path) == in_use | {"building.lock", "building.partial"}
        user.stdin.close()
        user.wait(10)
    tiny.get_or_build("next", _write("x"))
    assert _names(tmp_path) == {"mine", "mine.lock", "next", "next.lock"}
    assert _content(mine) == "x"


def test_builders_and_removers_leave_nobody_without(tmp_path):
    cache = TokenCache(tmp_path, max_bytes=0)

    def use(number: int) -> None:
        for turn in range(8):
            key = "abc"[(number + turn) % 3]
            assert _content(cache.get_or_build(key, _write(key))) == key

    with ThreadPoolExecutor(6) as threads:
        list(threads.map(use, range(6)))
    assert not list(tmp_path.glob("*.partial"))


@pytest.fixture
def lock_error(request, monkeypatch) -> None:
    """Has locks fail with an error, by default that of a file system without any."""
    number = getattr(request, "param", errno.ENOSYS)

    def fail(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", fail)


@pytest.mark.parametrize("lock_error", [errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS], indirect=True)
def test_a_file_system_without_locks_keeps_entries_and_removes_none(tmp_path, lock_error):
    said: list[str] = []
    cache, log = TokenCache(tmp_path, max_bytes=0, on_progress=said.append), []
    for content in ("one", "two", "one"):
        assert _content(cache.get_or_build(content, _write(content, log))) == content
    assert (log, said) == (["one", "two"], [])


def test_builders_that_cannot_wait_for_each_other_do_not_meet(tmp_path, lock_error):
    all_at_once = threading.Barrier(4)

    def build(folder: Path) -> dict:
        about = _write("whole")(folder)
        all_at_once.wait(10)  # Each has begun, and all end at the same time.
        assert _names(folder) == {"content"}
        return about

    with ThreadPoolExecutor(4) as threads:
        entries = list(threads.map(lambda _: TokenCache(tmp_path).get_or_build("key", build), range(4)))
    assert [_content(entry) for entry in entries] == ["whole"] * 4
    assert _names(tmp_path) == {"key", "key.lock"}


def test_an_entry_that_another_builder_publishes_at_the_last_moment_stays(tmp_path, monkeypatch, lock_error):
    open_entry, looks = TokenCache._open, []

    def open_late(cache: TokenCache, folder: Path):
        try:
            return open_entry(cache, folder)
        except FileNotFoundError:
            looks.append(folder)
            if len(looks) == 3:  # before and after waiting for the lock, and before publishing
                monkeypatch.setattr(TokenCache, "_open", open_entry)
                assert _content(TokenCache(tmp_path).get_or_build("key", _write("theirs"))) == "theirs"
            raise

    monkeypatch.setattr(TokenCache, "_open", open_late)
    assert _content(TokenCache(tmp_path).get_or_build("key", _write("ours"))) == "theirs"
    assert _names(tmp_path) == {"key", "key.lock"}


@pytest.mark.parametrize("lock_error", [errno.EIO], indirect=True)
def test_locks_that_fail_otherwise_are_told(tmp_path, lock_error):
    with pytest.raises(DataError, match=r"cannot be written: .*Input/output error"):
        TokenCache(tmp_path).get_or_build("key", _write("x"))


@pytest.mark.parametrize("made_anew", [False, True])
def test_an_entry_that_is_removed_while_its_lock_is_waited_for_is_not_called_damaged(tmp_path, monkeypatch, made_anew):
    said: list[str] = []
    cache, log = TokenCache(tmp_path, on_progress=said.append), []
    folder = cache.get_or_build("key", _write("one", log)).folder
    flock = fcntl.flock

    def remove_meanwhile(*arguments):
        monkeypatch.setattr(fcntl, "flock", flock)
        folder.rename(tmp_path / "removed")
        if made_anew:
            shutil.copytree(tmp_path / "removed", folder)
        flock(*arguments)

    monkeypatch.setattr(fcntl, "flock", remove_meanwhile)
    assert _content(cache.get_or_build("key", _write("one", log))) == "one"
    assert (log, said) == (["one"] if made_anew else ["one", "one"], [])


def test_files_that_are_gone_have_no_key(tmp_path):
    with pytest.raises(DataError, match=r"none cannot be read: No such file or directory"):
        cache_key([tmp_path / "none"])


@settings(max_examples=40)
@given(data=st.data())
def test_any_damage_of_an_entry_is_made_good(tmp_path_factory, data):
    directory = tmp_path_factory.mktemp("cache")
    cache = TokenCache(directory)
    folder = cache.get_or_build("key", _write("content")).folder
    path = folder / data.draw(st.sampled_from(["content", "entry.json"]))
    content = path.read_bytes()
    start = data.draw(st.integers(0, len(content)))
    stop = data.draw(st.integers(start, len(content)))
    new = data.draw(st.binary(max_size=20) | st.sampled_from([b"null", b"[]", b"{}", b"[" * 5000, b"1" * 5000]))
    path.write_bytes(content[:start] + new + content[stop:])
    assert _content(cache.get_or_build("key", _write("content"))) == "content"
