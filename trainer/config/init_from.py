"""The model that a run begins with: read from a folder's `config.json`, with what the config says on top of it.

A run's own settings, such as dtypes and remat policy, are the config's. What a longer context needs, such as masks and
RoPE scaling, is the config's where it sets it, and the folder's otherwise. All else belongs to the parameters: the
config leaves it out, or says the same. A field of a config file counts as set if it differs from `GPTConfig`'s default,
a flag always. In a run's config.json, used as a config, each field is set.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from layers import GPTConfig
from layers.pretrained import config_from_huggingface
from layers.pretrained.families import find_family
from layers.pretrained.folder import inside, read_config
from layers.pretrained.peft import base_of, model_folder
from trainer.config.file import load_saved_config
from trainer.config.sections import DataConfig, check_path
from trainer.config.train_config import TrainConfig
from trainer.errors import UserMistake
from trainer.files.paths import refuse_unusual

_OF_THE_RUN = ("implementation", "decode_implementation", "remat", "scan_layers", "compute_dtype", "param_dtype")
_OF_THE_CONTEXT = ("masks", "layer_overrides", "rope_base", "rope_scaling")
_LOSS_WEIGHTS = ("load_balance_loss_weight", "router_z_loss_weight")


def is_workdir(folder: Path) -> bool:
    """True if a folder that a run begins with is another run's workdir, and not a Hugging Face model's."""
    return os.path.isdir(folder / "checkpoints")  # unlike Path's, it answers for any path, be it forbidden


@dataclass(frozen=True)
class InitialModel:
    """The model that a folder describes; no tensor has been looked at."""

    folder: Path
    model: GPTConfig
    tokenizer: str | None
    """As `data.tokenizer`; None: unknown."""
    end_of_document_token: int | str | None = None
    """As `data.end_of_document_token`."""
    begin_of_document_token: int | str | None = None
    """As `data.begin_of_document_token`."""
    context_length: int | None = None
    """Tokens that it was trained on at most; None: unknown."""
    optimizer_kind: str | None = None
    """Of a run's moments, as `optimizer.kind`; None: the folder is no workdir."""

    def under(self, page: TrainConfig, flags: Mapping[str, Any], *, is_saved: bool = False) -> TrainConfig:
        """The config file's config with the folder's model and tokenizer, where nothing is set on top of them.

        Args:
          page: the config file's.
          flags: the values of the command line's flags, by `section.field`. They have yet to be applied to the result.
          is_saved: it is a run's config.json, in which every field is set: the folder's were put in already.

        Raises:
          UserMistake: file or flags ask for another model than the folder's.
        """
        default = GPTConfig()
        on_page = {field.name: getattr(page.model, field.name) for field in dataclasses.fields(GPTConfig)}
        on_page = {name: value for name, value in on_page.items() if is_saved or value != getattr(default, name)}
        by_flag = {name.removeprefix("model."): value for name, value in flags.items() if name.startswith("model.")}
        self._refuse_other_model(on_page | by_flag)
        own = {name: getattr(page.model, name) for name in _OF_THE_RUN}
        own |= {name: on_page[name] for name in (*_OF_THE_CONTEXT, "moe") if name in on_page}
        try:
            model = dataclasses.replace(self.model, **own)
        except ValueError as refused:
            raise UserMistake(str(refused)) from None
        data = page.data if is_saved else self._data(page.data, flags)
        return dataclasses.replace(page, init_from=str(self.folder), model=model, data=data)

    def check(self, config: TrainConfig) -> None:
        """Checks a config with its flags applied.

        Raises:
          UserMistake: its layers aren't the folder's, its model can't be trained on its mesh or in a phase, or it is
            to go on with moments that the folder doesn't hold.
        """
        if config.init_optimizer == "carry" and self.optimizer_kind is None:
            raise UserMistake(
                f"init_optimizer='carry' needs a run's workdir as init_from, and {str(self.folder)!r} holds no "
                "checkpoints; leave it out to begin with fresh moments"
            )
        if config.init_optimizer == "carry" and self.optimizer_kind != config.optimizer.kind:
            raise UserMistake(
                f"init_optimizer='carry': the moments in {str(self.folder)!r} are of {self.optimizer_kind}, and "
                f"optimizer.kind={config.optimizer.kind!r}; set it to that, or leave init_optimizer out"
            )
        if config.lora.rank is None and base_of(self.folder) is not None:
            raise UserMistake(
                f"init_from={str(self.folder)!r} holds adapters; set lora.rank, lora.alpha and lora.targets as there, "
                "or name the base"
            )
        model = config.model
        for index, (ours, theirs) in enumerate(zip(_layers(model), _layers(self.model), strict=True)):
            if ours != theirs:
                raise UserMistake(
                    f"model.layer_overrides gives layer {index} num_kv_heads and head_dim of {ours}, and "
                    f"init_from={str(self.folder)!r} has {theirs}; leave them out of layer_overrides"
                )
        try:
            config.check_model()
            for phase in config.in_phases():
                phase.config.check_model()
        except ValueError as refused:
            raise UserMistake(str(refused)) from None

    def _refuse_other_model(self, given: Mapping[str, Any]) -> None:
        differing = [
            f"model.{name}={value} (there {getattr(self.model, name)})"
            for name, value in given.items()
            if name.partition(".")[0] not in (*_OF_THE_RUN, *_OF_THE_CONTEXT) and not self._agrees(name, value)
        ]
        if differing:
            raise UserMistake(
                f"init_from={str(self.folder)!r} holds another model than the config asks for: {', '.join(differing)}; "
                f"leave {'these' if len(differing) > 1 else 'this'} out: a model's shape comes with its parameters"
            )

    def _agrees(self, name: str, value: Any) -> bool:
        """True if a field is as in the folder, up to the weights of losses, which are the run's to choose."""
        theirs = getattr(self.model, name)
        if name == "moe" and value is not None and theirs is not None:
            return value == dataclasses.replace(theirs, **{weight: getattr(value, weight) for weight in _LOSS_WEIGHTS})
        return value == theirs

    def _data(self, data: DataConfig, flags: Mapping[str, Any]) -> DataConfig:
        if data.tokenizer is not None or flags.get("data.tokenizer") is not None:
            return data  # another tokenizer may have other delimiters, too
        tokenizer, own = self.tokenizer, str(self.folder / "tokenizer.json")
        formats = [each.format for each in data.sources] or [flags.get("data.source", data.source)]
        if tokenizer is None and "bin" not in formats:
            tokenizer = own  # the data refuses it where it is missing
        if tokenizer == own:
            self._check_tokenizer()
        own_delimiters = {
            name: getattr(self, name)
            for name in ("end_of_document_token", "begin_of_document_token")
            if getattr(data, name) is None
        }
        return dataclasses.replace(data, tokenizer=tokenizer, **own_delimiters)

    def _check_tokenizer(self) -> None:
        """Refuses a tokenizer of links out of the folder, and of pipes, which would be waited for."""
        for name in ("tokenizer.json", "tokenizer_config.json"):
            if os.path.lexists(self.folder / name):
                try:
                    inside(self.folder, name)
                except ValueError as refused:
                    raise UserMistake(
                        f"init_from={str(self.folder)!r}: {refused}; or name another tokenizer with --data.tokenizer"
                    ) from None


