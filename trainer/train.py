"""A whole run, to be read from top to bottom: config, data, mesh, step, compile, loop.

`python -m trainer` reads a config page and the flags (`trainer/cli/`), claims the workdir (`trainer/workdir.py`) and
calls `train`. The code calls into these folders, each named for what it does:

    data/          makes tokens of documents, and packed batches of tokens
    step/          makes the mesh, and model, loss and optimizer as functions of state and batch
    checkpoints/   keeps the state on the disk
    compile/       compiles the functions ahead of their first use
    observers/     tells console, record, metrics and TensorBoard what happens
    loop/          holds what else a run needs: stop signals, progress, log windows, saves, resuming
"""

from __future__ import annotations

import functools
import json
import sys
import threading
from collections.abc import Callable, Sequence

import jax

from kernels import Target
from trainer.checkpoints.training_state import Checkpoints
from trainer.compile.history import CompileHistory
from trainer.compile.out_of_memory import running
from trainer.compile.persistent_cache import cache_folder, use_compilation_cache
from trainer.compile.programs import CompiledSteps, compile_steps
from trainer.config import TrainConfig
from trainer.config.changes import ConfigHistory, changes_to_json
from trainer.data import load_corpus, make_batches
from trainer.errors import TrainingFailed, UserMistake, name_some
from trainer.hosts.agreement import require_same
from trainer.hosts.membership import ALONE, Membership
from trainer.hosts.peers import Peers
from trainer.loop.attempt import Attempt, attempt
from trainer.loop.ending import tell_ending
from trainer.loop.evaluator import Evaluator, describe_validation
from trainer.loop.initial_params import load_initial_params
from trainer.loop.origin import find_origin
from trainer.loop.progress import Progress
from trainer.loop.resume import restore
from trainer.loop.retention import spared_steps
from trainer.loop.saver import Saver, Snapshot
from trainer.loop.setup import Setup
from trainer.loop.skipped_updates import too_many_skipped
from trainer.loop.step_trace import StepTrace
from trainer.loop.watchdog import Watchdog
from trainer.loop.window import RunningWindow
from trainer.observers.make_observers import make_observers
from trainer.observers.metrics import LoggedEntries
from trainer.observers.observer import Observers, Start
from trainer.observers.times import StepTimes
from trainer.observers.wandb import require_wandb
from trainer.sample.during_training import Samples
from trainer.step.attention_plan import plan_attention, plan_sequence_sharding
from trainer.step.expert_plan import plan_experts
from trainer.step.flops import FlopCounter, peak_flops_per_s
from trainer.step.functions import TrainState, make_step_functions
from trainer.step.global_batch import make_global_batch, rows_of_process
from trainer.step.loss_plan import plan_loss
from trainer.step.sharding import batch_sharding, make_mesh
from trainer.step.tensor_plan import plan_tensor
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
        setup = prepare(config, this.console.note, this.peers)
        this.opened(setup, origin.get("family"))
        loop = TrainingLoop(setup, workdir, this, traced)
        try:
            loop.restore_and_compile()
            this.under_way = loop.progress.under_way
            return loop.train()
        finally:
            this.over.set()
            loop.close()


