"""Says why a step may take long to compile, and which comparisons tell whether a remedy helps."""

from __future__ import annotations

from trainer.compile.step_profile import StepProfile
from trainer.config import TrainConfig

# Seconds of a step that nobody waits for twice without asking why.
_SLOW_S = 30.0


def describe_slowness(config: TrainConfig, profile: StepProfile, *, is_topology: bool) -> list[str]:
    """Lines about a step that compiles slowly; none if it doesn't, or was read from the cache.

    Args:
      config: the experiment.
      profile: of its step.
      is_topology: whether it was compiled for devices that aren't there.
    """
    compiled, model = profile.compiled, config.model
    if compiled.cache_hit or compiled.trace_s + compiled.lower_s + compiled.compile_s < _SLOW_S:
        return []
    lines = []
    if compiled.trace_s > compiled.compile_s:
        lines.append(
            "tracing takes most of it: a mask without a closed form is evaluated on every pair of positions; "
            "docs/masks.md says how to give it one"
        )
    if not model.scan_layers and model.num_layers > model.pattern_length:
        lines.append(
            f"the program holds {model.num_layers} layers one after the other, a scan would hold "
            f"{model.pattern_length}: --compare model.scan_layers=False,True"
        )
    elif model.pattern_length > 1:
        lines.append(
            f"the program holds {model.pattern_length} layers, after which masks and layer_overrides repeat; fewer "
            "make it smaller: --compare config=A.py,B.py"
        )
    if model.remat != "none":
        lines.append(
            f"the program holds parts of the forward pass twice (remat {model.remat}): "
            f"--compare 'model.remat={model.remat},none'"
        )
    if profile.platform == "gpu" and not is_topology:
        lines.append("XLA times several forms of each matmul; for a try, XLA_FLAGS=--xla_gpu_autotune_level=0")
    if not config.compilation.cache_dir and not is_topology:
        lines.append("each start compiles anew: --compilation.cache-dir names a folder for the program")
    return [*lines, 'how to find out: "XLA is slow, what now?" in docs/profile_compile_time.md']
