"""Evaluation counts targets by their weights, and a loss counts as measured only where it was measured the same way."""

import dataclasses
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from layers import GPTConfig
from trainer.config import DataConfig, EvaluationConfig, LossConfig, MeshConfig, OptimizerConfig, TrainConfig
from trainer.data import load_corpus, make_batches
from trainer.loop.evaluator import Evaluator, describe_validation, evaluate
from trainer.observers.observer import Evaluated
from trainer.step.loss import CrossEntropy

T = 64


def eval_step(scale, batch):
    nats, weights = scale * batch["nats"], batch.get("weights", jnp.ones_like(batch["nats"]))
    total, num_targets = (nats * weights).sum(), (weights != 0).sum()
    return CrossEntropy(total, total, jnp.zeros(()), jnp.abs(weights).sum(), num_targets, jnp.zeros(()))


BATCHES = [{"nats": jnp.array([1.0, 2.0, 3.0])}, {"nats": jnp.array([10.0])}]


def test_mean_over_targets_not_batches():
    result = evaluate(eval_step, 2.0, BATCHES, num_bytes=None)
    assert (result.nats_per_token, result.bits_per_byte, result.num_targets) == (8.0, None, 4)


def test_bits_per_byte():
    assert evaluate(eval_step, 1.0, BATCHES, num_bytes=32).bits_per_byte == pytest.approx(0.5 / math.log(2))


def test_no_targets_is_refused():
    with pytest.raises(ValueError, match=r"1 batch\(es\) without a single target"):
        evaluate(eval_step, 1.0, [{"nats": jnp.array([])}], num_bytes=None)


def fields_of(folder: Path, suffix: str) -> dict[str, Any]:
    """The files of training and of validation."""
    names = {"files": "train", "validation_files": "validation"}
    return {field: (f"{folder}/{name}{suffix}",) for field, name in names.items()}


@pytest.fixture
def base(tmp_path, rng) -> TrainConfig:
    """Training files, validation files, and others in their place."""
    for folder, num_files in (("train", 20), ("validation", 12), ("other", 12)):
        (tmp_path / folder).mkdir()
        for number in range(num_files):
            text = "".join(rng.choice(list("abc é中"), rng.integers(10, 90)))
            (tmp_path / folder / f"{number}.txt").write_text(text)
    sizes = {"num_layers": 1, "width": 16, "num_heads": 2, "num_kv_heads": 1, "head_dim": 8, "mlp_width": 32}
    data = DataConfig(source="text", token_cache_dir=f"{tmp_path}/cache", **fields_of(tmp_path, "/*.txt"))
    evaluation = EvaluationConfig(num_sequences=100)  # all that there are
    model = GPTConfig(vocab_size=512, **sizes)
    return TrainConfig("base", model, num_steps=200, sequence_length=T, data=data, evaluation=evaluation)


def describe(config: TrainConfig):
    """(bytes, digest), and what the loss of given parameters follows from: the oracle."""
    corpus = load_corpus(config.data, vocab_size=config.model.vocab_size)
    train, batches, validation = make_batches(config, corpus, "contiguous", lambda line: None)
    train.close()
    rows = [row for batch in batches for row in zip(*batch.arrays.values(), strict=True) if row[2].any()]
    measured = [[array.tolist() for array in row] for row in rows]
    followed = (measured, config.data.keep_documents_apart, config.model.compute_dtype)
    return describe_validation(config, validation, corpus.tokenizer), followed


