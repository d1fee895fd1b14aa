"""A function that is compiled again says why, and only then."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from tests.compilations import count_compilations
from trainer.compile.recompilation import ArgumentChange, RecompilingFunction, summarize


class Told:
    """Collects what is told of recompiles."""

    def __init__(self):
        self.reports, self.changes = [], []

    def __call__(self, report, changes):
        self.reports.append(report)
        self.changes.append([str(change) for change in changes])


@pytest.fixture
def told():
    return Told()


def train_step(state, batch):
    total = batch["tokens"].sum() + batch["weights"].sum()
    return jax.tree.map(lambda leaf: leaf + total.astype(leaf.dtype), state)


def make_state():
    return {"params": [jnp.zeros((4, 4)), jnp.zeros(4)], "step": jnp.zeros((), jnp.int32)}


def make_batch(rng, num_rows=2, dtype=jnp.int32):
    tokens = jnp.asarray(rng.integers(0, 9, (num_rows, 8)), dtype)
    return {"tokens": tokens, "weights": jnp.asarray(rng.integers(0, 9, (num_rows, 8)), jnp.float32)}


@pytest.fixture
def step(rng, told):
    jitted = jax.jit(train_step, donate_argnums=0)
    return RecompilingFunction(jitted, make_state(), make_batch(rng), name="train_step", on_recompile=told)


def test_calls_that_fit_compile_nothing_and_tell_nothing(rng, step, told):
    state = make_state()
    with count_compilations() as counts:
        for _ in range(3):
            state = step(state, jax.tree.map(np.asarray, make_batch(rng)))  # NumPy's arrays are as good as JAX's
    assert (counts["train_step"], told.reports) == (0, [])
    assert step.report.name == "train_step"


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (
            lambda rng, state, _: (state, make_batch(rng, num_rows=3)),
            ["batch['tokens']: shape (2, 8) → (3, 8)", "batch['weights']: shape (2, 8) → (3, 8)"],
        ),
        (lambda rng, state, _: (state, make_batch(rng, dtype=jnp.float32)), ["batch['tokens']: dtype int32 → float32"]),
        (
            lambda _, state, batch: (state | {"params": [state["params"][0], jnp.zeros((4, 2), jnp.bfloat16)]}, batch),
            ["state['params'][1]: shape (4,) → (4, 2)", "state['params'][1]: dtype float32 → bfloat16"],
        ),
        (
            lambda rng, state, batch: (state, batch | {"extra": jnp.zeros((2, 8), jnp.bool_)}),
            ["batch['extra']: structure absent → bool[2,8]"],
        ),
        (lambda _, state, batch: ({"params": state["params"]}, batch), ["state['step']: structure int32[] → absent"]),
    ],
)
def test_a_recompile_says_what_changed_and_gives_the_right_result(rng, step, told, change, expected):
    state, batch = change(rng, make_state(), make_batch(rng))
    wanted = train_step(state, batch)
    with count_compilations() as counts:
        result = step(state, batch)
    assert jax.tree.all(jax.tree.map(jnp.array_equal, result, wanted))
    assert told.changes == [expected]
    assert counts["train_step"] == 1
    (report,) = told.reports
    assert min(report.trace_s, report.lower_s, report.compile_s) > 0
    assert report.memory.peak > 0


def test_a_tuple_for_a_list_is_a_change_of_structure(rng, step, told):
    state, batch = make_state(), make_batch(rng)
    step(state | {"params": tuple(state["params"])}, batch)
    ((change,),) = told.changes
    assert change.startswith("arguments: structure PyTreeDef(")


def test_going_back_and_forth_compiles_each_program_once(rng, step, told):
    state, short, long = make_state(), make_batch(rng), make_batch(rng, num_rows=5)
    with count_compilations() as counts:
        for batch in (short, long, short, long, long, short):
            state = step(state, batch)
    assert counts["train_step"] == len(told.reports) == 1


def test_changes_are_since_the_call_before(rng, step, told):
    state = make_state()
    for num_rows in (3, 2, 4):
        state = step(state, make_batch(rng, num_rows))
    assert [changes[0] for changes in told.changes] == [f"batch['tokens']: shape (2, 8) → ({n}, 8)" for n in (3, 4)]


def test_donated_arguments_live_until_the_new_program_takes_them(rng, step):
    state = make_state()

    def refuse(report, changes):
        assert not state["params"][0].is_deleted()
        raise OSError("no space left on device")

    step._on_recompile = refuse
    with pytest.raises(OSError, match="no space left"):
        step(state, make_batch(rng, num_rows=3))
    assert not state["params"][0].is_deleted()
    step(state, make_batch(rng, num_rows=3))
    assert state["params"][0].is_deleted(), "the program was kept, and donates like the first"


def test_the_programs_own_errors_are_not_taken_for_a_recompile(rng, step, told):
    class Broken:
        input_shardings = step._latest.compiled.input_shardings

        def __call__(self, *_):
            raise TypeError("from inside")

    step._latest = dataclasses.replace(step._latest, compiled=Broken())
    with pytest.raises(TypeError, match="from inside"):
        step(make_state(), make_batch(rng))
    assert told.reports == []


def test_a_deleted_argument_is_told_as_such(rng, step, told):
    state = make_state()
    step(state, make_batch(rng))
    with pytest.raises((RuntimeError, ValueError), match="deleted"):  # JAX 0.11, 0.10
        step(state, make_batch(rng))
    assert told.reports == []


def test_what_is_no_array_and_what_cannot_be_traced_raise_as_they_do_in_jax(rng, step, told):
    with pytest.raises(TypeError, match="'no array' of type <class 'str'> is not a valid JAX type"):
        step(make_state(), make_batch(rng) | {"tokens": "no array"})
    with pytest.raises(KeyError, match="weights"):
        step(make_state(), {"tokens": jnp.zeros(3)})
    assert told.reports == []
    step(make_state(), make_batch(rng))


def make_shardings():
    """Along four devices, whole on each of them, and on one."""
    mesh = Mesh(np.array(jax.devices()[:4]), ("data",))
    over_four = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in (("data",), ()))
    return *over_four, SingleDeviceSharding(jax.devices()[1])


def compiled_for(sharding, told, **options):
    """A function of eight numbers that lie so."""
    abstract = jax.ShapeDtypeStruct((8,), jnp.float32, sharding=sharding)
    return RecompilingFunction(jax.jit(lambda x: 2 * x, **options), abstract, name="double", on_recompile=told)


@pytest.mark.usefixtures("eight_devices")
def test_a_sharding_that_changes_is_told(told):
    x, shardings = jnp.arange(8.0), make_shardings()
    double = compiled_for(shardings[0], told)
    for sharding in shardings:
        np.testing.assert_array_equal(double(jax.device_put(x, sharding)), 2 * np.arange(8))
        # An array that isn't bound to a device goes wherever it is wanted.
        np.testing.assert_array_equal(double(x), 2 * np.arange(8))
    (spec,), (device,) = told.changes
    assert spec == "x: sharding P('data',) → P()"
    assert re.fullmatch(r"x: sharding NamedSharding\(.*\) → SingleDeviceSharding\(.*\)", device)


@pytest.mark.usefixtures("eight_devices")
def test_a_sharding_other_than_the_declared_one_is_refused_as_jax_does(told):
    along, whole, _ = make_shardings()
    with pytest.raises(ValueError, match="does not match the sharding on the respective arg"):
        compiled_for(along, told, in_shardings=along)(jax.device_put(jnp.arange(8.0), whole))
    assert told.changes == []


def test_summaries_put_like_changes_together_and_end():
    shape = ("shape", "(1, 32)", "(2, 32)")
    changes = [ArgumentChange("tokens", *shape), ArgumentChange("targets", *shape)]
    changes.append(ArgumentChange("n", "dtype", "int32", "float32"))
    assert summarize(changes) == "tokens and 1 more: shape (1, 32) → (2, 32); n: dtype int32 → float32"
    many = [ArgumentChange("x", "shape", str(size), str(size + 1)) for size in range(5)]
    assert summarize(many) == "x: shape 0 → 1; x: shape 1 → 2; x: shape 2 → 3; …"
