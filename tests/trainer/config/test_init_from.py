"""What a config says on top of a folder's model: a run's own settings, a longer context; all else is refused."""

import dataclasses
import json
import os
import shutil
from pathlib import Path

import pytest

from kernels import CausalMask, LocalMask
from layers import GPTConfig, LayerOverride, MoEConfig, RopeScaling
from trainer.cli.train_command import parse_command_line
from trainer.compile.command.compile_command import parse_command_line as parse_compile_command
from trainer.compile.fit_search import single_remedies
from trainer.compile.step_profile import profile_step
from trainer.config import DataConfig, MeshConfig, TrainConfig
from trainer.config.file import config_from_json, config_to_json
from trainer.config.init_from import InitialModel, read_initial_model
from trainer.errors import UserMistake
from trainer.workdir import claim_workdir

WINDOW = CausalMask() & LocalMask(15, 0)
OTHER = GPTConfig(vocab_size=300, num_layers=4, width=24, num_heads=4, num_kv_heads=2, head_dim=8, mlp_width=40)


@pytest.fixture
def folder(pretrained, tmp_path) -> Path:
    """A copy of the folder's config.json, and nothing else: no tensor, no tokenizer."""
    (tmp_path / "llama").mkdir()
    shutil.copy(pretrained.folder / "config.json", tmp_path / "llama")
    return tmp_path / "llama"


@pytest.fixture
def config_file(tmp_path):
    """Writes a config file around the fields of its GPTConfig and of its TrainConfig."""

    def write(model: str = "", rest: str = "") -> Path:
        path = tmp_path / "page.py"
        path.write_text(
            "from kernels import *\nfrom layers import *\nfrom trainer.config import *\n\n\ndef get_config():\n"
            f"    return TrainConfig('page', GPTConfig({model}), num_steps=200, sequence_length=64, {rest})\n"
        )
        return path

    return write


def parse(page: Path, *arguments: object) -> TrainConfig:
    return parse_command_line(["--config", str(page), *map(str, arguments)]).train


def refusal(page: Path, *arguments: object) -> str:
    with pytest.raises(UserMistake) as caught:
        parse(page, *arguments)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_the_model_is_the_folders_and_how_it_runs_the_configs(pretrained, folder, config_file):
    page = config_file("remat='none', compute_dtype='float32'")
    config = parse(page, "--init-from", folder, "--model.scan-layers", False)
    expected = dataclasses.replace(pretrained.model, remat="none", compute_dtype="float32", scan_layers=False)
    assert config.model == expected
    assert config.init_from == str(folder)
    assert config.data.tokenizer == str(folder / "tokenizer.json")
    assert config_from_json(json.loads(json.dumps(config_to_json(config)))) == config
    on_page = parse(config_file("remat='none', compute_dtype='float32'", f"init_from={str(folder)!r}"))
    assert on_page == dataclasses.replace(config, model=dataclasses.replace(expected, scan_layers=True))


def test_what_a_longer_context_needs_is_the_configs_where_it_says_so(pretrained, folder, config_file):
    assert parse(config_file(), "--init-from", folder).model.rope_scaling == pretrained.model.rope_scaling
    model = parse(config_file("rope_base=5e5, masks=(CausalMask() & LocalMask(15, 0),)"), "--init-from", folder).model
    assert (model.rope_base, model.masks) == (5e5, (WINDOW,))
    model = parse(config_file("rope_scaling=RopeScaling('yarn', 4.0)"), "--init-from", folder).model
    assert model.rope_scaling == RopeScaling("yarn", 4.0)
    # Flags count as set, whatever their value, and change the folder's scaling field by field.
    arguments = ("--init-from", folder, "--model.rope-scaling.factor", 8, "--model.rope-base", 10000.0)
    model = parse(config_file("rope_base=5e5"), *arguments).model
    assert model.rope_scaling == dataclasses.replace(pretrained.model.rope_scaling, factor=8.0)
    assert model.rope_base == GPTConfig().rope_base


