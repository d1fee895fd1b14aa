"""Phases by ProLong's recipe: its own values at its own lengths, and what a model keeps of its RoPE."""

import dataclasses
import json

import pytest

from kernels import CausalMask, LocalMask
from layers import GPTConfig, LayerOverride, MoEConfig, RopeScaling
from trainer.__main__ import main
from trainer.cli.train_command import parse_command_line
from trainer.compile.command.compile_command import parse_command_line as parse_compile_command
from trainer.config import DataConfig, MeshConfig, Phase, TrainConfig
from trainer.config.extension import extend_context, read_lengths, rope_base_at
from trainer.config.file import config_to_json, load_config
from trainer.config.init_from import read_initial_model
from trainer.config.written_page import page_text
from trainer.errors import UserMistake

LLAMA_3 = GPTConfig(rope_base=5e5)
WINDOW = CausalMask() & LocalMask(1023, 0)
LENGTHS = (65_536, 524_288)


def make(model: GPTConfig = LLAMA_3, **changes) -> TrainConfig:
    return TrainConfig("x", model, **{"num_steps": 4000, "sequence_length": 65_536, "batch_size": 64, **changes})


def test_prolong_itself():
    """Table 9 of arXiv:2410.02660, with a peak and tokens in a step that are the config's."""
    first, second = extend_context(make(), LENGTHS, context_length=8192).in_phases()
    assert [each.config.model.rope_base for each in (first, second)] == [8e6, 1.28e8]
    assert [(each.first_step, each.last_step) for each in (first, second)] == [(0, 2000), (2000, 4000)]
    assert [each.config.batch_size for each in (first, second)] == [64, 8]
    for each in (first, second):
        optimizer = each.config.optimizer
        assert (optimizer.schedule, optimizer.num_warmup_steps, each.config.num_steps) == ("cosine", 200, 2000)
        assert optimizer.final_learning_rate_fraction == 0.1
        assert optimizer.learning_rate == make().optimizer.learning_rate
        assert (each.moments, each.config.data.keep_documents_apart) == ("carry", True)
    assert rope_base_at(8192) == LLAMA_3.rope_base
    assert 8e6 < rope_base_at(131_072) < 1.28e8


def test_the_last_phase_is_open_ended():
    config = extend_context(make(num_steps=1001), LENGTHS)
    assert [phase.num_steps for phase in config.phases] == [500, None]
    assert dataclasses.replace(config, num_steps=3000).in_phases()[1].last_step == 3000


def bases(config: TrainConfig) -> list[list[float | None]]:
    """Of the layers, in each phase."""
    models = [phase.config.model for phase in config.in_phases()]
    return [[model.layer(index).rope_base for index in range(model.pattern_length)] for model in models]


NOPE = LayerOverride(rope_base=None)
LOCAL = LayerOverride(rope_base=1e4)
NTK = LayerOverride(rope_scaling=RopeScaling("ntk", 2.0))
LLAMA_SCALING = RopeScaling("llama3", 8.0, original_context_length=8192)


@pytest.mark.parametrize(
    ("changes", "context_length", "expected"),
    [
        # It is raised past the lengths that the model knows alone.
        ({}, 65_536, [[5e5], [1.28e8]]),
        ({}, 524_288, [[5e5], [5e5]]),
        ({"rope_scaling": LLAMA_SCALING}, 8192, [[5e5], [1.28e8]]),
        ({}, None, [[8e6], [1.28e8]]),
        # A larger one stays.
        ({"rope_base": 5e7}, 8192, [[5e7], [1.28e8]]),
        ({"rope_base": 5e8}, 8192, [[5e8], [5e8]]),
        # Windows of the same base get the new one, whatever their scaling, and others keep theirs, as in Gemma 3.
        ({"masks": (WINDOW, CausalMask())}, 8192, [[8e6] * 2, [1.28e8] * 2]),
        ({"masks": (WINDOW, CausalMask()), "layer_overrides": (LayerOverride(), NTK)}, 8192, [[8e6] * 2, [1.28e8] * 2]),
        (
            {"masks": (WINDOW, CausalMask()), "layer_overrides": (LOCAL, LayerOverride())},
            8192,
            [[1e4, 8e6], [1e4, 1.28e8]],
        ),
        # Windows within what the model knows, beside layers without RoPE, see no new position.
        ({"masks": (WINDOW, CausalMask()), "layer_overrides": (LayerOverride(), NOPE)}, 8192, [[5e5, None]] * 2),
        ({"masks": (WINDOW, CausalMask()), "layer_overrides": (LayerOverride(), NOPE)}, None, [[5e5, None]] * 2),
        (
            {"masks": (WINDOW, CausalMask()), "layer_overrides": (LayerOverride(), NOPE)},
            512,
            [[8e6, None], [1.28e8, None]],
        ),
        ({"layer_overrides": (LayerOverride(), NOPE)}, 8192, [[8e6, None], [1.28e8, None]]),  # SmolLM3
        ({"rope_base": None}, 8192, [[None]] * 2),
    ],
)
def test_the_rope_base_grows_where_a_layer_meets_new_positions(changes, context_length, expected):
    model = dataclasses.replace(LLAMA_3, **changes)
    config = extend_context(make(model), LENGTHS, context_length=context_length)
    assert bases(config) == expected
    scalings = {phase.config.model.layer(0).rope_scaling for phase in config.in_phases()}
    assert scalings == {model.layer(0).rope_scaling}


