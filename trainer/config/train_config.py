"""All settings of a run, as nested frozen dataclasses.

A field declares its default, its bounds, and the consequence of a change when a run resumes (`options.py`); its
docstring is its help text on the command line. Each class validates itself on construction, so a config that exists is
one that can be run. `trainer.step.sharding` checks whether the mesh fits the devices, and `trainer.data` the corpus.

A new field also needs the consent of `test_the_number_of_fields` in tests/trainer/config/test_resume_changes.py.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from kernels import Mask
from kernels.collectives import Collectives
from kernels.context import Exchange, SequenceSharding
from layers import GPTConfig, RopeScaling
from layers.checks import check_choice
from layers.token_choice import TokenChoice
from trainer.config.options import (
    AT_LEAST_1,
    DECAY,
    FRACTION,
    NOT_NEGATIVE,
    POSITIVE,
    Bound,
    check_options,
    option,
    rules,
)
from trainer.config.sources import SourceConfig, SourceFormat, check_sources, check_sources_of_run
from trainer.errors import name_some
from trainer.files.paths import refuse_url

_SEED = Bound(lambda x: x < 0, "must not be negative")
_COUNTED_IN_INT32 = Bound(lambda x: x >= 2**31, "must be less than 2**31: the state counts steps in 32 bits")
_SECONDS = POSITIVE._replace(text="must be positive and finite; watchdog.enabled False watches nothing")
_STOPS_AT_FIRST = AT_LEAST_1._replace(text="must be at least 1, which stops at the first update that is skipped")
_MULTIPLE_OF_MEAN = Bound(
    lambda x: not 1 < x < math.inf,
    "must be more than 1 and finite, as it is a multiple of the mean; None skips no gradient that is finite",
)


@dataclass(frozen=True)
class DataConfig:
    """Where the documents come from and how they become tokens."""

    source: SourceFormat = option("stdlib", "corpus")
    """stdlib: the Python standard library's own sources; the others read `files`."""
    files: tuple[str, ...] = option((), "corpus")
    """Globs (`**` allowed) of the training files."""
    validation_files: tuple[str, ...] = option((), "corpus")
    """Globs of the validation files; when empty, documents are split by a hash."""
    validation_fraction: float = option(
        0.05, "corpus", Bound(lambda x: not 0.0 < x < 1.0, "must lie strictly between 0 and 1")
    )
    """Fraction of documents held out when `validation_files` is empty; at least one; of a single document, its end."""
    text_field: str = option("text", "corpus")
    """Name of the text field (jsonl) or column (parquet)."""
    tokenizer: str | None = option(None, "corpus")
    """`byte`, or the path of a Hugging Face `tokenizer.json`. None: byte, but unknown for `bin`."""
    end_of_document_token: int | str | None = option(None, "tokenizer")
    """Token (text or id) that ends a document; `none`: none does. None: the tokenizer's own; for `bin` without one
    50256, in llm.c's Llama 3 files 128000, and none where no file has it."""
    begin_of_document_token: int | str | None = option(None, "corpus")
    """Token (text or id) that begins a document; `none`: none does. None: the one that the tokenizer puts before a
    text, or else the one that ends a document."""
    token_cache_dir: str = option("~/.cache/flax-longcontext/tokens", "free")
    """Folder of the tokens of text, jsonl and parquet files and the index of bin files: made once, then checked."""
    token_cache_gib: float = option(
        100.0, "free", Bound(lambda x: not 0 <= x < math.inf, "must be at least 0 and finite")
    )
    """Size to which that folder is held: past it, what was unused for longest is removed, never what a run is using."""
    keep_documents_apart: bool = option(True, "evaluation")
    """Attention and positions stay within a document. False: a packed sequence is read as one text, as nanoGPT does."""
    num_prefetch_batches: int = option(4, "free", AT_LEAST_1)
    """Batches prepared ahead of the step."""
    allow_changed: bool = option(False, "free")
    """When a run resumes: go on although the documents are other ones (more files, say), with a new epoch. False: stop
    and tell."""
    sources: tuple[SourceConfig, ...] = option((), "corpus")
    """A mixture in the place of `source` and its files, of sources weighted in tokens. Set in a config file."""

    def __post_init__(self):
        if self.sources:
            self._check_sources()
        for name in ("files", "validation_files"):
            if self.source == "stdlib" and getattr(self, name):
                raise ValueError(
                    f"data.{name}={name_some(getattr(self, name))} has no effect with data.source='stdlib'; "
                    "set data.source to text, jsonl, parquet or bin"
                )
            for pattern in getattr(self, name):
                _refuse_url(f"data.{name}", pattern)
        if self.source != "stdlib" and not self.files:
            raise ValueError(f"data.source={self.source!r} needs data.files, one or more globs; got none")
        check_options(self, "data.")
        check_path("data.token_cache_dir", self.token_cache_dir)
        if self.tokenizer is not None:
            check_path("data.tokenizer", self.tokenizer)

    @property
    def known_tokenizer(self) -> str | None:
        """The tokenizer's name: `byte`, or a path. None: files of token ids don't say which one made them."""
        formats = [source.format for source in self.sources] or [self.source]
        return self.tokenizer or (None if "bin" in formats else "byte")

    def _check_sources(self) -> None:
        given = {"source": self.source != "stdlib", "files": self.files, "validation_files": self.validation_files}
        if names := [f"data.{name}" for name, is_given in given.items() if is_given]:
            raise ValueError(
                f"{' and '.join(names)} can't be set together with data.sources, whose sources have their own files; "
                "leave out one or the other (on a command line: --data.sources with nothing behind it)"
            )
        for source in self.sources:
            for pattern in source.files:
                _refuse_url(f"data.sources {source.name!r}: files", pattern)
        check_sources(self.sources)


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW or Muon, with warm-up and a cosine or warm-up–stable–decay schedule."""

    learning_rate: float = option(6e-4, "schedule", POSITIVE)
    """Peak learning rate."""
    schedule: Literal["cosine", "wsd"] = option("cosine", "schedule")
    """Shape after the warm-up: cosine to the end, or stable then linear decay."""
    num_warmup_steps: int = option(100, "schedule", NOT_NEGATIVE)
    """Steps of linear warm-up from 0."""
    decay_fraction: float = option(0.2, "schedule", FRACTION)
    """wsd only: fraction of the steps spent in the final linear decay, which has at least one."""
    final_learning_rate_fraction: float = option(0.1, "schedule", FRACTION)
    """Learning rate at the last step, as a fraction of the peak."""
    beta1: float = option(0.9, "training", DECAY)
    """Decay of the first moment."""
    beta2: float = option(0.95, "training", DECAY)
    """Decay of the second moment."""
    epsilon: float = option(1e-8, "training", POSITIVE)
    """Added to the root of the second moment."""
    weight_decay: float = option(0.1, "training", NOT_NEGATIVE)
    """Decoupled decay of matrices and embeddings; norms, biases and sinks have none."""
    clip_norm: float = option(1.0, "training", POSITIVE)
    """Global gradient norm above which gradients are scaled down."""
    skip_grad_norm_above: float | None = option(None, "training", _MULTIPLE_OF_MEAN)
    """Skip an update whose gradient norm is more than this many times the mean of recent ones. None: never."""
    max_skipped_in_a_row: int = option(8, "free", _STOPS_AT_FIRST)
    """Updates skipped in a row, as not finite or by `skip_grad_norm_above`, at which the run stops; 1: at the first."""
    kind: Literal["adamw", "muon"] = option("adamw", "optimizer")
    """adamw (arXiv:1711.05101); muon (kellerjordan.github.io/posts/muon): matrices of blocks move along orthogonalised
    momentum, with updates of AdamW's size (arXiv:2502.16982), and all else by AdamW."""
    momentum: float = option(0.95, "training", DECAY)
    """muon only: decay of the block matrices' momentum, which is Nesterov's."""
    offload_moments: bool = option(False, "free")
    """Keep the moments in the host's pinned memory, and have them on the devices only for the update."""

    def __post_init__(self):
        check_options(self, "optimizer.")
        if self.schedule == "wsd" and self.decay_fraction == 0 and self.final_learning_rate_fraction < 1:
            raise ValueError(
                "optimizer.decay_fraction=0 leaves no step in which the learning rate could fall to "
                f"optimizer.final_learning_rate_fraction={self.final_learning_rate_fraction} of the peak; "
                "set that to 1 to hold the peak to the end, or the decay_fraction to more than 0"
            )

    def num_decay_steps(self, num_steps: int) -> int:
        """Steps in which the learning rate falls, the last of a run.

        Args:
          num_steps: of the whole run.

        Raises:
          ValueError: the warm-up leaves too few steps.
        """
        # To have fallen by the last step takes at least that step.
        num_fewest = int(self.final_learning_rate_fraction < 1)
        of_wsd = max(round(self.decay_fraction * num_steps), num_fewest)
        num_most = num_steps - (num_fewest if self.schedule == "cosine" else of_wsd)
        if self.num_warmup_steps > num_most:
            raise ValueError(
                f"optimizer.num_warmup_steps={self.num_warmup_steps} leaves too few of num_steps={num_steps} for the "
                f"{self.schedule} decay; use at most {num_most} warm-up steps"
            )
        return num_steps - self.num_warmup_steps if self.schedule == "cosine" else of_wsd


