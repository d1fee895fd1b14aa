"""From a config to everything that the loop needs, in the order that finds mistakes soonest: data, devices, model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax

from trainer.compile.out_of_memory import running
from trainer.compile.recompilation import OnRecompile, RecompilingFunction
from trainer.compile.stages import CompileReport, compile_in_stages, use_compilation_cache
from trainer.config import TrainConfig
from trainer.data import Corpus, TrainIterator, load_corpus, make_train_iterator, make_validation_batches
from trainer.observers.record import describe_devices
from trainer.sample.during_training import Samples
from trainer.step.attention_plan import AttentionPlan, describe_attention, plan_attention
from trainer.step.flops import DevicePeak, FlopCounter, device_peak
from trainer.step.functions import Batch, StepFunctions, TrainState, make_step_functions
from trainer.step.sharding import batch_sharding, bytes_per_device, make_mesh
from trainer.terminal.units import format_bytes, format_count


@dataclass(frozen=True)
class Setup:
    """A run before its first step."""

    config: TrainConfig
    corpus: Corpus
    functions: StepFunctions
    attention: tuple[AttentionPlan, ...]
    batches: TrainIterator
    validation_batches: list[Batch]
    """On the devices."""
    samples: Samples | None
    """None: no prompts to continue."""
    flops: FlopCounter
    peak: DevicePeak

    @property
    def devices(self) -> list[jax.Device]:
        return list(self.functions.mesh.devices.flat)

    @property
    def tokens_per_step(self) -> int:
        return self.config.batch_size * self.config.sequence_length

    def put(self, batch: Any) -> Batch:
        """A batch of NumPy arrays, on the devices."""
        return jax.device_put(batch, batch_sharding(self.functions.mesh))

    def to_json(self) -> dict[str, Any]:
        """What the run record says about it."""
        return {
            "name": self.config.name,
            "description": self.config.description,
            "devices": describe_devices(self.devices)
            | {"peak_flops_per_s": self.peak.flops_per_s, "peak_source": self.peak.source},
            "mesh": dict(self.functions.mesh.shape),
            "num_parameters": self.functions.num_parameters,
            "tokens_per_step": self.tokens_per_step,
            "attention": [plan.to_json() for plan in self.attention],
            "data": self.corpus.summary() | {"padding_fraction": self.batches.padding_fraction},
        }

    def facts(self) -> dict[str, str | list[str]]:
        """What the opening panel says about it."""
        devices, config = self.devices, self.config
        state_bytes = bytes_per_device(self.functions.abstract_state)
        gradient_bytes = bytes_per_device(self.functions.abstract_state.params)
        data = self.corpus.summary()
        return {
            "devices": f"{len(devices)} × {devices[0].device_kind} ({devices[0].platform}), "
            f"{self.peak.flops_per_s / 1e12:,.2f} TFLOP/s each ({self.peak.source})",
            "mesh": " × ".join(f"{axis} {size}" for axis, size in self.functions.mesh.shape.items()),
            "model": f"{format_count(self.functions.num_parameters)} parameters, {config.model.num_layers} layers "
            f"of width {config.model.width}, {config.model.compute_dtype} compute",
            "attention": describe_attention(self.attention),
            "data": f"{data['source']}, {data['train']['num_tokens']:,} training tokens, "
            f"{data['tokenizer']} tokenizer, unigram entropy {self.corpus.unigram_nats_per_token:.4f} nats/token",
            "step": f"{self.tokens_per_step:,} tokens: {config.batch_size} × {config.sequence_length:,}"
            + (f" in {config.gradient_accumulation} micro-batches" if config.gradient_accumulation > 1 else ""),
            "memory": f"{format_bytes(state_bytes)} of state and {format_bytes(gradient_bytes)} of gradients "
            "per device, before activations",
        }


@dataclass(frozen=True)
class CompiledSteps:
    """The programs of a run, each compiled once, and again only if its arguments change."""

    init_state: Callable[[], TrainState] | None
    """None if the state comes from a checkpoint."""
    train_step: RecompilingFunction
    eval_step: RecompilingFunction
    reports: tuple[CompileReport, ...]


def prepare(config: TrainConfig, on_progress: Callable[[str], None]) -> Setup:
    """Opens the data, starts the devices and builds the step functions; nothing is compiled for the model yet.

    Args:
      config: the experiment.
      on_progress: told, in one line, of work that takes long.

    Raises:
      UserMistake: the data can't be trained on, the mesh doesn't fit the devices, or the attention backend can't serve
        a mask.
      TrainingFailed: the devices can't be started.
    """
    corpus = load_corpus(config.data, vocab_size=config.model.vocab_size, on_progress=on_progress)
    samples = Samples(config, corpus.tokenizer) if config.samples.prompts else None
    use_compilation_cache(config.compilation.cache_dir)
    mesh = make_mesh(config.mesh)
    device = mesh.devices.flat[0]
    attention = plan_attention(config, device)
    functions = make_step_functions(config, mesh)
    batches = make_train_iterator(
        corpus,
        sequence_length=config.sequence_length,
        batch_size=config.batch_size,
        seed=config.seed,
        num_prefetch_batches=config.data.num_prefetch_batches,
        on_progress=on_progress,
    )
    validation_batches = make_validation_batches(
        corpus,
        sequence_length=config.sequence_length,
        batch_size=config.batch_size // config.gradient_accumulation,
        num_sequences=config.evaluation.num_sequences,
        on_progress=on_progress,
    )
    return Setup(
        config=config,
        corpus=corpus,
        functions=functions,
        attention=attention,
        batches=batches,
        validation_batches=[jax.device_put(batch, batch_sharding(mesh)) for batch in validation_batches],
        samples=samples,
        flops=FlopCounter(config.model, config.sequence_length, keep_documents_apart=config.data.keep_documents_apart),
        peak=device_peak(device, config.model.compute_dtype),
    )


def compile_steps(functions: StepFunctions, *, with_init: bool, on_recompile: OnRecompile) -> CompiledSteps:
    """Compiles each program of a run, once, ahead of its first use.

    Args:
      functions: of the run.
      with_init: whether the state has to be made.
      on_recompile: told if one of them has to be compiled another time.

    Raises:
      OutOfMemory: the compiler finds that one doesn't fit in the devices' memory.
    """
    state = functions.abstract_state
    init_state, reports = None, []
    if with_init:
        with running("init_state"):
            init_state, report = compile_in_stages(functions.init_state, name="init_state")
        reports.append(report)
    with running("train_step"):
        train_step = RecompilingFunction(
            functions.train_step, state, functions.abstract_batch, name="train_step", on_recompile=on_recompile
        )
    with running("eval_step"):
        batch = functions.abstract_eval_batch
        eval_step = RecompilingFunction(
            functions.eval_step, state.params, batch, name="eval_step", on_recompile=on_recompile
        )
    return CompiledSteps(init_state, train_step, eval_step, (*reports, train_step.report, eval_step.report))
