"""A step on packed targets of any weights is one on documents in rows of their own, however it is cut. In float64."""

import numpy as np
import pytest

from layers import GPTConfig, MoEConfig
from tests.trainer.step.sharded_steps import FLOAT64, LENGTH, PLAIN, SIZES, draw_params, gradients_on, make_batch
from tests.trainer.step.test_loss import draw_weights
from trainer.config import MeshConfig

pytestmark = pytest.mark.usefixtures("eight_devices", "float64")

# The load is balanced in each micro-batch, so its loss isn't that of separate rows if there are several.
Z_LOSS, BOTH = ({"router_z_loss_weight": 0.3, "load_balance_loss_weight": weight} for weight in (0.0, 0.7))


def make_model(of_routers):
    """With experts where their losses have weights."""
    moe = None if of_routers is None else MoEConfig(4, 2, expert_width=6, **of_routers)
    return GPTConfig(**SIZES, **PLAIN, **FLOAT64, mlp_width=48, moe=moe)


def in_rows_of_their_own(batch):
    """The documents of a batch, one to a row."""
    ids = batch["segment_ids"]
    documents = [(row, ids[row] == own) for row in range(len(ids)) for own in np.unique(ids[row]) if own]
    return {
        name: np.stack([np.pad(array[row, chosen], (0, LENGTH - chosen.sum())) for row, chosen in documents])
        for name, array in batch.items()
    }


@pytest.mark.sample(2)
@pytest.mark.parametrize("has_experts", [False, True])
@pytest.mark.parametrize(
    ("mesh", "accumulation"),
    [
        (MeshConfig(), 4),
        (MeshConfig(data=2, fsdp=4), 1),
        (MeshConfig(data=4, tensor=2), 2),
        (MeshConfig(fsdp=2, context=4), 4),
        (MeshConfig(fsdp=2, tensor=2, context=2), 2),
        (MeshConfig(tensor=2, context=4), 1),
    ],
    ids=repr,
)
def test_loss_and_gradients_are_those_of_separate_rows(mesh, accumulation, has_experts, rng):
    model = make_model((BOTH if accumulation == 1 else Z_LOSS) if has_experts else None)
    params, batch = draw_params(rng, model), make_batch(rng)
    batch["weights"] *= draw_weights(rng, batch["weights"].shape)
    batch["weights"][rng.choice(len(batch["weights"]), 2)] = 0
    expected, expected_sums = gradients_on(MeshConfig(), 1, model, params, in_rows_of_their_own(batch))
    found, sums = gradients_on(mesh, accumulation, model, params, batch)
    assert sums["num_targets"] == expected_sums["num_targets"] == (batch["weights"] != 0).sum()
    assert sums["num_tokens"] == expected_sums["num_tokens"] == (batch["segment_ids"] > 0).sum()
    # The signs of weights may leave a mean of nearly nothing.
    assert abs(sums["mean"] - expected_sums["mean"]) < 1e-12
    assert sums["weight_sum"] == pytest.approx(np.abs(batch["weights"], dtype=np.float64).sum(), rel=1e-12)
    for name, gradient in expected.items():
        assert np.linalg.norm(found[name] - gradient) < 1e-12 * np.linalg.norm(gradient), name


@pytest.mark.parametrize("is_padding", [False, pytest.param(True, marks=pytest.mark.full)])
def test_weights_of_0_leave_the_routers_losses_alone(is_padding, rng):
    """And padding leaves nothing at all."""
    model, batch = make_model(BOTH), make_batch(rng)
    batch["weights"][:] = 0
    batch["segment_ids"] *= not is_padding
    found, sums = gradients_on(MeshConfig(data=2, tensor=2, context=2), 2, model, draw_params(rng, model), batch)
    assert [sums[name] for name in ("nats", "z", "weight_sum", "num_targets")] == [0] * 4
    is_learned = {name for name, gradient in found.items() if np.any(gradient)}
    assert not np.isnan(sums["mean"])
    assert (sums["mean"] == 0, is_learned == set()) == (is_padding, is_padding)
    assert all(np.isfinite(gradient).all() for gradient in found.values())
    # The final norm and the head come behind all routers.
    assert not {"final_norm.scale", "head.kernel"} & is_learned