LossImplementation = Literal["mosaic_gpu", "xla"]
"""The values that the head's matmul stores for the gradient: exponentials, by our kernel, or logits."""


@dataclass(frozen=True)
class LossConfig:
    """Cross-entropy over the vocabulary, computed a chunk of the sequence at a time."""

    chunk_size: int = option(2048, "free", AT_LEAST_1)
    """Tokens whose logits exist at one time."""
    z_loss: float = option(
        1e-4, "training", NOT_NEGATIVE._replace(text="must be finite and not negative; 0 turns it off")
    )
    """Weight of the squared log-partition penalty (PaLM, arXiv:2204.02311); 0 turns it off."""
    implementation: LossImplementation | None = option(None, "free")
    """mosaic_gpu: by a kernel that stores exponentials of logits; xla: by logits. None: the kernel where it serves."""

    def __post_init__(self):
        if self.implementation is not None:
            check_choice("loss.implementation", self.implementation, LossImplementation)
        check_options(self, "loss.")


@dataclass(frozen=True)
class MeshConfig:
    """Sizes of the mesh axes; their product is the number of devices used."""

    data: int = option(1, "free", AT_LEAST_1)
    """Replicas, each on its own sequences."""
    fsdp: int = option(1, "free", AT_LEAST_1)
    """Parameters and optimizer state sharded; also splits the batch."""
    tensor: int = option(1, "free", AT_LEAST_1)
    """Heads, MLP and vocabulary split."""
    context: int = option(1, "free", AT_LEAST_1)
    """Each sequence split over its tokens; parameters and optimizer state sharded, too."""

    def __post_init__(self):
        check_options(self, "mesh.")


