"""Prints the loss of tokens that three CPU devices share out, by exponentials, beside NumPy's dense one in float64.

Argument: the seed. Output: JSON, by case: the differences, and the number of devices that recomputed.
"""

import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType

from tests.trainer.step.test_loss import dense_oracle, make_inputs, relative_error
from trainer.step.loss import chunked_cross_entropy

LENGTH, NUM_DEVICES, Z_LOSS = 94, 3, 1e-2


def exponentials(hidden, head, shifts, *, soft_cap):
    """What `kernels.exp_logits.ExpLogits` computes, without rounding."""
    logits = hidden @ head
    slopes = 1.0
    if soft_cap is not None:
        logits, slopes = soft_cap * jnp.tanh(logits / soft_cap), 1 / jnp.cosh(logits / soft_cap) ** 2
    terms = jnp.exp(logits - shifts[:, None])
    return terms * slopes, terms.sum(1)


def compare(inputs, cap):
    hidden, head, targets, mask = (jnp.asarray(x) for x in inputs)

    def total(hidden, head):
        loss = chunked_cross_entropy(
            hidden,
            head,
            targets,
            mask,
            chunk_size=16,
            z_loss=Z_LOSS,
            logits_soft_cap=cap,
            shared_over="tensor",
            exp_logits=exponentials,
        )
        return loss.total, loss

    mesh = jax.make_mesh((NUM_DEVICES,), ("tensor",), axis_types=(AxisType.Auto,))
    with jax.set_mesh(mesh):
        gradients, loss = jax.jit(jax.grad(total, argnums=(0, 1), has_aux=True))(hidden, head)
    nats, z, *expected = dense_oracle(*inputs, z_loss=Z_LOSS, cap=cap)
    return {
        "sums": max(relative_error(actual, sum_) for actual, sum_ in ((loss.nats, nats), (loss.z, z))),
        "gradients": max(map(relative_error, gradients, expected)),
        "num_targets": int(loss.num_targets) - int(inputs[3].sum()),
        "num_recomputed": int(loss.num_recomputed),
    }


def main() -> None:
    rng = np.random.default_rng(int(sys.argv[1]))
    hidden, head, targets, mask = make_inputs(rng, 2, LENGTH, 16, 48)
    inputs = hidden.astype(np.float64), head.astype(np.float64), targets, mask
    # The second device's part of the first row has a token whose target is unlikely beyond float32's range.
    far = inputs[0].copy(), inputs[1], targets.copy(), mask
    far[0][0, LENGTH // 2] *= 100
    far[2][0, LENGTH // 2] = (far[0][0, LENGTH // 2] @ head).argmin()
    cases = {"held": compare(inputs, None), "soft cap": compare(inputs, 3.0), "one out of range": compare(far, None)}
    print(json.dumps(cases))


if __name__ == "__main__":
    main()
