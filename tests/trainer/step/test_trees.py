"""A step on trees is a step on their branches, in which each shared token is counted once."""

import jax
import numpy as np
import pytest

from kernels import CausalMask, ChunkedCausalMask, LocalMask
from layers import GPTConfig
from tests.trainer.data.test_trees import load_trees
from tests.trainer.step.sharded_steps import FLOAT64, SIZES, in_order_of_ranks, put
from trainer.config import ContextConfig, DataConfig, LossConfig, MeshConfig, OptimizerConfig, TrainConfig
from trainer.data.tree_packing import pack
from trainer.step.functions import make_step_functions
from trainer.step.plan import make_plan
from trainer.step.sharding import make_mesh

BEGIN = END = 256
LENGTH, BATCH_SIZE = 48, 4
MODEL = {
    **SIZES,
    **FLOAT64,
    "vocab_size": 260,
    "num_layers": 3,
    "masks": (CausalMask(), CausalMask() & LocalMask(5, 0), ChunkedCausalMask(8)),
    "implementation": "reference",
    "mlp_width": 48,
    "sinks": True,
}


def draw_node(rng, depth):
    text = "".join(rng.choice([*"abcd"], rng.integers(1, 6)))
    node = {"text": text, "weight": float(np.float32(rng.normal()))}
    if depth and rng.random() < 0.6:
        node["completions"] = [draw_node(rng, depth - 1) for _ in range(rng.integers(1, 4))]
    return node


def draw_tree(rng):
    prompt = draw_node(rng, 0)["text"]
    return {"prompt": prompt, "completions": [draw_node(rng, 2) for _ in range(rng.integers(2, 4))]}


def branches_of(tree):
    """The tokens of each branch, and the weight of each, 0 where an earlier branch has counted it."""
    found = []

    def walk(node, text, tokens, weights, default):
        own = [*text.encode(), *([] if "completions" in node else [END])]
        tokens, weights = [*tokens, *own], [*weights, *[node.get("weight", default)] * len(own)]
        if "completions" not in node:
            found.append((tokens, weights))
        for child in node.get("completions", ()):
            walk(child, child["text"], tokens, weights, 1.0)
            weights = [0.0] * len(weights)

    walk(tree, tree["prompt"], [BEGIN], [0.0], 0.0)
    return found


def rows_of_branches(branches):
    """A row for each branch, up to a multiple of `BATCH_SIZE`."""
    num_rows = -(-len(branches) // BATCH_SIZE) * BATCH_SIZE
    batch = {name: np.zeros((num_rows, LENGTH), np.int32) for name in ("tokens", "targets", "segment_ids", "positions")}
    batch["weights"] = np.zeros((num_rows, LENGTH), np.float32)
    for row, (tokens, weights) in enumerate(branches):
        length = len(tokens) - 1
        batch["tokens"][row, :length], batch["targets"][row, :length] = tokens[:-1], tokens[1:]
        batch["positions"][row, :length], batch["segment_ids"][row, :length] = np.arange(length), 1
        batch["weights"][row, :length] = weights[1:]
    return batch


def run(batch, mesh, source, **context):
    """The gradient, the parameters after a step, the sums of the loss, and the weighted loss of each target."""
    config = TrainConfig(
        name="trees",
        model=GPTConfig(**MODEL),
        num_steps=4,
        sequence_length=LENGTH,
        batch_size=len(batch["tokens"]),
        gradient_accumulation=2,
        data=DataConfig(**source),
        optimizer=OptimizerConfig(num_warmup_steps=1, epsilon=1e-5),
        loss=LossConfig(chunk_size=40, z_loss=1e-2),
        mesh=mesh,
        context=ContextConfig(**context),
    )
    plan = make_plan(config, make_mesh(mesh))
    functions = make_step_functions(config, make_mesh(mesh), plan)
    batch = in_order_of_ranks(batch, config, plan.sequence_sharding)
    placed = put(batch, functions.mesh)
    state = functions.init_state()
    gradients, sums = functions.gradients(state.params, placed)
    losses = functions.token_step(state.params, placed).nats * batch["weights"]
    after, metrics = functions.train_step(state, placed)
    assert (metrics.num_targets, metrics.num_tokens) == (
        (batch["weights"] != 0).sum(),
        (batch["segment_ids"] > 0).sum(),
    )
    return jax.device_get((gradients, after.params, sums._asdict(), losses))


def assert_close(found, expected, scale):
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12 * scale)


@pytest.mark.usefixtures("eight_devices", "float64")
@pytest.mark.parametrize(
    ("mesh", "context"),
    [
        (MeshConfig(), {}),
        (MeshConfig(data=2, tensor=2), {}),
        (MeshConfig(fsdp=2, context=2), {"sequence_sharding": "balanced"}),
        (MeshConfig(context=4), {"sequence_sharding": "zigzag", "exchange": "all_gather"}),
        (MeshConfig(context=4), {"sequence_sharding": "contiguous", "exchange": "all_to_all"}),
    ],
    ids=["one device", "mesh", "balanced", "zigzag", "contiguous"],
)
def test_a_step_on_trees_is_one_on_branches(rng, tmp_path, mesh, context):
    lines = []
    while len(lines) < 8:
        tree = draw_tree(rng)
        if all(len(tokens) <= LENGTH + 1 for tokens, _ in branches_of(tree)):
            lines.append(tree)
    packed = pack(load_trees(tmp_path, lines), LENGTH)
    rows = [packed[i] for i in range(len(packed))]
    rows += [packed.empty_sequence()] * (-len(rows) % BATCH_SIZE)
    trees = {name: np.stack([row[name] for row in rows]) for name in rows[0]}
    assert packed.sharing()["num_tokens_saved"] > 0
    branches = rows_of_branches([branch for line in lines for branch in branches_of(line)])
    *of_trees, sums, losses = run(trees, mesh, {"source": "trees", "files": ("trees.jsonl",)}, **context)
    *of_branches, expected_sums, expected_losses = run(branches, MeshConfig(), {})
    for ours, theirs in zip(jax.tree.leaves(of_trees), jax.tree.leaves(of_branches), strict=True):
        assert_close(ours, theirs, np.abs(theirs).max())
    scale = np.abs(losses).sum()  # of which the signs leave less
    for name in ("mean", "nats", "z", "weight_sum", "num_targets"):
        assert_close(sums[name], expected_sums[name], scale)
    for each in (losses, expected_losses):
        assert_close(sums["nats"], each.sum(), scale)
