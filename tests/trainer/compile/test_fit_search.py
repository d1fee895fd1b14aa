"""The search: in the order of harm, the least value that fits, nothing tried in vain, and an end to it."""

import dataclasses

import pytest

from layers import GPTConfig
from tests.trainer.compile.step_profiles import make_profile
from trainer.compile.command.report import describe_search
from trainer.compile.fit_search import Remedy, search_remedy, single_remedies
from trainer.config import LossConfig, MeshConfig, OptimizerConfig, TrainConfig
from trainer.errors import TrainingFailed

MODEL = GPTConfig(vocab_size=64, num_layers=2, width=32, num_heads=4, num_kv_heads=2, head_dim=8, mlp_width=64)


def make_config(**changes) -> TrainConfig:
    settings = {"sequence_length": 1024, "batch_size": 4, "loss": LossConfig(chunk_size=4096)} | changes
    return TrainConfig(
        name="x", model=dataclasses.replace(MODEL, remat=settings.pop("remat", "none")), num_steps=1000, **settings
    )


def run(config: TrainConfig, needed_with, *, num_devices: int = 8, seconds: float = 1000.0):
    """The search, where `needed_with(change)` is what a change needs of 100."""
    told = []
    result = search_remedy(
        config,
        num_devices,
        lambda change: make_profile(needed_with(change)),
        seconds=seconds,
        on_try=lambda attempt: told.append(str(attempt.change)),
    )
    assert told == [str(attempt.change) for attempt in result.tries]
    return result, told


def test_all_changes_in_the_order_of_harm():
    changes = [[str(change) for change in field] for field in single_remedies(make_config(), 8)]
    policies = ("save_matmuls", "save_attention", "full", "offload_attention", "offload_inputs")
    assert changes == [
        [f"--model.remat {policy}" for policy in policies],
        [f"--loss.chunk-size {size}" for size in (2048, 1024, 512, 256, 128)],
        ["--optimizer.offload-moments True"],
        ["--gradient-accumulation 2", "--gradient-accumulation 4"],
        ["--mesh.fsdp 2", "--mesh.fsdp 4"],  # 8 would not divide the batch
        ["--mesh.context 2", "--mesh.context 4", "--mesh.context 8"],
        ["--mesh.tensor 2"],  # 4 would not divide the key/value heads
    ]


def test_nothing_is_offloaded_where_the_host_has_no_other_memory():
    changes = [str(change) for field in single_remedies(make_config(), 8, can_offload=False) for change in field]
    assert changes[:4] == [
        *(f"--model.remat {policy}" for policy in ("save_matmuls", "save_attention", "full")),
        "--loss.chunk-size 2048",
    ]
    assert not any("offload" in change for change in changes)


def test_of_a_policy_by_names_only_the_strictest_is_surely_stricter():
    fields = single_remedies(make_config(remat="save(attention_output) & offload(layer_input)"), 8)
    assert [str(change) for change in fields[0]] == ["--model.remat offload_inputs"]


def test_only_what_can_change_anything_and_is_valid():
    config = make_config(
        remat="offload_inputs",
        optimizer=OptimizerConfig(offload_moments=True),
        batch_size=2,
        gradient_accumulation=2,
        sequence_length=200,
        mesh=MeshConfig(tensor=2),
    )
    changes = [[str(change) for change in field] for field in single_remedies(config, 4)]
    # 200 tokens at once, whatever the chunk is set to: no half of that is worth it. A batch of 1 can't be split.
    assert changes == [["--mesh.context 2"]]
    assert single_remedies(config, 2) == []


def test_the_mesh_takes_a_divisor_of_the_devices():
    config = make_config(remat="full", batch_size=1, sequence_length=960, mesh=MeshConfig(context=2))
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, width=48))  # which 12 divides
    fields = single_remedies(config, 12)
    assert [change.value for change in fields[-2]] == [4, 6, 12]
    assert all(change.field == "mesh.context" for change in fields[-2])


def test_the_first_that_fits_is_the_end_of_it():
    result, told = run(make_config(), lambda change: 100)
    assert told == ["--model.remat save_matmuls"]
    assert result.is_complete
    assert str(result.found.change) == told[0]


def test_the_least_value_of_the_least_harmful_field_that_can():
    def needed(change: Remedy) -> int:
        return {2048: 120, 1024: 110, 512: 100}.get(change.value, 60) if change.field == "loss.chunk_size" else 130

    result, told = run(make_config(), needed)
    assert told == [
        "--model.remat save_matmuls",
        "--model.remat offload_inputs",
        *(f"--loss.chunk-size {size}" for size in (2048, 128, 1024, 512)),
    ]
    assert str(result.found.change) == "--loss.chunk-size 512"
    assert result.found.profile.fit.needed == 100


def test_nothing_fits():
    result, told = run(make_config(), lambda change: 300 if change.field != "mesh.fsdp" else 200 + change.value)
    assert result.found is None
    assert result.is_complete
    assert str(result.closest.change) == "--mesh.fsdp 2"
    assert describe_search(result, 900) == [
        "no single change makes it fit",
        "closest:",
        "  --mesh.fsdp 2: does not fit, 202 B of 100 B",
        "--longest-context finds the longest sequence that fits",
    ]
    assert len(told) == 2 + 2 + 1 + 2 + 2 + 2 + 1


def test_a_change_that_cannot_be_compiled_is_passed_over():
    def needed(change: Remedy) -> int:
        if change.field == "model.remat":
            raise TrainingFailed("the compiler crashed")
        return 90

    result, told = run(make_config(), needed)
    assert told[:2] == ["--model.remat save_matmuls", "--model.remat offload_inputs"]
    assert [attempt.problem for attempt in result.tries[:2]] == ["the compiler crashed"] * 2
    assert str(result.found.change) == "--loss.chunk-size 2048"


@pytest.mark.parametrize(
    ("needed", "seconds", "found"),
    [
        (lambda change: 300, 4, None),
        (lambda change: 300 if change.value == "save_matmuls" else 50, 3, "offload_inputs"),
    ],
)
def test_time_runs_out_and_what_was_found_is_kept(monkeypatch, needed, seconds, found):
    clock = iter(range(100))
    monkeypatch.setattr("trainer.compile.fit_search.time.monotonic", lambda: next(clock))
    result, told = run(make_config(), needed, seconds=seconds)
    expected = ["--model.remat save_matmuls", "--model.remat offload_inputs", "--loss.chunk-size 2048"]
    assert told == expected[: seconds - 1]
    assert (result.found and result.found.change.value, result.is_complete) == (found, False)


@pytest.mark.parametrize(
    "change", [Remedy("model.remat", "full"), Remedy("gradient_accumulation", 2), Remedy("mesh.fsdp", 4)]
)
def test_a_change_applied_is_the_field_set(change):
    changed = change.apply(make_config())
    section, _, name = change.field.rpartition(".")
    assert getattr(getattr(changed, section) if section else changed, name) == change.value
