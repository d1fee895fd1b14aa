"""How the embedding lies in a GPU's memory, where its shards are gathered and its gradient is summed."""

import re

import pytest

from layers import GPTConfig
from tests.gpu_compiler import needs_gpu_compiler
from trainer.compile.hlo import parse_module
from trainer.compile.topology import parse_topology
from trainer.config import LossConfig, MeshConfig, TrainConfig
from trainer.step.functions import make_step_functions
from trainer.step.sharding import make_mesh

VOCABULARY, WIDTH = 640, 256


@pytest.mark.sample(1)
@needs_gpu_compiler
@pytest.mark.jax_0_11
@pytest.mark.parametrize("axis", ["fsdp", "context"])
def test_rows_of_the_embedding_stay_in_one_piece(axis):
    """Else each number that is looked up, or added to, lies apart, as the loss's kernel would have its head."""
    config = TrainConfig(
        name="embedding",
        num_steps=1000,
        sequence_length=2048,
        batch_size=4 if axis == "fsdp" else 1,
        gradient_accumulation=1,
        model=GPTConfig(VOCABULARY, num_layers=1, num_heads=4, num_kv_heads=4, width=WIDTH, head_dim=64),
        loss=LossConfig(implementation="mosaic_gpu"),
        mesh=MeshConfig(**{axis: 4}),
    )
    functions = make_step_functions(config, make_mesh(config.mesh, parse_topology("h200:4").devices()))
    lowered = functions.train_step.lower(functions.abstract_state, functions.abstract_batch)
    module = parse_module(lowered.compile().as_text())
    tables = {
        (instruction.opcode, computation.instructions[instruction.operands[0]].shape)
        for computation in module.computations.values()
        for instruction in computation.instructions.values()
        if instruction.opcode in ("gather", "scatter")
        and f"[{VOCABULARY},{WIDTH}]" in str(computation.instructions[instruction.operands[0]].shape)
    }
    assert {opcode for opcode, _ in tables} == {"gather", "scatter"}
    assert {re.search(r"\{[\d,]+\}", shape)[0] for _, shape in tables} == {"{1,0}"}