@pytest.mark.parametrize(
    ("batch", "accumulation", "mesh", "expected"),
    [
        (4, 4, MeshConfig(), [(4, 4), (1, 1)]),
        (16, 2, MeshConfig(), [(16, 2), (4, 2)]),
        (16, 4, MeshConfig(fsdp=2), [(16, 4), (4, 2)]),  # no fewer than a sequence for each part of the batch
        (6, 2, MeshConfig(context=2), [(6, 2), (2, 2)]),
        (2, 1, MeshConfig(), [(2, 1), (1, 1)]),
    ],
)
def test_a_step_has_as_many_tokens_in_each_phase(batch, accumulation, mesh, expected):
    config = make(sequence_length=32_768, batch_size=batch, gradient_accumulation=accumulation, mesh=mesh)
    phases = [phase.config for phase in extend_context(config, (32_768, 131_072)).in_phases()]
    assert [(phase.batch_size, phase.gradient_accumulation) for phase in phases] == expected


@pytest.mark.parametrize(
    ("lengths", "changes", "told"),
    [
        ((131_072, 65_536), {}, "the lengths of phases must rise, got 131,072, 65,536"),
        ((65_536, 65_536), {}, "the lengths of phases must rise"),
        ((), {}, "the lengths of phases must rise, got none"),
        ((32_768,), {}, "the first phase has sequences of 32,768 tokens, and sequence_length=65536 is more"),
        (
            LENGTHS,
            {"num_steps": 103, "phases": (Phase(),)},
            r"the config file has 1 phases already; leave .* \(65,536,",
        ),
        (LENGTHS, {"num_steps": 3, "optimizer": None}, "num_steps=3 is too few for 2 phases"),
        ((65_536, 65_537), {"mesh": MeshConfig(context=2)}, r"phases\[1\]: sequence_length=65537 is not a multiple"),
    ],
)
def test_lengths_that_cannot_be_are_refused(lengths, changes, told):
    if "optimizer" in changes:
        changes = changes | {"optimizer": dataclasses.replace(make().optimizer, num_warmup_steps=1)}
    with pytest.raises(ValueError, match=told):
        extend_context(make(**changes), lengths)


@pytest.mark.parametrize("text", ["", "32k,", "3.2k", "32kb", "-1", "Phase()"])
def test_text_that_is_no_length_is_refused(text):
    with pytest.raises(ValueError, match=r"expected lengths in tokens, such as 32k,128k; k stands for 1,024, M for"):
        read_lengths(text)
    assert read_lengths("512, 32K,1M") == (512, 32_768, 1_048_576)


def arguments(pretrained, *more: object) -> list[str]:
    sizes = ["--sequence-length", 64, "--batch-size", 8, "--gradient-accumulation", 1, "--num-steps", 10]
    return [str(each) for each in ("--config", pretrained.page, "--init-from", pretrained.folder, *sizes, *more)]


