"""The experiments' pages: what they say they are, and that no compiled training step holds a T×T array."""

import dataclasses
import importlib
import math
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import (
    continue_pretrained,
    extend_context,
    gpt_1b_32k,
    gpt_1m,
    gpt_32k,
    gpt_32k_window,
    gpt_128k,
    smoke,
)
from kernels import CausalMask
from layers import GPTConfig
from layers.pretrained import config_from_huggingface, read_params
from layers.pretrained.table import parameter_shapes
from trainer.__main__ import main
from trainer.checkpoints.training_state import Checkpoints
from trainer.cli.train_command import parse_command_line
from trainer.config import DataConfig, MeshConfig
from trainer.config.resume_changes import ConfigHistory
from trainer.data import load_tokenizer
from trainer.errors import UserMistake
from trainer.export.__main__ import main as export
from trainer.export.family import describe_export
from trainer.step.functions import make_step_functions
from trainer.step.sharding import make_mesh
from trainer.workdir import claim_workdir


def arrays_in(hlo):
    """Elements of each array in HLO text, inside tuples and fusions too."""
    shapes = re.findall(r"\b(?:pred|bf16|[fsu]\d+)\[([\d,]+)\]", hlo)
    return [math.prod(map(int, shape.split(","))) for shape in shapes]


def assert_no_t_by_t_array(config):
    """Reads the optimised HLO of the whole training step."""
    functions = make_step_functions(config, make_mesh(MeshConfig()))
    hlo = functions.train_step.lower(functions.abstract_state, functions.abstract_batch).compile().as_text()
    assert max(arrays_in(hlo)) < config.sequence_length**2


@pytest.mark.parametrize("platform", ["cpu", pytest.param("cuda", marks=pytest.mark.full)])
def test_no_array_of_t_by_t_elements_in_the_training_step(platform, monkeypatch):
    """The page's config for either kind of machine, compiled for this one."""
    monkeypatch.setenv("JAX_PLATFORMS", platform)
    config = gpt_32k.get_config()
    assert config.sequence_length == 32_768
    assert CausalMask() in config.model.masks
    assert_no_t_by_t_array(config)


