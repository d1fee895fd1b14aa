"""A model, its parameters and its tokens, and what one step's loss and gradients are on a mesh.

Shapes: B batch, T tokens.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from kernels import BlockwiseTuning
from kernels.context import SequenceSharding
from layers import GPTConfig, MoEConfig
from tests.kernels.contract_cases import draw_bounds
from tests.parity.cases import ATTENTION, Placement, Problem
from tests.parity.oracle import mean_loss
from trainer.config import ContextConfig, DataConfig, LossConfig, MeshConfig, OptimizerConfig, TrainConfig
from trainer.data.sequence_sharding import SequenceSharder
from trainer.step.functions import make_step_functions
from trainer.step.plan import make_plan
from trainer.step.sharding import batch_sharding, make_mesh, path_name

# Any mesh of 8 devices divides all of these, whichever axis it puts them on.
BATCH_SIZE, VOCAB_SIZE, WIDTH, MLP_WIDTH, EXPERT_WIDTH, HEAD_DIM, NUM_LAYERS = 16, 56, 32, 48, 24, 4, 2
LENGTHS = (80, 112)
"""Tokens of a row: what zigzag over 8 ranks divides, and the tiles don't."""
TILES = BlockwiseTuning(16, 24)


class Outcome(NamedTuple):
    """What a step computes before it updates anything."""

    loss: np.ndarray
    """Nats and z-loss of the targets by their weights, and the losses of routers."""
    gradients: dict[str, np.ndarray]
    """By the parameters' paths."""