@dataclass(frozen=True)
class ContextConfig:
    """Attention over mesh.context, chosen for each mask where no name is given."""

    exchange: Exchange | None = option(None, "free")
    """How ranks get each other's keys. all_gather: all ranks get the keys that any other rank needs; peer: up to four
    GPUs read each other's memory; halo: a rank gets the keys within its windows' reach; ring: keys go from rank to
    rank; all_to_all: each rank gets whole sequences of some heads. None: the fastest for each mask."""
    sequence_sharding: SequenceSharding | None = option(None, "free")
    """The tokens that a rank holds. contiguous: one part of the sequence; zigzag: one part from each end; balanced:
    chunks, so that all ranks have equal work. None: the simplest one that balances the work."""

    def __post_init__(self):
        for name, choices in (("exchange", Exchange), ("sequence_sharding", SequenceSharding)):
            if getattr(self, name) is not None:
                check_choice(f"context.{name}", getattr(self, name), choices)


@dataclass(frozen=True)
class TensorConfig:
    """How tokens go over mesh.tensor between the layers' matmuls."""

    collectives: Collectives | None = option(None, "free")
    """mosaic_gpu: by kernels in which GPUs write to each other's memory; xla: by XLA's collectives. None: the kernels
    where two to four GPUs can run them."""

    def __post_init__(self):
        if self.collectives is not None:
            check_choice("tensor.collectives", self.collectives, Collectives)


