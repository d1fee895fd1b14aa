"""One case of the table: attention over the context axis of a topology, compiled in a process of its own and counted.

    python -m experiments.benchmarks.context_bytes.measure JSON

The process has the topology's environment before it loads the compiler. Its last line of output is the result.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from experiments.benchmarks.context_bytes.least import PassBytes
from kernels import parse_mask
from trainer.compile.topology import Topology, parse_topology
from trainer.errors import UserMistake

if TYPE_CHECKING:
    import jax

    from trainer.config import TrainConfig

LOCAL = "local"


@dataclass(frozen=True)
class BytesCase:
    """The call to compile: attention of one layer of the 1.3B model, one sequence for each group of ranks."""

    topology: str
    """`local`: this machine's devices. Devices that one sequence doesn't need hold further sequences."""
    num_ranks: int
    """Devices to a row."""
    length: int
    """Tokens of a row."""
    mask: str
    """The mask, as `kernels.parse_mask` reads it."""
    packed: bool
    """True if a sequence has several documents, kept apart."""
    exchange: str | None
    """None: chosen by `kernels.context`."""
    sequence_sharding: str | None = None
    """None: chosen by `kernels.context`."""


@dataclass(frozen=True)
class Measured:
    """Bytes that a device receives in one call, according to its compiled program."""

    exchange: str
    sequence_sharding: str
    num_sequences: int
    """Sequences in the batch of all devices."""
    forward_bytes: float
    backward_bytes: float
    """Without the trips of a loop of which documents decide how many there are."""
    trip_bytes: tuple[float, float]
    """Bytes of each such trip, forward and backward."""
    predicted_bytes: tuple[float, float]
    """The bytes of `kernels.context.exchange_cost`, forward and backward."""
    temporaries: int
    """Bytes of the program of both passes."""
    collectives: list[dict[str, Any]]
    """Bytes of both passes, with one trip of each such loop."""


def measure(case: BytesCase) -> Measured:
    """Compiles the case's forward pass, and both passes together.

    Raises:
      UserMistake: the topology has no such group of ranks, or the exchange can't serve the mask.
    """
    import jax

    from trainer.compile.collectives import count_collectives, received_share
    from trainer.compile.hlo import parse_module
    from trainer.compile.stages import memory_report
    from trainer.step.plan import make_plan
    from trainer.step.sharding import make_mesh

    topology = topology_of(case)
    devices = jax.devices() if topology is None else topology.devices()
    config = config_of(case, len(devices))
    mesh = make_mesh(config.mesh, devices)
    exchange = make_plan(config, mesh).attention[0].exchange
    assert exchange is not None
    forward, both, arguments = _functions(config, mesh, exchange.name, exchange.sequence_sharding)
    programs = [jax.jit(forward).lower(*arguments[:-1]).compile(), jax.jit(both).lower(*arguments).compile()]
    modules = [parse_module(program.as_text() or "") for program in programs]
    without_trips, with_one = (
        _pass_bytes(
            *(
                sum(
                    total.bytes * received_share(total.operation, case.num_ranks)
                    for total in count_collectives(each, trips)
                )
                for each in modules
            )
        )
        for trips in (0, 1)
    )
    memory = memory_report(programs[1])
    assert memory is not None
    return Measured(
        exchange.name,
        exchange.sequence_sharding,
        config.batch_size,
        *without_trips,
        (with_one.forward - without_trips.forward, with_one.backward - without_trips.backward),
        exchange.received_bytes,
        memory.temporaries,
        [dataclasses.asdict(total) for total in count_collectives(modules[1])],
    )


def _pass_bytes(forward: float, both: float) -> PassBytes:
    return PassBytes(forward, both - forward)


def topology_of(case: BytesCase) -> Topology | None:
    """The topology to compile for; None: this machine's devices."""
    return None if case.topology == LOCAL else parse_topology(case.topology)


def config_of(case: BytesCase, num_devices: int) -> TrainConfig:
    """The 1.3B model on the topology's devices, with the case's mask in every layer.

    Raises:
      UserMistake: the ranks don't divide the devices.
    """
    from experiments import gpt_1b_32k
    from trainer.config import ContextConfig, MeshConfig

    if num_devices % case.num_ranks:
        raise UserMistake(
            f"{case.num_ranks} ranks to a sequence don't divide the {num_devices} devices of {case.topology}; "
            f"use {math.gcd(case.num_ranks, num_devices)}"
        )
    base = gpt_1b_32k.gpt_1b()
    num_sequences = num_devices // case.num_ranks
    return dataclasses.replace(
        base,
        sequence_length=case.length,
        batch_size=num_sequences,
        gradient_accumulation=1,
        mesh=MeshConfig(fsdp=num_sequences, context=case.num_ranks),
        context=ContextConfig(case.exchange, case.sequence_sharding),  # type: ignore[arg-type]  # the config refuses others
        model=dataclasses.replace(base.model, masks=(parse_mask(case.mask),)),
        data=dataclasses.replace(base.data, keep_documents_apart=case.packed),
    )


def _functions(
    config: TrainConfig, mesh: jax.sharding.Mesh, exchange: Any, sequence_sharding: Any
) -> tuple[Any, Any, list[Any]]:
    """The forward pass, both passes, and their arguments; the last, the output's gradient, is the backward pass's."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P

    from kernels.context import attend_over_mesh
    from layers import ActivationSharding
    from trainer.step.sharding import BATCH_AXES, batch_sharding

    model, (mask,) = config.model, config.model.masks
    layer = ActivationSharding(mesh, exchange=exchange, sequence_sharding=sequence_sharding)
    heads = NamedSharding(mesh, P(BATCH_AXES, "context", "tensor"))

    def operand(num_heads: int) -> jax.ShapeDtypeStruct:
        shape = (config.batch_size, config.sequence_length, num_heads, model.head_dim)
        return jax.ShapeDtypeStruct(shape, model.compute_dtype, sharding=heads)

    tokens = jax.ShapeDtypeStruct((config.batch_size, config.sequence_length), jnp.int32, sharding=batch_sharding(mesh))

    # As in a model that keeps a layer's output: keys gathered for the forward pass aren't kept for the backward.
    @functools.partial(
        jax.checkpoint, policy=jax.checkpoint_policies.save_only_these_names("attention_output", "attention_lse")
    )
    def attend(query, key, value, segment_ids, token_order):
        segment_ids = segment_ids if config.data.keep_documents_apart else None
        token_order = token_order if sequence_sharding == "balanced" else None
        return attend_over_mesh(
            query,
            key,
            value,
            mask,
            layer.layout,
            segment_ids=segment_ids,
            token_order=token_order,
            exchange=exchange,
        )

    def both(query, key, value, segment_ids, token_order, d_output):
        output, vjp = jax.vjp(lambda *heads: attend(*heads, segment_ids, token_order), query, key, value)
        return output, vjp(d_output)

    query, key = operand(model.num_heads), operand(model.num_kv_heads)
    return attend, both, [query, key, key, tokens, tokens, query]


if __name__ == "__main__":
    try:
        print(json.dumps(dataclasses.asdict(measure(BytesCase(**json.loads(sys.argv[1]))))))
    except UserMistake as mistake:
        print(f"error: {mistake}", file=sys.stderr)
        sys.exit(2)
