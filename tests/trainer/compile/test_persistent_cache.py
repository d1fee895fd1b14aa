"""Where compiled programs are kept: JAX's own folder is honoured, and ours is bounded."""

import os

import jax
import pytest

from trainer.compile import persistent_cache
from trainer.compile.persistent_cache import OWN_FOLDER, cache_folder, hold_to_size, use_compilation_cache


@pytest.fixture(autouse=True)
def told(monkeypatch):
    """What JAX's config is told, in its place."""
    told: dict = {}
    monkeypatch.setattr(jax.config, "update", told.__setitem__)
    monkeypatch.setattr(persistent_cache.compilation_cache, "reset_cache", lambda: None)
    monkeypatch.setattr(persistent_cache, "hold_to_size", lambda *held: told.__setitem__("held", held))
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    return told


@pytest.mark.parametrize("folder", ["gs://bucket/cache", "relative"])
def test_the_folder_of_jax_is_taken_as_it_is(monkeypatch, tmp_path, told, folder):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", folder)
    use_compilation_cache(None)
    assert told["jax_compilation_cache_dir"] == cache_folder(None) == folder
    assert "held" not in told
    assert list(tmp_path.iterdir()) == []


def test_a_config_that_names_a_folder_comes_first(monkeypatch, tmp_path, told):
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "elsewhere")
    use_compilation_cache(str(tmp_path / "named"))
    assert told["jax_compilation_cache_dir"] == str(tmp_path / "named")
    assert "held" not in told, "somebody else's folder isn't ours to clear"
    use_compilation_cache("")
    assert told["jax_compilation_cache_dir"] is None


@pytest.mark.parametrize("variable", [None, ""])
def test_otherwise_ours_is_taken_and_bounded(monkeypatch, tmp_path, told, variable):
    monkeypatch.setenv("HOME", str(tmp_path))
    if variable is not None:
        monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", variable)
    use_compilation_cache(None)
    folder = tmp_path / ".cache" / "flax-longcontext" / "xla"
    assert folder.is_dir()
    assert told["jax_compilation_cache_dir"] == str(folder)
    assert told["held"] == (folder, 10 * 2**30)
    assert cache_folder(None) == OWN_FOLDER


@pytest.mark.parametrize(("num_bytes", "kept"), [(600, "abcdef"), (599, "bcdef"), (250, "ef"), (99, ""), (0, "")])
def test_what_was_unused_for_longest_goes_first(tmp_path, num_bytes, kept):
    times = {"a": (1, 2), "b": (1, 3), "c": (4, 1), "d": (5, 5), "e": (9, 1), "f": (1, 9)}
    for name, (read, written) in times.items():
        (tmp_path / f"{name}-cache").write_bytes(b"x" * 100)
        os.utime(tmp_path / f"{name}-cache", (read, written))
        (tmp_path / f"{name}-atime").write_bytes(b"x" * 8)
    (tmp_path / "foreign").write_bytes(b"x" * 1000)
    hold_to_size(tmp_path, num_bytes)
    expected = {"foreign", *(f"{name}-{part}" for name in kept for part in ("cache", "atime"))}
    assert {path.name for path in tmp_path.iterdir()} == expected


def test_what_is_not_there_or_cannot_be_removed_stops_nothing(tmp_path):
    hold_to_size(tmp_path / "missing", 0)
    (tmp_path / "a-cache").mkdir()
    hold_to_size(tmp_path, 0)
    assert (tmp_path / "a-cache").is_dir()
