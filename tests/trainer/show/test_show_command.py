"""`python -m trainer.show`: what it shows are the batches that train, token for token and weight for weight."""

from __future__ import annotations

import dataclasses
import html.parser
import json
import re
from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from tests.trainer.data.chat_templates import STYLES, make_folder, random_chat
from trainer.config import ChatConfig, Phase, SourceConfig, TrainConfig
from trainer.config.file import config_to_json, load_config
from trainer.data import load_corpus, make_train_iterator
from trainer.show.__main__ import main

LENGTH, BATCH = 128, 3
MARK = re.compile(r"⟪|⟫|⟦(.*?)⟧")
ESCAPE = re.compile(r"\x1b\[([\d;]*)m")


@pytest.fixture
def show(capsys):
    """Runs the command in this process: (status, standard output, standard error)."""

    def run_command(*arguments: object) -> tuple[int, str, str]:
        capsys.readouterr()  # the seed's line
        status = main(list(map(str, arguments)))
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run_command


def write_lines(path: Path, lines) -> str:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def some_trees(rng) -> list[dict]:
    def completion(depth: int) -> dict:
        node = {
            "text": "".join(rng.choice(list("xyz é\n"), rng.integers(1, 9))),
            "weight": float(rng.choice([0, 1, 2, -0.5])),
        }
        if depth and rng.random() < 0.5:
            node["completions"] = [completion(depth - 1) for _ in range(rng.integers(1, 4))]
        return node

    return [{"prompt": f"{i}?", "completions": [completion(2) for _ in range(rng.integers(1, 3))]} for i in range(40)]


@pytest.fixture
def page(trainer_command, tmp_path, rng, random_texts):
    """Writes a config of a kind of data, and returns its path and what is in it."""

    def write(kind: str) -> tuple[Path, TrainConfig]:
        config = load_config(trainer_command.config)
        data = dataclasses.replace(config.data, token_cache_dir=str(tmp_path / "tokens"))
        phases = ()
        if kind == "trees":
            data = dataclasses.replace(
                data, source="trees", files=(write_lines(tmp_path / "t.jsonl", some_trees(rng)),)
            )
        elif kind == "chats":
            pytest.importorskip("jinja2", reason="renders chat templates")
            tokenizer = make_folder(tmp_path / "folder", STYLES[str(rng.choice(list(STYLES)))], rng)
            lines = [{"messages": random_chat(rng, 3, calls=False), "weight": 2.0} for _ in range(60)]
            files = (write_lines(tmp_path / "t.jsonl", lines),)
            chat = ChatConfig(too_long="cut")
            data = dataclasses.replace(data, source="chats", files=files, tokenizer=str(tokenizer), chat=chat)
        elif kind == "text":
            lines = [{"text": text} for text in random_texts(60)]
            data = dataclasses.replace(data, source="jsonl", files=(write_lines(tmp_path / "t.jsonl", lines),))
        else:
            sources = []
            for letter, weight in zip("abc", rng.uniform(0.5, 4, 3).tolist(), strict=True):
                lines = [{"text": letter * n} for n in rng.integers(1, 1500, 40).tolist()]
                files = (write_lines(tmp_path / f"{letter}.jsonl", lines),)
                sources.append(SourceConfig(letter, files, format="jsonl", weight=weight))
            later = tuple(dataclasses.replace(source, weight=2.0) for source in sources)
            phases = (Phase(num_steps=int(rng.integers(1, 6))), Phase(sequence_length=2 * LENGTH, sources=later))
            data = dataclasses.replace(data, source="stdlib", files=(), sources=tuple(sources))
            if kind == "phases":
                data = dataclasses.replace(data, source="jsonl", files=sources[0].files, sources=())
                phases = (phases[0], Phase(sequence_length=2 * LENGTH))
        config = dataclasses.replace(
            config, data=data, sequence_length=LENGTH, batch_size=BATCH, phases=phases, seed=int(rng.integers(100))
        )
        if kind == "chats":
            config = dataclasses.replace(config, model=dataclasses.replace(config.model, vocab_size=2000))
        path = tmp_path / "config.json"
        path.write_text(json.dumps(config_to_json(config)))
        return path, config

    return write


