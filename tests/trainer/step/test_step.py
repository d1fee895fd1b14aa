"""The training step against dense logits and AdamW written out, and what it must leave alone."""

import dataclasses
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from layers import GPTConfig
from tests.compilations import count_compilations
from tests.trainer.step.sharded_steps import PLAIN
from tests.trainer.step.test_loss import exact_exponentials
from trainer.compile.stages import compile_in_stages
from trainer.config import LossConfig, MeshConfig, OptimizerConfig, TrainConfig
from trainer.step.functions import WITHOUT_CUDA_GRAPHS, compiler_options, make_step_functions
from trainer.step.optimizer import make_optimizer
from trainer.step.plan import make_plan
from trainer.step.sharding import make_mesh
from trainer.step.skipping import NUM_RECENT, Skipping

BATCH_SIZE, LENGTH, VOCAB_SIZE = 4, 32, 64
SIZES = {"vocab_size": VOCAB_SIZE, "num_layers": 2, "width": 16, "num_heads": 2, "num_kv_heads": 1, "head_dim": 8}
MODEL = GPTConfig(**SIZES, **PLAIN, mlp_width=32, compute_dtype="float32")
CONFIG = TrainConfig(
    name="test",
    model=MODEL,
    num_steps=50,
    sequence_length=LENGTH,
    batch_size=BATCH_SIZE,
    # An epsilon far above the gradient's rounding: Adam would make a whole update of an entry that is nearly 0.
    optimizer=OptimizerConfig(learning_rate=1e-2, num_warmup_steps=5, clip_norm=0.3, epsilon=1e-5),
    loss=LossConfig(chunk_size=24, z_loss=1e-2),
)


def make_batch(rng):
    """Packed documents, padding at the ends, and rows with very different numbers of targets."""
    segment_ids = np.sort(rng.integers(1, 4, (BATCH_SIZE, LENGTH)), axis=1).astype(np.int32)
    for row, num_tokens in enumerate((LENGTH, 3, LENGTH - 5, 11)):
        segment_ids[row, num_tokens:] = 0
    tokens = rng.integers(0, VOCAB_SIZE, (BATCH_SIZE, LENGTH + 1)).astype(np.int32)
    starts = np.array([np.searchsorted(row, row) for row in np.where(segment_ids == 0, 9, segment_ids)])
    return {
        "tokens": jnp.asarray(tokens[:, :-1]),
        "targets": jnp.asarray(tokens[:, 1:]),
        "weights": jnp.asarray(segment_ids != 0, jnp.float32),
        "segment_ids": jnp.asarray(segment_ids),
        "positions": jnp.asarray(np.arange(LENGTH) - starts, jnp.int32),
    }


@pytest.fixture(scope="module")
def functions():
    return make_step_functions(CONFIG, make_mesh(MeshConfig()))


@pytest.fixture(scope="module")
def initial_state(functions):
    return jax.device_get(functions.init_state())


@pytest.fixture(scope="module")
def train_step(functions):
    """The compiled step. It donates the state that it is given."""
    with count_compilations() as counts:
        compiled, _ = compile_in_stages(
            functions.train_step, functions.abstract_state, functions.abstract_batch, name="train_step"
        )
    assert counts == {"train_step": 1}
    return compiled


def copy(state):
    return jax.tree.map(jnp.array, state)


def dense_loss(functions, params, batch):
    """Sums of nats and z from whole logits."""
    model = nnx.merge(functions.graphdef, params)
    logits = model.logits(model(batch["tokens"], batch["segment_ids"], batch["positions"]))
    log_partition = jax.nn.logsumexp(logits, axis=-1)
    target_logits = jnp.take_along_axis(logits, batch["targets"][..., None], axis=-1)[..., 0]
    nats = ((log_partition - target_logits) * batch["weights"]).sum()
    return nats, CONFIG.loss.z_loss * (log_partition**2 * batch["weights"]).sum()


