"""All settings of a run, as nested frozen dataclasses.

A field declares its default, its bounds, and the consequence of a change when a run resumes (`options.py`); its
docstring is its help text on the command line. Each class validates itself on construction, so a config that exists is
one that can be run. `trainer.step.sharding` checks whether the mesh fits the devices, and `trainer.data` the corpus.

A new field also needs the consent of `test_the_number_of_fields` in tests/trainer/config/test_resume_changes.py.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from kernels import Mask
from layers import GPTConfig, LoRAConfig, RopeScaling
from trainer.config.options import (
    AT_LEAST_1,
    POSITIVE,
    Bound,
    check_options,
    option,
    rules,
)
from trainer.config.sections import (
    SEED,
    CheckpointConfig,
    CompilationConfig,
    ContextConfig,
    DataConfig,
    EvaluationConfig,
    LossConfig,
    MeshConfig,
    OptimizerConfig,
    SamplesConfig,
    TensorConfig,
    WandbConfig,
    WatchdogConfig,
    check_path,
)
from trainer.config.sources import SourceConfig, check_sources_of_run

_COUNTED_IN_INT32 = Bound(lambda x: x >= 2**31, "must be less than 2**31: the state counts steps in 32 bits")


@dataclass(frozen=True)
class Phase:
    """A part of a run. Each field but the length says what differs from the phase before; None: nothing.

    The first phase differs from the run's own settings. The state goes on from phase to phase.
    """

    num_steps: int | None = option(None, "schedule", AT_LEAST_1)
    """Steps of the phase. The last phase may leave both lengths out: it lasts until the run's num_steps."""
    num_tokens: int | None = option(None, "schedule", AT_LEAST_1)
    """The length in tokens instead, padding among them; the last step may go past it."""
    sequence_length: int | None = None
    """As `TrainConfig.sequence_length`. Documents, or sources, go on where they were."""
    batch_size: int | None = None
    """As `TrainConfig.batch_size`."""
    gradient_accumulation: int | None = None
    """As `TrainConfig.gradient_accumulation`."""
    masks: tuple[Mask, ...] | None = None
    """As `GPTConfig.masks`."""
    rope_base: float | None = option(None, "training", POSITIVE)
    """As `GPTConfig.rope_base`, of the layers that `rope_layers` names; layers without rotary embedding stay so."""
    rope_scaling: RopeScaling | None = None
    """As `GPTConfig.rope_scaling`, of the same layers."""
    rope_layers: Literal["all", "global"] = "all"
    """Layers that `rope_base` and `rope_scaling` are for. global: those whose mask has no window."""
    remat: str | None = None
    """As `GPTConfig.remat`."""
    keep_documents_apart: bool | None = None
    """As `DataConfig.keep_documents_apart`."""
    sources: tuple[SourceConfig, ...] | None = None
    """As `DataConfig.sources`: sources of the run's, with other weights. Each goes on where it was."""
    optimizer: OptimizerConfig | None = None
    """A schedule of its own, over this phase and those after it that have none. None: the schedule before goes on."""
    mesh: MeshConfig | None = None
    """As `TrainConfig.mesh`, of as many devices."""
    moments: Literal["carry", "fresh"] = "carry"
    """The optimizer's moments. fresh: they begin at 0 again."""

    def __post_init__(self):
        check_options(self, "phases.")
        if self.num_steps is not None and self.num_tokens is not None:
            raise ValueError(
                f"phases: a phase has num_steps={self.num_steps} and num_tokens={self.num_tokens}; leave one out"
            )

    def length(self, config: TrainConfig) -> int | None:
        """Steps of the phase.

        Args:
          config: in this phase.

        Returns:
          None: it is left out.
        """
        if self.num_tokens is None:
            return self.num_steps
        return -(-self.num_tokens // (config.batch_size * config.sequence_length))

    def model_after(self, model: GPTConfig) -> GPTConfig:
        """The model in this phase.

        Args:
          model: in the phase before.

        Raises:
          ValueError: it is no model.
        """
        if self.masks is not None:
            model = replace(model, masks=self.masks)
        if self.remat is not None:
            model = replace(model, remat=self.remat)
        rope = {"rope_base": self.rope_base, "rope_scaling": self.rope_scaling}
        rope = {name: value for name, value in rope.items() if value is not None}
        return model.with_rope(only_global=self.rope_layers == "global", **rope) if rope else model

    def check_follows(self, before: TrainConfig) -> None:
        """Checks what a phase changes of the phase before.

        Raises:
          ValueError: no state can be carried into it, or it unlearns a length.
        """
        if self.optimizer is not None and self.optimizer.kind != before.optimizer.kind and self.moments == "carry":
            raise ValueError(
                f"optimizer.kind={self.optimizer.kind!r} can't go on with the moments of {before.optimizer.kind!r}; "
                "use the kind before, or moments='fresh'"
            )
        if self.mesh is not None and math.prod(vars(self.mesh).values()) != math.prod(vars(before.mesh).values()):
            raise ValueError(
                f"mesh={self.mesh} has another number of devices than {before.mesh}, the one before; use as many"
            )
        factor = max(layer.rope_scaling.factor for layer in before.model.layer_counts)
        if self.rope_scaling is not None and self.rope_scaling.factor < factor and self.rope_base is None:
            raise ValueError(
                f"rope_scaling.factor={self.rope_scaling.factor} is less than the {factor} before, which would shorten "
                "the context; use a larger factor, or leave rope_scaling out"
            )
        bases = [base for layer in before.model.layer_counts if (base := layer.rope_base) is not None]
        if self.rope_base is not None and bases and self.rope_base < max(bases):
            raise ValueError(
                f"rope_base={self.rope_base} is less than the {max(bases)} before, which would shorten the context; "
                "use a larger base, or leave it out"
            )


@dataclass(frozen=True)
class RunPhase:
    """A phase of a run: its settings, and its place in the run."""

    index: int
    config: TrainConfig
    """The settings. It has no phases; its `num_steps` are those of the schedule."""
    first_step: int
    """Steps of the run before it."""
    last_step: int
    """Steps of the run when it is over."""
    schedule_from: int
    """Steps of the run before the schedule's first."""
    moments: Literal["carry", "fresh"]


@dataclass(frozen=True)
class TrainConfig:
    """One experiment: the model, its data, and how it is trained."""

    name: str = field(metadata=rules("free"))
    """Short name; the default workdir is `runs/<name>`."""
    model: GPTConfig = field(
        metadata=rules(
            "model",
            implementation="free",
            decode_implementation="free",
            remat="free",
            scan_layers="free",
            compute_dtype="evaluation",
        )
    )
    """The network."""
    num_steps: int = field(metadata=rules("schedule", AT_LEAST_1, _COUNTED_IN_INT32))
    """Optimizer steps, of all phases together."""
    phases: tuple[Phase, ...] = field(default=(), metadata=rules("phases"))
    """Parts of the run that differ in length, masks, rotary embedding, mixture or schedule. Empty: it is one part. A
    config file sets each; lengths, such as 32k,128k, make phases by a published recipe, which is printed."""
    description: str = option("", "free")
    """One line printed first: what this run is, and on what hardware it is meant to run."""
    sequence_length: int = option(32_768, "sequences", AT_LEAST_1)
    """Tokens in each packed sequence. Where it changes, the documents that are left of an epoch are packed anew."""
    batch_size: int = option(1, "training", AT_LEAST_1)
    """Sequences in an optimizer step, over all devices and micro-batches."""
    gradient_accumulation: int = option(1, "free", AT_LEAST_1)
    """Micro-batches that an optimizer step is split into."""
    log_every_num_steps: int = option(10, "free", AT_LEAST_1)
    """Steps between log lines; the step time is measured over this window."""
    seed: int = option(0, "seed", SEED)
    """Seed of the parameters and of the order of the data."""
    init_from: str | None = option(None, "beginning")
    """Folder whose model a fresh run begins with: a Hugging Face model's (config.json, *.safetensors, tokenizer.json)
    or another run's workdir. Model and tokenizer are the folder's. None: random parameters."""
    init_optimizer: Literal["fresh", "carry"] = option("fresh", "beginning")
    """carry: with a workdir as init_from, its optimizer's moments and its place in the same data go on, too."""
    data: DataConfig = field(default_factory=DataConfig)
    lora: LoRAConfig = field(default_factory=LoRAConfig, metadata=rules("model"))
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    mesh: MeshConfig = field(default_factory=MeshConfig)
    context: ContextConfig = field(default_factory=ContextConfig)
    tensor: TensorConfig = field(default_factory=TensorConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    samples: SamplesConfig = field(default_factory=SamplesConfig, metadata=rules("free"))
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    watchdog: WatchdogConfig = field(default_factory=WatchdogConfig)
    compilation: CompilationConfig = field(default_factory=CompilationConfig)
    wandb: WandbConfig = field(default_factory=WandbConfig)

    def __post_init__(self):
        if isinstance(self.name, str):  # any other type is refused as in every field
            _check_name(self.name)
        check_options(self)
        if self.batch_size % self.gradient_accumulation:
            raise ValueError(
                f"batch_size={self.batch_size} is not a multiple of gradient_accumulation={self.gradient_accumulation}"
            )
        micro_batch, shards = self.batch_size // self.gradient_accumulation, self.mesh.data * self.mesh.fsdp
        if micro_batch % shards:
            raise ValueError(
                f"a micro-batch of {micro_batch} sequences is not a multiple of mesh.data × mesh.fsdp = {shards}; "
                f"raise batch_size to a multiple of {shards * self.gradient_accumulation}, or lower both: they take "
                "as many devices"
            )
        if self.checkpoint.keep_best and self.checkpoint.every_num_steps % self.evaluation.every_num_steps:
            raise ValueError(
                f"checkpoint.keep_best compares the validation losses of checkpoints: "
                f"checkpoint.every_num_steps={self.checkpoint.every_num_steps} must be a multiple of "
                f"evaluation.every_num_steps={self.evaluation.every_num_steps}"
            )
        if self.sequence_length % self.mesh.context:
            raise ValueError(
                f"sequence_length={self.sequence_length} is not a multiple of mesh.context={self.mesh.context}; "
                f"use {-(-self.sequence_length // self.mesh.context) * self.mesh.context}"
            )
        if self.init_from is None:
            self.check_model()
            self.in_phases()
        if self.init_from is None and self.init_optimizer == "carry":
            raise ValueError("init_optimizer='carry' has no effect without init_from; name a run's workdir there")
        if isinstance(self.init_from, str):  # its model is put in and checked in trainer/config/init_from.py
            check_path("init_from", self.init_from)
        self.optimizer.num_decay_steps(self.num_steps)

    def in_phases(self) -> tuple[RunPhase, ...]:
        """The settings of each phase; a run without phases is one.

        Raises:
          ValueError: a phase can't follow the one before, or their lengths aren't the run's.
        """
        if not self.phases:
            return (RunPhase(0, self, 0, self.num_steps, 0, "carry"),)
        config, ends = replace(self, phases=()), [0]
        configs: list[TrainConfig] = []
        for index, phase in enumerate(self.phases):
            try:
                phase.check_follows(config)
                check_sources_of_run(phase.sources or (), self.data.sources)
                config = config._in_phase(phase)
            except ValueError as refused:
                raise ValueError(f"phases[{index}]: {refused}") from None
            length, is_last = phase.length(config), index == len(self.phases) - 1
            if length is None and not is_last:
                raise ValueError(f"phases[{index}] has no length; set its num_steps or num_tokens")
            ends.append(self.num_steps if length is None else ends[-1] + length)
            configs.append(config)
        if ends[-1] != self.num_steps or ends[-2] >= ends[-1]:
            raise ValueError(
                f"num_steps={self.num_steps} is not the length of the phases, which end after {ends[1:]} steps; set it "
                "to the last of these, or leave out the length of the last phase"
            )
        begins = [index for index, phase in enumerate(self.phases) if index == 0 or phase.optimizer is not None]
        resolved = []
        for begin, end in zip(begins, [*begins[1:], len(self.phases)], strict=True):
            for index in range(begin, end):
                try:
                    of_schedule = replace(configs[index], num_steps=ends[end] - ends[begin])
                except ValueError as refused:  # too short for its warm-up, say
                    raise ValueError(f"phases[{index}]: {refused}") from None
                moments = self.phases[index].moments
                resolved.append(RunPhase(index, of_schedule, ends[index], ends[index + 1], ends[begin], moments))
        return tuple(resolved)

    def phase_at(self, step: int) -> RunPhase:
        """The phase that makes a step.

        Args:
          step: from 1; 0 is the first phase's, and so is each step past the end the last one's.
        """
        phases = self.in_phases()
        return next((phase for phase in phases if step <= phase.last_step), phases[-1])

    def _in_phase(self, phase: Phase) -> TrainConfig:
        """The settings in a phase that follows one with these. `num_steps` is a long one, until lengths are known."""
        names = ("sequence_length", "batch_size", "gradient_accumulation", "mesh", "optimizer")
        own: dict[str, Any] = {name: getattr(phase, name) for name in names}
        of_data = {name: getattr(phase, name) for name in ("keep_documents_apart", "sources")}
        own["data"] = replace(self.data, **{name: value for name, value in of_data.items() if value is not None})
        own = {name: value for name, value in own.items() if value is not None}
        return replace(self, model=phase.model_after(self.model), num_steps=2**31 - 1, **own)

    def check_model(self) -> None:
        """Checks that the model can be trained on this mesh, and asked for the samples.

        Raises:
          ValueError: it can't.
        """
        # What `trainer.step.sharding.PARTITION_RULES` splits, in the words of the config; a test compares the two.
        model, moe = self.model, self.model.moe
        hidden = ("mlp_width", model.mlp_width) if moe is None else ("moe.expert_width", moe.expert_width)
        for name, length, axes in (
            ("width", model.width, ("fsdp", "context")),
            ("num_heads", model.num_heads, ("tensor",)),
            ("num_kv_heads", model.num_kv_heads, ("tensor",)),
            (*hidden, ("tensor",)),
            ("vocab_size", model.vocab_size, ("tensor",)),
        ):
            size = math.prod(getattr(self.mesh, axis) for axis in axes)
            if length % size:
                product = " × ".join(f"mesh.{axis}" for axis in axes)
                raise ValueError(
                    f"model.{name}={length} is not a multiple of {product} = {size}; "
                    f"use {-(-length // size) * size}, or make {product} a divisor of {length}"
                )
        for index in range(self.model.pattern_length):
            if (num_kv_heads := self.model.layer(index).num_kv_heads) % self.mesh.tensor:
                raise ValueError(
                    f"model.layer_overrides gives layer {index} num_kv_heads={num_kv_heads}, which mesh.tensor = "
                    f"{self.mesh.tensor} does not divide; make mesh.tensor a divisor of it"
                )
        if self.mesh.tensor > 1 and any(mask.num_heads is not None for mask in self.model.masks):
            raise ValueError(
                f"model.masks holds a MultiHeadMask, whose heads mesh.tensor={self.mesh.tensor} would split, and one "
                "program can't have another mask on each device; set mesh.tensor to 1, or use one mask for all heads"
            )
        if self.data.source == "trees" and (window := self.model.scheduled_window) is not None:
            raise ValueError(
                f"model.masks holds {window!r}, whose width counts tokens of the sequence, and data.source='trees' "
                "puts other branches between the tokens of a branch; "
                f"use LocalMask({window.stop - 1}, 0), which counts positions along the branch"
            )
        self.lora.matrices(self.model)
        if self.model.param_dtype not in ("float32", "float64"):
            raise ValueError(
                f"model.param_dtype={self.model.param_dtype!r}: training updates parameters in float32, since small "
                "updates vanish in less; set it to float32 (model.compute_dtype is what the matmuls run in)"
            )
        if self.samples.prompts:
            self.model.check_looks_back_only()
            if self.data.known_tokenizer is None:
                raise ValueError(
                    "samples.prompts needs a tokenizer, and a .bin file doesn't say which one made it; "
                    "set data.tokenizer to its tokenizer.json"
                )


def _check_name(name: str) -> None:
    """Refuses what can't name a folder."""
    if name in ("", ".", "..") or "/" in name or not name.isprintable():
        raise ValueError(f"name={name!r} must be a folder's name, printable and without /; see also --workdir")
    if len(name.encode()) > 255:
        raise ValueError(f"name={name[:40]!r}… is too long for a folder's name; use up to 255 bytes")
