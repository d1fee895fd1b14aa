"""The sections of a run's config, but for the model's, which `layers` declares. See `train_config.py`."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from kernels.collectives import Collectives
from kernels.context import Exchange, SequenceSharding
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
)
from trainer.config.sources import SourceConfig, SourceFormat, check_sources
from trainer.errors import name_some
from trainer.files.paths import refuse_url

SEED = Bound(lambda x: x < 0, "must not be negative")
_SECONDS = POSITIVE._replace(text="must be positive and finite; watchdog.enabled False watches nothing")
_STOPS_AT_FIRST = AT_LEAST_1._replace(text="must be at least 1, which stops at the first update that is skipped")
_MULTIPLE_OF_MEAN = Bound(
    lambda x: not 1 < x < math.inf,
    "must be more than 1 and finite, as it is a multiple of the mean; None skips no gradient that is finite",
)


ChatLoss = Literal["assistant", "all", "last"]
"""The tokens of a chat that the loss is of."""
TooLong = Literal["cut", "drop", "refuse"]
"""What becomes of a chat that is longer than a sequence."""


@dataclass(frozen=True)
class ChatConfig:
    """How conversations become tokens, of sources whose format is `chats`."""

    template: str | None = option(None, "corpus")
    """Path of a chat template. None: the tokenizer's own, in chat_template.jinja or tokenizer_config.json beside it."""
    loss: ChatLoss = option("assistant", "corpus")
    """The tokens that the loss is of. assistant: its turns'; all: all tokens; last: the assistant's last turn's."""
    too_long: TooLong = option("cut", "corpus")
    """What becomes of a chat that is longer than a sequence. cut: it ends with the last turn of the assistant's that
    fits, and is dropped where none does; drop: it is left out; refuse: the run doesn't start."""

    def __post_init__(self):
        if self.template is not None:
            check_path("data.chat.template", self.template)


@dataclass(frozen=True)
class DataConfig:
    """Where the documents come from and how they become tokens."""

    source: SourceFormat = option("stdlib", "corpus")
    """stdlib: the Python standard library's own sources; the others read `files`. trees: JSON-lines of prompts with
    weighted completions, each shared prefix once. chats: JSON-lines or Parquet of conversations."""
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
    chat: ChatConfig = field(default_factory=ChatConfig)

    def __post_init__(self):
        if self.sources:
            self._check_sources()
        for name in ("files", "validation_files"):
            if self.source == "stdlib" and getattr(self, name):
                raise ValueError(
                    f"data.{name}={name_some(getattr(self, name))} has no effect with data.source='stdlib'; "
                    "set data.source to text, jsonl, parquet, bin, trees or chats"
                )
            for pattern in getattr(self, name):
                _refuse_url(f"data.{name}", pattern)
        if self.source == "trees" and not self.keep_documents_apart:
            raise ValueError(
                "data.source='trees' has positions that restart at each branch, which "
                "data.keep_documents_apart=False leaves out; set it to True"
            )
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
    seed: int = option(0, "free", SEED)
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
