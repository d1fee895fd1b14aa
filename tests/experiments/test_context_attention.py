"""The benchmark of exchanges: its rows on simulated devices, and what it refuses."""

import dataclasses
import types

import pytest

from experiments.benchmarks import context_attention
from experiments.benchmarks.context_attention import CASES, CONTENDERS, ContextArguments, main, measure, times_beside


@pytest.mark.usefixtures("eight_devices")
@pytest.mark.parametrize(
    ("name", "exchange"),
    [("16x128_131k", "all_to_all"), pytest.param("packed_131k", "all_gather", marks=pytest.mark.full)],
)
def test_each_exchange_is_held_to_one_device(name, exchange, monkeypatch):
    monkeypatch.setattr(context_attention, "WITHOUT_CUDA_GRAPHS", None)
    sizes = {"length": 256, "num_heads": 8, "num_kv_heads": 8, "head_dim": 16}
    case = dataclasses.replace(CASES[name], **sizes, document_length=CASES[name].document_length and 100)
    *rows, refused = measure(name, case, ContextArguments(exchanges=(exchange, "halo"), num_rounds=1, sample_ms=1))
    assert [(row["exchange"], row["sequence_sharding"]) for row in rows] == [x for x in CONTENDERS if x[0] == exchange]
    for row in rows:
        assert row["num_devices"] == 8
        assert 0 <= row["error"] < 0.02
        assert row["efficiency"] > 0
    assert (refused["exchange"], "can't serve this call" in refused["refused"]) == ("halo", True)


def test_efficiency_is_one_devices_time_over_that_of_all():
    all_four, one = (types.SimpleNamespace(seconds=seconds) for seconds in ([(1.0, 3.0)] * 3, [(4.0, 6.0)] * 3))
    assert times_beside(all_four, one, 4) == {
        "forward_s": 1,
        "one_forward_s": 4,
        "forward_efficiency": 1,
        "backward_s": 3,
        "one_backward_s": 6,
        "backward_efficiency": 0.5,
        "efficiency": 10 / 4 / 4,
    }


def test_what_cannot_be_measured_is_refused(capsys):
    assert main(ContextArguments(cases=("window_131k",))) == 2
    assert "needs two accelerators or more" in capsys.readouterr().err
    with pytest.raises(ValueError, match="unknown cases 16x128; expected some of 16x128_131k"):
        ContextArguments(cases=("16x128",))