def prepare(config: TrainConfig, on_progress: Callable[[str], None], peers: Peers | None = None) -> Setup:
    """Opens the data, makes the mesh and builds the step functions, in the order that finds mistakes soonest.

    Nothing is compiled yet. `on_progress` is called with a line about work that takes long. All `peers` must be at it.

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
    plan_sequence_sharding(config, None)  # what it refuses, it refuses for every device
    corpus = load_corpus(config.data, vocab_size=config.model.vocab_size, on_progress=on_progress)
    require_same(peers, "data", {"fingerprint": corpus.fingerprint, "tokenizer": corpus.tokenizer.identity})
    samples = Samples(config, corpus.tokenizer) if config.samples.prompts else None
    use_compilation_cache(config.compilation.cache_dir)
    mesh = make_mesh(config.mesh)
    attention = plan_attention(config, mesh)
    target = Target.of(mesh.devices.flat[0])
    experts, tensor, loss = plan_experts(config, target), plan_tensor(config, mesh), plan_loss(config, target)
    if samples is not None:
        samples.check()
    functions = make_step_functions(config, mesh)
    sharding = batch_sharding(mesh)
    rows_of = functools.partial(rows_of_process, sharding, sequence_length=config.sequence_length)
    batches, validation_shares, validation = make_batches(
        config, corpus, functions.sequence_sharding, on_progress, rows_of
    )
    validation_batches = [make_global_batch(share, sharding) for share in validation_shares]
    # Process 0 measures it for all: the others read no rows but their own.
    told = peers.of_first("validation", lambda: json.dumps(describe_validation(config, validation, corpus.tokenizer)))
    num_bytes, digest = json.loads(told)
    flops = FlopCounter(config.model, config.sequence_length, keep_documents_apart=config.data.keep_documents_apart)
    peak = peak_flops_per_s(mesh.devices.flat[0], config.model.compute_dtype)
    plans = attention, experts, tensor, loss
    evaluation = validation_batches, num_bytes, digest
    return Setup(config, corpus, functions, *plans, batches, *evaluation, samples, flops, peak)


class TrainingLoop:
    """Steps, evaluations and saves, to the last step or a stop signal.

    Args:
      setup: data, devices and step functions.
      workdir: where everything is written.
      this: the attempt: its console, record, account of time and stop signals.
      traced: steps to trace for xprof.
    """

    def __init__(self, setup: Setup, workdir: Workdir, this: Attempt, traced: range = range(0)):
        self.setup, self.config, self.workdir = setup, setup.config, workdir
        self.console, self.record, self.account, self.stop = this.console, this.record, this.account, this.stop
        self.peers = this.peers
        self.times, self.history = StepTimes(), CompileHistory(cache_folder(setup.config.compilation.cache_dir))
        listening = (setup.config, workdir, this.console, this.record, self.history, self.times)
        self.observers = make_observers(*listening) if self.peers.is_first else Observers()
        self.progress = Progress(self.observers, self.times, self.history, this.account)
        self.watchdog = Watchdog(setup.config.watchdog, this.account, self.times, this.stalled)
        self.checkpoints = Checkpoints(
            workdir.checkpoints,
            setup.config.checkpoint.num_kept,
            this.console.note,
            spared=lambda steps: spared_steps(steps, setup.config.checkpoint, self.evaluator.evaluations),
            peers=self.peers,
            saving=self.watchdog.saving,
        )
        told = this.console, this.account, self.observers, this.stop
        self.saver = Saver(self.checkpoints, workdir, setup.config, *told)
        self.config_history = ConfigHistory(setup.config)
        self.evaluator = Evaluator(setup, this.account, self.observers, this.stop)
        self.trace = StepTrace(traced, workdir.profile, this.console, is_first=self.peers.is_first)
        self.data_failure: TrainingFailed | None = None
        self.is_amid_skipped = False
        self.state: TrainState
        self.programs: CompiledSteps

    def restore_and_compile(self) -> None:
        """Restores the newest checkpoint, compiles the functions, and initialises the state if there is none."""
        functions, initial = self.setup.functions, None
        with self.account.measure("checkpoint"), running("restoring"):
            resumed = restore(self.checkpoints, self.setup, self.workdir, self.console)
            is_new = resumed.state is None
            if is_new:
                initial = load_initial_params(self.config, functions, self.console, self.peers)
                self.record.put(init_from=None if initial is None else initial.origin)
        self.state, self.config_history = resumed.state, resumed.config_history
        self.progress.go_on_from(resumed.step)
        self.trace.check(resumed.step)
        if resumed.step < self.config.num_steps:
            self.saver.rehearse([*functions.mesh.devices.flat])
        with self.account.measure("compile"), self.console.working("compiling"):
            given, on_recompile = initial is not None, self.progress.recompiled
            self.programs = compile_steps(functions, with_init=is_new, with_params=given, on_recompile=on_recompile)
            if self.programs.init_state is not None:
                with running("init_state"):
                    arguments = () if initial is None else (initial.params,)
                    self.state = jax.block_until_ready(self.programs.init_state(*arguments))
        self.history.add_first(self.programs.reports)
        self.record.put(resumed_from=resumed.origin, config_changes=changes_to_json(self.config_history.changes))
        logged = LoggedEntries(self.workdir.metrics, self.progress.step if self.peers.is_first else 0, self.console)
        evaluations = json.loads(self.peers.of_first("evaluations", lambda: json.dumps([*logged.evaluations.values()])))
        if measures_otherwise := self.evaluator.take_up(evaluations):
            self.console.note(measures_otherwise)
        self.observers.started(Start(self.progress.step, self.config.num_steps, logged, self.programs.reports))

    def train(self) -> int:
        """Steps to the end, or to a stop signal; returns the exit status."""
        progress, num_steps = self.progress, self.config.num_steps
        own = (self.programs.train_step, self.programs.eval_step)
        with (
            self.history.watch(own, lambda: progress.step),
            self.watchdog.watching(lambda: self.programs.is_compiling),
        ):
            self.evaluator.evaluate_if_due(progress.step, self.programs.eval_step, self.state)
            while progress.step < num_steps and not self.stop.requested and self.data_failure is None:
                self.run_window()
                self.evaluator.evaluate_if_due(progress.step, self.programs.eval_step, self.state)
                if progress.step % self.config.checkpoint.every_num_steps == 0:
                    self.save_if_good()
                for warning in self.history.take_warnings():
                    self.console.warning(warning)
            self.saver.save_at_last(self.snapshot)
        if self.data_failure is not None:
            raise self.data_failure
        return tell_ending(self.observers, self.setup, progress.step, self.evaluator, self.checkpoints.newest)

    def run_window(self) -> None:
        """Steps until the device has to be waited for: to log, to evaluate, to save, to stop, or for a trace."""
        self.trace.begin_if_due(self.progress.step + 1)
        progress, window = self.progress, RunningWindow(self.setup, self.account, self.progress.step + 1)
        while not window.is_over(self.times, self.stop):
            if window.num_steps > 0 and self.trace.splits(progress.step):
                break
            progress.begin()
            try:
                with self.account.measure("data_wait"):
                    batch = next(self.setup.batches)
            except TrainingFailed as failure:  # the steps so far are saved before it ends the run
                if self.peers.count > 1:  # the others make this step, so there is none at which all could save
                    raise
                self.data_failure = failure
                break
            with self.account.measure("step"), running("train_step"), self.trace.around(progress.step + 1):
                self.state, metrics = self.programs.train_step(self.state, self.setup.put(batch))
                progress.step += 1
                progress.finish(window.add(batch, metrics))
        with self.account.measure("step"), running("train_step"):
            window.wait(self.state)
        progress.go_on_from(progress.step)
        if window.num_steps > 0:
            done = window.result(self.times, self.history)
            self.observers.window(done)
            self.is_amid_skipped = done.is_amid_skipped
            if done.failure is not None:
                self.saver.finish(tries_again=False)
                raise too_many_skipped(done.failure, self.checkpoints.newest)
        self.trace.end_if_due(progress.step)

    def save_if_good(self) -> None:
        """Saves, unless the last update was skipped: such checkpoints could push out the last good one."""
        if self.is_amid_skipped:
            self.console.note(f"step {self.progress.step} is not saved, since its update was skipped")
        else:
            self.saver.save(self.snapshot)

    def snapshot(self) -> Snapshot:
        """What a checkpoint of this very step holds."""
        return Snapshot(self.progress.step, self.state, self.setup.batches.get_state(), self.config_history.to_json())

    def close(self) -> None:
        """Lets go of threads and files; a save in progress is finished."""
        self.trace.close()
        self.observers.stopped()
        self.setup.batches.close()
        self.saver.close()
        self.observers.close()


if __name__ == "__main__":
    sys.exit("error: trainer.train is no command; python -m trainer --config FILE trains")