def with_initial_model(config: TrainConfig) -> TrainConfig:
    """A page's config with the model and tokenizer of its `init_from`, if it has one.

    Raises:
      UserMistake: as `read_initial_model`, `InitialModel.under` and `InitialModel.check`.
    """
    if config.init_from is None:
        return config
    initial = read_initial_model(config.init_from)
    config = initial.under(config, {})
    initial.check(config)
    return config


def read_initial_model(init_from: str) -> InitialModel:
    """Reads what a folder says about its model.

    Args:
      init_from: as `TrainConfig.init_from`.

    Raises:
      UserMistake: there is no such folder, or it describes no model that this version knows.
    """
    try:
        check_path("init_from", init_from)
    except ValueError as refused:
        raise UserMistake(str(refused)) from None
    folder = Path(init_from).expanduser().absolute()
    if ".." in folder.parts:  # a resumed run tells by its name whether it is the same
        folder = folder.resolve()
    try:
        refuse_unusual(folder)
    except ValueError as refused:
        raise UserMistake(f"init_from={refused}") from None
    if not os.path.isdir(folder):
        raise UserMistake(
            f"init_from={init_from!r} is no folder; expected a Hugging Face model's on this machine "
            "(`hf download NAME --local-dir DIR` puts one there), or the workdir of a run"
        )
    if is_workdir(folder):
        held = load_newest_phase(folder)
        tokenizer = held.data.known_tokenizer
        end, begin = held.data.end_of_document_token, held.data.begin_of_document_token
        length = _trained_length_of_run(folder, held)
        return InitialModel(folder, held.model, tokenizer, end, begin, length, held.optimizer.kind)
    try:
        weights = model_folder(folder)
        model = config_from_huggingface(weights)
        context_length = trained_length(read_config(weights), weights)
    except (ValueError, OSError) as refused:
        raise UserMistake(f"init_from={init_from!r}: {refused}") from refused
    tokenizer_file = weights / "tokenizer.json"
    tokenizer = str(tokenizer_file) if os.path.isfile(tokenizer_file) else None
    return InitialModel(folder, model, tokenizer, context_length=context_length)


def trained_length(values: Mapping[str, Any], folder: Path) -> int | None:
    """Tokens that a Hugging Face model was trained on at most; None: unknown.

    Args:
      values: of its config.json.
      folder: for messages.
    """
    section = find_family(values["model_type"], str(folder)).section
    length = (values if section is None else values[section]).get("max_position_embeddings")
    return length if type(length) is int else None


def load_newest_phase(workdir: Path) -> TrainConfig:
    """The config of a run in the phase of its newest checkpoint.

    Raises:
      UserMistake: as `load_saved_config`.
    """
    names = os.listdir(workdir / "checkpoints")
    step = max((int(name) for name in names if name.isascii() and name.isdecimal()), default=0)
    return load_saved_config(workdir / "config.json").phase_at(step).config


def _trained_length_of_run(workdir: Path, held: TrainConfig) -> int:
    """Tokens that the parameters of a run were trained on at most, by itself or by the model that it began with.

    A record that can't be read tells nothing here; the run, which needs it, refuses it.
    """
    try:
        before = json.loads((workdir / "record.json").read_bytes())["init_from"]["context_length"]
    except (OSError, ValueError, LookupError, TypeError):
        before = None
    return max(held.sequence_length, before) if type(before) is int else held.sequence_length


def _layers(model: GPTConfig) -> Iterator[tuple[int, int]]:
    """Key/value heads and head dim of each layer."""
    layers = (model.layer(index) for index in range(model.num_layers))
    return ((layer.num_kv_heads, layer.head_dim) for layer in layers)
