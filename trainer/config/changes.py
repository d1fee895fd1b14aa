"""What may change in a config when a run resumes, and how each change is told and kept.

A change that makes sense is allowed: later steps follow the new config, and the change is recorded with the step after
which it was made. A change that makes none (another model, another tokenizer) is refused.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from trainer.config.file import config_from_json, config_to_json, flag_types
from trainer.config.train_config import TrainConfig
from trainer.errors import UserMistake, shorten

Aspect = Literal[
    "free",
    "training",
    "schedule",
    "evaluation",
    "sequences",
    "corpus",
    "model",
    "optimizer",
    "tokenizer",
    "seed",
    "beginning",
]

# Which aspect of a run each field of TrainConfig touches. A test checks that no field is missing.
#   free        changes no parameter and no loss, except by the order of floating-point sums
#   training    how later steps train
#   schedule    the learning rate of every later step
#   evaluation  how a validation loss is measured, and how later steps train; see `evaluation_settings`
#   sequences   how documents are packed; the run then begins a new epoch
#   corpus      where the documents are, and which are evaluated; digests tell whether they are still the same
#   model, optimizer, tokenizer, seed, beginning
#               refused, for the reasons below
ASPECT_OF_FIELD: dict[str, Aspect] = {
    "name": "free",
    "description": "free",
    "num_steps": "schedule",
    "sequence_length": "sequences",
    "batch_size": "training",
    "gradient_accumulation": "free",
    "log_every_num_steps": "free",
    "seed": "seed",
    "init_from": "beginning",
    "model.vocab_size": "model",
    "model.num_layers": "model",
    "model.width": "model",
    "model.num_heads": "model",
    "model.num_kv_heads": "model",
    "model.head_dim": "model",
    "model.mlp_width": "model",
    "model.mlp": "model",
    "model.mlp_bias": "model",
    "model.moe": "model",
    "model.tie_embeddings": "model",
    "model.masks": "model",
    "model.layer_overrides": "model",
    "model.rope_base": "model",
    "model.rope_scaling.kind": "model",
    "model.rope_scaling.factor": "model",
    "model.rope_scaling.low_frequency_factor": "model",
    "model.rope_scaling.high_frequency_factor": "model",
    "model.rope_scaling.original_context_length": "model",
    "model.rope_scaling.beta_fast": "model",
    "model.rope_scaling.beta_slow": "model",
    "model.rope_scaling.truncate": "model",
    "model.rope_scaling.attention_factor": "model",
    "model.rope_scaling.short_factors": "model",
    "model.rope_scaling.long_factors": "model",
    "model.rope_fraction": "model",
    "model.attention_bias": "model",
    "model.output_bias": "model",
    "model.qk_norm": "model",
    "model.qk_norm_after_rope": "model",
    "model.query_scale": "model",
    "model.logits_soft_cap": "model",
    "model.sinks": "model",
    "model.norm_epsilon": "model",
    "model.norm_placement": "model",
    "model.norm_scale_offset": "model",
    "model.embedding_scale": "model",
    "model.final_logits_soft_cap": "model",
    "model.param_dtype": "model",
    "model.implementation": "free",
    "model.decode_implementation": "free",
    "model.remat": "free",
    "model.scan_layers": "free",
    "model.compute_dtype": "evaluation",
    "data.source": "corpus",
    "data.files": "corpus",
    "data.validation_files": "corpus",
    "data.validation_fraction": "corpus",
    "data.text_field": "corpus",
    "data.tokenizer": "corpus",
    "data.end_of_document_token": "tokenizer",
    "data.begin_of_document_token": "corpus",
    "data.allow_changed": "free",
    "data.token_cache_dir": "free",
    "data.token_cache_gib": "free",
    "data.keep_documents_apart": "evaluation",
    "data.num_prefetch_batches": "free",
    "optimizer.kind": "optimizer",
    "optimizer.learning_rate": "schedule",
    "optimizer.schedule": "schedule",
    "optimizer.num_warmup_steps": "schedule",
    "optimizer.decay_fraction": "schedule",
    "optimizer.final_learning_rate_fraction": "schedule",
    "optimizer.beta1": "training",
    "optimizer.beta2": "training",
    "optimizer.epsilon": "training",
    "optimizer.momentum": "training",
    "optimizer.weight_decay": "training",
    "optimizer.clip_norm": "training",
    "optimizer.skip_grad_norm_above": "training",
    "optimizer.max_skipped_in_a_row": "free",
    "optimizer.offload_moments": "free",
    "loss.chunk_size": "free",
    "loss.z_loss": "training",
    "loss.implementation": "free",
    "mesh.data": "free",
    "mesh.fsdp": "free",
    "mesh.tensor": "free",
    "mesh.context": "free",
    "context.exchange": "free",
    "context.sequence_sharding": "free",
    "tensor.collectives": "free",
    "evaluation.every_num_steps": "free",
    "evaluation.num_sequences": "corpus",
    "samples.temperature": "free",
    "samples.top_k": "free",
    "samples.top_p": "free",
    "samples.prompts": "free",
    "samples.num_tokens": "free",
    "samples.seed": "free",
    "checkpoint.every_num_steps": "free",
    "checkpoint.num_kept": "free",
    "checkpoint.keep_every_num_steps": "free",
    "checkpoint.keep_best": "free",
    "watchdog.enabled": "free",
    "watchdog.factor": "free",
    "watchdog.min_seconds": "free",
    "watchdog.first_seconds": "free",
    "compilation.cache_dir": "free",
    "wandb.project": "free",
    "wandb.mode": "free",
}
_REFUSED: dict[Aspect, str] = {
    "model": "the parameters are of another model",
    "optimizer": "the moments are of another optimizer",
    "tokenizer": "the parameters were trained on other tokens",
    "seed": "the parameters and the order of the data are made from it already; samples.seed may change",
    "beginning": "the parameters began as those of that folder, which a run that resumes doesn't load again",
}
# What a new run may set on top of another's parameters; see trainer/config/init_from.py.
_ON_TOP_OF_PARAMETERS = ("model.masks", "model.layer_overrides", "model.rope_base", "model.rope_scaling.")


@dataclass(frozen=True)
class ConfigChange:
    """One field that changed when a run resumed."""

    step: int
    """Steps done before the change: it holds from the next step on."""
    field: str
    """`section.field`."""
    before: Any
    """As a JSON value."""
    after: Any
    """As a JSON value."""

    @property
    def aspect(self) -> Aspect:
        """The aspect of the run that the change touches; "free" for a field that has since been renamed."""
        return ASPECT_OF_FIELD.get(self.field, "free")

    def __str__(self) -> str:
        before, after = shorten(repr(self.before), 200), shorten(repr(self.after), 200)
        return f"{self.field}: {before} up to step {self.step}, {after} from now on"


@dataclass(frozen=True)
class ConfigHistory:
    """The config of a run's next steps, and its changes so far. Each checkpoint holds one."""

    config: TrainConfig
    changes: tuple[ConfigChange, ...] = ()
    """The oldest first."""

    def resumed(self, step: int, config: TrainConfig) -> ConfigHistory:
        """The history after a run has resumed with a config.

        Args:
          step: the steps behind the run.
          config: of the steps to come.
        """
        return ConfigHistory(config, self.changes + tuple(_changes(step, self.config, config)))

    def to_json(self) -> dict[str, Any]:
        """As a dict of JSON's types."""
        return {"config": config_to_json(self.config), "changes": changes_to_json(self.changes)}

    @staticmethod
    def from_json(value: Any) -> ConfigHistory:
        """Reads back what `to_json` made.

        Raises:
          UserMistake: it is something else.
        """
        if not isinstance(value, dict) or not isinstance(value.get("changes"), list):
            raise UserMistake("expected an object with config and changes")
        names = {"step", "field", "before", "after"}
        for change in value["changes"]:
            if not isinstance(change, dict) or change.keys() != names or not isinstance(change["field"], str):
                raise UserMistake(f"expected changes with {', '.join(sorted(names))}, got {str(change)[:80]}")
        changes = tuple(ConfigChange(**change) for change in value["changes"])
        return ConfigHistory(config_from_json(value.get("config")), changes)


