"""One forward pass over token streams, and the loss of each of their tokens.

Shapes: n targets of a stream, B sequences of a batch, T tokens of each.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Bool, Float32, Int32

from trainer.config import SamplesConfig, TrainConfig
from trainer.data import BatchShare, SequenceSharder
from trainer.data.packing import empty_sequence, pack_best_fit
from trainer.step.functions import make_step_functions
from trainer.step.global_batch import indices_of_process, make_global_batch
from trainer.step.plan import make_plan
from trainer.step.sharding import batch_sharding

# Sequences are padded to a multiple for each rank of `mesh.context`, so that any sharding divides them.
_MULTIPLE = 128


class StreamLosses(NamedTuple):
    """What a model makes of each token of a stream but the first."""

    nats: Float32[np.ndarray, " n"]
    is_likeliest: Bool[np.ndarray, " n"]
    """True where the token is the argmax of the model's logits."""


class TokenForward:
    """The losses of all tokens of texts, on the mesh of a run; nothing is compiled before the first call.

    Short streams share a sequence, each a document of its own, so one program serves all lengths.

    Args:
      config: of the run.
      mesh: from `make_mesh(config.mesh)`.
      length: targets of the longest stream.

    Raises:
      UserMistake: a backend that the config names can't serve sequences of this length.
    """

    def __init__(self, config: TrainConfig, mesh: Mesh, length: int):
        shards, multiple = config.mesh.data * config.mesh.fsdp, _MULTIPLE * config.mesh.context
        self._length = -(-length // multiple) * multiple
        self._config = dataclasses.replace(
            config,
            sequence_length=self._length,
            batch_size=shards,
            gradient_accumulation=1,
            init_from=None,
            init_optimizer="fresh",
            samples=SamplesConfig(),
            data=dataclasses.replace(config.data, keep_documents_apart=True),
            optimizer=dataclasses.replace(config.optimizer, offload_moments=False),
        )
        plan = make_plan(self._config, mesh)
        self.functions = make_step_functions(self._config, mesh, plan)
        self._shard = SequenceSharder.of(self._config, plan.sequence_sharding)
        self._batch_sharding = batch_sharding(mesh)

    @property
    def abstract_params(self) -> Any:
        """Shapes, dtypes and shardings of the parameters that a call takes: those of the run's state."""
        return self.functions.abstract_state.params

    def __call__(self, params: Any, streams: Sequence[Int32[np.ndarray, " n+1"]]) -> list[StreamLosses]:
        """The losses of each stream's tokens, given those before them.

        Args:
          params: as `abstract_params`.
          streams: each of at least two tokens, and of one more than `length` at most.
        """
        losses: list[StreamLosses] = [StreamLosses(np.zeros(0, np.float32), np.zeros(0, bool))] * len(streams)
        if not streams:
            return losses
        sequence_of = pack_best_fit(np.array([len(stream) - 1 for stream in streams]), self._length)
        packed = [np.flatnonzero(sequence_of == number).tolist() for number in range(sequence_of.max() + 1)]
        batch_size = self._config.batch_size
        for start in range(0, len(packed), batch_size):
            batch = packed[start : start + batch_size]
            for members, found in zip(batch, self._run(params, batch, streams), strict=False):
                offset = 0
                for index in members:
                    end = offset + len(streams[index]) - 1
                    losses[index] = StreamLosses(found.nats[offset:end], found.is_likeliest[offset:end])
                    offset = end
        return losses

    def _run(self, params: Any, batch: Sequence[Sequence[int]], streams: Sequence[np.ndarray]) -> list[StreamLosses]:
        """The losses of a batch's sequences, in their tokens' order."""
        batch_size = self._config.batch_size
        indices = indices_of_process(self._batch_sharding, batch_size, self._length)
        padded = [*batch, *[()] * (batch_size - len(batch))]
        sharded = [self._shard(self._sequence([streams[index] for index in members])) for members in padded]
        arrays = {name: np.stack([sharded[index][name] for index in indices]) for name in sharded[0]}
        lengths = tuple(np.array([len(streams[index]) - 1 for index in members], np.int64) for members in padded)
        placed = make_global_batch(BatchShare(arrays, indices, lengths), self._batch_sharding)
        found = jax.device_get(self.functions.token_step(params, placed))
        in_order = np.arange(self._length)
        orders = [np.argsort(sequence.get("token_order", in_order)) for sequence in sharded]
        return [StreamLosses(found.nats[i][order], found.is_likeliest[i][order]) for i, order in enumerate(orders)]

    def _sequence(self, streams: Sequence[Int32[np.ndarray, " n+1"]]) -> dict[str, np.ndarray]:
        sequence, offset = empty_sequence(self._length), 0
        for number, stream in enumerate(streams):
            place = slice(offset, offset := offset + len(stream) - 1)
            sequence["tokens"][place], sequence["targets"][place] = stream[:-1], stream[1:]
            sequence["weights"][place] = 1
            sequence["segment_ids"][place] = len(streams) - number  # falling, as in `PackedSequences`
            sequence["positions"][place] = np.arange(len(stream) - 1)
        return sequence
