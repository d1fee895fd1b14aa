"""Matmuls of tokens and features that a few devices split, against NumPy; for test_collectives.py.

Run as a program on GPUs: it draws shapes, dtypes and values, and prints a JSON line for each draw.
"""

import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from kernels.collectives import all_gather_matmul, choose_collectives, matmul_reduce_scatter

# Layers one after another: a rank that runs ahead would read or write what isn't its turn.
NUM_LAYERS = 4
TOKENS, MATRICES, MATRICES_BACK = P(None, "tensor"), P(None, "tensor"), P("tensor")


def draw_shape(rng, collectives):
    """Sequences, one rank's tokens, width, and one rank's features of two matrices."""
    tokens, features = (128, 64) if collectives == "mosaic_gpu" else (1, 1)
    sizes = rng.integers(1, (4, 20, 12, 12, 12))
    return tuple(int(n) for n in sizes * (1, tokens, features, features, features))


def run_layers(mesh, chosen, function):
    """On all devices `function` of tokens, after two matmuls of each layer and the sum of two matmuls back."""

    def layers(tokens, matrices, back):
        def layer(tokens, _):
            features = all_gather_matmul(tokens, matrices, "tensor", chosen)
            sums = [matmul_reduce_scatter(x, y, "tensor", chosen) for x, y in zip(features, back, strict=True)]
            tokens = function(sums[0] + sums[1])
            return tokens, (*features, tokens)

        return jax.lax.scan(layer, tokens, None, length=NUM_LAYERS)[1]

    of_features = P(None, None, None, "tensor")
    return jax.shard_map(
        layers,
        mesh=mesh,
        in_specs=(TOKENS, MATRICES, MATRICES_BACK),
        out_specs=(of_features, of_features, P(None, None, "tensor")),
        check_vma=False,
    )


def numpy_layers(tokens, matrices, back, function):
    """The same of float64 arrays."""
    found = []
    for _ in range(NUM_LAYERS):
        features = [tokens @ matrix for matrix in matrices]
        tokens = function(features[0] @ back[0] + features[1] @ back[1])
        found.append((*features, tokens))
    return tuple(map(np.stack, zip(*found, strict=True)))


def numpy_gradients(tokens, matrices, back, gradients):
    """Of `numpy_layers` of the identity, from the gradients of features and tokens."""
    *features, outputs = numpy_layers(tokens, matrices, back, lambda x: x)
    inputs = [tokens, *outputs[:-1]]
    of_tokens, of_matrices, of_back = 0.0, [0.0, 0.0], [0.0, 0.0]
    for layer in reversed(range(NUM_LAYERS)):
        of_sums = of_tokens + gradients[2][layer]
        of_tokens = 0.0
        for i in range(2):
            of_features = gradients[i][layer] + of_sums @ back[i].T
            of_back[i] = of_back[i] + np.tensordot(features[i][layer], of_sums, ((0, 1), (0, 1)))
            of_matrices[i] = of_matrices[i] + np.tensordot(inputs[layer], of_features, ((0, 1), (0, 1)))
            of_tokens = of_tokens + of_features @ matrices[i].T
    return of_tokens, *of_matrices, *of_back


def few_ones(rng, shape):
    """A matrix of zeros, but for at most three ones or minus ones in each column."""
    matrix = np.zeros(shape)
    for _ in range(3):
        matrix[rng.integers(shape[0], size=shape[1]), np.arange(shape[1])] = rng.choice([-1.0, 1.0], shape[1])
    return matrix


def positive(rng, shape):
    """Numbers around 1, of which no two rows and no two columns are alike."""
    *_, num_rows, num_columns = shape
    each, of_row, of_column = (rng.uniform(0.5, 1.5, size) for size in (shape, (num_rows, 1), num_columns))
    return each * of_row * of_column


