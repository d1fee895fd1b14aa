"""Training on meshes of eight fake CPU devices is training on one."""

import json
from pathlib import Path

import numpy as np
import pytest

from tests.fresh_inputs import run_on_fresh_inputs
from tests.host_cpus import environment_of_cpus

SCRIPT = Path(__file__).parent / "sharded_training.py"
SHARDED = ["data_fsdp_tensor", "fsdp_tensor_context", "data_fsdp_context", "tensor"]
MUON = ["muon_data_fsdp_tensor", "muon_data_fsdp"]


@pytest.fixture(scope="module")
def run():
    done = run_on_fresh_inputs(SCRIPT, environment=environment_of_cpus(8))
    return json.loads(done.stdout), done.stderr


@pytest.fixture
def reports(run):
    return run[0]["training"]


def has_momentum_of_blocks(report):
    return any(".trace.blocks." in name for name in report["memory_kinds"])


@pytest.mark.parametrize("mesh", SHARDED)
def test_same_losses_and_parameters_as_one_device(reports, mesh):
    np.testing.assert_allclose(reports[mesh]["losses"], reports["one_device"]["losses"], rtol=1e-4)
    np.testing.assert_allclose(reports[mesh]["evaluation"], reports["one_device"]["evaluation"], rtol=1e-5)
    assert reports[mesh]["initial_difference"] < 1e-6
    assert reports[mesh]["params_difference"] < 1e-4
    assert reports[mesh]["opt_state_difference"] < 1e-4


@pytest.mark.parametrize("mesh", MUON)
def test_muon_with_layers_dealt_out_is_muon_on_one_device(reports, mesh):
    np.testing.assert_allclose(reports[mesh]["losses"], reports["muon_one_device"]["losses"], rtol=1e-4)
    assert reports[mesh]["params_difference"] < 1e-4
    assert reports[mesh]["opt_state_difference"] < 1e-4
    assert has_momentum_of_blocks(reports[mesh])
    assert not has_momentum_of_blocks(reports["one_device"]), "AdamW's"


def test_offloaded_moments_lie_in_the_hosts_memory(reports):
    kinds = reports["muon_data_fsdp_tensor"]["memory_kinds"]
    on_host = {name for name, kind in kinds.items() if kind == "pinned_host"}
    moments = {name for name in kinds if any(f".{moment}." in name for moment in ("mu", "nu", "trace"))}
    assert on_host == moments != set()


def test_each_device_holds_its_part_of_parameters_and_moments(reports):
    for prefix in ("params", "opt_state.1.mu", "opt_state.1.nu"):
        shards = reports["data_fsdp_tensor"]["shards"]
        assert shards[f"{prefix}.embedding.embedding"] == [[64, 16], [32, 8]]
        assert shards[f"{prefix}.blocks.0.attention.query.kernel"] == [[2, 16, 4, 4], [2, 8, 2, 4]]
        assert shards[f"{prefix}.blocks.0.attention.output.kernel"] == [[2, 4, 4, 16], [2, 2, 4, 8]]
        assert shards[f"{prefix}.blocks.0.mlp.down.kernel"] == [[2, 48, 16], [2, 24, 8]]
        assert shards[f"{prefix}.final_norm.scale"] == [[16], [16]]
        # fsdp and context split one dim together.
        shards = reports["data_fsdp_context"]["shards"]
        assert shards[f"{prefix}.embedding.embedding"] == [[64, 16], [64, 4]]
        assert shards[f"{prefix}.blocks.0.mlp.down.kernel"] == [[2, 48, 16], [2, 48, 4]]
        assert shards[f"{prefix}.final_norm.scale"] == [[16], [16]]


def test_gradients_are_summed_in_float32_and_once_an_update(run):
    sums = run[0]["sums"]
    for of_update in sums.values():
        assert of_update["element_types"] == ["f32", "i32"]  # i32: numbers of targets
        _, num_bytes, is_exact = of_update["collectives"]["reduce-scatter"]
        assert is_exact
        assert num_bytes == 4 * of_update["num_matrix_parameters"]
    one, four = (of_update["collectives"] for of_update in sums.values())
    assert one["all-reduce"][1] == pytest.approx(four["all-reduce"][1], rel=0.01)
    # One micro-batch: layer by layer, and once more where the backward pass recomputes. Four: all at once.
    assert four["all-gather"][1] < one["all-gather"][1]


@pytest.mark.parametrize("mesh", SHARDED + MUON)
def test_shardings_survive_the_step(reports, mesh):
    assert reports[mesh]["state_keeps_its_shardings"]


@pytest.mark.parametrize("mesh", SHARDED)
def test_a_whole_copy_can_be_had_on_one_device(reports, mesh):
    assert reports[mesh]["gathered_on"] == [1]
    assert reports[mesh]["gathered_difference"] == 0


def test_no_device_makes_a_whole_parameter(reports):
    assert "f32[64,16]" in reports["one_device"]["init_program"]
    for name, (shape, shard_shape) in reports["data_fsdp_tensor"]["shards"].items():
        if shape != shard_shape:
            dims = ",".join(map(str, shape))
            assert f"[{dims}]" not in reports["data_fsdp_tensor"]["init_program"], name


def test_xla_finds_an_efficient_way_between_shardings(run):
    assert "Involuntary full rematerialization" not in run[1]