@pytest.mark.parametrize("flag", [["--phases", "64,256"], ["--phases=64,256"], ["--phases", "64", "256"]])
def test_the_flag_makes_phases_of_the_folders_model(pretrained, flag):
    """The folder's model knows 128 positions."""
    assert read_initial_model(str(pretrained.folder)).context_length == 128
    parsed = parse_command_line(arguments(pretrained, *flag)).train
    assert parsed == parse_compile_command(arguments(pretrained, *flag)).options.train
    assert parsed.phases == extend_context(dataclasses.replace(parsed, phases=()), (64, 256), context_length=128).phases
    sizes = [(each.config.sequence_length, each.config.batch_size) for each in parsed.in_phases()]
    assert sizes == [(64, 8), (256, 2)]
    # The rule's base for so short a sequence is less than the folder's, which stays.
    assert bases(parsed) == [[pretrained.model.rope_base]] * 2


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ("--phases 64,32", "the lengths of phases must rise"),
        ("--phases 32,128", "the first phase has sequences of 32 tokens"),
        ("--phases x", "phases='x': expected lengths"),
    ],
)
def test_the_flag_refuses_what_the_recipe_refuses(pretrained, flags, told):
    with pytest.raises(UserMistake, match=told):
        parse_command_line(arguments(pretrained, *flags.split()))


def test_the_written_page_gives_the_same_config(pretrained, tmp_path, capsys):
    page = tmp_path / "page.py"
    line = arguments(pretrained, "--phases", "64,256", "--model.masks", repr(WINDOW), "CausalMask()")
    assert main([*line, "--write-page", str(page)]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith("phases by the recipe of ProLong (arXiv:2410.02660, Table 9)")
    assert said[1].startswith("  steps 1 to 5: 8 × 64 = 512 tokens in a step; RoPE base 5,000; learning rate ")
    assert said[2].startswith("  steps 6 to 10: 2 × 256 = 512 tokens in a step; RoPE base 5,000; learning rate ")
    assert said[3] == f"wrote {page}; python -m trainer --config {page} runs it"
    ours = parse_command_line(line).train
    assert load_config(page) == ours
    assert parse_command_line(["--config", str(page)]).train == ours
    assert said[0] in page.read_text()
    assert main([*line, "--write-page", str(page)]) == 2
    assert f"--write-page {page} exists; name another file" in capsys.readouterr().err


def test_a_page_can_be_written_of_every_kind_of_field(tmp_path):
    model = GPTConfig(
        masks=(WINDOW, CausalMask()),
        layer_overrides=(LOCAL, LayerOverride(rope_scaling=LLAMA_SCALING)),
        moe=MoEConfig(num_experts=4, num_experts_per_token=2, expert_width=64),
    )
    config = make(model, description='"quotes" \\ and\nlines ü', data=DataConfig(source="text", files=("a b", "ü")))
    page = tmp_path / "page.py"
    page.write_text(page_text(extend_context(config, LENGTHS), ["python", 'say """', "\\"]))
    assert load_config(page) == extend_context(config, LENGTHS)
    assert max(map(len, page.read_text().splitlines())) <= 120


def test_a_page_that_cannot_say_a_config_is_not_left(pretrained, tmp_path, capsys):
    """A field at GPTConfig's default means the folder's."""
    page = tmp_path / "page.py"
    default = str(GPTConfig().rope_base)
    assert main([*arguments(pretrained, "--model.rope-base", default), "--write-page", str(page)]) == 2
    assert "a page can't say this config's model, as a field at its default is" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


TAKES_A_FOLDER = """
from trainer.config import TrainConfig
from trainer.config.init_from import with_initial_model

def get_config(init_from: str = "nowhere"):
    return with_initial_model(TrainConfig("x", GPTConfig(), 200, init_from=init_from))
"""


def test_a_page_that_takes_init_from_gets_the_flag(pretrained, tmp_path):
    page = tmp_path / "page.py"
    page.write_text("from layers import GPTConfig\n" + TAKES_A_FOLDER)
    config = parse_command_line(["--config", str(page), "--init-from", str(pretrained.folder)]).train
    assert config.model.num_layers == pretrained.model.num_layers
    assert config == parse_command_line(["--config", f"{page}:init_from={pretrained.folder}"]).train
    with pytest.raises(UserMistake, match="init_from='nowhere' is no folder"):
        parse_command_line(["--config", str(page)])
    with pytest.raises(UserMistake, match="--init-from b is given, too; leave init_from out of --config"):
        parse_command_line(["--config", f"{page}:init_from=a", "--init-from", "b"])


def test_a_runs_parameters_know_what_the_model_before_them_knew(pretrained, tmp_path):
    config = parse_command_line(arguments(pretrained)).train
    for folder, record, known in (("a", {"context_length": 4096}, 4096), ("b", None, 64), ("c", {}, 64)):
        run = tmp_path / folder
        (run / "checkpoints").mkdir(parents=True)
        (run / "config.json").write_text(json.dumps(config_to_json(config)))
        (run / "record.json").write_text(json.dumps({"init_from": record}))
        assert read_initial_model(str(run)).context_length == known