def test_a_t_by_t_array_would_be_caught(monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    config = gpt_32k.get_config()
    # Short, so that XLA's memory holds it; wide enough apart from every other size for the blockwise step to pass.
    config = dataclasses.replace(config, sequence_length=4096)
    assert_no_t_by_t_array(config)
    dense = dataclasses.replace(config.model, implementation="reference")
    with pytest.raises(AssertionError):
        assert_no_t_by_t_array(dataclasses.replace(config, model=dense))


def test_the_page_fits_the_machine(monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    small = gpt_32k.get_config()
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    large = gpt_32k.get_config()
    assert small.sequence_length == large.sequence_length == 32_768
    assert "No accelerator" in small.description
    assert large.model.num_parameters == pytest.approx(124e6, rel=0.01)
    assert (large.model.num_layers, large.model.width, large.model.num_heads) == (12, 768, 12)
    assert large.model.vocab_size == 50_304


def test_the_large_page_refuses_a_machine_without_an_accelerator(monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    with pytest.raises(UserMistake, match=r"needs an accelerator.*run experiments/gpt_32k\.py"):
        gpt_1b_32k.get_config()
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    model = gpt_1b_32k.get_config().model
    assert (model.num_layers, model.width, model.num_heads, model.head_dim) == (24, 2048, 16, 128)
    assert model.num_parameters == pytest.approx(1.336e9, rel=0.01)


@pytest.mark.parametrize(("page", "length"), [(gpt_128k, 131_072), (gpt_1m, 1_048_576)], ids=["gpt_128k", "gpt_1m"])
def test_a_page_for_two_gpus_refuses_fewer(page, length, monkeypatch, capsys):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    name = page.__name__.removeprefix("experiments.")
    assert main(["--config", f"experiments/{name}.py"]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"error: experiments/{name}.py trains 1.3B parameters on {length:,} tokens and needs two")
    assert "run experiments/gpt_32k.py" in said
    assert f"python -m trainer.compile --config experiments/{name}.py --topology h200:2" in said
    assert said.count("\n") == 1
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    config = page.get_config()
    assert (config.name, config.sequence_length) == (name, length)
    assert config.model.num_parameters == pytest.approx(1.336e9, rel=0.01)
    message = (
        r"mesh data=1 × fsdp=1 × tensor=1 × context=2 needs 2 device\(s\), got 1 \(cpu\); set the sizes under mesh"
    )
    with pytest.raises(UserMistake, match=message):
        make_mesh(config.mesh, jax.devices()[:1])


def test_the_page_for_any_pretrained_model_says_nothing_of_its_shape(monkeypatch, tmp_path, capsys):
    config = continue_pretrained.get_config()
    assert dataclasses.replace(config.model, remat=GPTConfig().remat) == GPTConfig()
    path = str(Path(continue_pretrained.__file__).absolute())
    monkeypatch.chdir(tmp_path)
    assert main(["--config", path]) == 2
    assert capsys.readouterr().err.startswith("error: init_from='models/pretrained' is no folder; expected")


QWEN_3 = """{"model_type": "qwen3", "max_position_embeddings": 32768, "rope_theta": 1e6, "tie_word_embeddings": true,
"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
"head_dim": 16, "vocab_size": 256, "rms_norm_eps": 1e-6, "hidden_act": "silu"}"""


def test_the_page_that_extends_any_pretrained_model(monkeypatch, tmp_path, capsys):
    (tmp_path / "config.json").write_text(QWEN_3)
    path = str(Path(extend_context.__file__).absolute())
    command = ["--config", path, "--init-from", str(tmp_path), "--data.tokenizer", "byte", "--mesh.context", "2"]
    phases = [phase.config for phase in parse_command_line(command).train.in_phases()]
    assert [(phase.sequence_length, phase.batch_size) for phase in phases] == [(32_768, 4), (131_072, 1)]
    assert [phase.model.rope_base for phase in phases] == [1e6, 2.02e7]
    assert {phase.optimizer.learning_rate for phase in phases} == {1e-5}
    assert extend_context.get_config(str(tmp_path)).model == config_from_huggingface(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert main(["--config", path]) == 2
    assert "init_from='models/pretrained' is no folder; expected" in capsys.readouterr().err


# As what family each page's model goes out, on a machine with an accelerator and without.
FAMILIES = {
    **dict.fromkeys([("gpt_32k", "cpu"), ("smoke", "cpu")], "mistral"),  # windows in some layers
    **dict.fromkeys([("gpt_32k_window", "cpu"), ("gpt_32k_window", "cuda")], "mistral"),  # windows in all layers
    **{(name, "cuda"): "llama" for name in ("gpt_32k", "smoke", "gpt_1b_32k", "gpt_128k", "gpt_1m")},
    ("long_context_from_scratch", "cuda"): "llama",
    **{(name, "cpu"): "llama" for name in ("extend_tiny", "finetune_chat")},
}
NO_PAGES = {"__init__", "generated_chats", "retrieval_documents"}


def test_every_page_is_in_the_table():
    pages = {path.stem for path in Path(gpt_32k.__file__).parent.glob("*.py")} - NO_PAGES
    assert pages == {name for name, _ in FAMILIES} | {"continue_pretrained", "extend_context", "extend_8b_one_gpu"}, (
        "of which the folder's family goes out"
    )


@pytest.mark.parametrize(("name", "platform"), FAMILIES)
def test_every_page_can_be_exported(name, platform, monkeypatch, tmp_path, rng, capsys):
    """A run of the page with smaller sizes: every bit of its parameters comes back."""
    monkeypatch.setenv("JAX_PLATFORMS", platform)
    module = importlib.import_module(f"experiments.{name}")
    if hasattr(module, "make_files"):  # which takes a minute
        monkeypatch.setattr(module, "make_files", lambda *_, **__: ("documents.jsonl",))
        monkeypatch.setattr("experiments.extend_tiny.FOLDER", tmp_path)
    if hasattr(module, "make_chats"):
        monkeypatch.setattr(module, "make_chats", lambda *_: "chats.jsonl")
        monkeypatch.setattr("experiments.generated_chats.FOLDER", tmp_path)
    page = module.get_config()
    model_type = FAMILIES[name, platform]
    assert describe_export(page.model, None) == f"as a {model_type}"
    sizes = {"vocab_size": 256, "num_layers": 4, "width": 16, "head_dim": 4, "num_heads": 4, "mlp_width": 24}
    kv_heads = 4 * page.model.num_kv_heads // page.model.num_heads
    model = dataclasses.replace(page.model, num_kv_heads=kv_heads, **sizes)
    config = dataclasses.replace(page, model=model, mesh=MeshConfig(), phases=(), data=DataConfig())
    workdir = claim_workdir(tmp_path / "run", config)
    shapes = parameter_shapes(config.model)
    params = jax.tree.map(lambda leaf: jnp.asarray(rng.normal(size=leaf.shape), leaf.dtype), shapes)
    checkpoints = Checkpoints(workdir.checkpoints, num_kept=1)
    data_state = {"tokenizer": load_tokenizer("byte").identity}
    checkpoints.save(1, {"params": params}, data_state, ConfigHistory(config).to_json())
    checkpoints.close()
    assert export(["--workdir", str(workdir.path), "--output", str(tmp_path / "model")]) == 0
    assert f" as {model_type}: " in capsys.readouterr().out
    found = config_from_huggingface(tmp_path / "model")
    of_layers = [[each.layer(index).mask.lookback for index in range(4)] for each in (found, model)]
    assert of_layers[0] == of_layers[1]
    of_the_run = {"remat": model.remat, "scan_layers": model.scan_layers, "compute_dtype": model.compute_dtype}
    assert dataclasses.replace(found, masks=model.masks, **of_the_run) == model
    read = read_params(tmp_path / "model", config.model)
    jax.tree.map(np.testing.assert_array_equal, read, params)


@pytest.mark.parametrize("platform", ["cpu", "cuda"])
def test_no_description_says_what_a_flag_may_change(platform, monkeypatch):
    """It is printed first, with --sequence-length 2048 and --mesh.context 8, too."""
    pages = [gpt_32k.get_config(), gpt_32k_window.get_config(), smoke.get_config(), continue_pretrained.get_config()]
    monkeypatch.setenv("JAX_PLATFORMS", platform)
    pages += [gpt_1b_32k.gpt_1b(), gpt_128k.gpt_1b_128k(), gpt_1m.gpt_1b_1m(), gpt_32k.get_config()]
    numbers = re.compile(r"\d|\b(one|two|four|eight) (accelerators|GPUs|CPU|sequences)\b")
    assert [page.description for page in pages if not page.description or numbers.search(page.description)] == []


@pytest.mark.parametrize("platform", ["cpu", "cuda"])
def test_variants_change_one_thing(platform, monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", platform)
    base, window, short = gpt_32k.get_config(), gpt_32k_window.get_config(), smoke.get_config()
    assert dataclasses.replace(window, name=base.name, model=base.model) == base
    assert dataclasses.replace(window.model, masks=base.model.masks) == base.model
    assert dataclasses.replace(short, name=base.name, num_steps=base.num_steps, optimizer=base.optimizer) == base
    assert short.num_steps == 2
