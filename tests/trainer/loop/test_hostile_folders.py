"""Commands that begin with a folder that anybody may have written: status 2, one readable message, nothing executed."""

import re
import shutil
from pathlib import Path

import pytest

from tests.layers.pretrained.hostile import CONFIGS, TENSORS, TOKENIZERS, booby_trap
from trainer.__main__ import main as train
from trainer.compile.__main__ import main as compile_step


@pytest.fixture
def folder(pretrained, tmp_path) -> Path:
    return Path(shutil.copytree(pretrained.folder, tmp_path / "llama"))


@pytest.fixture
def run(pretrained, folder, tmp_path, capsys):
    """Runs a command on the folder: its status, and what it said."""

    def run(command, *arguments: str):
        workdir = [] if command is compile_step else ["--workdir", str(tmp_path / "run")]
        status = command(["--config", str(pretrained.page), "--init-from", str(folder), *workdir, *arguments])
        return status, capsys.readouterr()

    return run


def assert_refused(status: int, captured, message: str) -> None:
    """Checks that a command ended with one line on standard error, which a terminal shows as it is."""
    assert status == 2
    assert captured.err.startswith("error: ")
    line = captured.err.removesuffix("\n")
    assert line.isprintable()
    assert len(line) < 1500
    assert re.search(message, line), line
    assert "Traceback" not in captured.out


@pytest.mark.parametrize("spoilt", [*CONFIGS, *TOKENIZERS])
@pytest.mark.parametrize("command", [train, compile_step], ids=["trainer", "trainer.compile"])
def test_a_config_or_tokenizer_is_refused_before_anything_runs(spoilt, command, folder, tmp_path, run):
    spoil, message = (CONFIGS | TOKENIZERS)[spoilt]
    spoil(folder)
    mark = booby_trap(folder)
    status, captured = run(command)
    assert_refused(status, captured, message)
    assert captured.out == ""
    assert not (tmp_path / "run").exists()
    assert not mark.exists()


@pytest.mark.parametrize("spoilt", TENSORS)
def test_tensors_are_refused_before_anything_is_compiled(spoilt, folder, run):
    spoil, message = TENSORS[spoilt]
    spoil(folder)
    mark = booby_trap(folder)
    status, captured = run(train)
    assert_refused(status, captured, message)
    assert "compile" not in captured.out
    assert not mark.exists()


def test_another_tokenizer_takes_the_place_of_one_that_is_refused(pretrained, folder, run):
    TOKENIZERS["a tokenizer that is a pipe"][0](folder)
    spoil, message = TENSORS["a header of 10 GB"]  # what is refused next
    spoil(folder)
    assert_refused(*run(train, "--data.tokenizer", str(pretrained.folder / "tokenizer.json")), message)
