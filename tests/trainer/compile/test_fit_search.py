"""The search: in the order of harm, the least value that fits, nothing tried in vain, and an end to it."""

import dataclasses

import pytest

from layers import GPTConfig
from tests.trainer.compile.step_profiles import make_profile
from trainer.compile.changes import Changes
from trainer.compile.command.report import describe_search
from trainer.compile.fit_search import Search, Try, search_remedy, single_remedies
from trainer.config import LossConfig, MeshConfig, OptimizerConfig, TrainConfig
from trainer.errors import TrainingFailed

MODEL = GPTConfig(vocab_size=64, num_layers=2, width=32, num_heads=4, num_kv_heads=2, head_dim=8, mlp_width=64)


def make_config(**changes) -> TrainConfig:
    settings = {"sequence_length": 1024, "batch_size": 4, "loss": LossConfig(chunk_size=4096)} | changes
    return TrainConfig(
        name="x", model=dataclasses.replace(MODEL, remat=settings.pop("remat", "none")), num_steps=1000, **settings
    )


def run(config: TrainConfig, needed_with, *, seconds: float = 1000.0) -> tuple[Try | None, Search, list[str]]:
    """The search, where `needed_with(field, value)` is what a change needs of 100, and what was tried."""
    told = []
    search = Search(
        config,
        lambda changes: make_profile(needed_with(*changes.values[0])),
        num_devices=8,
        seconds=seconds,
        on_try=lambda attempt: told.append(str(attempt.changes)),
    )
    found = search_remedy(search)
    assert told == [str(changes) for changes in search.tries]
    return found, search, told


def test_all_changes_in_the_order_of_harm():
    policies = ["save_matmuls", "save_attention", "full", "offload_attention", "offload_inputs"]
    expected = {
        "model.remat": policies,
        "loss.chunk_size": [2048, 1024, 512, 256, 128],
        "optimizer.offload_moments": [True],
        "gradient_accumulation": [2, 4],
        "mesh.fsdp": [2, 4],  # 8 would not divide the batch
        "mesh.context": [2, 4, 8],
        "mesh.tensor": [2],  # 4 would not divide the key/value heads
    }
    assert [*single_remedies(make_config(), 8).items()] == [*expected.items()]
    # Where the host has no other memory, nothing is offloaded.
    del expected["optimizer.offload_moments"]
    expected["model.remat"] = policies[:3]
    assert single_remedies(make_config(), 8, can_offload=False) == expected


def test_of_a_policy_by_names_only_the_strictest_is_surely_stricter():
    fields = single_remedies(make_config(remat="save(attention_output) & offload(layer_input)"), 8)
    assert fields["model.remat"] == ["offload_inputs"]


def test_only_what_can_change_anything_and_is_valid():
    config = make_config(
        remat="offload_inputs",
        optimizer=OptimizerConfig(offload_moments=True),
        batch_size=2,
        gradient_accumulation=2,
        sequence_length=200,
        mesh=MeshConfig(tensor=2),
    )
    # 200 tokens at once, whatever the chunk is set to: no half of that is worth it. A batch of 1 can't be split.
    assert single_remedies(config, 4) == {"mesh.context": [2]}
    assert single_remedies(config, 2) == {}


def test_the_mesh_takes_a_divisor_of_the_devices():
    config = make_config(remat="full", batch_size=1, sequence_length=960, mesh=MeshConfig(context=2))
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, width=48))  # which 12 divides
    assert single_remedies(config, 12)["mesh.context"] == [4, 6, 12]


def test_the_first_that_fits_is_the_end_of_it():
    found, search, told = run(make_config(), lambda *_: 100)
    assert told == ["--model.remat save_matmuls"] == [str(found.changes)]
    assert search.is_complete


def test_the_least_value_of_the_least_harmful_field_that_can():
    def needed(field: str, value: object) -> int:
        return {2048: 120, 1024: 110, 512: 100}.get(value, 60) if field == "loss.chunk_size" else 130

    found, _, told = run(make_config(), needed)
    assert told == [
        "--model.remat save_matmuls",
        "--model.remat offload_inputs",
        *(f"--loss.chunk-size {size}" for size in (2048, 128, 1024, 512)),
    ]
    assert str(found.changes) == "--loss.chunk-size 512"
    assert found.profile.fit.needed == 100


def test_nothing_fits():
    found, search, told = run(make_config(), lambda field, value: 300 if field != "mesh.fsdp" else 200 + value)
    assert found is None
    assert search.is_complete
    assert describe_search(search, found, 900) == [
        "no single change makes it fit",
        "closest:",
        "  --mesh.fsdp 2: does not fit, 202 B of 100 B",
        "--longest-context finds the longest sequence that fits",
    ]
    assert len(told) == 2 + 2 + 1 + 2 + 2 + 2 + 1


def test_a_change_that_cannot_be_compiled_is_passed_over():
    def needed(field: str, value: object) -> int:
        if field == "model.remat":
            raise TrainingFailed("the compiler crashed")
        return 90

    found, search, told = run(make_config(), needed)
    assert told[:2] == ["--model.remat save_matmuls", "--model.remat offload_inputs"]
    assert [attempt.problem for attempt in search.tries.values()][:2] == ["the compiler crashed"] * 2
    assert str(found.changes) == "--loss.chunk-size 2048"


@pytest.mark.parametrize(
    ("needed", "seconds", "found"),
    [
        (lambda field, value: 300, 4, None),
        (lambda field, value: 300 if value == "save_matmuls" else 50, 3, "--model.remat offload_inputs"),
    ],
)
def test_time_runs_out_and_what_was_found_is_kept(monkeypatch, needed, seconds, found):
    clock = iter(range(100))
    monkeypatch.setattr("trainer.compile.fit_search.time.monotonic", lambda: next(clock))
    result, search, told = run(make_config(), needed, seconds=seconds)
    expected = ["--model.remat save_matmuls", "--model.remat offload_inputs", "--loss.chunk-size 2048"]
    assert told == expected[: seconds - 1]
    assert (result and str(result.changes), search.is_complete) == (found, False)


@pytest.mark.parametrize(("field", "value"), [("model.remat", "full"), ("gradient_accumulation", 2), ("mesh.fsdp", 4)])
def test_a_change_applied_is_the_field_set(field, value):
    changed = Changes(((field, value),)).apply(make_config())
    section, _, name = field.rpartition(".")
    assert getattr(getattr(changed, section) if section else changed, name) == value