def training_sequences(config: TrainConfig, phase: int, count: int) -> list[dict[str, np.ndarray]]:
    """The sequences that the steps of a phase train on, by taking all steps before them."""
    corpus, state = load_corpus(config.data, vocab_size=config.model.vocab_size), None
    for each in config.in_phases()[: phase + 1]:
        own = each.config
        iterator = make_train_iterator(
            corpus, sources=own.data.sources, sequence_length=own.sequence_length, batch_size=own.batch_size,
            seed=own.seed, num_prefetch_batches=2,
        )  # fmt: skip
        if state is not None:
            iterator.set_state(state)
        if each.index < phase:
            for _ in range(each.last_step - each.first_step):
                next(iterator)
            state = iterator.get_state()
            iterator.close()
    sequences = []
    while len(sequences) < count:
        batch = next(iterator).arrays
        sequences += [{name: array[i] for name, array in batch.items()} for i in range(own.batch_size)]
    iterator.close()
    return sequences[:count]


def expected_tokens(sequence: dict[str, np.ndarray]) -> list[tuple[int, float]]:
    """Each segment's first token, without a weight, and then its targets."""
    found, before = [], 0
    columns = (sequence[name].tolist() for name in ("segment_ids", "tokens", "targets", "weights"))
    for segment, token, target, weight in zip(*columns, strict=True):
        if segment:
            found += [(token, 0.0)] * (segment != before) + [(target, weight)]
        before = segment
    return found


def read_shown(text: str) -> list[tuple[int, float]]:
    """Ids and weights, by the marks in a text that was shown with ids."""
    found, weight, is_open = [], 0.0, False
    for match in MARK.finditer(text):
        if match[0] in "⟪⟫":
            assert is_open == (match[0] == "⟫")
            is_open = not is_open
            weight = float(is_open)
        elif match[1].startswith("×"):
            assert is_open
            weight = float(match[1].removeprefix("×"))
        else:
            _, *ids = re.split(r"^(?:\S*[^\s\d]\S* )?", match[1], maxsplit=1)
            found += [(int(each), weight) for each in ids[0].split()]
    assert not is_open
    return found


def shown_sequences(output: str) -> list[str]:
    """The part of each sequence, without the titles of its documents."""
    body = output[: output.index("\nsources: ")]
    parts = re.split(r"\nsequence \d+ of batch \d+: .*\n", body)[1:]
    return [re.sub(r"\n── .*\n", "\n", part) for part in parts]


@pytest.mark.parametrize(
    ("kind", "phase"), [("text", 0), ("trees", 0), ("chats", 0), ("mixture", 0), ("mixture", 1), ("phases", 1)]
)
def test_it_shows_the_batches_that_train(show, page, kind, phase):
    path, config = page(kind)
    options = ("--num-sequences", BATCH + 1, "--ids", "--whole", *(("--phase", phase + 1) if config.phases else ()))
    status, output, errors = show("--config", path, *options)
    assert status == 0, errors
    expected = [expected_tokens(each) for each in training_sequences(config, phase, BATCH + 1)]
    assert [read_shown(part) for part in shown_sequences(output)] == expected


def rows_of(output: str, name: str) -> dict[str, list[str]]:
    """The rows of a table by their labels; the columns of numbers by the last words of the line."""
    lines = output[output.index(f"\n{name}: ") :].strip().split("\n")
    table = lines[2 : lines.index("") if "" in lines else None]
    return {cells[0]: cells[1:] for cells in (re.split(r"\s{2,}", line) for line in table)}


def test_the_tables_count_the_batch(show, page):
    path, config = page("mixture")
    status, output, errors = show("--config", path, "--num-sequences", 1)
    assert status == 0, errors
    counts, weights = Counter(), Counter()
    for sequence in training_sequences(config, 0, BATCH):
        for segment in set(sequence["segment_ids"].tolist()) - {0}:
            own = sequence["segment_ids"] == segment
            ids = {*sequence["tokens"][own].tolist(), *sequence["targets"][own].tolist()} - {256}
            (letter,) = map(chr, ids)
            counts[letter] += 1
            weights[letter] += int(own.sum())
    found = rows_of(output, "sources")
    total, wanted = sum(weights.values()), {source.name: source.weight for source in config.data.sources}
    assert found.keys() == wanted.keys()
    corpus = load_corpus(config.data, vocab_size=config.model.vocab_size)
    for name, cells in found.items():
        train, share = corpus.sources[name].train, f"{weights[name] / total:.1%}"
        asked = f"{wanted[name] / sum(wanted.values()):.1%}"
        numbers = [f"{each:,}" for each in (len(train), train.num_tokens, counts[name], weights[name])]
        assert cells == [*numbers[:2], asked, *numbers[2:], share, numbers[3], share]
    lengths = rows_of(output, "lengths")
    bounds = [0, 1024, 4096]
    expected = {}
    for least, end in pairwise(bounds):
        num = int(((corpus.train.num_targets >= least) & (corpus.train.num_targets < end)).sum())
        expected |= {f"{least:,} to {end - 1:,}": f"{num:,}"} if num else {}
    assert {label: cells[0] for label, cells in lengths.items()} == expected
    assert sum(int(cells[3].replace(",", "")) for cells in lengths.values()) == total