@dataclass(frozen=True)
class EvaluationConfig:
    """Loss on a fixed set of validation sequences."""

    every_num_steps: int = option(100, "free", AT_LEAST_1)
    """Steps between evaluations; the last step is always followed by one."""
    num_sequences: int = option(8, "corpus", AT_LEAST_1)
    """Packed validation sequences at most, the same ones each time."""
    lengths: tuple[int, ...] = option((), "free")
    """Tokens of contexts at which retrieval and losses are measured at the end of each phase; empty: nowhere."""
    lengths_every_num_steps: int | None = option(None, "free", AT_LEAST_1)
    """Steps between these evaluations; None: at the ends of phases alone."""
    tasks: tuple[str, ...] = option(("niah_single", "niah_multikey"), "free")
    """Retrieval tasks at these lengths, as `python -m trainer.evaluate --tasks` names them."""
    num_examples: int = option(2, "free", AT_LEAST_1)
    """Contexts of each task, length and depth, of which there are ten."""

    def __post_init__(self):
        check_options(self, "evaluation.")
        if any(length < 2 for length in self.lengths) or len(set(self.lengths)) < len(self.lengths):
            raise ValueError(f"evaluation.lengths={self.lengths} must be different numbers of at least 2 tokens")


@dataclass(frozen=True)
class SamplesConfig(TokenChoice):
    """Texts that the model continues at each evaluation, printed beside the loss; off without prompts.

    A device holds the whole model for it, in the compute dtype, and a cache.
    """

    prompts: tuple[str, ...] = option((), "free")
    """Texts to continue; the empty text begins a document. `python -m trainer.sample` does the same by hand."""
    num_tokens: int = option(64, "free", AT_LEAST_1)
    """Tokens added to each prompt, fewer where the document or the context ends."""
    seed: int = option(0, "free", _SEED)
    """Seed of the choices; the same at each evaluation."""

    def __post_init__(self):
        super().__post_init__()
        check_options(self, "samples.")


@dataclass(frozen=True)
class CheckpointConfig:
    """How often checkpoints are saved, and which are kept."""

    every_num_steps: int = option(100, "free", AT_LEAST_1)
    """Steps between checkpoints; the last step and a stop signal always save one."""
    num_kept: int = option(3, "free", AT_LEAST_1)
    """Newest checkpoints kept."""
    keep_every_num_steps: int | None = option(None, "free")
    """Steps between checkpoints that are kept for good, beside the newest; a multiple of every_num_steps."""
    keep_best: bool = option(False, "free")
    """Keep the checkpoint of the lowest validation loss, too, until one has a lower."""

    def __post_init__(self):
        check_options(self, "checkpoint.")
        kept = self.keep_every_num_steps
        if kept is not None and (kept < 1 or kept % self.every_num_steps):
            raise ValueError(
                f"checkpoint.keep_every_num_steps={kept} must be a positive multiple of "
                f"checkpoint.every_num_steps={self.every_num_steps}: other steps aren't saved"
            )