def changes_to_json(changes: Iterable[ConfigChange]) -> list[dict[str, Any]]:
    """As the record holds them."""
    return [{"step": item.step, "field": item.field, "before": item.before, "after": item.after} for item in changes]


def refuse_other_run(held: TrainConfig, config: TrainConfig, place: str) -> None:
    """Refuses a config that can't go on from another's checkpoints.

    Args:
      held: the config that they were made with.
      config: of the steps to come.
      place: what holds that config, for the message: "workdir runs/x", say.

    Raises:
      UserMistake: names each field and why it can't change.
    """
    refused = [change for change in _changes(0, held, config) if change.aspect in _REFUSED]
    if refused:
        told = [
            f"{item.field}: {shorten(str(item.before), 200)} in {place}, {shorten(str(item.after), 200)} now"
            for item in refused
        ]
        reasons = dict.fromkeys(_REFUSED[item.aspect] for item in refused)
        raise UserMistake(
            "\n  ".join([f"{place} is of another config:", *told])
            + f"\n{'; '.join(reasons)}; choose another with --workdir"
            + (
                ", which --init-from lets begin with this one's parameters"
                if all(item.field.startswith(_ON_TOP_OF_PARAMETERS) for item in refused)
                else ""
            )
        )


def field_values(config: TrainConfig) -> dict[str, Any]:
    """Each field of a config, as `section.field` → its JSON value."""
    return {name: config_to_json(functools.reduce(getattr, name.split("."), config)) for name in flag_types()}


def evaluation_settings(config: TrainConfig) -> dict[str, Any]:
    """The fields that decide how a validation loss is measured on given sequences, with their JSON values.

    Among the fields that may change when a run resumes; those of the model may not.
    """
    return {name: value for name, value in field_values(config).items() if ASPECT_OF_FIELD[name] == "evaluation"}


def _changes(step: int, before: TrainConfig, after: TrainConfig) -> list[ConfigChange]:
    new = field_values(after)
    return [ConfigChange(step, name, old, new[name]) for name, old in field_values(before).items() if old != new[name]]
