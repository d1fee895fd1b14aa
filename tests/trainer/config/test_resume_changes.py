"""Changes when a run resumes: each field declares the consequence, changes are kept, some are refused."""

import dataclasses
import json
from typing import get_args

import jax
import pytest

from kernels import LocalMask, TritonDecodeTuning, TritonTiles
from layers import GPTConfig, RopeScaling
from trainer import config as configs
from trainer.config import DataConfig, OptimizerConfig, TrainConfig
from trainer.config.file import flag_types
from trainer.config.options import Change, change_of
from trainer.config.resume_changes import (
    CHANGE_OF_FIELD,
    ConfigChange,
    ConfigHistory,
    changes_to_json,
    refuse_other_run,
)
from trainer.errors import UserMistake
from trainer.step.functions import make_step_functions
from trainer.step.sharding import make_mesh

CONFIG = TrainConfig(
    "first",
    GPTConfig(vocab_size=260, num_layers=2, width=16, num_heads=2, num_kv_heads=1, head_dim=8, mlp_width=32),
    num_steps=200,
    sequence_length=64,
)
# Everything changed that may change, but for the mesh.
MODEL = dataclasses.replace(
    CONFIG.model,
    implementation="reference",
    decode_implementation=TritonDecodeTuning(TritonTiles(16, 32)),
    remat="none",
    scan_layers=False,
    compute_dtype="float32",
)
FILES = {"source": "text", "files": ("*.txt",), "validation_files": ("*.md",), "tokenizer": "other.json"}
CACHE = {"token_cache_dir": "tokens", "token_cache_gib": 50.0, "num_prefetch_batches": 2, "allow_changed": True}
DOCUMENTS = {"text_field": "body", "begin_of_document_token": 1, "keep_documents_apart": False}
CHAT = configs.ChatConfig("other.jinja", "last", "drop")
RATES = (1e-3, "wsd", 3, 0.5, 0.2, 0.8, 0.99, 1e-6, 0.0, 2.0, 4.0, 3)
CHANGED = TrainConfig(
    "second",
    MODEL,
    num_steps=300,
    phases=(configs.Phase(num_steps=100), configs.Phase()),
    sequence_length=128,
    description="other",
    batch_size=4,
    gradient_accumulation=2,
    log_every_num_steps=3,
    data=DataConfig(validation_fraction=0.5, **FILES, **CACHE, **DOCUMENTS, chat=CHAT),
    optimizer=OptimizerConfig(*RATES, momentum=0.9, offload_moments=True),
    loss=configs.LossConfig(chunk_size=32, z_loss=0.0, implementation="xla"),
    context=configs.ContextConfig("ring", "zigzag"),
    tensor=configs.TensorConfig("xla"),
    evaluation=configs.EvaluationConfig(7, 3, (64,), 5, ("key_values",), 4),
    samples=configs.SamplesConfig(0.5, 3, 0.9, ("a",), 5, 6),
    checkpoint=configs.CheckpointConfig(14, 6, keep_every_num_steps=28, keep_best=True),
    watchdog=configs.WatchdogConfig(False, 5.0, 6.0, 7.0),
    compilation=configs.CompilationConfig("xla"),
    wandb=configs.WandbConfig("project", "offline"),
)


def test_every_field_declares_the_consequence_of_a_change():
    assert set(CHANGE_OF_FIELD) == set(flag_types()), "see trainer/config/options.py"
    assert set(CHANGE_OF_FIELD.values()) == set(get_args(Change)), "each consequence is some field's"
    # Of the model's fields, which `layers` declares, the section says it: "model" for all that it doesn't name.
    of_model = {name: change for name, change in CHANGE_OF_FIELD.items() if name.startswith("model.")}
    assert {name for name, change in of_model.items() if change != "model"} == {
        "model.implementation",
        "model.decode_implementation",
        "model.remat",
        "model.scan_layers",
        "model.compute_dtype",
    }


def test_the_number_of_fields():
    """Each setting is one more for everybody to read. Whoever adds one says here that it is worth it."""
    assert len(flag_types()) == 124


def test_a_field_without_a_consequence_is_found():
    @dataclasses.dataclass(frozen=True)
    class Bare:
        num_steps: int = 3

    assert change_of(Bare, "num_steps") is None


