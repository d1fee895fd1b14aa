"""A whole run, to be read from top to bottom: config, data, mesh, plan, step, restore, compile, loop.

`python -m trainer` reads a config page and the flags (`cli/`), claims the workdir (`workdir.py`) and calls `train`.
The code calls into these folders, each named for what it does:

    launch/        joins processes, takes stop signals, ends a run that hangs
    config/        holds every setting, its bounds, and whether a resumption may change it
    data/          makes tokens of documents, and packed batches of tokens
    step/          makes mesh and plan, and model, loss and optimizer as functions of state and batch
    compile/       compiles the functions ahead of their first use
    checkpoints/   keeps the state on the disk
    loop/          holds the steps: log windows, evaluations, saves, resuming
    observers/     tells console, record, metrics and TensorBoard what happens
    sample/        continues prompts
    evaluate/      measures retrieval and losses at length
"""

from __future__ import annotations

import functools
import json
import sys
import threading
from collections.abc import Callable, Sequence

from trainer.checkpoints.base import require_base
from trainer.compile.persistent_cache import use_compilation_cache
from trainer.config import RunPhase, TrainConfig
from trainer.data import Corpus, load_corpus, make_batches
from trainer.data.packing import check_lengths
from trainer.errors import UserMistake, name_some
from trainer.evaluate.tasks import Example
from trainer.launch.membership import ALONE, Membership
from trainer.launch.peers import Peers, require_same
from trainer.loop.attempt import attempt
from trainer.loop.evaluator import describe_validation
from trainer.loop.length_evaluator import make_run_examples
from trainer.loop.origin import find_origin
from trainer.loop.setup import Setup
from trainer.loop.training_loop import TrainingLoop
from trainer.observers.wandb import require_wandb
from trainer.sample.during_training import Samples
from trainer.step.attention_plan import plan_context_parallelism
from trainer.step.flops import FlopCounter, peak_flops_per_s
from trainer.step.functions import make_step_functions
from trainer.step.global_batch import indices_of_process, make_global_batch
from trainer.step.plan import make_plan
from trainer.step.sharding import batch_sharding, make_mesh
from trainer.workdir import Workdir


def train(
    config: TrainConfig,
    workdir: Workdir,
    *,
    command: Sequence[str],
    started: float,
    ending: threading.Event | None = None,
    membership: Membership = ALONE,
    traced: range = range(0),
    owns_process: bool = True,
) -> int:
    """Trains, from the workdir's newest checkpoint if there is one.

    Args:
      config: the experiment.
      workdir: claimed for this process.
      command: the command line, for the record.
      started: `time.perf_counter()` when the process began.
      ending: set once a stop signal can no longer change the run's exit status.
      membership: of this process among those that train together.
      traced: steps to trace for xprof.
      owns_process: whether a stop signal may end the process; otherwise it belongs to the caller (`trainer.run`).

    Returns:
      The exit status: 0 when all steps are done, 75 when a signal stopped the run after saving.

    Raises:
      UserMistake: data, mesh or model can't be used as the config says.
      TrainingFailed: the devices can't start, a device or this machine is out of memory, too many updates in a row were
        skipped, the data can't be read any more, no checkpoint can be read, the last can't be saved, or something
        called `sys.exit`.
    """
    with attempt(
        config,
        workdir,
        command=command,
        started=started,
        ending=ending,
        membership=membership,
        owns_process=owns_process,
    ) as this:
        origin = find_origin(config, this.record["init_from"], this.console, this.peers)
        setups = prepare(config, this.console.note, this.peers)
        this.opened(setups, origin.get("family"))
        loop = TrainingLoop(setups, workdir, this, traced)
        try:
            loop.restore()
            loop.compile()
            this.under_way = loop.progress.under_way
            return take_steps(loop)
        finally:
            this.over.set()
            loop.close()