def test_step_matches_dense_logits(rng, functions, initial_state, train_step):
    batch = make_batch(rng)
    num_targets = batch["weights"].sum()

    @jax.jit
    def dense_step(params, opt_state):
        def total(params):
            nats, z = dense_loss(functions, params, batch)
            return (nats + z) / num_targets, (nats / num_targets, z / num_targets)

        gradient, losses = jax.grad(total, has_aux=True)(params)
        updates, _ = make_optimizer(CONFIG.optimizer, CONFIG.num_steps).update(gradient, opt_state, params)
        return optax.apply_updates(params, updates), losses, optax.tree.norm(gradient)

    params, (loss, z_loss), grad_norm = dense_step(initial_state.params, initial_state.opt_state)
    state, metrics = train_step(copy(initial_state), batch)
    np.testing.assert_allclose(metrics.loss, loss, rtol=1e-5)
    np.testing.assert_allclose(metrics.z_loss, z_loss, rtol=1e-5)
    np.testing.assert_allclose(metrics.grad_norm, grad_norm, rtol=1e-4)
    np.testing.assert_allclose(metrics.learning_rate, CONFIG.optimizer.learning_rate / 5, rtol=1e-5)
    assert (int(metrics.num_targets), bool(metrics.finite), int(state.step)) == (int(num_targets), True, 1)
    assert_trees_close(state.params, params)


def test_documents_are_kept_apart_unless_the_config_says_otherwise(rng, initial_state):
    batch = make_batch(rng)
    one_document = batch | {
        "segment_ids": jnp.ones_like(batch["segment_ids"]),
        "positions": jnp.broadcast_to(jnp.arange(LENGTH), (BATCH_SIZE, LENGTH)),
    }
    together = dataclasses.replace(CONFIG, data=dataclasses.replace(CONFIG.data, keep_documents_apart=False))
    both = (make_step_functions(config, make_mesh(MeshConfig())) for config in (CONFIG, together))
    apart_step, together_step = (functions.eval_step for functions in both)
    nats = together_step(initial_state.params, batch, 0).nats
    np.testing.assert_allclose(nats, apart_step(initial_state.params, one_document, 0).nats, rtol=1e-6)

    def nats_of_rows(batch):
        each = (batch["weights"] * (jnp.arange(BATCH_SIZE)[:, None] == row) for row in range(BATCH_SIZE))
        return np.array([apart_step(initial_state.params, batch | {"weights": own}, 0).nats for own in each])

    # Each row by itself: in the sum of all, differences may cancel.
    assert np.abs(nats_of_rows(one_document) - nats_of_rows(batch)).max() > 1e-3


def test_accumulation_equals_the_large_batch(rng, functions, initial_state, train_step):
    # The rows' numbers of targets differ, so a mean of the micro-batches' means would be another number.
    batch = make_batch(rng)
    config = dataclasses.replace(CONFIG, gradient_accumulation=4)
    accumulating = make_step_functions(config, functions.mesh)
    assert accumulating.abstract_eval_batch["tokens"].shape == (1, LENGTH)
    state, metrics = train_step(copy(initial_state), batch)
    accumulated_state, accumulated_metrics = accumulating.train_step(copy(initial_state), batch)
    jax.tree.map(lambda *both: np.testing.assert_allclose(*both, rtol=1e-4), accumulated_metrics, metrics)
    assert_trees_close(accumulated_state, state)


@pytest.mark.parametrize(("factor", "num_recomputed"), [(1, 0), (1e5, 2)])
def test_losses_computed_again_are_counted_by_micro_batch(
    rng, functions, initial_state, train_step, factor, num_recomputed
):
    """Far logits have unlikely targets, whose exponentials don't fit."""
    config, mesh = dataclasses.replace(CONFIG, gradient_accumulation=2), functions.mesh
    loss = SimpleNamespace(exp_logits=lambda _: exact_exponentials)
    plan = dataclasses.replace(make_plan(config, mesh), loss=loss)
    by_exponentials = make_step_functions(config, mesh, plan)
    batch, state = make_batch(rng), copy(initial_state)
    state.params["final_norm"]["scale"] *= factor
    _, expected = train_step(copy(state), batch)
    _, metrics = by_exponentials.train_step(state, batch)
    assert expected.num_losses_recomputed is None
    assert metrics.num_losses_recomputed == num_recomputed
    np.testing.assert_allclose(metrics.loss, expected.loss, rtol=1e-4)
    np.testing.assert_allclose(metrics.grad_norm, expected.grad_norm, rtol=1e-4)


