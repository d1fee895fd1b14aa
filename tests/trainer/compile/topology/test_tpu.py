"""Slices of TPUs by name: the refusals, and what libtpu is told."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from trainer.compile.topology import parse_topology
from trainer.compile.topology.tpu import GENERATIONS
from trainer.errors import UserMistake

HAS_LIBTPU = importlib.util.find_spec("libtpu") is not None


@pytest.mark.parametrize(
    ("name", "accelerator_type"),
    [
        ("v4:2x2x1", "v4-8"),
        ("v5e:2x2", "v5litepod-4"),
        ("v5p:2x2x1", "v5p-8"),
        ("v6e:16x16", "v6e-256"),
        ("tpu7x:2x2x1", "tpu7x-8"),
    ],
)
def test_the_environment_that_keeps_libtpu_quiet(name, accelerator_type, monkeypatch):
    monkeypatch.setenv("TPU_ACCELERATOR_TYPE", "v2-8")
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    assert parse_topology(name).environment() == {
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_ACCELERATOR_TYPE": accelerator_type,
        "TPU_WORKER_HOSTNAMES": "localhost",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "JAX_PLATFORMS": "cpu",
    }
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    assert parse_topology(name).environment()["JAX_PLATFORMS"] == "cuda"


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("v9:2x2", r"unknown topology 'v9:2x2'; expected a TPU generation and the shape .* such as v4:2x2x1, .*v6e:16"),
        ("v5p-8", r"unknown topology 'v5p-8'; expected"),
        ("v5p2x2x1", r"; did you mean v5p:2x2x1\?$"),
        ("v5p:0x2x1", r"unknown topology 'v5p:0x2x1'"),
        ("v5p:2x2x", r"unknown topology"),
        ("", r"unknown topology ''"),
        ("v5p:2x2", r"'v5p:2x2': a slice of v5p has 3 dims, got 2; for example v5p:2x2x1"),
        ("v6e:2x2x1", r"'v6e:2x2x1': a slice of v6e has 2 dims, got 3; for example v6e:1x1, v6e:2x2"),
    ],
)
def test_a_wrong_name_is_told_with_those_that_exist(name, told):
    with pytest.raises(UserMistake, match=told) as caught:
        parse_topology(name)
    assert "\n" not in str(caught.value)


def test_a_missing_libtpu_is_told_with_the_extra_to_install(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.delenv("TPU_LIBRARY_PATH", raising=False)
    topology = parse_topology("v5e:2x2")
    with pytest.raises(UserMistake, match=r"--topology v5e:2x2 needs libtpu.*isn't installed; .*\"\.\[tpu\]\""):
        topology.require_compiler()
    monkeypatch.setenv("TPU_LIBRARY_PATH", "/somewhere/libtpu.so")
    topology.require_compiler()


SCRIPT = """
import sys
from trainer.compile.topology import parse_topology
for name in sys.argv[1:]:
    devices = parse_topology(name).devices()
    print(name, len(devices), devices[0].device_kind, [device.id for device in devices[:3]], sep="|")
"""


@pytest.mark.skipif(not HAS_LIBTPU, reason="needs libtpu (the tpu extra); no TPU")
def test_libtpu_knows_all_of_our_examples():
    names = [example for generation in GENERATIONS for example in generation.examples]
    environment = os.environ | parse_topology(names[0]).environment() | {"PYTHONPATH": str(Path(__file__).parents[4])}
    command = [sys.executable, "-c", SCRIPT, *names]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    rows = [line.split("|") for line in done.stdout.splitlines()]
    assert [row[0] for row in rows] == names
    for name, count, kind, first in rows:
        topology = parse_topology(name)
        assert kind == topology.generation.device_kind
        assert int(count) == topology.num_chips * (2 if name.startswith("tpu7x") else 1)
        assert first == str(list(range(min(int(count), 3))))