def check(rng, mesh, chosen, dtype, shape):
    (batch, length, width, *features), num_ranks = shape, mesh.size

    def on_devices(tokens, matrices, back):
        specs = TOKENS, (MATRICES, MATRICES), (MATRICES_BACK, MATRICES_BACK)
        return jax.tree.map(
            lambda x, spec: jax.device_put(jnp.asarray(x, dtype), NamedSharding(mesh, spec)),
            (tokens, tuple(matrices), tuple(back)),
            specs,
        )

    def as_float64(arrays):
        return jax.tree.map(lambda x: np.asarray(x, np.float64), arrays)

    small = (
        rng.integers(-1, 2, (batch, num_ranks * length, width)).astype(np.float64),
        [few_ones(rng, (width, num_ranks * size)) for size in features],
        [few_ones(rng, (num_ranks * size, width)) for size in features],
    )
    found = jax.jit(run_layers(mesh, chosen, jnp.sign))(*on_devices(*small))
    is_exact = all(map(np.array_equal, as_float64(found), numpy_layers(*small, np.sign)))

    arrays = on_devices(
        positive(rng, (batch, num_ranks * length, width)),
        [abs(few_ones(rng, (width, num_ranks * size))) * positive(rng, (width, num_ranks * size)) for size in features],
        [
            abs(few_ones(rng, (num_ranks * size, width))) * positive(rng, (num_ranks * size, width)) / 16
            for size in features
        ],
    )
    run = run_layers(mesh, chosen, lambda x: x)
    # Sums over features and over tokens stay in float16's range.
    height = min(1, width / (num_ranks * max(features))) / 8
    gradients = [
        jnp.asarray(positive(rng, x.shape) * height * (rng.random((*x.shape[:-1], 1)) < 32 / x.shape[-2]), dtype)
        for x in jax.eval_shape(run, *arrays)
    ]

    def with_gradients(arrays, gradients):
        outputs, vjp = jax.vjp(run, *arrays)
        return outputs, vjp(tuple(gradients))

    found = jax.tree.leaves(as_float64(jax.jit(with_gradients)(arrays, gradients)))
    arrays, gradients = as_float64((arrays, gradients))
    expected = *numpy_layers(*arrays, lambda x: x), *numpy_gradients(*arrays, gradients)
    unit = float(jnp.finfo(dtype).eps) / 2
    return is_exact, float(np.max([roundings(a, b, unit) for a, b in zip(found, expected, strict=True)]))


def roundings(found, expected, unit):
    """The largest difference, relative to what is expected; of 0, infinite."""
    difference = np.abs(found - expected)
    relative = np.divide(difference, expected, out=np.where(difference == 0, 0, np.inf), where=expected != 0)
    return float(relative.max() / unit)


def draw(rng, num_ranks, dtype, collectives):
    """What is drawn, and what comes of it.

    Whether values of small integers, which no dtype rounds, are exact; and the largest difference of values and
    gradients of random numbers, each relative to what it should be, in roundings: in half the dtype's epsilon. The
    random numbers aren't negative, so that no term of a sum cancels another.
    """
    axes, devices = (AxisType.Auto,) * 2, jax.devices()[:num_ranks]
    mesh = jax.make_mesh((1, num_ranks), ("data", "tensor"), axes, devices=devices)
    shape = draw_shape(rng, collectives)
    chosen = choose_collectives(mesh, "tensor", shape[:3], shape[3:], dtype, collectives)
    is_exact, difference = check(rng, mesh, chosen, dtype, shape)
    drawn = {"collectives": chosen.name, "num_ranks": num_ranks, "dtype": dtype, "shape": shape}
    return drawn | {"is_exact": is_exact, "difference": difference}


def main(seed: int, num_draws: int) -> None:
    rng = np.random.default_rng(seed)
    numbers = [number for number in (2, 3, 4) if number <= jax.device_count()]
    for index in range(num_draws):
        dtype = str(rng.choice(["bfloat16", "float16"]))
        print(json.dumps(draw(rng, numbers[-1 - index % len(numbers)], dtype, "mosaic_gpu")), flush=True)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