def test_whatever_can_be_meant_may_change_and_is_kept_with_its_step():
    refuse_other_run(CONFIG, CHANGED, "workdir runs/x")
    history = ConfigHistory(CONFIG).resumed(40, CHANGED)
    refused = ("model", "optimizer", "tokenizer", "seed", "beginning")
    expected = {
        name for name, change in CHANGE_OF_FIELD.items() if change not in refused and not name.startswith("mesh.")
    } - {"data.sources"}  # which exclude data.files
    assert {change.field for change in history.changes} == expected
    assert ConfigChange(40, "num_steps", 200, 300) in history.changes
    assert str(history.changes[1]).endswith("up to step 40, 'reference' from now on")
    again = ConfigHistory.from_json(json.loads(json.dumps(history.to_json())))
    assert again.config == CHANGED
    assert changes_to_json(again.changes) == json.loads(json.dumps(changes_to_json(history.changes)))
    assert history.resumed(50, CHANGED) == history, "without a change there is nothing to keep"
    back = history.resumed(50, dataclasses.replace(CHANGED, num_steps=200))
    assert back.changes[len(history.changes) :] == (ConfigChange(50, "num_steps", 300, 200),)


def test_the_training_state_has_the_same_tree_whatever_may_change():
    def shapes(config: TrainConfig):
        state = make_step_functions(config, make_mesh(config.mesh)).abstract_state
        return jax.tree.structure(state), [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(state)]

    assert shapes(CHANGED) == shapes(CONFIG)
    wider = dataclasses.replace(CONFIG, model=dataclasses.replace(CONFIG.model, mlp_width=64))
    assert shapes(wider) != shapes(CONFIG)


@pytest.mark.parametrize(
    ("change", "told", "reason"),
    [
        ({"model": {"masks": (LocalMask(7, 0),)}}, "model.masks: ['CausalMask(offset=0)'] in checkpoint x, [", "m"),
        ({"model": {"mlp_width": 64}}, "model.mlp_width: 32 in checkpoint x, 64 now", "m"),
        (
            {"model": {"rope_scaling": RopeScaling("ntk", 2.0)}},
            "rope_scaling.factor: 1.0 in checkpoint x, 2.0 now",
            "m",
        ),
        ({"seed": 3}, "seed: 0 in checkpoint x, 3 now", "s"),
        ({"init_from": "/models/other"}, "init_from: None in checkpoint x, /models/other now", "b"),
        ({"optimizer": {"kind": "muon"}}, "optimizer.kind: adamw in checkpoint x, muon now", "o"),
        ({"data": {"end_of_document_token": 5}}, "data.end_of_document_token: None in checkpoint x, 5 now", "t"),
    ],
)
def test_what_cannot_be_meant_is_refused_with_the_reason(change, told, reason):
    replaced = {
        name: dataclasses.replace(getattr(CONFIG, name), **value) if isinstance(value, dict) else value
        for name, value in change.items()
    }
    changed = dataclasses.replace(CONFIG, num_steps=210, **replaced)
    with pytest.raises(UserMistake) as caught:
        refuse_other_run(CONFIG, changed, "checkpoint x")
    message = str(caught.value)
    assert message.startswith("checkpoint x is of another config:\n  ")
    assert told in message
    assert {
        "m": "the parameters are of another model;",
        "o": "the moments are of another optimizer;",
        "b": "the parameters began as those of that folder, which a run that resumes doesn't load again;",
        "s": "the parameters and the order of the data are made from it already; samples.seed may change;",
        "t": "the parameters were trained on other tokens;",
    }[reason] in message
    assert "num_steps" not in message
    # What a longer context needs makes another model of the same parameters.
    may_begin = message.endswith("--workdir, which --init-from lets begin with this one's parameters")
    assert may_begin == told.startswith(("model.masks", "rope_scaling"))


SAVED = ConfigHistory(CONFIG).to_json()


@pytest.mark.parametrize(
    "value",
    [
        *(None, [], 3, {}, {"changes": []}),
        *({"config": config, "changes": []} for config in ({}, None, {"name": 3})),
        *(
            SAVED | {"changes": [change]}
            for change in (3, {"step": 3}, {"step": 3, "field": [], "before": 1, "after": 2})
        ),
        *(
            {"config": SAVED["config"] | changed, "changes": []}
            for changed in ({"unknown": 3}, {"num_steps": "many"}, {"mesh": [[]]}, {"model": {"masks": [[3]]}})
        ),
    ],
)
def test_a_history_that_is_none_is_told(value):
    with pytest.raises(UserMistake):
        ConfigHistory.from_json(value)
