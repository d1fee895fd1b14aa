"""What the opening panel, the record and the compile report say of the loss."""

import dataclasses

import jax
import pytest

from kernels import Target
from kernels.exp_logits import ExpLogits
from layers import GPTConfig
from tests.trainer.compile.step_profiles import make_profile
from trainer.compile.command.report import describe_target, profile_to_json
from trainer.config import TrainConfig
from trainer.step.loss_plan import plan_loss

H200, TPU = Target("gpu", "NVIDIA H200", 9.0, 132), Target("tpu", "TPU v5p")
SERVED = GPTConfig(vocab_size=50304, width=768, compute_dtype="bfloat16")
NEEDS_JAX_0_11 = pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="the kernel needs JAX 0.11")


@NEEDS_JAX_0_11
def test_a_hopper_gpu_computes_exponentials_and_others_say_why_not():
    plan = plan_loss(SERVED, H200)
    assert plan.describe() == ["mosaic_gpu, exponentials of logits in chunks"]
    assert plan.exp_logits(H200) == ExpLogits(H200)
    odd = plan_loss(dataclasses.replace(SERVED, vocab_size=50257), H200)
    reason = "it takes features in multiples of 64, not 50257"
    assert odd.describe() == ["xla, logits in chunks", f"  mosaic_gpu passed over: {reason}"]
    assert odd.exp_logits(H200) is None


def test_other_devices_have_no_reason_to_tell():
    plan = plan_loss(SERVED, TPU)
    assert plan.to_json() == {"implementation": "xla", "passed_over": {}}
    assert plan.exp_logits(TPU) is None


@NEEDS_JAX_0_11
def test_the_compile_report_has_the_loss():
    plan = plan_loss(SERVED, H200)
    config = TrainConfig(name="x", num_steps=1000, model=SERVED)
    profile = dataclasses.replace(make_profile(needed=10), loss=plan)
    assert "loss" not in describe_target(config, None, profile)  # of a TPU
    assert profile_to_json(profile)["loss"] == plan.to_json()
    assert describe_target(config, None, dataclasses.replace(profile, platform="gpu"))["loss"] == plan.describe()
