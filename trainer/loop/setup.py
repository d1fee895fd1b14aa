"""The parts of a run before its first step, and their description in the record and the opening lines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax

from trainer.config import RunPhase, TrainConfig
from trainer.data import BatchShare, Corpus, TrainIterator
from trainer.evaluate.tasks import Example
from trainer.observers.record import describe_devices
from trainer.sample.during_training import Samples
from trainer.step.flops import FlopCounter
from trainer.step.frozen import split_frozen
from trainer.step.functions import StepFunctions
from trainer.step.global_batch import make_global_batch
from trainer.step.plan import Plan
from trainer.step.sharding import batch_sharding, bytes_per_device
from trainer.step.train_step import Batch
from trainer.terminal.units import format_bytes, format_count


@dataclass(frozen=True)
class Setup:
    """The parts of a phase of a run before its first step."""

    run: TrainConfig
    """The settings of the whole run."""
    phase: RunPhase
    corpus: Corpus
    plan: Plan
    functions: StepFunctions
    batches: TrainIterator
    validation_batches: list[Batch]
    """On the devices."""
    validation_bytes: int | None
    """Bytes of the text that their targets stand for; None: the text isn't known."""
    validation_digest: str
    """Equal only if a validation loss is measured on the same targets in the same way."""
    samples: Samples | None
    """None: no prompts to continue."""
    examples: Sequence[Example]
    """Retrieval tasks at `evaluation.lengths`."""
    flops: FlopCounter
    peak_flops_per_s: float | None
    """Of one device; None: unknown."""
    validation_sources: tuple[str | None, ...]
    """The source of each validation batch; None: the data is no mixture."""

    @property
    def config(self) -> TrainConfig:
        """The settings in this phase. `num_steps` are those of its schedule."""
        return self.phase.config

    @property
    def phase_number(self) -> int | None:
        """The phase among the run's, from 1; None: the run has none."""
        return self.phase.index + 1 if self.run.phases else None

    @property
    def devices(self) -> list[jax.Device]:
        return list(self.functions.mesh.devices.flat)

    @property
    def tokens_per_step(self) -> int:
        """Positions of a batch, padding among them."""
        return self.config.batch_size * self.config.sequence_length

    def put(self, share: BatchShare) -> Batch:
        """The batch of which this process has read a share, on the devices."""
        return make_global_batch(share, batch_sharding(self.functions.mesh))

    def to_json(self) -> dict[str, Any]:
        """The description in the run record."""
        return {
            "name": self.config.name,
            "description": self.config.description,
            "devices": describe_devices(self.devices) | {"peak_flops_per_s": self.peak_flops_per_s},
            "mesh": dict(self.functions.mesh.shape),
            "num_parameters": self.functions.num_parameters,
            "tokens_per_step": self.tokens_per_step,
            **self.plan.to_json(),
            "data": self.corpus.summary() | {"padding_fraction": self.batches.padding_fraction} | self._counts(),
        }

    def phase_to_json(self) -> dict[str, Any]:
        """The phase's entry in the run record."""
        return {
            "first_step": self.phase.first_step + 1,
            "last_step": self.phase.last_step,
            "tokens_per_step": self.tokens_per_step,
            "sequence_length": self.config.sequence_length,
            "mesh": dict(self.functions.mesh.shape),
            **self.plan.to_json(),
            **self._counts(),
        }

    def _counts(self) -> dict[str, Any]:
        """What trees share, and which chats are longer than a sequence."""
        sharing, cuts = self.batches.sharing(), self.corpus.train.cuts(self.config.sequence_length)
        found = {"sharing": sharing, "chats": cuts}
        return {name: counts for name, counts in found.items() if counts is not None}

    def _describe_adapters(self) -> dict[str, str]:
        """A line for adapters; none where all parameters train."""
        lora = self.config.lora
        if lora.rank is None:
            return {}
        trained, _ = split_frozen(lora, self.functions.abstract_state.params)
        num_trained = sum(leaf.size for leaf in jax.tree.leaves(trained))
        names = ", ".join(lora.matrices(self.config.model))
        return {"lora": f"{format_count(num_trained)} parameters train: rank {lora.rank} on {names}"}

    def describe_phase(self) -> str:
        """A line for the beginning of the phase."""
        config, phase = self.config, self.phase
        cuts = _describe_cuts(self.corpus.train.cuts(config.sequence_length))
        return (
            f"phase {phase.index + 1} of {len(self.run.phases)}: steps {phase.first_step + 1} to {phase.last_step}, "
            f"{config.batch_size} × {config.sequence_length:,} tokens"
            + "".join(f"; {name}: {line}" for name, line in cuts.items())
        )

    def facts(self) -> dict[str, str | list[str]]:
        """The description in the opening lines."""
        devices, config = self.devices, self.config
        state_bytes = bytes_per_device(self.functions.abstract_state)
        gradient_bytes = bytes_per_device(self.functions.abstract_gradient)
        host_bytes = bytes_per_device(self.functions.abstract_state, on_host=True)
        data = self.corpus.summary()
        return {
            "devices": f"{len(devices)} × {devices[0].device_kind} ({devices[0].platform})"
            + (f", {self.peak_flops_per_s / 1e12:,.0f} TFLOP/s each" if self.peak_flops_per_s else ""),
            "mesh": " × ".join(f"{axis} {size}" for axis, size in self.functions.mesh.shape.items()),
            "model": f"{format_count(self.functions.num_parameters)} parameters, {config.model.num_layers} layers "
            f"of width {config.model.width}, {config.model.compute_dtype} compute",
            **self._describe_adapters(),
            **self.plan.describe(),
            "data": f"{data['source']}, {data['train']['num_tokens']:,} training tokens, "
            f"{data['tokenizer']} tokenizer, documents {self.corpus.tokenizer.delimiters}, "
            f"unigram entropy {self.corpus.unigram_nats_per_token:.4f} nats/token",
            **_describe_sharing(self.batches.sharing()),
            **_describe_cuts(self.corpus.train.cuts(config.sequence_length)),
            "step": f"{self.tokens_per_step:,} tokens: {config.batch_size} × {config.sequence_length:,}"
            + (f" in {config.gradient_accumulation} micro-batches" if config.gradient_accumulation > 1 else ""),
            "memory": f"{format_bytes(state_bytes)} of state and {format_bytes(gradient_bytes)} of gradients "
            "per device, before activations"
            + (f"; {format_bytes(host_bytes)} of state per device in the host's memory" if host_bytes else ""),
        }


