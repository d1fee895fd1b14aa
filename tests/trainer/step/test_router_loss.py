"""What routers add to the training loss, against formulas on whole logits."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from layers import MoEConfig
from tests.trainer.step.test_step import CONFIG, MODEL, make_batch
from trainer.config import MeshConfig
from trainer.step.functions import make_step_functions
from trainer.step.sharding import make_mesh

MIXTURE = MoEConfig(4, 2, expert_width=6, load_balance_loss_weight=0.7, router_z_loss_weight=0.3)


@pytest.fixture
def config():
    """In float64, where no rounding sends a token to another expert."""
    with jax.enable_x64(True):
        model = dataclasses.replace(MODEL, moe=MIXTURE, compute_dtype="float64", param_dtype="float64")
        yield dataclasses.replace(CONFIG, model=model, gradient_accumulation=2)


def test_gradient_and_metrics_match_whole_logits(rng, config):
    functions = make_step_functions(config, make_mesh(MeshConfig()))
    abstract, batch = functions.abstract_state, make_batch(rng)
    drawn = rng.normal(0, 1, batch["weights"].shape) * rng.integers(0, 2, batch["weights"].shape)
    batch["weights"] = jnp.asarray(drawn * batch["weights"], jnp.float32)
    params = jax.tree.map(lambda leaf: jnp.asarray(rng.normal(0, 0.3, leaf.shape)), abstract.params)
    num_tokens = int((batch["segment_ids"] > 0).sum())
    weight_sum = np.abs(np.asarray(batch["weights"], np.float64)).sum()

    def mean_losses(params):
        """Nats with z-loss over the weights, and load-balance loss and router z-loss over the tokens of documents."""
        losses = np.zeros(3)
        for first_row in range(2):
            tokens, targets, weights, segment_ids, positions = (
                batch[name][first_row::2] for name in ("tokens", "targets", "weights", "segment_ids", "positions")
            )
            mask = segment_ids > 0
            model = nnx.merge(functions.graphdef, params)
            hidden, router = model.with_router_sums(tokens, segment_ids, positions, counted=mask)
            logits = model.logits(hidden)
            log_partition = jax.nn.logsumexp(logits, axis=-1)
            nats = log_partition - jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
            load = router.choices / mask.sum()
            losses += jnp.stack(
                [
                    (weights * nats + jnp.abs(weights) * (config.loss.z_loss * log_partition**2)).sum(),
                    4 * (load * router.probabilities).sum() / 2,  # 4 experts, 2 layers
                    router.squared_log_partitions.sum() / 2,
                ]
            )
        return losses / np.array([weight_sum, num_tokens, num_tokens])

    def weighted(params):
        losses = mean_losses(params)
        return losses @ np.array([1, 0.7, 0.3]), losses

    gradient, expected = jax.jit(jax.grad(weighted, has_aux=True))(params)
    actual, sums = functions.gradients(params, batch)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12), actual, gradient)
    np.testing.assert_allclose(sums.mean, expected @ np.array([1, 0.7, 0.3]))

    _, metrics = functions.train_step(functions.begin_state(params), batch)
    np.testing.assert_allclose((metrics.load_balance_loss, metrics.router_z_loss), expected[1:])
    np.testing.assert_allclose(metrics.loss + metrics.z_loss, expected[0])


def test_a_model_without_routers_has_no_such_metrics():
    functions = make_step_functions(CONFIG, make_mesh(MeshConfig()))
    _, metrics = jax.eval_shape(functions.train_step, functions.abstract_state, functions.abstract_batch)
    assert (metrics.load_balance_loss, metrics.router_z_loss) == (None, None)
