"""Stages, the persistent cache, memory by category, and counting compilations."""

import jax
import jax.numpy as jnp
import pytest

from tests.compilations import count_compilations
from tests.trainer.conftest import compilation_cache_as_before
from trainer.compile.persistent_cache import use_compilation_cache
from trainer.compile.stages import compile_in_stages


@pytest.fixture
def cache_dir(tmp_path):
    with compilation_cache_as_before():
        use_compilation_cache(str(tmp_path / "new" / "cache"))
        yield tmp_path / "new" / "cache"


def make_step(factor):
    def step(state, batch):
        return state + factor * batch @ batch.T, (batch**2).sum()

    return jax.jit(step, donate_argnums=0)


ARGS = (jax.ShapeDtypeStruct((64, 64), jnp.float32), jax.ShapeDtypeStruct((64, 8), jnp.float32))


def test_report_and_program(rng):
    factor = rng.standard_normal()
    compiled, report = compile_in_stages(make_step(factor), *ARGS, name="step")
    batch = jnp.asarray(rng.standard_normal((64, 8)), jnp.float32)
    state, _ = compiled(jnp.zeros((64, 64)), batch)
    assert jnp.allclose(state, factor * batch @ batch.T, atol=1e-4)
    assert report.name == "step"
    assert min(report.trace_s, report.lower_s, report.compile_s) > 0
    json = report.to_json()
    assert json["memory"]["arguments"] == 4 * (64 * 64 + 64 * 8)
    assert json["memory"]["outputs"] >= 4 * 64 * 64
    assert json["memory"]["aliased"] == 4 * 64 * 64
    assert json["memory"]["peak"] == sum(
        sign * json["memory"][name]
        for name, sign in (("arguments", 1), ("outputs", 1), ("aliased", -1), ("temporaries", 1), ("code", 1))
    )


def test_second_compilation_hits_the_cache(cache_dir, rng):
    factor = rng.standard_normal()
    _, first = compile_in_stages(make_step(factor), *ARGS, name="step")
    _, second = compile_in_stages(make_step(factor), *ARGS, name="step")
    _, other = compile_in_stages(make_step(factor + 1), *ARGS, name="step")
    assert (first.cache_hit, second.cache_hit, other.cache_hit) == (False, True, False)
    assert len([path for path in cache_dir.iterdir() if path.name.endswith("-cache")]) == 2


def test_a_cache_folder_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    told = r"compilation\.cache_dir='.*file/cache' is not a folder that can be written to"
    with pytest.raises(ValueError, match=told):
        use_compilation_cache(str(tmp_path / "file" / "cache"))


def test_count_compilations():
    step, args = make_step(3.0), (jnp.zeros((64, 64)), jnp.zeros((64, 8)))
    with count_compilations() as counts:
        state, _ = step(*args)
        state, _ = step(state, args[1])
        assert counts["step"] == 1
        step(jnp.zeros((32, 32)), jnp.zeros((32, 8)))
        assert counts["step"] == 2
    step(jnp.zeros((16, 16)), jnp.zeros((16, 8)))
    assert counts["step"] == 2