CHANGES = {
    "validation_files": {"data.validation_files": ("other/*.txt",)},
    "a file's content": "validation/3.txt",
    "a file more": "validation/new.txt",
    "a split of the training files": {"data.validation_files": ()},
    "the fraction of that split": {"data.validation_files": (), "data.validation_fraction": 0.5},
    "tokenizer": {"data.tokenizer": "tokenizer.json"},
    "num_sequences": {"evaluation.num_sequences": 2},
    "sequence_length": {"sequence_length": 2 * T},
    "keep_documents_apart": {"data.keep_documents_apart": False},
    "compute_dtype": {"model.compute_dtype": "float32"},
    "nothing": {},
    "num_sequences, of which there are fewer": {"evaluation.num_sequences": 200},
    "batch_size": {"batch_size": 4},
    "gradient_accumulation": {"batch_size": 4, "gradient_accumulation": 2},
    "num_steps": {"num_steps": 300},
    "how it is trained": {"optimizer": OptimizerConfig(3e-3), "loss": LossConfig(chunk_size=16, z_loss=0.0)},
    "how it is computed": {"model.implementation": "reference", "model.remat": "none", "mesh": MeshConfig(data=2)},
    "training files": {"data.files": ("other/*.txt",)},
    "a training file's content": "train/3.txt",
    "every_num_steps": {"evaluation.every_num_steps": 3},
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_loss_is_measured_anew_exactly_where_something_else_is_measured(change, base, tmp_path, tokenizer_file):
    def changed(config, name: str, value):
        section, _, field = name.rpartition(".")
        if field.endswith("files"):
            value = tuple(f"{tmp_path}/{glob}" for glob in value)
        if field == "tokenizer":
            value = str(tokenizer_file)
        of = getattr(config, section) if section else config
        of = dataclasses.replace(of, **{field: value})
        return dataclasses.replace(config, **{section: of}) if section else of

    before, oracle_before = describe(base)
    after_config = base
    if isinstance(CHANGES[change], str):
        (tmp_path / CHANGES[change]).write_text("something else, é中, " * 4)
    else:
        if "batch_size" not in CHANGES[change]:
            after_config = dataclasses.replace(base, batch_size=2)
        for name, value in CHANGES[change].items():
            after_config = changed(after_config, name, value)
    after, oracle_after = describe(after_config)
    assert (before[1] == after[1]) == (oracle_before == oracle_after)
    assert (before[1] == after[1]) == (list(CHANGES).index(change) >= list(CHANGES).index("nothing"))

    # A run that is finished prints the loss that it has, or measures another.
    entry = {"step": 9, "validation_nats_per_token": 7.5, "validation_digest": before[1]}
    evaluator = Evaluator(
        SimpleNamespace(validation_digest=after[1], phase=SimpleNamespace(first_step=0)), None, None, None
    )
    told = evaluator.take_up([{"step": 5, "validation_nats_per_token": 8.0, "validation_digest": "old"}, entry])
    assert evaluator.evaluations == ({9: entry} if before == after else {})
    assert (told is None) == (before == after)
    assert told is None or "measured otherwise from now on, and don't compare with those up to here" in told


def num_bytes_of_tokens(tokenizer, ids: list[int]) -> int:
    """Of byte-level tokens, each for itself: GPT-2 spells each byte as one character."""
    names = (tokenizer._tokenizer.id_to_token(i) for i in ids if i != tokenizer.delimiters.end)
    return sum(map(len, names))


@pytest.mark.parametrize("source", ["text", "bin"])
@pytest.mark.parametrize("tokenizer", ["byte", "byte-level"])
def test_bits_per_byte_are_of_the_evaluated_tokens_own_bytes(base, tmp_path, tokenizer_file, source, tokenizer, rng):
    """Long documents are cut, within characters too, and only some of their parts are evaluated."""
    name = "byte" if tokenizer == "byte" else str(tokenizer_file)
    for number in range(3):  # long ones have few bytes to a token, short ones many
        (tmp_path / "validation" / f"long{number}.txt").write_text("".join(rng.choice(list("é中🙂x"), 400)))
        (tmp_path / "validation" / f"short{number}.txt").write_text("the cat and the hat " * 3)
    data = dataclasses.replace(base.data, tokenizer=name)
    if source == "bin":
        from trainer.data import load_tokenizer

        loaded = load_tokenizer(name)
        for folder in ("train", "validation"):
            texts = [path.read_text() for path in sorted((tmp_path / folder).iterdir())]
            ids = [i for text in texts for i in [*loaded.encode(text), loaded.delimiters.end]]
            np.asarray(ids, "<u2").tofile(tmp_path / f"{folder}.bin")
        data = dataclasses.replace(data, source="bin", **fields_of(tmp_path, ".bin"))
    config = dataclasses.replace(base, data=data, evaluation=EvaluationConfig(num_sequences=9))
    corpus = load_corpus(data, vocab_size=512)
    train, batches, validation = make_batches(config, corpus, "contiguous", lambda line: None)
    train.close()
    targets = [i for batch in batches for i in batch.arrays["targets"][batch.arrays["weights"] != 0].tolist()]
    expected = sum(i < 256 for i in targets) if tokenizer == "byte" else num_bytes_of_tokens(corpus.tokenizer, targets)
    assert describe_validation(config, validation, corpus.tokenizer)[0] == expected


def test_a_space_after_many_byte_tokens_is_counted(tmp_path):
    """Llama 2's decoder takes a space away, but only at the beginning of a text."""
    from tokenizers import Tokenizer, decoders, models

    from trainer.data import load_tokenizer

    names = ["<unk>", "</s>", "\u2581", "x", *(f"<0x{byte:02X}>" for byte in range(256))]
    vocabulary = {name: index for index, name in enumerate(names)}
    made = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    parts = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    made.decoder = decoders.Sequence(parts)
    made.add_special_tokens(["<unk>", "</s>"])
    made.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(str(tmp_path / "tokenizer.json"))
    ids = [vocabulary[f"<0x{byte:02X}>"] for byte in "🙂".encode() * 4] + [vocabulary["\u2581"], vocabulary["x"]]
    assert tokenizer.num_bytes(ids, 16) == len(" x")
    assert tokenizer.num_bytes(ids, 0) == 18
    assert tokenizer.num_bytes(ids[16:], 0) == len("x")


def test_bytes_of_ids_without_a_tokenizer_are_unknown(base, tmp_path, rng):
    for name in ("train", "validation"):
        np.asarray([*rng.integers(0, 256, 500), 256], "<u2").tofile(tmp_path / f"{name}.bin")
    data = dataclasses.replace(base.data, source="bin", end_of_document_token=256, **fields_of(tmp_path, ".bin"))
    assert describe(dataclasses.replace(base, data=data))[0][0] is None


def test_losses_that_an_earlier_version_logged_are_measured_anew_without_a_word():
    evaluator = Evaluator(SimpleNamespace(validation_digest="d", phase=SimpleNamespace(first_step=0)), None, None, None)
    assert evaluator.take_up([{"step": 9, "validation_nats_per_token": 7.5}]) is None
    assert evaluator.evaluations == {}


def test_targets_of_the_whole_and_of_each_source_count_by_their_weights():
    nats = [[1.0, 2.0, 3.0], [4.0], [10.0], [5.0]]
    weights = [[0.5, 0.0, -1.0], [0.5], [2.0], [0.0]]
    batches = [{"nats": jnp.array(x), "weights": jnp.array(w)} for x, w in zip(nats, weights, strict=True)]
    result = evaluate(eval_step, 1.0, batches, None, sources=("a", "a", "b", "none"))
    assert result.nats_per_token == pytest.approx((0.5 - 3 + 2 + 20) / 4)
    assert result.nats_per_token_by_source == pytest.approx({"a": -0.5 / 2, "b": 10.0})
    assert result.num_targets == 4
    entry = Evaluated.now(5, result, "d").entry
    assert entry["validation_nats_per_token/b"] == 10.0