def test_a_long_document_is_shown_by_its_ends(show, page, tmp_path, rng):
    letters = rng.choice(list("pqrs"), 5000)
    files = write_lines(tmp_path / "long.jsonl", [{"text": "".join(letters)}])
    unseen = write_lines(tmp_path / "unseen.jsonl", [{"text": "uv"}])
    path, _ = page("text")
    data = ("--data.files", files, "--data.validation-files", unseen, "--sequence-length", 8192)
    status, output, errors = show("--config", path, *data, "--num-sequences", 1)
    assert status == 0, errors
    long = re.search(r"⟦<256>⟧⟪([p-s]+)⟫\n⟦… ([\d,]+) tokens left out, of which ([\d,]+) count …⟧\n⟪([p-s]+)⟦", output)
    assert long is not None
    num_left_out = int(long[2].replace(",", ""))
    assert long[2] == long[3]
    assert len(long[1]) + num_left_out + len(long[4]) == len(letters)
    assert (long[1], long[4]) == ("".join(letters[: len(long[1])]), "".join(letters[-len(long[4]) :]))


def test_colors_change_no_character(show, page, monkeypatch):
    path, _ = page("trees")
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    plain = show("--config", path)[1]
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    colored = show("--config", path)[1]
    assert "\x1b" not in plain
    assert ESCAPE.sub("", colored) == plain
    colors = {code for found in ESCAPE.findall(colored) for code in found.split(";")}
    assert len(colors & {str(code) for code in range(31, 37)}) > 1, "documents have colours of their own"
    monkeypatch.setenv("NO_COLOR", "1")
    codes = {code for found in ESCAPE.findall(show("--config", path)[1]) for code in found.split(";")}
    assert not codes & {str(code) for code in range(30, 40)}


class Page(html.parser.HTMLParser):
    """The elements of a page, and the tooltips of its tokens."""

    def __init__(self):
        super().__init__()
        self.tags, self.tooltips = Counter(), []
        self.text = ""

    def handle_starttag(self, tag, attrs):
        self.tags[tag] += 1
        self.tooltips += [value for name, value in attrs if name == "title"]

    def handle_data(self, data):
        self.text += data


def test_the_page_is_escaped_and_starts_no_device(trainer_command, page, tmp_path):
    hostile = '<script>alert("1")</script>&amp;</pre>\x1b[31m'
    files = write_lines(tmp_path / "hostile.jsonl", [{"text": f"{i}{hostile}"} for i in range(9)])
    path, config = page("text")
    config = dataclasses.replace(config, data=dataclasses.replace(config.data, files=(files,)))
    path.write_text(json.dumps(config_to_json(config)))
    written = tmp_path / "shown.html"
    # JAX fails at its first device if it is told to use a platform that doesn't exist.
    finished = trainer_command.run_alone(
        "--config", path, "--html", written, module="trainer.show", JAX_PLATFORMS="no_such_platform"
    )
    assert finished.status == 0, finished.errors
    assert f"written: {written}" in finished.output
    assert "script" not in finished.output
    parsed = Page()
    parsed.feed(written.read_text(encoding="utf-8"))
    assert parsed.tags["script"] == 0
    assert hostile.replace("\x1b", "␛") in parsed.text
    found = [re.fullmatch(r"id ([\d ]+), (?:weight (\S+)|no target)", each).groups() for each in parsed.tooltips]
    shown = [(int(each), float(weight or 0)) for ids, weight in found for each in ids.split()]
    assert shown == [token for each in training_sequences(config, 0, 2) for token in expected_tokens(each)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--num-sequences", 0), "--num-sequences 0 must be at least 1"),
        (("--phase", 1), "--phase 1 expects a run with phases, and tiny has none; leave it out"),
        (("--html", "no/such/folder/a.html"), "--html no/such/folder/a.html can't be written; name a file in a folder"),
        (("--idz",), "unknown option --idz; did you mean --ids?"),
    ],
)
def test_mistakes_are_one_message(show, trainer_command, arguments, message):
    status, output, errors = show("--config", trainer_command.config, *arguments)
    assert (status, output) == (2, "")
    assert errors.startswith(f"error: {message}")
    assert errors.count("\n") == 1
