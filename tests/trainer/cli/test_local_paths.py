"""A URL, or a folder whose name isn't UTF-8, is refused wherever a path is given, before a device starts."""

from __future__ import annotations

import dataclasses
import importlib
import os
from pathlib import Path

import pytest

import trainer
from experiments.benchmarks.command_line import read_arguments
from trainer.cli.train_command import parse_command_line
from trainer.compare.compare_command import parse_command_line as parse_compare
from trainer.compile.command.compile_command import parse_command_line as parse_compile
from trainer.compile.persistent_cache import use_compilation_cache
from trainer.config import CompilationConfig, DataConfig, TrainConfig
from trainer.config.file import load_config
from trainer.config.init_from import read_initial_model
from trainer.errors import UserMistake
from trainer.evaluate.evaluate_command import parse_command_line as parse_evaluate
from trainer.export.export_command import parse_command_line as parse_export
from trainer.files.paths import refuse_url
from trainer.sample.sample_command import parse_command_line as parse_sample
from trainer.saved_run import open_saved_run
from trainer.workdir import claim_workdir

URLS = ("s3://bucket/x", "gs://bucket/x", "file:///tmp/x", "S3:/bucket/x", "hf://datasets/x", " az://x", "a::s3://b/x")
PAGE = str(Path(__file__).parents[3] / "experiments" / "smoke.py")


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    yield
    assert not list(tmp_path.glob("*:*")), "no local folder was made of a URL"


@pytest.mark.parametrize("url", URLS)
def test_a_url_is_no_path(url):
    with pytest.raises(
        ValueError, match=r"is a URL; expected a path in this machine's file systems: mount the storage"
    ):
        refuse_url(url)


@pytest.mark.parametrize(
    "path", ["runs/a", "/a/s3://b", "a:b", "C:/x", "~/x", "./s3://b", "**/*.txt", "", "http:", "é:/x"]
)
def test_a_path_is_no_url(path):
    refuse_url(path)


@pytest.mark.parametrize("url", URLS)
@pytest.mark.parametrize(
    ("parse", "flags"),
    [
        (parse_command_line, ["--workdir"]),
        (parse_command_line, ["--config"]),
        (parse_command_line, ["--init-from"]),
        (parse_command_line, ["--data.source", "text", "--data.files"]),
        (parse_command_line, ["--data.source", "text", "--data.files", "x.txt", "--data.validation-files"]),
        (parse_command_line, ["--data.tokenizer"]),
        (parse_command_line, ["--data.token-cache-dir"]),
        (parse_command_line, ["--compilation.cache-dir"]),
        (parse_compile, ["--output"]),
        (parse_compile, ["--init-from"]),
        (parse_sample, ["--workdir"]),
        (parse_sample, ["--workdir", "run", "--prompt-file"]),
        (parse_sample, ["--workdir", "run", "--prompt", "x", "--tokenizer"]),
        (parse_evaluate, ["--workdir"]),
        (parse_evaluate, ["--model"]),
        *(
            (parse_evaluate, ["--workdir", "run", flag])
            for flag in ("--output", "--haystack", "--files", "--tokenizer")
        ),
        (parse_compare, ["runs/a"]),
        (parse_compare, ["runs/a", "runs/b", "--output"]),
        (parse_export, ["--output", "x", "--workdir"]),
        (parse_export, ["--workdir", "run", "--output"]),
        (parse_export, ["--workdir", "run", "--output", "x", "--tokenizer"]),
    ],
)
def test_each_command_refuses_urls(parse, flags, url):
    page = ["--config", PAGE] if parse in (parse_command_line, parse_compile) and flags != ["--config"] else []
    with pytest.raises(UserMistake, match=r"is a URL; expected a path in this machine's file systems"):
        parse([*page, *flags, url])


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("adapters", "AdaptersArguments"),
        ("attention.__main__", "AttentionArguments"),
        ("compile_time.__main__", "Arguments"),
        ("context_attention", "ContextArguments"),
        ("decode.__main__", "DecodeArguments"),
        ("mixture", "MixtureArguments"),
        ("plots", "PlotArguments"),
        ("shared_context", "SharedContextArguments"),
        ("tables", "TablesArguments"),
        ("train_throughput.__main__", "ThroughputArguments"),
    ],
)
def test_each_benchmark_refuses_urls(module, name, capsys):
    arguments = getattr(importlib.import_module(f"experiments.benchmarks.{module}"), name)
    fields = [field.name for field in dataclasses.fields(arguments) if str(field.type).startswith("Path")]
    assert fields
    for field in fields:
        with pytest.raises(SystemExit) as ended:
            read_arguments(arguments, [f"--{field}", "s3://bucket/x"])
        assert ended.value.code == 2
        assert "is a URL; expected a path" in " ".join(capsys.readouterr().err.replace("│", " ").split())