def prepare(config: TrainConfig, on_progress: Callable[[str], None], peers: Peers | None = None) -> tuple[Setup, ...]:
    """Opens the data, makes mesh and plan, and builds the step functions, in the order that finds mistakes soonest.

    Nothing is compiled yet. `on_progress` is called with a line about work that takes long. All `peers` must be at it.

    Returns:
      One for each phase; a run without phases is one.

    Raises:
      UserMistake: an extra isn't installed, the data can't be trained on, the mesh doesn't fit the devices, the
        attention backend can't serve a mask or a sample, `tensor.collectives` or `loss.implementation` can't serve, or
        processes differ in their data.
      TrainingFailed: the devices can't be started.
    """
    peers = peers or Peers()
    if peers.count > 1 and config.samples.prompts:
        raise UserMistake(
            f"samples.prompts={name_some(config.samples.prompts)} aren't continued by several processes together yet; "
            "leave them out (--samples.prompts with nothing behind it), and continue texts from a checkpoint, with "
            "python -m trainer.sample"
        )
    if peers.is_first and config.wandb.project is not None:
        require_wandb(config.wandb.project)
    require_base(config)
    phases = config.in_phases()
    for phase in phases:
        plan_context_parallelism(phase.config, None)  # refuses what no device can do, before the data is read
    corpus = load_corpus(config.data, vocab_size=config.model.vocab_size, on_progress=on_progress)
    require_same(peers, "data", {"fingerprint": corpus.fingerprint, "tokenizer": corpus.tokenizer.identity})
    for phase in phases:
        for documents in (corpus.train, corpus.validation):
            check_lengths(documents, phase.config.sequence_length)
    samples = [Samples(phase.config, corpus.tokenizer) if config.samples.prompts else None for phase in phases]
    use_compilation_cache(config.compilation.cache_dir)
    warn_of_short_documents(phases, corpus, on_progress)
    examples = make_run_examples(config, corpus.tokenizer)
    return tuple(
        prepare_phase(phase, config, corpus, (of_phase, examples), on_progress, peers)
        for phase, of_phase in zip(phases, samples, strict=True)
    )


def prepare_phase(
    phase: RunPhase,
    run: TrainConfig,
    corpus: Corpus,
    asked: tuple[Samples | None, Sequence[Example]],
    on_progress: Callable[[str], None],
    peers: Peers,
) -> Setup:
    """Makes mesh, plan, step functions and batches of one phase. Arguments are as in `Setup` and `prepare`."""
    config, mesh = phase.config, make_mesh(phase.config.mesh)
    plan = make_plan(config, mesh)
    samples, examples = asked
    if samples is not None:
        samples.check()
    functions = make_step_functions(config, mesh, plan, schedule_from=phase.schedule_from)
    sharding = batch_sharding(mesh)
    indices_of = functools.partial(indices_of_process, sharding, sequence_length=config.sequence_length)
    batches, validation_shares, validation = make_batches(
        config, corpus, plan.sequence_sharding, on_progress, indices_of
    )
    validation_batches = [make_global_batch(share, sharding) for share in validation_shares]
    # Process 0 measures it for all: the others read no sequences but their own.
    described = peers.of_first(
        f"validation/{phase.index}", lambda: json.dumps(describe_validation(config, validation, corpus.tokenizer))
    )
    num_bytes, digest = json.loads(described)
    flops = FlopCounter(
        config.model,
        config.sequence_length,
        keep_documents_apart=config.data.keep_documents_apart,
        lora=config.lora,
    )
    peak = peak_flops_per_s(mesh.devices.flat[0], config.model.compute_dtype)
    sources = tuple(share.source for share in validation_shares)
    return Setup(
        run,
        phase,
        corpus,
        plan,
        functions,
        batches,
        validation_batches,
        num_bytes,
        digest,
        samples,
        examples,
        flops,
        peak,
        sources,
    )


def warn_of_short_documents(phases: Sequence[RunPhase], corpus: Corpus, on_progress: Callable[[str], None]) -> None:
    """Warns of phases in whose sequences no document comes near the end: they teach no longer context."""
    longest = corpus.train.longest
    for phase in phases[1:]:
        if longest * 2 < phase.config.sequence_length:
            on_progress(
                f"phases[{phase.index}] has sequences of {phase.config.sequence_length:,} tokens, and the longest "
                f"training document has {longest:,}: no token sees more than its own document; add longer documents"
            )


def take_steps(loop: TrainingLoop) -> int:
    """Steps to the end, or to a stop signal; returns the exit status."""
    with loop.watched():
        loop.evaluate_if_due()
        loop.change_phase_if_due()
        while loop.goes_on:
            loop.run_window()
            loop.evaluate_if_due()
            loop.save_if_due()
            loop.change_phase_if_due()
        loop.save_at_last()
    return loop.end()


if __name__ == "__main__":
    sys.exit("error: trainer.train is no command; python -m trainer --config FILE trains")