def test_what_belongs_to_the_parameters_is_left_out_or_the_same(pretrained, folder, config_file):
    same = "num_heads=4, num_kv_heads=2, mlp='swiglu'"
    assert parse(config_file(same), "--init-from", folder, "--model.width", pretrained.model.width).model.width == 32
    told = f"init_from='{folder}' holds another model than the config asks for: model."
    of_page = refusal(config_file("num_heads=24, sinks=True"), "--init-from", folder)
    assert of_page.startswith(f"{told}num_heads=24 (there 4), model.sinks=True (there False); leave these out: ")
    of_flags = refusal(config_file(), "--init-from", folder, "--model.vocab-size", 50304)
    assert of_flags == f"{told}vocab_size=50304 (there 304); leave this out: a model's shape comes with its parameters"


def test_moments_are_carried_from_a_run_with_the_same_optimizer_alone(folder, config_file):
    told = f"init_optimizer='carry' needs a run's workdir as init_from, and '{folder}' holds no checkpoints; leave"
    assert refusal(config_file(), "--init-from", folder, "--init-optimizer", "carry").startswith(told)
    carried = TrainConfig("page", OTHER, num_steps=200, init_from=str(folder), init_optimizer="carry")
    InitialModel(folder, OTHER, "byte", optimizer_kind="adamw").check(carried)
    with pytest.raises(UserMistake, match=r"are of muon, and optimizer\.kind='adamw'; set it to that, or leave"):
        InitialModel(folder, OTHER, "byte", optimizer_kind="muon").check(carried)


def test_a_meshs_divisors_are_checked_against_the_folders_model(folder, config_file):
    # 12 heads, the default, can't be split in 8, nor the folder's 2 key/value heads in 4.
    page = config_file(rest=f"init_from={str(folder)!r}, mesh=MeshConfig(tensor=8)")
    assert refusal(page).startswith("model.num_heads=4 is not a multiple of mesh.tensor = 8; use 8")
    assert parse(page, "--mesh.tensor", 2).mesh == MeshConfig(tensor=2)
    assert refusal(page, "--init-from", "None").startswith("model.num_heads=12 is not a multiple of mesh.tensor = 8")


def test_the_tokenizer_is_the_folders_unless_the_config_names_one(folder, config_file):
    page = config_file()
    assert parse(page, "--init-from", folder, "--data.tokenizer", "byte").data.tokenizer == "byte"
    bins = ("--data.source", "bin", "--data.files", "*.bin")
    assert parse(page, "--init-from", folder, *bins).data.tokenizer is None, "there is none, and .bin files need none"
    (folder / "tokenizer.json").write_text("{}")
    assert parse(page, "--init-from", folder, *bins).data.tokenizer == str(folder / "tokenizer.json")


@pytest.mark.parametrize("tokenizer", [None, "byte", "other.json"])
def test_of_another_run_its_config_tells_model_and_tokenizer(tmp_path, config_file, tokenizer):
    masks = (WINDOW, WINDOW, WINDOW, CausalMask())
    delimiters = {"end_of_document_token": 7, "begin_of_document_token": "none"} if tokenizer == "other.json" else {}
    data = DataConfig(tokenizer=tokenizer, **delimiters)
    model = dataclasses.replace(OTHER, masks=masks, remat="none")
    held = TrainConfig("other", model, num_steps=200, sequence_length=64, data=data)
    workdir = claim_workdir(tmp_path / "run", held)
    config = parse(config_file(), "--init-from", workdir.path)
    assert config.model == dataclasses.replace(OTHER, masks=masks)
    assert config.data == dataclasses.replace(data, tokenizer=tokenizer or "byte")
    for others in ((CausalMask(),), (WINDOW, CausalMask())):  # layers that repeat after another number
        told = ("--model.masks", *map(repr, others))
        assert parse(config_file(), "--init-from", workdir.path, *told).model.masks == others
    workdir.config.unlink()
    told = refusal(config_file(), "--init-from", workdir.path)
    assert told.endswith("config.json can't be read: No such file or directory")


def under(model: GPTConfig, **page) -> GPTConfig:
    """The model of a folder with a page's fields on top."""
    initial = InitialModel(Path("/models/x"), model, "byte", None)
    train = TrainConfig("page", GPTConfig(**page), num_steps=200, sequence_length=64)
    merged = initial.under(train, {})
    initial.check(merged)
    return merged.model