@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_a_step_that_is_not_finite_changes_nothing_but_the_counts(rng, initial_state, train_step, poison):
    state, _ = train_step(copy(initial_state), make_batch(rng))
    state.params["final_norm"]["scale"] = state.params["final_norm"]["scale"].at[0].set(poison)
    after, metrics = train_step(copy(state), make_batch(rng))
    assert not metrics.finite
    assert (int(metrics.num_skipped), int(metrics.num_skipped_in_a_row), int(after.step)) == (1, 1, 2)
    np.testing.assert_array_equal(metrics.learning_rate, np.float32(CONFIG.optimizer.learning_rate * 2 / 5))
    jax.tree.map(np.testing.assert_array_equal, after.params, state.params)
    _, adam, _, schedule = state.opt_state
    jax.tree.map(np.testing.assert_array_equal, after.opt_state[1], adam)
    assert (int(adam.count), int(schedule.count), int(after.opt_state[3].count)) == (1, 1, 2)


def test_an_update_after_skipped_ones_has_the_learning_rate_of_its_step(rng, initial_state, train_step):
    """Against a state whose schedule was set by hand: Adam has made one update, the schedule is at the third."""
    batches = [make_batch(rng) for _ in range(3)]
    bad = batches[1] | {"tokens": batches[1]["tokens"] + VOCAB_SIZE}  # JAX reads such tokens as NaN
    state, _ = train_step(copy(initial_state), batches[0])
    by_hand = copy(state)
    *others, schedule = by_hand.opt_state
    by_hand = by_hand._replace(step=by_hand.step + 1, opt_state=(*others, schedule._replace(count=schedule.count + 1)))
    state, metrics = train_step(state, bad)
    assert not metrics.finite
    state, metrics = train_step(state, batches[2])
    by_hand, expected = train_step(by_hand, batches[2])
    assert (int(metrics.num_skipped), int(metrics.num_skipped_in_a_row)) == (1, 0)
    assert metrics.learning_rate == expected.learning_rate
    jax.tree.map(np.testing.assert_array_equal, (state.params, state.opt_state), (by_hand.params, by_hand.opt_state))


def test_a_spike_of_the_gradients_norm_is_skipped(rng, functions, initial_state):
    optimizer = dataclasses.replace(CONFIG.optimizer, skip_grad_norm_above=4.0)
    step = make_step_functions(dataclasses.replace(CONFIG, optimizer=optimizer), functions.mesh).train_step
    batch = make_batch(rng)
    _, usual = step(copy(initial_state), batch)
    for mean, is_spike in ((usual.grad_norm / 4.1, True), (usual.grad_norm / 3.9, False)):
        known = Skipping(num_accepted=jnp.int32(NUM_RECENT), mean_grad_norm=mean)
        state = copy(initial_state._replace(skipping=initial_state.skipping._replace(**known._asdict())))
        after, metrics = step(state, batch)
        assert metrics.finite
        assert (int(metrics.num_skipped), int(metrics.num_skipped_in_a_row)) == (is_spike, is_spike)
        kept = jax.tree.map(np.array_equal, after.params, initial_state.params)
        assert jax.tree.all(kept) == is_spike


def test_a_batch_without_weights_leaves_only_the_decay(rng, initial_state, train_step):
    batch = make_batch(rng) | {"weights": jnp.zeros((BATCH_SIZE, LENGTH))}
    state, metrics = train_step(copy(initial_state), batch)
    assert (float(metrics.loss), float(metrics.grad_norm), bool(metrics.finite)) == (0.0, 0.0, True)
    factor = 1 - CONFIG.optimizer.weight_decay * metrics.learning_rate
    np.testing.assert_allclose(
        state.params["embedding"]["embedding"], factor * initial_state.params["embedding"]["embedding"], rtol=1e-6
    )
    np.testing.assert_array_equal(state.params["final_norm"]["scale"], initial_state.params["final_norm"]["scale"])


def test_training_learns_a_batch_by_heart_without_compiling_again(rng, initial_state, train_step):
    batch, state, losses = make_batch(rng), copy(initial_state), []
    with count_compilations() as counts:
        for _ in range(CONFIG.num_steps):
            state, metrics = train_step(state, batch)
            losses.append(float(metrics.loss))
    assert not counts
    assert losses[0] == pytest.approx(np.log(VOCAB_SIZE), rel=0.1)
    assert losses[-1] < 0.5 * losses[0]
    assert int(state.step) == CONFIG.num_steps


