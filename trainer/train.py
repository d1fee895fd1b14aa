"""A whole run, to be read from top to bottom: config, data, mesh, step, compile, loop.

`python -m trainer` reads a config page and the flags (`trainer/cli/`), claims the workdir (`trainer/workdir.py`) and
calls `train`. Each line below calls into a folder that is named for what it does:

    data/          documents become tokens, and tokens packed batches
    step/          the mesh; model, loss and optimizer as functions of state and batch
    checkpoints/   the state on the disk
    compile/       the functions, compiled ahead of their first use
    observers/     console, record, metrics, TensorBoard: who hears of what happens
    run/           what a run needs besides: signals, progress, windows, saves, the summary
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import jax

from trainer.checkpoints.saving import Checkpoints
from trainer.compile.history import CompileHistory
from trainer.compile.out_of_memory import running
from trainer.compile.programs import CompiledSteps, compile_steps
from trainer.compile.recompilation import Change
from trainer.compile.stages import CompileReport, use_compilation_cache
from trainer.config import TrainConfig
from trainer.config.changes import ConfigHistory, changes_to_json
from trainer.data import load_corpus, make_train_iterator, make_validation_batches
from trainer.evaluate import evaluate
from trainer.observers.listeners import make_observers
from trainer.observers.metrics import read_logged_rows
from trainer.observers.observer import VALIDATION_LOSS, Ending, Evaluated, Row, Start
from trainer.observers.record import measured_memory
from trainer.observers.times import StepTimes
from trainer.observers.wandb import require_wandb
from trainer.process.signals import PREEMPTED
from trainer.run.attempt import Attempt, attempt
from trainer.run.progress import Progress
from trainer.run.resume import restore
from trainer.run.saver import Saver, Snapshot
from trainer.run.setup import Setup
from trainer.run.window import RunningWindow, not_finite
from trainer.sample.during_training import Samples
from trainer.step.attention_plan import plan_attention
from trainer.step.flops import FlopCounter, device_peak
from trainer.step.functions import TrainState, make_step_functions
from trainer.step.sharding import batch_sharding, make_mesh
from trainer.workdir import Workdir

COMPLETED = 0


def train(
    config: TrainConfig,
    workdir: Workdir,
    *,
    command: Sequence[str],
    started: float,
    ending: threading.Event | None = None,
) -> int:
    """Trains, going on from the workdir's newest checkpoint if there is one.

    Args:
      config: the experiment.
      workdir: claimed for this process.
      command: the command line, for the record.
      started: `time.perf_counter()` when the process began.
      ending: set once the run's exit status can't be changed by a stop signal any more.

    Returns:
      The exit status: 0 when all steps are done, 75 when a signal stopped the run after saving.

    Raises:
      UserMistake: data, mesh or model can't be used as the config says.
      TrainingFailed: the devices can't start, a device or this machine is out of memory, a loss or gradient was not
        finite, no checkpoint can be read, the last can't be saved, or something called `sys.exit`.
    """
    with attempt(config, workdir, command=command, started=started, ending=ending) as this:
        setup = prepare(config, this.console.note)
        this.opened(setup)
        loop = TrainingLoop(setup, workdir, this)
        try:
            loop.restore_and_compile()
            this.under_way = loop.progress.under_way
            return loop.train()
        finally:
            this.over.set()
            loop.close()


def prepare(config: TrainConfig, on_progress: Callable[[str], None]) -> Setup:
    """Opens the data, starts the devices and builds the step functions, in the order that finds mistakes soonest.

    Nothing is compiled for the model yet.

    Args:
      config: the experiment.
      on_progress: told, in one line, of work that takes long.

    Raises:
      UserMistake: an extra isn't installed, the data can't be trained on, the mesh doesn't fit the devices, or the
        attention backend can't serve a mask or a sample.
      TrainingFailed: the devices can't be started.
    """
    if config.wandb.project is not None:
        require_wandb(config.wandb.project)
    corpus = load_corpus(config.data, vocab_size=config.model.vocab_size, on_progress=on_progress)
    samples = Samples(config, corpus.tokenizer) if config.samples.prompts else None
    use_compilation_cache(config.compilation.cache_dir)
    mesh = make_mesh(config.mesh)
    device = mesh.devices.flat[0]
    attention = plan_attention(config, device)
    if samples is not None:
        samples.check()
    functions = make_step_functions(config, mesh)
    batches = make_train_iterator(
        corpus,
        sequence_length=config.sequence_length,
        batch_size=config.batch_size,
        seed=config.seed,
        num_prefetch_batches=config.data.num_prefetch_batches,
        on_progress=on_progress,
    )
    validation_batches = make_validation_batches(
        corpus,
        sequence_length=config.sequence_length,
        batch_size=config.batch_size // config.gradient_accumulation,
        num_sequences=config.evaluation.num_sequences,
        on_progress=on_progress,
    )
    return Setup(
        config=config,
        corpus=corpus,
        functions=functions,
        attention=attention,
        batches=batches,
        validation_batches=[jax.device_put(batch, batch_sharding(mesh)) for batch in validation_batches],
        samples=samples,
        flops=FlopCounter(config.model, config.sequence_length, keep_documents_apart=config.data.keep_documents_apart),
        peak=device_peak(device, config.model.compute_dtype),
    )


class TrainingLoop:
    """Steps, evaluations and saves, from a checkpoint or the start, to the end or a stop signal.

    Args:
      setup: data, devices and step functions.
      workdir: where everything is written.
      this: the attempt: its console, record, time and stop signals.
    """

    def __init__(self, setup: Setup, workdir: Workdir, this: Attempt):
        self.setup, self.config, self.workdir = setup, setup.config, workdir
        self.console, self.record, self.account, self.stop = this.console, this.record, this.account, this.stop
        self.times, self.history = StepTimes(), CompileHistory(setup.config.compilation.cache_dir)
        self.config_history = ConfigHistory(setup.config)
        self.evaluations: dict[int, Row] = {}
        self.checkpoints = Checkpoints(workdir.checkpoints, setup.config.checkpoint.num_kept, this.console.note)
        self.observers = make_observers(setup.config, workdir, this.console, this.record, self.history, self.times)
        self.saver = Saver(self.checkpoints, this.console, this.account, self.observers, this.stop)
        self.progress = Progress(self.observers, self.times)
        self.state: TrainState
        self.programs: CompiledSteps

    def restore_and_compile(self) -> None:
        """Everything before the first step."""
        with self.account.measure("checkpoint"), running("restoring"):
            resumed = restore(self.checkpoints, self.setup, self.workdir, self.console)
        if resumed is not None:
            self.state, self.config_history = resumed.state, resumed.config_history
        self.progress.go_on_from(0 if resumed is None else resumed.step)
        with self.account.measure("compile"), self.console.working("compiling"):
            functions, is_new = self.setup.functions, resumed is None
            self.programs = compile_steps(functions, with_init=is_new, on_recompile=self._recompiled)
            if self.programs.init_state is not None:
                with running("init_state"):
                    self.state = jax.block_until_ready(self.programs.init_state())
        self.history.add_first(self.programs.reports)
        changes = changes_to_json(self.config_history.changes)
        self.record.put(resumed_from=None if resumed is None else resumed.origin, config_changes=changes)
        rows = read_logged_rows(self.workdir.metrics, self.progress.step, self.console)
        self.evaluations = {row["step"]: row for row in rows if VALIDATION_LOSS in row}
        self.observers.started(Start(self.progress.step, self.config.num_steps, rows, self.programs.reports))

    def train(self) -> int:
        """Steps to the end, or to a stop signal; returns the exit status."""
        config, progress = self.config, self.progress
        with self.history.watch((self.programs.train_step, self.programs.eval_step), lambda: progress.step):
            self.evaluate_if_due()
            while progress.step < config.num_steps and not self.stop.requested:
                self.run_window()
                self.evaluate_if_due()
                if progress.step % config.checkpoint.every_num_steps == 0:
                    self.saver.save(self.snapshot)
                for warning in self.history.take_warnings():
                    self.console.warning(warning)
            self.saver.save_at_last(self.snapshot)
        return self._finish()

    def run_window(self) -> None:
        """Steps until the device has to be waited for anyway: to log, to evaluate, to save or to stop."""
        setup, progress = self.setup, self.progress
        window = RunningWindow(setup, self.account, progress.step + 1)
        while True:
            progress.begin()
            with self.account.measure("data_wait"):
                batch = next(setup.batches)
            with self.account.measure("step"), running("train_step"):
                self.state, metrics = self.programs.train_step(self.state, setup.put(batch))
                progress.step += 1
                progress.finish(window.add(batch, metrics))
            if self._window_ends():
                break
        with self.account.measure("step"), running("train_step"):
            window.wait(self.state)
        progress.finish(progress.step)
        done = window.result(self.times, self.history)
        self.observers.window(done)
        if done.overflow is not None:
            self.saver.finish(tries_again=False)
            raise not_finite(done.overflow, self.checkpoints.newest)

    def evaluate_if_due(self) -> None:
        """Evaluates at the end and every so many steps, unless an earlier attempt has, or a stop signal hurries."""
        step, config, setup = self.progress.step, self.config, self.setup
        due = step >= config.num_steps or (step > 0 and step % config.evaluation.every_num_steps == 0)
        if not due or step in self.evaluations or self.stop.requested:
            return
        with self.account.measure("evaluation"), running("eval_step"):
            batches, bytes_per_token = setup.validation_batches, setup.corpus.bytes_per_token
            result = evaluate(self.programs.eval_step, self.state.params, batches, bytes_per_token)
        evaluated = Evaluated.now(step, result)
        self.evaluations[step] = evaluated.row
        self.observers.evaluated(evaluated)
        if setup.samples is not None:
            with self.account.measure("evaluation"), running("sampling"):
                for prompt, text in setup.samples.write(self.state.params, setup.functions.mesh):
                    self.observers.sampled(step, prompt, text)

    def snapshot(self) -> Snapshot:
        """What a checkpoint of this very step holds."""
        return Snapshot(self.progress.step, self.state, self.setup.batches.get_state(), self.config_history.to_json())

    def close(self) -> None:
        """Lets go of threads and files; a save in progress is finished."""
        self.observers.stopped()
        self.setup.batches.close()
        self.saver.close()
        self.observers.close()

    def _window_ends(self) -> bool:
        config, step = self.config, self.progress.step
        periods = (config.log_every_num_steps, config.evaluation.every_num_steps, config.checkpoint.every_num_steps)
        return (
            self.times.first_s is None  # the attempt's first step is a window of its own: a first loss shows soon
            or step == config.num_steps
            or self.stop.requested
            or any(step % period == 0 for period in periods)
        )

    def _recompiled(self, report: CompileReport, changes: Sequence[Change]) -> None:
        """Tells of a program that was compiled again, before it first runs."""
        in_training = report.name == "train_step"  # a step under way isn't counted yet
        recompile = self.history.add_recompile(self.progress.step + in_training, report, changes)
        self.account.move(recompile.seconds, "step" if in_training else "evaluation", "compile")
        self.observers.recompiled(recompile)

    def _finish(self) -> int:
        """Tells how it ended; returns the exit status."""
        is_completed = self.progress.step >= self.config.num_steps and self.progress.step in self.evaluations
        self.observers.stopped()
        self.observers.finished(
            Ending(
                status="completed" if is_completed else "preempted",
                step=self.progress.step,
                checkpoint=self.checkpoints.newest,
                evaluation=self.evaluations[max(self.evaluations)] if self.evaluations else None,
                unigram_nats_per_token=self.setup.corpus.unigram_nats_per_token,
                memory=measured_memory(self.setup.devices[0]),
            )
        )
        return COMPLETED if is_completed else PREEMPTED
