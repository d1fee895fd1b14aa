"""The memory that XLA may pin: all GPUs of a host together never get more than there is."""

import os

import pytest

from trainer.step.sharding import limit_pinned_memory

VARIABLE = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"


@pytest.fixture
def gpus(tmp_path, monkeypatch):
    monkeypatch.setenv(VARIABLE, "")  # so that what the test leaves behind goes away
    monkeypatch.delenv(VARIABLE)

    def make(num: int, host_gib: float):
        for number in range(num):
            (tmp_path / f"0000:{number:02x}:00.0").mkdir()
        sizes = {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": int(host_gib * 2**30) // 4096}
        monkeypatch.setattr(os, "sysconf", sizes.__getitem__)
        return tmp_path

    return make


@pytest.mark.parametrize(("num", "host_gib", "limit"), [(2, 251.7, 100), (1, 125.9, 100), (8, 2015.5, 201), (8, 4, 1)])
def test_the_gpus_share_four_fifths_of_the_hosts_memory(gpus, num, host_gib, limit):
    limit_pinned_memory(gpus(num, host_gib))
    assert int(os.environ[VARIABLE]) == limit


def test_a_limit_of_the_environments_own_stands(gpus, monkeypatch):
    folder = gpus(2, 251.7)
    monkeypatch.setenv(VARIABLE, "7")
    limit_pinned_memory(folder)
    assert os.environ[VARIABLE] == "7"


def test_without_gpus_nothing_is_set(gpus, tmp_path):
    limit_pinned_memory(gpus(0, 251.7))
    limit_pinned_memory(tmp_path / "no driver")
    assert VARIABLE not in os.environ
