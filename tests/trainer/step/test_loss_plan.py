"""What the opening panel, the record and the compile report say of the loss."""

import pytest

from kernels import Target
from kernels.loss.exp_logits import ExpLogits
from layers import GPTConfig
from tests.trainer.compile.step_profiles import make_profile
from trainer.compile.command.report import describe_target, profile_to_json
from trainer.config import LossConfig, TrainConfig
from trainer.errors import UserMistake
from trainer.step.functions import make_step_functions
from trainer.step.plan import plan_loss
from trainer.step.sharding import make_mesh

H200, TPU = Target("gpu", "NVIDIA H200", 9.0, 132), Target("tpu", "TPU v5p")


def config_of(vocab_size=50304, implementation=None):
    model = GPTConfig(vocab_size=vocab_size, width=768, compute_dtype="bfloat16")
    return TrainConfig(name="x", num_steps=1000, model=model, loss=LossConfig(implementation=implementation))


@pytest.mark.jax_0_11
def test_a_hopper_gpu_computes_exponentials_and_others_say_why_not():
    plan = plan_loss(config_of(), H200)
    assert plan == plan_loss(config_of(implementation="mosaic_gpu"), H200)
    assert plan.describe() == ["mosaic_gpu, exponentials of logits in chunks"]
    assert plan.exp_logits(H200) == ExpLogits(H200)
    odd = plan_loss(config_of(50257), H200)
    reason = "it takes features in multiples of 64, not 50257"
    assert odd.describe() == ["xla, logits in chunks", f"  mosaic_gpu passed over: {reason}"]
    assert odd.exp_logits(H200) is None
    with pytest.raises(UserMistake, match=rf"loss\.implementation='mosaic_gpu' can't serve: {reason}; use 'xla'"):
        plan_loss(config_of(50257, "mosaic_gpu"), H200)


@pytest.mark.parametrize(("target", "implementation"), [(H200, "xla"), (TPU, "xla"), (TPU, None)])
def test_named_logits_and_other_devices_have_no_reason_to_tell(target, implementation):
    plan = plan_loss(config_of(implementation=implementation), target)
    assert plan.to_json() == {"implementation": "xla", "passed_over": {}}
    assert plan.exp_logits(target) is None


def test_a_step_refuses_the_kernel_where_there_is_none():
    config = config_of(implementation="mosaic_gpu")
    with pytest.raises(UserMistake, match=r"loss\.implementation='mosaic_gpu' can't serve: it "):
        make_step_functions(config, make_mesh(config.mesh))


@pytest.mark.jax_0_11
def test_the_compile_report_has_the_loss():
    config = config_of()
    plan = plan_loss(config, H200)
    profile, on_gpu = make_profile(needed=10, loss=plan), make_profile(needed=10, loss=plan, target=H200)
    assert "loss" not in describe_target(config, None, profile)  # of a TPU
    assert profile_to_json(profile)["loss"] == plan.to_json()
    assert describe_target(config, None, on_gpu)["loss"] == plan.describe()
