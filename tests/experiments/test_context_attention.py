"""The benchmark of exchanges: its rows on simulated devices, and what it refuses."""

import dataclasses

import pytest

from experiments.benchmarks import context_attention
from experiments.benchmarks.context_attention import CASES, CONTENDERS, ContextArguments, main, measure


@pytest.mark.usefixtures("eight_devices")
@pytest.mark.parametrize("name", ["16x128_131k", pytest.param("packed_131k", marks=pytest.mark.full)])
def test_each_exchange_is_held_to_one_device(name, monkeypatch):
    monkeypatch.setattr(context_attention, "WITHOUT_CUDA_GRAPHS", None)
    sizes = {"length": 512, "num_heads": 8, "num_kv_heads": 8, "head_dim": 16}
    case = dataclasses.replace(CASES[name], **sizes, document_length=CASES[name].document_length and 100)
    rows = measure(
        name, case, ContextArguments(exchanges=("all_gather", "all_to_all", "halo"), num_rounds=1, sample_ms=1)
    )
    measured = {(row["exchange"], row["sequence_sharding"]): row for row in rows if "refused" not in row}
    expected = [pair for pair in CONTENDERS if pair[0] in ("all_gather", "all_to_all")]
    assert list(measured) == [pair for pair in expected if name == "packed_131k" or pair[1] != "balanced"]
    for row in measured.values():
        assert row["num_devices"] == 8
        assert 0 <= row["error"] < 0.02
        assert row["efficiency"] > 0
    (refused,) = (row for row in rows if "refused" in row)
    assert (refused["exchange"], "can't serve this call" in refused["refused"]) == ("halo", True)


def test_what_cannot_be_measured_is_refused(capsys):
    assert main(ContextArguments(cases=("window_131k",))) == 2
    assert "needs two accelerators or more" in capsys.readouterr().err
    with pytest.raises(ValueError, match="unknown cases 16x128; expected some of 16x128_131k"):
        ContextArguments(cases=("16x128",))
