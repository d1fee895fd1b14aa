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
@pytest.mark.parametrize("command", ["trainer", "trainer.compile"])
def test_a_config_or_tokenizer_is_refused_before_anything_runs(spoilt, command, pretrained, folder, tmp_path, capsys):
    spoil, message = (CONFIGS | TOKENIZERS)[spoilt]
    spoil(folder)
    mark = booby_trap(folder)
    arguments = ["--config", str(pretrained.page), "--init-from", str(folder)]
    if command == "trainer":
        status = train([*arguments, "--workdir", str(tmp_path / "run")])
    else:
        status = compile_step(arguments)
    captured = capsys.readouterr()
    assert_refused(status, captured, message)
    assert captured.out == ""
    assert not (tmp_path / "run").exists()
    assert not mark.exists()


@pytest.mark.parametrize("spoilt", TENSORS)
def test_tensors_are_refused_before_anything_is_compiled(spoilt, pretrained, folder, tmp_path, capsys):
    spoil, message = TENSORS[spoilt]
    spoil(folder)
    mark = booby_trap(folder)
    arguments = ["--config", str(pretrained.page), "--init-from", str(folder), "--workdir", str(tmp_path / "run")]
    status = train(arguments)
    captured = capsys.readouterr()
    assert_refused(status, captured, message)
    assert "compile" not in captured.out
    assert not mark.exists()


def test_another_tokenizer_takes_the_place_of_one_that_is_refused(pretrained, folder, tmp_path, capsys):
    spoil, _ = TOKENIZERS["a tokenizer that is a pipe"]
    spoil(folder)
    TENSORS["a header of 10 GB"][0](folder)  # what is refused next
    arguments = ["--config", str(pretrained.page), "--init-from", str(folder), "--workdir", str(tmp_path / "run")]
    status = train([*arguments, "--data.tokenizer", str(pretrained.folder / "tokenizer.json")])
    assert_refused(status, capsys.readouterr(), TENSORS["a header of 10 GB"][1])
