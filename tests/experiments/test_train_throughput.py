"""The throughput benchmark: its workloads, its rows, and what it refuses."""

import dataclasses
import json
import re

import numpy as np
import pytest

from experiments.benchmarks.train_throughput import measure
from experiments.benchmarks.train_throughput.__main__ import ThroughputArguments, main, throughput_table
from experiments.benchmarks.train_throughput.workloads import WORKLOADS, Workload
from trainer.config import MeshConfig
from trainer.step.functions import make_step_functions
from trainer.step.sharding import make_mesh

# Of Llamas and Qwen: the published models'. The plain ones have two matrices of each three in the MLP.
NUM_PARAMETERS = {
    "gpt_32k": 123_587_328,
    "gpt_1b_32k": 1_336_248_320,
    "124m": 124e6,
    "124m_window": 124e6,
    "1b": 1.31e9,
}
NUM_PARAMETERS |= {"llama_1b": 1_235_814_400, "plain_llama_1b": 1_235_814_400 - 16 * 2048 * 8192}
NUM_PARAMETERS |= {"llama_8b": 8_030_261_248, "qwen3_4b": 4_022_468_096}
NUM_PARAMETERS["plain_qwen3_4b"] = NUM_PARAMETERS["qwen3_4b"] - 36 * 2560 * 9728
TINY = Workload("124m", 128, document_length=24, num_batches=2, num_windows=2, steps_per_window=1)


def tiny_config(**changes):
    config = TINY.config()
    sizes = {"vocab_size": 256, "num_layers": 2, "width": 32, "num_heads": 2, "num_kv_heads": 2, "head_dim": 16}
    return dataclasses.replace(config, model=dataclasses.replace(config.model, mlp_width=64, **(sizes | changes)))


def test_pages_and_gpt2s_differ_in_the_mlp_alone():
    """nanoGPT, which the latter are compared with, has GPT-2's.

    Of 1.3B parameters a SwiGLU of exactly as many would be no multiple of 256 features wide.
    """
    for page, gpt2, sizes in (
        ("gpt_32k", "124m_32k", (123_587_328, 123_587_328)),
        ("gpt_1b_32k", "1b_32k", (1_336_248_320, 1_311_082_496)),
    ):
        one, other = WORKLOADS[page].config(), WORKLOADS[gpt2].config()
        assert (one.model.mlp, other.model.mlp, other.model.mlp_width) == ("swiglu", "gelu", 4 * other.model.width)
        assert dataclasses.replace(one.model, mlp="gelu", mlp_width=other.model.mlp_width) == other.model
        assert (one.model.num_parameters, other.model.num_parameters) == sizes
        assert one.sequence_length == other.sequence_length == 32_768


@pytest.mark.parametrize("name", WORKLOADS)
def test_every_workload_is_a_config_with_batches_of_its_length(rng, name):
    workload = WORKLOADS[name]
    config = workload.config()
    assert config.data.keep_documents_apart is (workload.document_length is not None)
    assert config.model.num_parameters == pytest.approx(NUM_PARAMETERS[workload.model], rel=0.01)
    lengths = workload.document_lengths(rng)
    assert sum(lengths) == config.sequence_length == workload.sequence_length
    assert min(lengths) >= 1


def test_document_lengths_are_log_normal_around_the_median(rng):
    lengths = dataclasses.replace(TINY, sequence_length=2_000_000, document_length=1000).document_lengths(rng)[:-1]
    assert np.median(lengths) == pytest.approx(1000, rel=0.2)
    assert np.std(np.log(lengths)) == pytest.approx(0.5, rel=0.2)


def test_a_batch_is_packed_documents(rng):
    batch = TINY.batch(256, rng)
    starts = np.flatnonzero(batch["positions"][0] == 0)
    np.testing.assert_array_equal(starts[::-1], np.unique(batch["segment_ids"][0], return_index=True)[1])
    np.testing.assert_array_equal(batch["targets"][0, :-1], batch["tokens"][0, 1:])
    assert {name: array.shape for name, array in batch.items()} == dict.fromkeys(batch, (1, 128))


def test_a_workload_is_measured(rng):
    row = measure.measure("tiny", TINY, tiny_config())
    assert json.loads(json.dumps(row)) == row
    assert row["tokens_per_s"] == pytest.approx(128 / row["step_s"])
    assert row["fastest_step_s"] <= row["step_s"] <= row["slowest_step_s"]
    assert row["num_documents"] >= 2
    assert row["mfu_causal"] is row["mfu_noncausal"] is None, "no vendor tells a CPU's peak"
    assert row["loss"] == pytest.approx(np.log(256), rel=0.1)
    assert row["loss_implementation"] == "xla"
    assert [list(column.cells) for column in throughput_table([row]).columns[:2]] == [["tiny"], ["blockwise"]]


def test_a_workload_is_told_how_to_run():
    given = {"implementation": "blockwise", "exchange": "ring", "collectives": "xla", "loss_implementation": "xla"}
    config = measure.override(tiny_config(), mesh={"data": 2, "fsdp": 2}, **given)
    assert config.batch_size == 4
    assert config.mesh == MeshConfig(data=2, fsdp=2)
    found = (config.model.implementation, config.context.exchange, config.tensor.collectives)
    assert (*found, config.loss.implementation) == tuple(given.values())


def test_a_profile_can_name_the_parts_of_a_step():
    """The scopes reach the compiled program, whose instructions a profiler shows."""
    functions = make_step_functions(tiny_config(scan_layers=True, remat="none"), make_mesh(MeshConfig()))
    text = functions.train_step.lower(functions.abstract_state, functions.abstract_batch).compile().as_text()
    ops = re.findall(r'op_name="([^"]+)"', text)
    for scope in ("dot_product_attention", "mlp", "norm", "embedding", "loss", "optimizer"):
        assert any(re.search(rf"[/(]{scope}[/)]", op) for op in ops), scope


def test_refusals(monkeypatch, capsys):
    with pytest.raises(ValueError, match="unknown workloads 124m_33k; expected some of gpt_32k"):
        ThroughputArguments(workloads=("124m_33k",))
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert main(ThroughputArguments()) == 2
    assert "measures accelerators, but only CPUs are to be seen" in capsys.readouterr().err
