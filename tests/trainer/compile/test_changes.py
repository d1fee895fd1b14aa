"""Changes of a phase are set where the phase takes the field from."""

import dataclasses

import pytest

from layers import GPTConfig
from trainer.compile.changes import Changes, PhaseOfRun
from trainer.config import MeshConfig, OptimizerConfig, Phase, TrainConfig

MODEL = GPTConfig(vocab_size=64, num_layers=2, width=32, num_heads=4, num_kv_heads=2, head_dim=8, mlp_width=64)
OWN = OptimizerConfig(num_warmup_steps=1)
RUN = TrainConfig(
    "x",
    MODEL,
    num_steps=1000,
    batch_size=4,
    phases=(
        Phase(num_steps=300),
        Phase(num_steps=300, optimizer=OWN, mesh=MeshConfig(fsdp=1)),
        Phase(batch_size=2),
    ),
)


def change(index: int, field: str, value: object) -> Changes:
    return Changes(phase=PhaseOfRun(RUN, index)).also(field, value)


@pytest.mark.parametrize(
    ("index", "field", "value", "told"),
    [
        (2, "model.remat", "none", "phases[2].remat='none'"),
        (0, "gradient_accumulation", 2, "phases[0].gradient_accumulation=2"),
        (1, "loss.chunk_size", 512, "--loss.chunk-size 512"),
        (0, "optimizer.offload_moments", True, "--optimizer.offload-moments True"),
        (2, "optimizer.offload_moments", True, "phases[1].optimizer.offload_moments=True"),
    ],
)
def test_a_change_made_where_it_is_told_is_the_phases_own(index, field, value, told):
    changes = change(index, field, value)
    assert str(changes) == told
    changes.check_run()
    phases, run = [*RUN.phases], RUN
    for setting in changes.phase_settings:
        section, _, name = setting.field.rpartition(".")
        phase = phases[setting.phase]
        new = dataclasses.replace(getattr(phase, section), **{name: value}) if section else value
        phases[setting.phase] = dataclasses.replace(phase, **{section or name: new})
    if changes.arguments:
        run = Changes(((field, value),)).apply(run)
    changed = dataclasses.replace(run, phases=tuple(phases)).in_phases()[index].config
    assert changed == changes.apply(RUN.in_phases()[index].config)
    assert changed != RUN.in_phases()[index].config


@pytest.mark.parametrize(
    ("index", "field", "value", "told"),
    [
        (0, "gradient_accumulation", 4, r"phases\[2\]: batch_size=2 is not a multiple of gradient_accumulation=4"),
        (1, "mesh.fsdp", 2, r"phases\[1\]: mesh=.* another number of devices"),
    ],
)
def test_a_change_that_another_phase_cannot_have_is_refused(index, field, value, told):
    with pytest.raises(ValueError, match=told):
        change(index, field, value).check_run()
