"""A message repeats what came, and that may be a whole file: what is too long loses its middle, in one place."""

from __future__ import annotations

import pickle
import re

import pytest

from trainer.cli.train_command import parse_command_line
from trainer.compile.command.compile_command import parse_command_line as parse_compile_command
from trainer.config import DataConfig
from trainer.config.resume_changes import ConfigChange
from trainer.errors import TrainingFailed, UserMistake, name_some, shorten
from trainer.sample.sample_command import parse_command_line as parse_sample_command

LONG = "x" * 200_000


@pytest.mark.parametrize("error", [UserMistake, TrainingFailed])
def test_a_long_line_keeps_its_two_ends(error):
    told = str(error(f"data.files={LONG} is no glob; name another"))
    assert len(told) <= 1_200
    assert told.startswith("data.files=xxx")
    assert told.endswith("xxx is no glob; name another")
    assert re.search(r" … \(198,\d{3} characters\) … ", told)
    assert str(pickle.loads(pickle.dumps(error(told)))) == told


def test_so_do_many_lines():
    told = str(UserMistake("\n".join(map(str, range(1000))))).split("\n")
    assert (len(told), told[0], told[-1]) == (80, "0", "999")
    assert "… (921 lines) …" in told


@pytest.mark.parametrize("text", ["", "a", "a\nb", "x" * 1_200, "\n".join("y" * 80)])
def test_a_message_that_people_read_stays_as_it_is(text):
    assert str(UserMistake(text)) == text


@pytest.mark.parametrize("length", range(195, 206))
def test_nothing_is_lost_but_the_middle(length):
    text = "".join(chr(100 + i % 1000) for i in range(length))
    short = shorten(text, 200)
    if length <= 200:
        assert short == text
    else:
        first, middle, last = re.fullmatch(r"(.*) … \((\d+) characters\) … (.*)", short).groups()
        assert text == first + text[len(first) : len(first) + int(middle)] + last
        assert len(first + last) == 160


@pytest.mark.parametrize(
    ("parse", "arguments"),
    [
        (parse_command_line, ["--config", LONG]),
        (parse_command_line, ["--config", f"smoke:left={LONG}"]),
        (parse_command_line, [f"--{LONG}", "3"]),
        (parse_command_line, ["--config", "smoke", "--num-steps", LONG]),
        (parse_command_line, ["--config", "smoke", "--model.masks", LONG]),
        (parse_command_line, ["--config", "smoke", "--model.remat", LONG]),
        (parse_command_line, ["--config", "smoke", "--data.files", LONG]),
        (parse_command_line, ["--config", "smoke", "--init-from", LONG]),
        (parse_command_line, ["--resume", LONG]),
        (parse_compile_command, ["--config", "smoke", "--topology", LONG]),
        (parse_compile_command, ["--config", "smoke", "--compare", LONG]),
        (parse_sample_command, ["--workdir", "x", "--prompt", "a", "--temperature", LONG]),
    ],
)
def test_no_command_repeats_what_is_too_long(monkeypatch, parse, arguments):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    with pytest.raises(UserMistake) as caught:
        parse(arguments)
    assert len(str(caught.value)) <= 1_200


def test_many_paths_are_counted():
    paths = tuple(f"books/{number}.txt" for number in range(79))
    with pytest.raises(ValueError, match=r"^data\.files='books/0\.txt', 'books/1\.txt', 'books/2\.txt' and 76 more "):
        DataConfig(files=paths)
    told = str(ConfigChange(5, "data.files", list(paths), ["books/*.txt"]))
    assert len(told) < 320
    assert told.endswith("['books/*.txt'] from now on")
    assert name_some(()) == ""


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--num-steps", "3", *(f"{i}.txt" for i in range(79))], r"'0\.txt', '1\.txt', '2\.txt' and 76 more; --num-st"),
        (
            ["--mesh.fsdp", "8"],
            r"mesh\.fsdp = 8; raise batch_size to a multiple of 8, or lower both: they take as many",
        ),
        (["--mesh.model", "2"], r"unknown option --mesh\.model; did you mean --mesh\.tensor\?"),
    ],
)
def test_small_mistakes_are_told_in_short(monkeypatch, arguments, told):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    with pytest.raises(UserMistake, match=told):
        parse_command_line(["--config", "gpt_32k", *arguments])


@pytest.mark.parametrize(("word", "number"), [("1e3", 1000), ("1.5e3", 1500), ("2E+2", 200), ("1_000", 1000)])
def test_whole_numbers_may_be_written_with_an_exponent(monkeypatch, word, number):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert parse_command_line(["--config", "gpt_32k", "--num-steps", word]).train.num_steps == number
    assert parse_command_line(["--config", "gpt_32k", "--samples.top-k", word]).train.samples.top_k == number


@pytest.mark.parametrize("word", ["1e-3", "1.5", "1e999", "1.55e1", "inf", "1e3.0", "0x10", "", "1e999999999999"])
def test_others_are_refused(monkeypatch, word):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    with pytest.raises(UserMistake, match=rf"--num-steps: expected INT, got '{re.escape(word)}'$"):
        parse_command_line(["--config", "gpt_32k", "--num-steps", word])