def _describe_cuts(cuts: dict[str, int] | None) -> dict[str, str]:
    """A line for the training chats; none where there are none."""
    if cuts is None:
        return {}
    num_cut, num_dropped = cuts["num_chats_cut"], cuts["num_chats_dropped"]
    line = f"{cuts['num_chats']:,}"
    if num_cut or num_dropped:
        line += (
            f", of which {num_cut + num_dropped:,} longer than a sequence: {num_cut:,} cut at a turn, {num_dropped:,} "
            f"dropped ({cuts['num_tokens_left_out']:,} tokens left out)"
        )
    return {"chats": line}


def _describe_sharing(sharing: dict[str, int] | None) -> dict[str, str]:
    """A line for the training trees; none for documents."""
    if sharing is None:
        return {}
    saved, num_tokens, num_split = (sharing[name] for name in ("num_tokens_saved", "num_tokens", "num_trees_split"))
    line = (
        f"{sharing['num_trees']:,} with {sharing['num_branches']:,} branches; sharing saves {saved:,} of "
        f"{saved + num_tokens:,} tokens ({saved / max(saved + num_tokens, 1):.0%})"
    )
    if num_split:
        line += (
            f"; {num_split:,} longer than a sequence, split into {sharing['num_parts_of_split']:,} parts that repeat "
            f"{sharing['num_tokens_repeated']:,} tokens"
        )
    return {"trees": line}
