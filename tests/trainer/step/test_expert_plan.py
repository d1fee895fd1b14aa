"""What the opening panel, the record and the compile report say of a mixture's experts."""

import dataclasses

import pytest

from kernels import Target
from layers import GPTConfig, MoEConfig
from trainer.config import MeshConfig, TrainConfig
from trainer.step.plan import plan_experts

H200 = Target("gpu", "NVIDIA H200", 9.0, 132)


def config_of(moe, tensor=1):
    return TrainConfig(name="x", num_steps=1000, model=GPTConfig(moe=moe, mlp="swiglu"), mesh=MeshConfig(tensor=tensor))


def test_without_a_mixture_there_is_nothing_to_say():
    assert plan_experts(config_of(None), H200) is None


@pytest.mark.jax_0_11
def test_a_hopper_gpu_multiplies_by_the_kernel_and_others_say_why_not():
    moe = MoEConfig(num_experts=8, num_experts_per_token=2, expert_width=128)
    config, by_xla = config_of(moe), "xla for 8 experts of a layer, 2 to a token"
    assert plan_experts(config, H200).describe() == [by_xla.replace("xla", "mosaic_gpu")]

    a100 = dataclasses.replace(H200, device_kind="NVIDIA A100", compute_capability=8.0)
    reason = "  mosaic_gpu passed over: it is for Hopper GPUs (compute capability 9.0), not for NVIDIA A100"
    assert plan_experts(config, a100).describe() == [by_xla, reason]
    # A rank of `tensor` has a part of the experts' features.
    reason = "  mosaic_gpu passed over: it takes features in multiples of 64, not 32"
    assert plan_experts(config_of(moe, tensor=4), H200).describe() == [by_xla, reason]
    tpu = plan_experts(config, Target("tpu", "TPU v5p"))
    assert tpu.describe() == [by_xla]
    sizes = {"num_experts": 8, "num_experts_per_token": 2}
    assert tpu.to_json() == {**sizes, "grouped_matmul": "xla", "passed_over": {}}