def test_every_benchmark_reads_its_command_line_so():
    folder = Path(__file__).parents[3] / "experiments"
    assert [path.name for path in folder.rglob("*.py") if "tyro.cli(" in path.read_text()] == ["command_line.py"]


@pytest.mark.parametrize("path", [Path("gs://bucket/run"), "gs://bucket/run"])
@pytest.mark.parametrize("claim", [claim_workdir, lambda path, config: trainer.run(config, path)])
def test_a_program_that_calls_the_trainer_is_refused_a_url(path, claim):
    with pytest.raises(UserMistake, match=r"workdir: 'gs:/+bucket/run' is a URL"):
        claim(path, load_config(Path(PAGE)))


def test_a_config_refuses_urls_on_construction():
    with pytest.raises(ValueError, match=r"data\.files='s3://a/\*\.txt' is a URL"):
        DataConfig(source="text", files=("a.txt", "s3://a/*.txt"))
    with pytest.raises(ValueError, match=r"compilation\.cache_dir='gs://a' is a URL"):
        CompilationConfig(cache_dir="gs://a")
    config = load_config(Path(PAGE))
    with pytest.raises(ValueError, match=r"init_from='https://huggingface.co/a/b' is a URL"):
        TrainConfig(config.name, config.model, config.num_steps, init_from="https://huggingface.co/a/b")


def test_a_folder_that_is_not_utf8_is_refused(tmp_path, monkeypatch):
    odd = Path(os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9"))
    odd.mkdir()
    monkeypatch.chdir(odd)
    config = parse_command_line(["--config", PAGE])
    told = r"caf\\udce9/{}' is not UTF-8, and libraries that read and write there take nothing else; rename the folder"
    with pytest.raises(UserMistake, match=f"workdir: .*{told.format('runs/smoke')}"):
        claim_workdir(config.workdir, config.train)
    (odd / "model").mkdir()
    with pytest.raises(UserMistake, match=f"init_from=.*{told.format('model')}"):
        read_initial_model("model")
    with pytest.raises(UserMistake, match=f"--workdir: .*{told.format('run')}"):
        open_saved_run(Path("run"), setting="--workdir")
    with pytest.raises(UserMistake, match=rf"compilation\.cache_dir=.*{told.format('xla')}"):
        use_compilation_cache("xla")
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(odd / "xla"))
    with pytest.raises(UserMistake, match=rf"JAX_COMPILATION_CACHE_DIR=.*{told.format('xla')}"):
        use_compilation_cache(None)
    assert sorted(path.name for path in odd.iterdir()) == ["model"]


@pytest.mark.parametrize("name", ["exp[1]", "a*", "what?", "a\\b"])
def test_a_workdir_whose_checkpoints_could_not_be_read_again_is_refused(tmp_path, name):
    with pytest.raises(UserMistake, match=r"has (\[|\*|\?|\\), which libraries that read and write there take for"):
        claim_workdir(tmp_path / name / "run", load_config(Path(PAGE)))
    assert not (tmp_path / name).exists()


def test_odd_names_that_serve_are_taken(tmp_path):
    for name in ("a{1}", "50%20", "a b", "#x", "'q\"", "日本", "a]b", "$HOME"):
        with claim_workdir(tmp_path / name, load_config(Path(PAGE))) as workdir:
            assert workdir.path == tmp_path / name
