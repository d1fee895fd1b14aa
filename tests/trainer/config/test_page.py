"""What `--config` takes: a page by its file or its name, arguments for its get_config, and a run's config.json."""

import dataclasses
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernels import CausalMask, LocalMask
from layers import GPTConfig
from trainer.cli.train_command import parse_command_line
from trainer.compile.command.compile_command import parse_command_line as parse_compile_command
from trainer.config import TrainConfig
from trainer.config.file import config_to_json, load_config
from trainer.config.page import find_page, list_pages
from trainer.config.words import split_at_commas
from trainer.errors import UserMistake

PAGE = """
from typing import Literal
from kernels import CausalMask, LocalMask, Mask
from layers import GPTConfig
from trainer.config import OptimizerConfig, TrainConfig

def get_config(left: int = 7, rate=6e-4, *, name="page", mask: Mask = CausalMask(), deep: bool = False,
               schedule: Literal["cosine", "wsd"] = "cosine", untyped=None, several: tuple[int, ...] = (), table={},
               limit: int | None = None):
    '''Something.'''
    optimizer = OptimizerConfig(learning_rate=rate, schedule=schedule)
    masks = (mask & LocalMask(left, 0),)
    return TrainConfig(name, GPTConfig(masks=masks, num_layers=24 if deep else 12), limit or 500, optimizer=optimizer)
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The current folder, empty but for what a test writes."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def page(folder):
    (folder / "page.py").write_text(PAGE)
    return "page.py"


def refusal(*arguments: str, parse=parse_command_line) -> str:
    with pytest.raises(UserMistake) as caught:
        parse(list(arguments))
    return str(caught.value)


def test_a_page_is_called_with_the_arguments_behind_its_name(page):
    config = load_config("page.py:left=511,rate=2,mask=CausalMask(3) & LocalMask(9, 0),deep=True,name=a:b=c")
    assert (config.name, config.optimizer.learning_rate, config.model.num_layers) == ("a:b=c", 2.0, 24)
    assert config.model.masks == (CausalMask(3) & LocalMask(9, 0) & LocalMask(511, 0),)
    assert type(config.optimizer.learning_rate) is float
    assert load_config("page.py:left=1e2,limit=None").model.masks == (CausalMask() & LocalMask(100, 0),)
    assert load_config("page.py").num_steps == 500


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ("lft=3", "get_config() takes no 'lft'; did you mean left?"),
        ("zzz=3", "get_config() takes no 'zzz'; it takes left, rate, name, mask, deep, schedule, "),
        ("left=many", "left: expected INT, got 'many'"),
        ("left=0.5", "left: expected INT, got '0.5'"),
        ("rate=fast", "rate: could not convert string to float: 'fast'"),
        ("deep=yes", "invalid choice 'yes' for argument 'deep'; expected one of True, False"),
        ("schedule=cosin", "invalid choice 'cosin' for argument 'schedule'; expected one of cosine, wsd"),
        ("mask=CausalMsk()", "mask: cannot read 'CausalMsk()'"),
        ("limit=x", "limit: expected INT or None, got 'x'"),
        ("untyped=3", "get_config() doesn't say of what type untyped is; annotate it in the page, as"),
        ("several=3", "several: --config can't tell several values"),
        ("table=3", "table: a value of type <class 'dict'> can't be given on the command line"),
        ("rate=0", "11: optimizer.learning_rate=0.0 must be positive and finite"),
    ],
)
def test_arguments_that_a_page_does_not_take_are_refused(page, arguments, told):
    place, _, said = refusal("--config", f"page.py:{arguments}").partition(":")
    assert (place, said.removeprefix(" ")[: len(told)]) == ("config page.py", told)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [("left=3,left=4", "left is given twice")]
    + [(text, f"expected arguments as NAME=VALUE,NAME=VALUE, got '{text[7:]}'") for text in ("", "left=3,")]
    + [("left", "expected arguments as NAME=VALUE,NAME=VALUE, got 'left'")],
)
def test_arguments_of_another_form_are_refused(page, arguments, told):
    assert refusal("--config", f"page.py:{arguments}") == f"--config page.py:{arguments}: {told}"


def test_a_page_that_needs_an_argument_says_so(folder):
    (folder / "needs.py").write_text("def get_config(left, *, right: int):\n    return left\n")
    assert refusal("--config", "needs.py:right=3") == (
        "config needs.py: get_config() needs left; say --config needs.py:left=VALUE"
    )


def test_the_file_comes_before_the_arguments(folder):
    (folder / "a:left=3.py").write_text(PAGE)
    assert find_page("a:left=3.py").arguments == {}
    assert find_page("a:left=3.py:left=4,name=x:y").arguments == {"left": "4", "name": "x:y"}


@pytest.mark.parametrize("named", ["mine", "mine.py", "mine:left=3", "gpt_32k_window:left=3"])
def test_a_name_finds_the_page_in_experiments(folder, named):
    (folder / "experiments").mkdir()
    (folder / "experiments" / "mine.py").write_text(PAGE)
    found = find_page(named)
    if named.startswith("mine"):
        assert found.path == Path("experiments/mine.py")
    else:  # of the clone
        assert found.path == Path(__file__).parents[3] / "experiments" / "gpt_32k_window.py"
        assert load_config(found).model.masks == (LocalMask(3, 0),)
        assert load_config(found).name == "gpt_32k_window_3"


def test_a_file_in_the_folder_comes_before_a_name(page, folder):
    (folder / "experiments").mkdir()
    (folder / "experiments" / "page.py").write_text("")
    assert find_page("page.py").path == Path("page.py")


@pytest.mark.parametrize(
    ("named", "told"),
    [
        ("gpt_32", "config gpt_32 does not exist; did you mean gpt_32k?"),
        ("pge.py:left=3", "config pge.py does not exist; did you mean page.py?"),
        ("runs", "config runs is a folder, not a file; --config takes a page's name or file, or a run's config.json, "),
        ("runs/tiny", "config runs/tiny is a folder, not a file; did you mean runs/tiny/config.json?"),
        ("no/such.py", "config no/such.py does not exist; --config takes a page's name or file"),
        (":left=3", "config  does not exist; --config takes"),
    ],
)
def test_what_is_no_config_is_refused(page, folder, named, told):
    (folder / "runs" / "tiny").mkdir(parents=True)
    (folder / "runs" / "tiny" / "config.json").write_text("{}")
    assert refusal("--config", named).startswith(told)


@pytest.mark.parametrize("parse", [parse_command_line, parse_compile_command])
def test_config_alone_lists_the_pages_without_running_them(folder, capsys, parse):
    (folder / "experiments").mkdir()
    (folder / "experiments" / "mine.py").write_text('"""Mine alone.\n\nMore."""\nraise SystemExit\n' + PAGE)
    (folder / "experiments" / "other.py").write_text('"""No page."""\n')
    (folder / "experiments" / "broken.py").write_text('"""Broken."""\ndef get_config(:\n')
    with pytest.raises(SystemExit) as caught:
        parse(["--config"])
    assert caught.value.code == 0
    lines = {line.split("  ")[0].partition("(")[0]: line for line in capsys.readouterr().out.splitlines()}
    assert lines["mine"].startswith("mine(left: int=7, rate=0.0006, ")
    assert lines["mine"].endswith("  Mine alone.")
    assert lines["broken"].endswith("(can't be read: SyntaxError)")
    assert lines["gpt_32k"].endswith("  A GPT on packed documents, 32,768 tokens to a sequence.")
    assert {"smoke", "gpt_32k_window"} <= lines.keys()
    assert not {"other", "__init__"} & lines.keys()


@pytest.mark.parametrize(
    ("parse", "option"),
    [(parse_command_line, f"--{name}") for name in ("config", "workdir", "resume", "distributed")]
    + [(parse_compile_command, f"--{name}") for name in ("config", "topology", "output", "compare")],
)
def test_an_option_that_is_given_twice_is_refused(parse, option):
    told = refusal(option, "a", "--num-steps", "3", f"{option}=b", parse=parse)
    assert told == f"{option} is given twice, as a and as b; leave one out"


def test_a_config_json_is_a_config(page, folder):
    config = dataclasses.replace(load_config("page.py"), name="kept", batch_size=3)
    (folder / "config.json").write_text(json.dumps(config_to_json(config)))
    command = parse_command_line(["--config", "config.json", "--num-steps", "1e3"])
    assert command.train == dataclasses.replace(config, num_steps=1000)
    assert command.workdir == folder / "runs" / "kept"
    assert refusal("--config", "config.json:left=3") == (
        "config config.json takes no arguments: it is a run's config, not a page of Python"
    )
    (folder / "config.json").write_text('{"name": 3}')
    assert refusal("--config", "config.json").startswith("config config.json: it can't be read back: name=3 is of")


def test_a_saved_config_sets_every_field_over_the_folder_that_it_began_with(pretrained, folder):
    """A field at GPTConfig's default is left out of a page, and so is the folder's. A saved config means it."""
    began = ["--config", str(pretrained.page), "--init-from", str(pretrained.folder)]
    config = parse_command_line([*began, "--model.rope-base", str(GPTConfig().rope_base)]).train
    assert config.model.rope_base != pretrained.model.rope_base
    (folder / "config.json").write_text(json.dumps(config_to_json(config)))
    assert parse_command_line(["--config", "config.json"]).train == config
    told = refusal("--config", "config.json", "--model.num-layers", "5")
    assert told.startswith("init_from=")
    assert "model.num_layers=5 (there 2)" in told


def test_resume_takes_config_and_workdir_from_the_run(page, folder):
    config = dataclasses.replace(load_config("page.py"), name="kept", batch_size=3)
    (folder / "elsewhere").mkdir()
    (folder / "elsewhere" / "config.json").write_text(json.dumps(config_to_json(config)))
    command = parse_command_line(["--resume", "elsewhere", "--num-steps", "700"])
    assert command.train == dataclasses.replace(config, num_steps=700)
    assert command.workdir == folder / "elsewhere"


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ("elsewhere --config page.py", "--resume takes config and workdir from elsewhere; leave --c"),
        ("elsewhere --workdir x", "--resume takes config and workdir from elsewhere; leave --w"),
        ("missing", "--resume missing is no folder; expected the workdir of a run"),
        ("page.py", "--resume page.py is no folder; expected the workdir of a run"),
        ("empty", "--resume empty holds no config.json; expected the workdir of a run"),
        ("", "--resume: expected a path, got the empty text"),
    ],
)
def test_resume_refuses_what_is_no_run(page, folder, arguments, told):
    (folder / "elsewhere").mkdir()
    (folder / "empty").mkdir()
    (folder / "elsewhere" / "config.json").write_text("{}")
    assert refusal("--resume", *arguments.split(" ")).startswith(told)


@given(text=st.text(alphabet="ab(,)[] =", max_size=20))
def test_commas_split_only_outside_of_brackets(text):
    parts = split_at_commas(text)
    assert ",".join(parts).replace(" ", "") == text.replace(" ", "")
    assert split_at_commas("f(1, 2), [3, 4] ,c") == ["f(1, 2)", "[3, 4]", "c"]


def test_the_shipped_pages_are_listed_as_they_describe_themselves():
    told = "gpt_32k_window(left: int=1023) experiments/gpt_32k.py with one"
    assert any(" ".join(line.split()).startswith(told) for line in list_pages())


def test_the_python_annotation_of_a_float_that_is_whole_gets_the_integer(page):
    with pytest.raises(UserMistake, match=r"num_steps=1000\.0 is of type float; expected int; write 1000"):
        load_config_of("num_steps=1e3")
    with pytest.raises(UserMistake, match=r"seed=1\.5 is of type float; expected int$"):
        load_config_of("num_steps=500, seed=1.5")


def load_config_of(fields: str) -> TrainConfig:
    Path("own.py").write_text(
        "from layers import GPTConfig\nfrom trainer.config import TrainConfig\n"
        f"def get_config():\n    return TrainConfig(name='x', model=GPTConfig(), {fields})\n"
    )
    return load_config("own.py")