def test_the_state_is_donated(rng, initial_state, train_step):
    state = copy(initial_state)
    donated = jax.tree.leaves(state)
    train_step(state, make_batch(rng))
    assert all(leaf.is_deleted() for leaf in donated)


def test_evaluation_is_the_loss_without_z(rng, functions, initial_state):
    batch = make_batch(rng)
    sums = functions.eval_step(initial_state.params, batch, 0)
    np.testing.assert_allclose(sums.nats, dense_loss(functions, initial_state.params, batch)[0], rtol=1e-5)
    assert sums.weight_sum == sums.num_targets == batch["weights"].sum()


def test_the_state_is_float32_under_bfloat16_compute(functions):
    config = dataclasses.replace(CONFIG, model=dataclasses.replace(MODEL, compute_dtype="bfloat16"))
    bfloat16 = make_step_functions(config, functions.mesh)
    assert bfloat16.abstract_state == functions.abstract_state
    state, metrics = jax.eval_shape(bfloat16.train_step, bfloat16.abstract_state, bfloat16.abstract_batch)
    for leaf in jax.tree.leaves((state.params, state.opt_state, metrics)):
        assert leaf.dtype in (jnp.float32, jnp.int32, jnp.bool_)


def test_bfloat16_compute_keeps_the_gradient_of_frequent_tokens(rng, functions, initial_state):
    # All of 2048 tokens are one: their gradients have to add up in more than bfloat16's 8 bits.
    shape = (BATCH_SIZE, 512)
    tokens, weights = jnp.zeros(shape, jnp.int32), jnp.asarray(1 + rng.random((*shape, MODEL.width)), jnp.bfloat16)

    def gradient(compute_dtype):
        model = dataclasses.replace(MODEL, compute_dtype=compute_dtype)
        graphdef = make_step_functions(dataclasses.replace(CONFIG, model=model), functions.mesh).graphdef

        @jax.jit
        @jax.grad
        def weighted_sum(params):
            return jnp.sum(nnx.merge(graphdef, params)(tokens).astype(jnp.float32) * weights.astype(jnp.float32))

        return np.asarray(weighted_sum(initial_state.params)["embedding"]["embedding"][0])

    exact = gradient("float32")
    assert np.linalg.norm(gradient("bfloat16") - exact) < 0.1 * np.linalg.norm(exact)


def test_seeds_decide_the_parameters(functions, initial_state):
    other = make_step_functions(dataclasses.replace(CONFIG, seed=1), functions.mesh).init_state()
    again = functions.init_state()
    jax.tree.map(np.testing.assert_array_equal, again, initial_state)
    assert np.any(other.params["embedding"]["embedding"] != again.params["embedding"]["embedding"])
    assert functions.num_parameters == sum(x.size for x in jax.tree.leaves(again.params)) == MODEL.num_parameters


def assert_trees_close(actual, expected):
    for (path, a), b in zip(jax.tree_util.tree_flatten_with_path(actual)[0], jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5, err_msg=jax.tree_util.keystr(path))


@pytest.mark.parametrize(
    ("platform", "sizes", "options"),
    [
        ("gpu", {}, None),
        ("gpu", {"fsdp": 4}, None),
        ("gpu", {"tensor": 2}, WITHOUT_CUDA_GRAPHS),
        ("gpu", {"context": 4, "data": 2}, WITHOUT_CUDA_GRAPHS),
        ("tpu", {"tensor": 8}, None),
    ],
)
def test_steps_whose_gpus_wait_for_each_other_run_outside_of_cuda_graphs(platform, sizes, options):
    devices = np.array([SimpleNamespace(platform=platform)])
    assert compiler_options(SimpleNamespace(devices=devices, shape={"tensor": 1, "context": 1} | sizes)) == options


def test_compiler_options_reach_the_compiler(monkeypatch):
    monkeypatch.setattr("trainer.step.functions.compiler_options", lambda _: {"xla_no_such_option": "1"})
    step = make_step_functions(CONFIG, make_mesh(MeshConfig()))
    lowered = step.train_step.lower(step.abstract_state, step.abstract_batch)
    with pytest.raises(Exception, match="xla_no_such_option"):
        lowered.compile()
