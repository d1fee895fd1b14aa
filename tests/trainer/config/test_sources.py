"""Mixtures in a config: what is refused before anything is read, and that a run's config.json tells them."""

import dataclasses
import json

import pytest

from layers import GPTConfig
from trainer.config import DataConfig, LengthWeight, OptimizerConfig, Phase, SourceConfig, TrainConfig
from trainer.config.file import check_types, config_from_json, config_to_json, require_readable
from trainer.errors import UserMistake

CODE = SourceConfig("code", ("src/**/*.py",), length_weights=(LengthWeight(0, 0.5), LengthWeight(8192, 4.0)))
BOOKS = SourceConfig("books", ("books/*.jsonl.gz",), "jsonl", weight=3.0, when_exhausted="stop")
CONFIG = TrainConfig(
    "mixed",
    GPTConfig(),
    20,
    data=DataConfig(sources=(CODE, BOOKS, SourceConfig("python", format="stdlib"))),
    optimizer=OptimizerConfig(num_warmup_steps=2),
)


def test_a_mixture_is_written_and_read_back():
    assert config_from_json(json.loads(json.dumps(config_to_json(CONFIG)))) == CONFIG
    check_types(CONFIG)
    require_readable(CONFIG)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"weight": -1.0}, r"data.sources 'code': weight=-1.0 must be finite and not negative"),
        ({"weight": float("nan")}, r"weight=nan must be finite"),
        ({"weight": float("inf")}, r"weight=inf must be finite"),
        ({"length_weights": (LengthWeight(0, -2.0),)}, r"length_weights: weight=-2.0 must be finite and not negative"),
        (
            {"length_weights": (LengthWeight(100, 1.0), LengthWeight(100, 2.0))},
            r"length_weights must rise from 0 or more tokens, got min_tokens \[100, 100\]",
        ),
        ({"length_weights": (LengthWeight(9, 1.0), LengthWeight(3, 2.0))}, r"must rise .*\[9, 3\]"),
        ({"length_weights": (LengthWeight(-1, 1.0),)}, r"must rise from 0 or more tokens, got min_tokens \[-1\]"),
        ({"files": ()}, r"'code': format='text' needs files, one or more globs"),
        ({"format": "stdlib"}, r"format='stdlib' reads no files, but files="),
        ({"name": ""}, r"name='' must be printable, without /, and not empty"),
        ({"name": "a/b"}, r"name='a/b' must be printable"),
    ],
)
def test_a_source_that_can_t_be_meant_is_refused(changes, told):
    with pytest.raises(ValueError, match=told):
        dataclasses.replace(CODE, **changes)


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"sources": (CODE, CODE, BOOKS)}, r"data.sources has 2 sources named 'code'; give each its own name"),
        ({"sources": (dataclasses.replace(CODE, weight=0.0),)}, r"the weights of code are all 0; make one of them"),
        ({"sources": (CODE,), "files": ("x",)}, r"data.files can't be set together with data.sources"),
        ({"sources": (CODE,), "source": "text"}, r"data.source can't be set .*--data.sources with nothing behind it"),
        (
            {"sources": (dataclasses.replace(CODE, files=("s3://bucket/x",)),)},
            r"data.sources 'code': files='s3://bucket/x'",
        ),
    ],
)
def test_sources_that_can_t_be_mixed_are_refused(fields, told):
    with pytest.raises(ValueError, match=told):
        DataConfig(**fields)


@pytest.mark.parametrize(
    ("source", "told"),
    [
        (dataclasses.replace(CODE, format="txt"), r"data.sources\[0\].format='txt' is not one of stdlib, text.*text\?"),
        (dataclasses.replace(CODE, text_field=3), r"data.sources\[0\].text_field=3 is of type int; expected str"),
        (
            dataclasses.replace(CODE, length_weights=(LengthWeight(1.5, 1.0),)),
            r"data.sources\[0\].length_weights\[0\].min_tokens=1.5 is of type float; expected int",
        ),
    ],
)
def test_an_ill_typed_source_is_refused(source, told):
    with pytest.raises(UserMistake, match=told):
        check_types(dataclasses.replace(CONFIG, data=DataConfig(sources=(source,))))


def test_the_tokenizer_is_known_unless_a_source_holds_ids():
    assert CONFIG.data.known_tokenizer == "byte"
    ids = SourceConfig("ids", ("x.bin",), "bin")
    assert DataConfig(sources=(CODE, ids)).known_tokenizer is None
    assert DataConfig(sources=(CODE, ids), tokenizer="t.json").known_tokenizer == "t.json"


def test_a_phase_has_other_weights_of_the_run_s_sources():
    weighted = (dataclasses.replace(CODE, weight=9.0, length_weights=()), BOOKS)
    config = dataclasses.replace(CONFIG, phases=(Phase(num_steps=5), Phase(sources=weighted)))
    first, second = config.in_phases()
    assert (first.config.data.sources, second.config.data.sources) == (CONFIG.data.sources, weighted)
    assert config_from_json(json.loads(json.dumps(config_to_json(config)))) == config
    check_types(config)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"name": "other"}, r"phases\[0\]: sources: 'other' is not one of data.sources \(code, books, python\); name"),
        ({"files": ("y",)}, r"phases\[0\]: sources 'code': files=\('y',\) is \('src.*\) in data.sources; use the same"),
        ({"format": "jsonl"}, r"sources 'code': format='jsonl' is 'text' in data.sources"),
        ({"weight": 0.0}, r"the weights of code are all 0"),
    ],
)
def test_other_sources_in_a_phase_are_refused(changes, told):
    with pytest.raises(ValueError, match=told):
        dataclasses.replace(CONFIG, phases=(Phase(sources=(dataclasses.replace(CODE, **changes),)),))