class Model:
    """A problem's network, parameters and batch."""

    def __init__(self, problem: Problem):
        self.attention = ATTENTION[problem.attention]
        rng = np.random.default_rng([problem.seed, *problem.heads, *f"{problem.attention} {problem.mlp}".encode()])
        self.length = int(rng.choice(LENGTHS))
        self.z_loss = float(rng.choice([0.0, 1e-2]))
        self.config = GPTConfig(
            vocab_size=VOCAB_SIZE,
            num_layers=NUM_LAYERS,
            width=WIDTH,
            num_heads=problem.heads[0],
            num_kv_heads=problem.heads[1],
            head_dim=HEAD_DIM,
            mlp_width=MLP_WIDTH,
            mlp=str(rng.choice(["gelu", "swiglu"])),
            moe=_draw_mixture(rng) if problem.mlp == "mixture" else None,
            tie_embeddings=bool(rng.integers(2)),
            qk_norm=str(rng.choice(["none", "per_head"])),
            rope_base=10_000.0 if rng.integers(4) else None,
            masks=self.attention.masks,
            sinks=self.attention.sinks,
            logits_soft_cap=self.attention.soft_cap,
        )
        self.batch = self._draw_batch(rng)
        self.params = self._draw_params(rng)

    def run(self, placement: Placement) -> Outcome:
        """Loss and gradients of the step so placed.

        Raises:
          ValueError: the project refuses the placement.
        """
        config = self._config(placement)
        mesh = make_mesh(config.mesh)
        plan = make_plan(config, mesh)
        functions = make_step_functions(config, mesh, plan)
        params = jax.tree.map(
            lambda x, abstract: jax.device_put(x.astype(abstract.dtype), abstract.sharding),
            self.params,
            functions.abstract_state.params,
        )
        batch = jax.device_put(self._sharded(config, plan.sequence_sharding), batch_sharding(functions.mesh))
        gradients, sums = functions.gradients(params, batch)
        assert int(sums.num_targets) == (self.batch["weights"] != 0).sum()
        return Outcome(np.asarray(sums.mean), _by_path(gradients))

    def oracle(self, accumulation: int) -> Outcome:
        """The same by the oracle, in float64: the loss by NumPy, the gradients by JAX's derivative of it."""
        options = {"documents": self.attention.documents, "z_loss": self.z_loss, "accumulation": accumulation}
        arguments = self.batch, self.config, self.attention.allows
        loss = mean_loss(self.params, *arguments, **options)
        gradients = jax.jit(jax.grad(lambda params: mean_loss(params, *arguments, **options, xp=jnp)))(self.params)
        return Outcome(loss, _by_path(gradients))

    def _config(self, placement: Placement) -> TrainConfig:
        model = dataclasses.replace(
            self.config,
            compute_dtype=placement.dtype,
            param_dtype=placement.dtype,
            remat=placement.remat,
            implementation="reference" if placement.kernel == "reference" else TILES,
        )
        return TrainConfig(
            name="parity",
            model=model,
            num_steps=1,
            sequence_length=self.length,
            batch_size=BATCH_SIZE,
            gradient_accumulation=placement.accumulation,
            data=self._data,
            optimizer=OptimizerConfig(num_warmup_steps=0),
            loss=LossConfig(chunk_size=placement.loss_chunk, z_loss=self.z_loss),
            mesh=MeshConfig(*placement.mesh),
            context=ContextConfig(placement.exchange, placement.sequence_sharding),
        )

    @property
    def _data(self) -> DataConfig:
        if self.attention.bounds == "tree":
            return DataConfig(source="trees", files=("trees.jsonl",))
        return DataConfig(keep_documents_apart=self.attention.documents)

    def _sharded(self, config: TrainConfig, sequence_sharding: SequenceSharding) -> dict[str, np.ndarray]:
        """The batch as the data pipeline hands it to a run."""
        sharder = SequenceSharder.of(config, sequence_sharding)
        rows = [sharder({name: x[row] for name, x in self.batch.items()}) for row in range(BATCH_SIZE)]
        return {name: np.stack([row[name] for row in rows]) for name in rows[0]}

    def _draw_batch(self, rng: np.random.Generator) -> dict[str, np.ndarray]:
        """Packed rows: documents of any length, cut where no shard's boundary is, then padding."""
        shape = BATCH_SIZE, self.length
        segment_ids, positions = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
        for ids, own_positions in zip(segment_ids, positions, strict=True):
            num_cuts, num_tokens = rng.integers(1, 6), rng.integers(self.length // 2, self.length + 1)
            cuts = np.sort(rng.choice(np.arange(1, num_tokens), num_cuts, replace=False))
            starts = np.concatenate([[0], cuts, [num_tokens] if num_tokens < self.length else []]).astype(int)
            lengths = np.diff(starts, append=self.length)
            # Falling, as the data pipeline gives them, or rising.
            ids[:] = np.repeat(np.arange(1, len(starts) + 1)[:: rng.choice([-1, 1])], lengths)
            ids[num_tokens:] = 0
            own_positions[:] = np.arange(self.length) - np.repeat(starts, lengths)
        bounds = {}
        if self.attention.bounds is not None:
            drawn = draw_bounds(rng, self.attention.bounds, *shape, self.length)
            bounds = {name: np.asarray(getattr(drawn, name), np.int32) for name in drawn.given}
        if "q_end" in bounds:
            # A token's position is the number of tokens before it on its branch.
            index = np.arange(self.length)
            is_before = (index < index[:, None]) & (index[:, None] < bounds["q_end"][:, None])
            positions = (is_before & (segment_ids[:, :, None] == segment_ids[:, None])).sum(-1, dtype=np.int32)
        return {
            "tokens": rng.integers(0, VOCAB_SIZE, shape).astype(np.int32),
            "targets": rng.integers(0, VOCAB_SIZE, shape).astype(np.int32),
            "weights": np.where(segment_ids != 0, _draw_weights(rng, shape), 0).astype(np.float32),
            "segment_ids": segment_ids,
            "positions": positions,
            **bounds,
        }

    def _draw_params(self, rng: np.random.Generator) -> Any:
        """Float64 arrays that float32 holds exactly, large enough that attention is far from uniform."""

        def draw(path, abstract):
            values = rng.standard_normal(abstract.shape)
            kind = path_name(path).rpartition(".")[2]
            values = {"scale": 1 + values / 4, "sinks": values}.get(kind, values / 4)
            return values.astype(np.float32).astype(np.float64)

        config = self._config(Placement())
        mesh = make_mesh(config.mesh)
        plan = make_plan(config, mesh)
        functions = make_step_functions(config, mesh, plan)
        return jax.tree_util.tree_map_with_path(draw, functions.abstract_state.params)


def _draw_mixture(rng: np.random.Generator) -> MoEConfig:
    """Experts, with weights of the routers' losses that make them a part of every gradient."""
    num_experts = int(rng.integers(3, 8))
    return MoEConfig(
        num_experts,
        num_experts_per_token=int(rng.integers(1, num_experts)),
        expert_width=EXPERT_WIDTH,
        normalize_top_k=bool(rng.integers(2)),
        router_bias=bool(rng.integers(2)),
        expert_bias=bool(rng.integers(2)),
        load_balance_loss_weight=0.5,
        router_z_loss_weight=0.1,
    )


def _draw_weights(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Zeros, ones, and weights of either sign whose sizes differ by orders of magnitude."""
    drawn = np.exp(rng.normal(0, 3, shape)) * np.where(rng.random(shape) < 0.3, -1, 1)
    return np.choose(rng.choice(3, shape, p=(0.2, 0.4, 0.4)), (0.0, 1.0, drawn))


def _by_path(tree: Any) -> dict[str, np.ndarray]:
    leaves = jax.tree_util.tree_flatten_with_path(jax.device_get(tree))[0]
    return {path_name(path): leaf for path, leaf in leaves}