def test_weights_of_losses_are_the_configs_and_experts_the_folders():
    theirs = dataclasses.replace(OTHER, moe=MoEConfig(4, 2, 16, normalize_top_k=False))
    weighted = dataclasses.replace(theirs.moe, load_balance_loss_weight=0.5, router_z_loss_weight=0.0)
    assert under(theirs).moe == theirs.moe
    assert under(theirs, moe=weighted).moe == weighted
    for other in (dataclasses.replace(weighted, num_experts=8), dataclasses.replace(weighted, normalize_top_k=True)):
        with pytest.raises(UserMistake, match=r"model\.moe=MoEConfig\(.*\(there MoEConfig\("):
            under(theirs, moe=other)
    with pytest.raises(UserMistake, match=r"model\.moe=MoEConfig\(.*\(there None\)"):
        under(OTHER, moe=weighted)


def test_layers_may_turn_otherwise_but_not_have_other_heads():
    overrides = (LayerOverride(rope_base=None), LayerOverride())
    assert under(OTHER, layer_overrides=overrides).layer_overrides == overrides
    with pytest.raises(UserMistake, match=r"layer 1 num_kv_heads and head_dim of \(1, 8\), and .* has \(2, 8\)"):
        under(OTHER, layer_overrides=(LayerOverride(), LayerOverride(num_kv_heads=1)))


def test_what_is_no_folder_is_refused(folder, config_file):
    told = "is no folder; expected a Hugging Face model's on this machine (`hf download NAME --local-dir DIR` puts one"
    for name in ("meta-llama/Llama-3.2-1B", folder / "config.json"):
        assert refusal(config_file(), "--init-from", name).startswith(f"init_from='{name}' {told}")
    for name in ("", "x" * 256, "~no-such-user/llama"):
        assert refusal(config_file(), "--init-from", name).startswith(f"init_from={name[:40]!r}")
    assert refusal(config_file(rest="init_from=3")).endswith("init_from=3 is of type int; expected str | None")


def test_a_relative_path_and_a_home_folder_are_found(folder, config_file, monkeypatch):
    page = config_file()
    monkeypatch.chdir(folder.parent)
    monkeypatch.setenv("HOME", str(folder.parent))
    for name in ("llama", "./llama", "~/llama"):
        assert parse(page, "--init-from", name).init_from == os.path.join(folder.parent, "llama")
    assert read_initial_model("llama").folder == folder
    # One folder has one name, by which a resumed run knows it again.
    assert read_initial_model(f"../{folder.parent.name}/llama").folder == folder.resolve()


def test_a_contradiction_is_told_with_status_2_before_any_device_starts(trainer_command, pretrained, tmp_path):
    arguments = ("--config", pretrained.page, "--init-from", pretrained.folder, "--workdir", tmp_path / "run")
    finished = trainer_command.run_alone(*arguments, "--model.num-heads", 8, JAX_PLATFORMS="no_such_platform")
    assert (finished.status, finished.output) == (2, "")
    assert finished.errors == (
        f"error: --init-from='{pretrained.folder}' holds another model than the config asks for: "
        "--model.num-heads=8 (there 4); leave this out: a model's shape comes with its parameters\n"
    )
    assert not (tmp_path / "run").exists()


def test_the_folder_is_not_the_workdir(pretrained, folder, config_file):
    before = (folder / "config.json").read_bytes()
    (folder.parent / "link").symlink_to(folder)
    with pytest.raises(UserMistake, match=r"workdir .*/link is the folder of init_from, whose config\.json"):
        claim_workdir(folder.parent / "link", parse(config_file(), "--init-from", folder))
    assert [path.name for path in folder.iterdir()] == ["config.json"]
    assert (folder / "config.json").read_bytes() == before


def test_a_search_for_memory_tries_only_what_the_folders_model_allows(folder, config_file):
    config = parse(config_file(), "--init-from", folder, "--mesh.tensor", 2)
    fields = single_remedies(config, 128)
    assert fields["mesh.context"][-1] == 32, "of a width of 32, though the sequence has 64 tokens"
    assert "mesh.tensor" not in fields, "the two key/value heads are split already"


def test_a_step_compiles_from_config_json_alone(pretrained, folder):
    arguments = ["--config", str(pretrained.page), "--init-from", str(folder), "--sequence-length", "128"]
    task = parse_compile_command(arguments)
    assert set(task.arguments) == set(arguments), "what the compiling process reads again"
    profile = profile_step(task.options.train)
    assert profile.num_parameters == pretrained.model.num_parameters
    assert profile.tokens_per_step == 2 * 128
