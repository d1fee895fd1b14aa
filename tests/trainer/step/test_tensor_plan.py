"""What carries tokens over `mesh.tensor`: what is chosen, what is said of it, and which wish is refused."""

import dataclasses

import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, Mesh

from kernels import CausalMask
from layers import GPTConfig, LayerOverride, MoEConfig
from tests.trainer.compile.step_profiles import make_profile
from trainer.compile.command.report import describe_target, profile_to_json
from trainer.config import MeshConfig, TensorConfig, TrainConfig
from trainer.errors import UserMistake
from trainer.step.functions import make_step_functions
from trainer.step.plan import ExpertPlan, TensorPlan, plan_tensor
from trainer.step.sharding import AXES, make_mesh

MOE = MoEConfig(num_experts=8, num_experts_per_token=2, expert_width=128)


@dataclasses.dataclass(frozen=True)
class FakeGpu:
    """As much of a device as is looked at before anything is compiled."""

    id: int
    platform: str = "gpu"
    device_kind: str = "NVIDIA X"
    compute_capability: str = "9.0"
    process_index: int = 0
    core_count: int = 132


@dataclasses.dataclass(frozen=True)
class FakeCpu:
    id: int
    platform: str = "cpu"
    device_kind: str = "cpu"
    process_index: int = 0

    def addressable_memories(self):
        return ()


def mesh_of(device, **sizes):
    """A mesh of such devices."""
    shape = [sizes.get(axis, 1) for axis in AXES]
    devices = np.array([device(index) for index in range(np.prod(shape))], object).reshape(shape)
    return Mesh(devices, AXES, axis_types=(AxisType.Auto,) * 4)


def config_of(mesh, moe=None, collectives=None, model=None, **fields):
    sizes = {"width": 128, "num_heads": 4, "num_kv_heads": 4, "head_dim": 32, "mlp_width": 256, "mlp": "swiglu"}
    return TrainConfig(
        name="x",
        num_steps=1000,
        model=GPTConfig(**{"moe": moe, **sizes, **(model or {})}),
        mesh=MeshConfig(**mesh.shape),
        tensor=TensorConfig(collectives),
        **({"sequence_length": 256, "batch_size": 8} | fields),
    )


def plan(mesh, **options):
    return plan_tensor(config_of(mesh, **options), mesh)


def test_without_the_axis_there_is_nothing_to_carry():
    assert plan(mesh_of(FakeGpu, fsdp=2)) is None
    # As with an exchange and one rank of `context`: a wish for another mesh.
    assert plan(mesh_of(FakeGpu), collectives="mosaic_gpu") is None


@pytest.mark.jax_0_11
@pytest.mark.parametrize(
    ("tensor", "fields", "xla_for"),
    [
        (2, {}, ()),
        (4, {"model": {"head_dim": 64, "width": 256}, "sequence_length": 512}, ()),
        (2, {"moe": MOE}, ("experts",)),
    ],
)
def test_hopper_gpus_use_the_kernels_unless_told_not_to(tensor, fields, xla_for):
    mesh = mesh_of(FakeGpu, tensor=tensor)
    found = plan(mesh, **fields)
    assert found == plan(mesh, collectives="mosaic_gpu", **fields) == TensorPlan("mosaic_gpu", xla_for, {})
    assert found.describe() == ["mosaic_gpu" + "".join(f", xla for {name}" for name in xla_for)]
    assert found.to_json() == {"collectives": "mosaic_gpu", "xla_for": xla_for, "passed_over": {}}
    assert plan(mesh, collectives="xla", **fields) == TensorPlan("xla", (), {})
    assert plan(mesh, collectives="xla", **fields).describe() == ["xla"]


@pytest.mark.jax_0_11
def test_some_matmuls_may_be_served_and_others_not():
    two = mesh_of(FakeGpu, tensor=2)
    reason = "takes a GPU's features in multiples of 64, not 96"
    told = ["mosaic_gpu, xla for MLP, MLP's output", f"  mosaic_gpu passed over: it {reason}"]
    assert plan(two, model={"mlp_width": 192}).describe() == told
    with pytest.raises(UserMistake, match=f"tensor.collectives='mosaic_gpu' can't serve: it {reason}; use 'xla'"):
        plan(two, model={"mlp_width": 192}, collectives="mosaic_gpu")
    assert plan(two, model={"mlp_width": 192}, collectives="xla").describe() == ["xla"]
    few_heads = plan(two, model={"num_kv_heads": 2}).describe()
    assert few_heads == ["mosaic_gpu, xla for attention", "  mosaic_gpu passed over: it " + reason.replace("96", "32")]
    # The second of two layers has 32 features of queries on a rank.
    overrides = (LayerOverride(), LayerOverride(head_dim=16))
    told = plan(two, model={"masks": (CausalMask(),) * 2, "layer_overrides": overrides, "num_layers": 2}).describe()
    assert told[0] == "mosaic_gpu, xla for attention, attention's output"