@dataclass(frozen=True)
class WatchdogConfig:
    """Ends a run that hangs, with status 70: something takes far longer than it did before. Compiling is left out."""

    enabled: bool = option(True, "free")
    """Watch steps, waits for data, evaluations and saves."""
    factor: float = option(10.0, "free", Bound(lambda x: not 1 < x < math.inf, "must be more than 1 and finite"))
    """Times the median of its kind after which something counts as hung."""
    min_seconds: float = option(600.0, "free", _SECONDS)
    """Seconds up to which nothing counts as hung, however quick it was before: disks and networks pause for minutes."""
    first_seconds: float = option(3600.0, "free", _SECONDS)
    """Seconds after which the first of a kind count as hung, which have nothing to be compared with."""

    def __post_init__(self):
        check_options(self, "watchdog.")


@dataclass(frozen=True)
class CompilationConfig:
    """How the step is compiled."""

    cache_dir: str | None = option(None, "free")
    """Folder of XLA's persistent compilation cache; the empty string turns it off. None: JAX_COMPILATION_CACHE_DIR
    where that is set, otherwise ~/.cache/flax-longcontext/xla, which is held to 10 GiB."""

    def __post_init__(self):
        if self.cache_dir:
            check_path("compilation.cache_dir", self.cache_dir)


@dataclass(frozen=True)
class WandbConfig:
    """Weights & Biases (the `wandb` extra): what TensorBoard shows, there too; off without a project."""

    project: str | None = option(None, "free")
    """W&B project to log to. None: log nothing there."""
    mode: Literal["online", "offline"] = option("online", "free")
    """offline: keep W&B's files in the workdir, for `wandb sync` to send later."""

    def __post_init__(self):
        if self.project == "":
            raise ValueError("wandb.project='' names no project; leave it at None to log nothing there")


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
    """As `TrainConfig.sequence_length`."""
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
    """Tokens in each packed sequence."""
    batch_size: int = option(1, "training", AT_LEAST_1)
    """Sequences in an optimizer step, over all devices and micro-batches."""
    gradient_accumulation: int = option(1, "free", AT_LEAST_1)
    """Micro-batches that an optimizer step is split into."""
    log_every_num_steps: int = option(10, "free", AT_LEAST_1)
    """Steps between log lines; the step time is measured over this window."""
    seed: int = option(0, "seed", _SEED)
    """Seed of the parameters and of the order of the data."""
    init_from: str | None = option(None, "beginning")
    """Folder whose model a fresh run begins with: a Hugging Face model's (config.json, *.safetensors, tokenizer.json)
    or another run's workdir. Model and tokenizer are the folder's. None: random parameters."""
    init_optimizer: Literal["fresh", "carry"] = option("fresh", "beginning")
    """carry: with a workdir as init_from, its optimizer's moments and its place in the same data go on, too."""
    data: DataConfig = field(default_factory=DataConfig)
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


def check_path(name: str, path: str) -> None:
    """Raises ValueError for a URL, a path that no file system takes, and the empty one, which would be this folder."""
    _refuse_url(name, path)
    parts = Path(path).parts
    if not path or "\0" in path:
        raise ValueError(f"{name}={path!r} is no path; expected one of a file or folder")
    if len(os.fsencode(path)) >= 4096 or any(len(os.fsencode(part)) > 255 for part in parts):
        raise ValueError(f"{name}={path[:40]!r}… is too long: names take up to 255 bytes, paths up to 4,095")
    if os.path.expanduser(parts[0]).startswith("~"):
        raise ValueError(f"{name}={path!r}: {parts[0]} is no user's home folder")


def _refuse_url(name: str, path: str) -> None:
    try:
        refuse_url(path)
    except ValueError as refused:
        raise ValueError(f"{name}={refused}") from None


def _check_name(name: str) -> None:
    """Refuses what can't name a folder."""
    if name in ("", ".", "..") or "/" in name or not name.isprintable():
        raise ValueError(f"name={name!r} must be a folder's name, printable and without /; see also --workdir")
    if len(name.encode()) > 255:
        raise ValueError(f"name={name[:40]!r}… is too long for a folder's name; use up to 255 bytes")
