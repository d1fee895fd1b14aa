"""A step that compiles slowly is told with its causes and what to compare; another is not."""

import dataclasses

import pytest

from kernels import CausalMask, LocalMask
from layers import GPTConfig
from tests.trainer.compile.step_profiles import make_profile
from trainer.compile.slow import describe_slowness
from trainer.config import CompilationConfig, TrainConfig

MODEL = GPTConfig(
    vocab_size=64, num_layers=6, width=32, num_heads=4, num_kv_heads=2, head_dim=8, mlp_width=64, remat="none"
)
CONFIG = TrainConfig("x", MODEL, num_steps=1000, sequence_length=64)
WHERE = 'how to find out: "XLA is slow, what now?" in docs/profile_compile_time.md'


def lines(model: GPTConfig = MODEL, *, platform="tpu", is_topology=True, cache_dir="/cache", **compiled) -> list[str]:
    config = dataclasses.replace(CONFIG, model=model, compilation=CompilationConfig(cache_dir))
    profile = make_profile(10)
    report = dataclasses.replace(profile.compiled, **({"compile_s": 60.0} | compiled))
    profile = dataclasses.replace(profile, platform=platform, compiled=report)
    return describe_slowness(config, profile, is_topology=is_topology)


def test_what_compiles_soon_or_was_compiled_before_is_not_told():
    assert lines(compile_s=29.0) == []
    assert lines(cache_hit=True, trace_s=31.0) == []
    assert lines() == [WHERE], "nothing of the config's makes it larger"


MASKS = (CausalMask() & LocalMask(7, 0), CausalMask())


@pytest.mark.parametrize(
    ("changes", "told", "compare"),
    [
        ({"scan_layers": False}, "holds 6 layers one after the other, a scan would hold 1:", "model.scan_layers=Fal"),
        ({"scan_layers": False, "masks": MASKS}, "holds 6 layers one after the other, a scan would hold 2:", "model."),
        ({"masks": MASKS}, "holds 2 layers, after which masks and layer_overrides repeat", "config=A.py,B.py"),
        ({"remat": "full"}, "holds parts of the forward pass twice (remat full)", "'model.remat=full,none'"),
    ],
)  # fmt: skip
def test_what_makes_the_program_larger_is_told_with_its_comparison(changes, told, compare):
    cause, where = lines(dataclasses.replace(MODEL, **changes))
    assert told in cause
    assert f"--compare {compare}" in cause
    assert where == WHERE


def test_what_lies_in_the_compiler_or_before_it():
    assert "XLA_FLAGS=--xla_gpu_autotune_level=0" in lines(platform="gpu", is_topology=False)[0]
    assert lines(platform="gpu") == [WHERE], "where there is no GPU, XLA can't time anything"
    assert "--compilation.cache-dir" in lines(cache_dir="", is_topology=False)[0]
    assert lines(cache_dir="") == [WHERE], "the cache isn't used for a topology"
    assert "tracing takes most of it" in lines(trace_s=100.0)[0]
