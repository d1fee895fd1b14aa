"""Profiles of steps that nothing compiled."""

from kernels import Target
from trainer.compile.fit import DeviceMemory, Fit, StateMemory
from trainer.compile.stages import CompileReport
from trainer.compile.step_profile import StepProfile
from trainer.step.plan import LossPlan, Plan


def make_profile(needed: int, num_devices: int = 8, **planned) -> StepProfile:
    """A step that needs some of the 100 bytes that each device has; `planned` are fields of its plan."""
    plan = {"sequence_sharding": "contiguous", "attention": (), "experts": None, "tensor": None}
    target, loss = Target("tpu", "TPU v5 lite"), LossPlan("xla", {})
    return StepProfile(
        platform="tpu",
        device_kind="TPU v5 lite",
        num_devices=num_devices,
        mesh={"data": 1, "fsdp": 1, "tensor": 1, "context": 1},
        num_parameters=1,
        tokens_per_step=1,
        plan=Plan(**{"target": target, "loss": loss, **plan, **planned}),
        compiled=CompileReport("train_step", 0.1, 0.1, 0.1, False, None),
        size=None,
        collectives=(),
        state=StateMemory(1, 1, 1),
        fit=Fit(needed, DeviceMemory(100, "a test's")),
    )