@pytest.mark.jax_0_11
@pytest.mark.parametrize(
    ("sizes", "fields", "reason"),
    [
        ({"tensor": 2, "data": 4}, {}, "is for meshes of "),
        ({"tensor": 2, "fsdp": 2}, {}, "is for meshes of "),
        # A rank has half of the tokens.
        ({"tensor": 2}, {"sequence_length": 192}, "takes a GPU's tokens in multiples of 128, not 96"),
    ],
)
def test_a_gpu_says_why_the_kernels_cannot_serve(sizes, fields, reason):
    mesh = mesh_of(FakeGpu, **sizes)
    chosen, *told = plan(mesh, **fields).describe()
    assert (chosen, len(told)) == ("xla", 1)
    assert told[0].startswith(f"  mosaic_gpu passed over: it {reason}")
    assert plan(mesh, collectives="xla", **fields).describe() == ["xla"]
    refusal = f"^tensor.collectives='mosaic_gpu' can't serve: it {reason}.*'xla', or None for the fastest$"
    with pytest.raises(UserMistake, match=refusal):
        plan(mesh, collectives="mosaic_gpu", **fields)


def test_tokens_that_do_not_divide_are_left_to_xla_unless_the_kernels_are_named():
    mesh = mesh_of(FakeGpu, tensor=2, context=2)
    told = ["xla", "  mosaic_gpu passed over: it is for tokens that the mesh divides, not for 50 of a sequence"]
    assert plan(mesh, sequence_length=50).describe() == told
    assert plan(mesh, sequence_length=50, collectives="xla").describe() == ["xla"]
    told = (
        r"tensor\.collectives='mosaic_gpu' can't serve: 8 sequences of 50 tokens, .* don't divide into the mesh .*'xla'"
    )
    with pytest.raises(UserMistake, match=told):
        plan(mesh, sequence_length=50, collectives="mosaic_gpu")


def test_other_platforms_take_xla_without_a_word():
    assert plan(mesh_of(FakeCpu, tensor=2)) == TensorPlan("xla", (), {})
    assert plan(mesh_of(FakeCpu, tensor=2), sequence_length=33) == TensorPlan("xla", (), {})


def test_a_wish_that_cannot_be_met_makes_no_step():
    mesh = mesh_of(FakeCpu, tensor=2)
    with pytest.raises(UserMistake, match=r"tensor\.collectives='mosaic_gpu' can't serve: it .*; use 'xla', or None"):
        make_step_functions(config_of(mesh, collectives="mosaic_gpu"), mesh)


@pytest.mark.parametrize("collectives", ["xla", "mosaic_gpu", None])
def test_the_layers_get_what_the_config_names(collectives):
    mesh = make_mesh(MeshConfig())
    functions = make_step_functions(config_of(mesh, collectives=collectives), mesh)
    model = nnx.merge(functions.graphdef, functions.abstract_state.params)
    assert model.activation_sharding.collectives == collectives


@pytest.mark.parametrize(
    ("part", "plan"),
    [
        ("tensor", TensorPlan("xla", (), {"mosaic_gpu": "is for others"})),
        ("experts", ExpertPlan(8, 2, "xla", {"mosaic_gpu": "is for others"})),
    ],
)
def test_the_compile_report_has_the_plan(part, plan):
    config = config_of(mesh_of(FakeCpu))
    profile = make_profile(needed=10, **{part: plan})
    assert describe_target(config, None, profile)[part] == plan.describe()
    assert "  mosaic_gpu passed over: it is for others" in plan.describe()
    assert profile_to_json(profile)[part] == plan.to_json()
    without = make_profile(needed=10)
    assert part not in describe_target(config, None, without)
    assert profile_to_json(without)[part] is None
