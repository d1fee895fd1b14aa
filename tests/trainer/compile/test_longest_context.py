"""The search for the longest context: as the config is, then with changes that are kept; few compilations."""

import dataclasses
from collections.abc import Callable

import pytest

from layers import GPTConfig
from tests.trainer.compile.step_profiles import make_profile
from trainer.compile.changes import Changes
from trainer.compile.command.report import describe_longest_context
from trainer.compile.fit_search import Search
from trainer.compile.longest_context import LongestContext, search_longest_context
from trainer.config import LossConfig, MeshConfig, TrainConfig
from trainer.errors import TrainingFailed

MODEL = GPTConfig(vocab_size=64, num_layers=2, width=32, num_heads=4, num_kv_heads=2, head_dim=8, mlp_width=64)


def make_config(length: int = 1024, remat: str = "none", **changes) -> TrainConfig:
    settings = {"batch_size": 1, "loss": LossConfig(chunk_size=128)} | changes
    return TrainConfig("x", dataclasses.replace(MODEL, remat=remat), num_steps=1000, sequence_length=length, **settings)


def search(
    config: TrainConfig,
    needed: Callable[[TrainConfig], float],
    *,
    seconds: float = 1000.0,
    num_devices: int = 1,
) -> tuple[LongestContext, Search]:
    """The search, where `needed(config)` is what a config needs of 100."""
    compiled = []

    def compile_with(changes: Changes):
        compiled.append(str(changes))
        return make_profile(needed(changes.apply(config)), num_devices)

    profile, told = make_profile(needed(config), num_devices), []
    tries = Search(
        config,
        compile_with,
        num_devices=num_devices,
        seconds=seconds,
        on_try=lambda attempt: told.append(str(attempt.changes)),
    )
    found = search_longest_context(tries, profile)
    assert told == compiled, "each try is told once"
    assert len(set(compiled)) == len(compiled), "nothing is compiled twice"
    assert [*map(str, tries.tries)][1:] == compiled, "the first is the config as it is"
    return found, tries


def longest_by_hand(needed: Callable[[int], float], length: int) -> int | None:
    """The longest by trying all lengths of three bits below a leading one, and the config's own."""
    tried = {8 * 2**k + j * 2**k for k in range(4, 27) for j in range(8)} | {length}
    return max((each for each in tried if each >= 128 and needed(each) <= 100), default=None)


@pytest.mark.parametrize("length", [128, 1024, 32_768, 1000, 33_000])
@pytest.mark.parametrize("limit", [100, 128, 1023, 1024, 1500, 40_000, 65_536, 1_000_000])
def test_as_the_config_is(length, limit):
    """Nothing but the length matters, so that no change helps."""
    found, tries = search(make_config(length), lambda config: 100 * config.sequence_length / limit)
    expected = longest_by_hand(lambda each: 100 * each / limit, length)
    assert found.as_is.tokens == found.changed.tokens == expected
    assert tries.is_complete
    if expected is not None:
        assert expected < found.as_is.too_long <= 1.13 * expected or expected == length
        assert found.as_is.attempt.changes.arguments == ("--sequence-length", str(expected))
    num_powers = abs(limit.bit_length() - length.bit_length()) + 1
    assert sum(len(each.values) == 1 for each in tries.tries) <= num_powers + 5


def test_changes_are_kept_for_the_lengths_above_and_the_least_harmful_is_taken():
    """Each stricter policy halves what a token needs, and so does each doubling of the context axis."""
    policies = ["none", "save_matmuls", "save_attention", "full", "offload_attention", "offload_inputs"]

    def needed(config: TrainConfig) -> float:
        of_token = 0.5 ** policies.index(config.model.remat) / config.mesh.context
        return 100 * config.sequence_length * of_token / 1024

    found, tries = search(make_config(), needed, num_devices=4)
    assert (found.as_is.tokens, found.as_is.too_long) == (1024, 1152)
    # 2048 and 4096 fit with the next policy each, and so on; then with more devices.
    assert str(found.changed.attempt.changes) == (
        "--sequence-length 131072 --model.remat offload_inputs --mesh.context 4"
    )
    assert (found.changed.tokens, found.changed.too_long) == (1024 * 32 * 4, 147_456)
    assert found.changed.attempt.profile.fit.needed == 100
    assert len(tries.tries) < 80
    lines = describe_longest_context(tries, found, 900)
    assert lines == [
        "longest context as the config is: 1,024 tokens (1,152 don't fit)",
        "longest context with changes: 131,072 tokens (147,456 don't fit):",
        "  --sequence-length 131072 --model.remat offload_inputs --mesh.context 4",
    ]


@pytest.mark.parametrize(
    ("needed", "tokens", "lines"),
    [
        (
            lambda config: 500 if config.model.remat == "none" else config.sequence_length / 20,
            (None, 1920),
            ["longest context as the config is: none (128 don't fit)"],
        ),
        (
            lambda config: 101,
            (None, None),
            ["no context fits, whatever changes are made: change the batch, the model or the topology"],
        ),
        (
            lambda config: config.sequence_length / 10.24,
            (1024, 1024),
            [
                "longest context as the config is: 1,024 tokens (1,152 don't fit)",
                "no change of one field makes a longer one fit",
            ],
        ),
        (lambda config: 1, (2**30, 2**30), ["longest context as the config is: 1,073,741,824 tokens"]),
    ],
    ids=["with a change only", "nothing", "no change helps", "everything"],
)
def test_what_fits_is_told(needed, tokens, lines):
    found, tries = search(make_config(), needed)
    assert (found.as_is.tokens, found.changed.tokens) == tokens
    assert describe_longest_context(tries, found, 900)[: len(lines)] == lines


def test_a_length_that_cannot_be_compiled_does_not_fit():
    def needed(config: TrainConfig) -> float:
        if config.sequence_length > 3000:
            raise TrainingFailed("the compiler crashed")
        return 50

    found, tries = search(make_config(), needed)
    assert (found.as_is.tokens, found.as_is.too_long) == (2816, 3072)
    assert "the compiler crashed" in {attempt.problem for attempt in tries.tries.values()}


def test_lengths_stay_what_the_mesh_divides():
    config = make_config(24_576, mesh=MeshConfig(context=8))
    found, tries = search(config, lambda config: config.sequence_length / 700, num_devices=8)
    assert found.as_is.tokens == 69_632 - 69_632 % 8192 == 65_536
    assert all(attempt.problem is None for attempt in tries.tries.values())


def test_time_runs_out(monkeypatch):
    clock = iter(range(1000))
    monkeypatch.setattr("trainer.compile.fit_search.time.monotonic", lambda: next(clock))
    found, tries = search(make_config(), lambda config: config.sequence_length / 100, seconds=4)
    assert len(tries.tries) == 1 + 3
    assert not tries.is_complete
    assert found.as_is.tokens == found.changed.tokens == 8192
    assert describe_longest_context(tries, found, 4) == [
        "longest context as the config is: 8,192 tokens",
        "(not everything was tried in the 4 s of --search-seconds)",
    ]
