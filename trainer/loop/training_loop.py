"""The parts of a run around its steps: state, programs, observers, saves, evaluations. See `trainer/train.py`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import jax

from trainer.checkpoints.base import base_digest
from trainer.checkpoints.training_state import Checkpoints
from trainer.compile.history import CompileHistory
from trainer.compile.out_of_memory import running
from trainer.compile.persistent_cache import cache_folder
from trainer.compile.programs import AheadOfTime, CompiledSteps, compile_steps
from trainer.config.resume_changes import ConfigHistory, changes_to_json
from trainer.errors import DataUsedUpError, TrainingFailed
from trainer.launch.process_exit import COMPLETED, PREEMPTED
from trainer.launch.watchdog import Watchdog
from trainer.loop.attempt import Attempt
from trainer.loop.carry import enter_phase
from trainer.loop.evaluator import Evaluator
from trainer.loop.initial_params import InitialParams, load_initial_params, load_initial_state
from trainer.loop.length_evaluator import LengthEvaluator
from trainer.loop.progress import Progress
from trainer.loop.resume import restore
from trainer.loop.saver import Saver, Snapshot, spared_steps
from trainer.loop.setup import Setup
from trainer.loop.skipped_updates import too_many_skipped
from trainer.loop.step_trace import StepTrace
from trainer.loop.window import RunningWindow
from trainer.observers.make_observers import make_observers
from trainer.observers.metrics import LoggedEntries
from trainer.observers.observer import Ending, Observers, PhaseBegun, Start
from trainer.observers.record import measured_memory
from trainer.observers.times import StepTimes
from trainer.step.frozen import split_frozen
from trainer.step.train_step import TrainState
from trainer.workdir import Workdir


class TrainingLoop:
    """Steps, evaluations and saves of a run.

    Args:
      setups: data, devices and step functions of each phase.
      workdir: where everything is written.
      this: the attempt: its console, record, account of time and stop signals.
      traced: steps to trace for xprof.
    """

    def __init__(self, setups: Sequence[Setup], workdir: Workdir, this: Attempt, traced: range = range(0)):
        self.setups, self.setup, self.config, self.workdir = setups, setups[0], setups[0].run, workdir
        config = self.config
        self.console, self.record, self.account, self.stop = this.console, this.record, this.account, this.stop
        self.peers = this.peers
        self.times, self.history = StepTimes(), CompileHistory(cache_folder(config.compilation.cache_dir))
        listening = (config, workdir, this.console, this.record, self.history, self.times)
        self.observers = make_observers(*listening) if self.peers.is_first else Observers()
        self.progress = Progress(self.observers, self.times, self.history, this.account)
        self.watchdog = Watchdog(config.watchdog, this.account, self.times.typical_step_s, this.stalled)
        self.checkpoints = Checkpoints(
            workdir.checkpoints,
            config.checkpoint.num_kept,
            spared=lambda steps: spared_steps(steps, config.checkpoint, self.evaluator.evaluations),
            peers=self.peers,
            saving=self.watchdog.saving,
        )
        self.saver = Saver(self.checkpoints, workdir, config, this.console, this.account, self.observers, this.stop)
        self.config_history = ConfigHistory(config)
        self.base: str | None = None
        """Digest of the frozen base of adapters."""
        self.evaluator = Evaluator(self.setup, this.account, self.observers, this.stop)
        self.length_evaluator = LengthEvaluator(workdir.path, this.account, this.console, self.observers, self.peers)
        self.trace = StepTrace(traced, workdir.profile, this.console, is_first=self.peers.is_first)
        self.data_failure: TrainingFailed | None = None
        self.is_amid_skipped = False
        self.resumed_from: dict[str, Any] | None = None
        """The record's entry about the checkpoint; None: the run is new."""
        self.initial: InitialParams | None = None
        """The parameters of `init_from`, until they are in the state."""
        self.state: TrainState
        self.programs: CompiledSteps
        self.ahead: AheadOfTime | None = None
        """The programs of later phases; None: before `compile`."""

    def restore(self) -> None:
        """Restores the newest checkpoint; if there is none, loads the parameters of `init_from`."""
        with self.account.measure("checkpoint"), running("restoring"):
            self.base = json.loads(self.peers.of_first("base", lambda: json.dumps(base_digest(self.config))))
            resumed = restore(self.checkpoints, self.setups, self.workdir, self.console, self.base)
            if resumed.state is None and self.config.init_optimizer == "carry":
                state, origin = load_initial_state(self.setup, self.console, self.peers)
                resumed = resumed._replace(state=state)
                self.record.put(init_from=origin)
            elif resumed.state is None:
                self.initial = load_initial_params(self.config, self.setup.functions, self.console, self.peers)
                self.record.put(init_from=None if self.initial is None else self.initial.origin)
        self.state, self.config_history, self.resumed_from = resumed.state, resumed.config_history, resumed.origin
        self._enter(resumed.phase)
        self.progress.go_on_from(resumed.step)
        self.trace.check(resumed.step)
        if resumed.step < self.config.num_steps:
            self.saver.rehearse([*self.setup.functions.mesh.devices.flat])

    def compile(self) -> None:
        """Compiles the functions, initialises the state where nothing was restored, and tells the observers."""
        functions, initial, is_new = self.setup.functions, self.initial, self.state is None
        self.console.note("compiling …")
        with self.account.measure("compile"):
            given, on_recompile = initial is not None, self.progress.recompiled
            self.programs = compile_steps(functions, with_init=is_new, with_params=given, on_recompile=on_recompile)
            if self.programs.init_state is not None:
                with running("init_state"):
                    arguments = () if initial is None else (initial.params,)
                    self.state = jax.block_until_ready(self.programs.init_state(*arguments))
            later = {each.phase.index: each.functions for each in self.setups[self.setup.phase.index + 1 :]}
            self.ahead = AheadOfTime(later, on_recompile)
        self.initial = None  # its parameters belong to the state now
        self.history.add_first(self.programs.reports)
        changes = changes_to_json(self.config_history.changes)
        self.record.put(resumed_from=self.resumed_from, config_changes=changes)
        logged = LoggedEntries(self.workdir.metrics, self.progress.step if self.peers.is_first else 0, self.console)
        evaluations = json.loads(self.peers.of_first("evaluations", lambda: json.dumps([*logged.evaluations.values()])))
        if warning := self.evaluator.take_up(evaluations):
            self.console.note(warning)
        self.observers.observe(Start(self.progress.step, self.config.num_steps, logged, self.programs.reports))

    def watched(self) -> AbstractContextManager[None]:
        """Ends the process if the run hangs inside."""
        return self.watchdog.watching(lambda: self.programs.is_compiling or self.length_evaluator.is_evaluating)

    @property
    def goes_on(self) -> bool:
        """False after the last step, a stop signal, or data that can't be read."""
        is_done = self.progress.step >= self.config.num_steps
        return not is_done and not self.stop.requested and self.data_failure is None

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
                if self.peers.count > 1 and not isinstance(failure, DataUsedUpError):
                    raise  # the others make this step, so there is none at which all could save
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
            self.observers.observe(done)
            self.is_amid_skipped = done.is_amid_skipped
            if done.failure is not None:
                self.saver.finish(tries_again=False)
                raise too_many_skipped(done.failure, self.checkpoints.newest)
        self.trace.end_if_due(progress.step)

    def evaluate_if_due(self) -> None:
        """Evaluates after every `evaluation.every_num_steps` and after the last step."""
        self.evaluator.evaluate_if_due(self.progress.step, self.programs.eval_step, self.state)
        if not self.stop.requested:
            self.length_evaluator.evaluate_if_due(self.setup, self.progress.step, self.state)

    def save_if_due(self) -> None:
        """Saves at a phase's end, and every `checkpoint.every_num_steps` unless the last update was skipped.

        Checkpoints of skipped updates could push out the last good one. A border's is needed all the same: a stop
        before the next phase's first save goes on from there.
        """
        if self.progress.step % self.config.checkpoint.every_num_steps and not self._is_at_border:
            return
        if self.is_amid_skipped and not self._is_at_border:
            self.console.note(f"step {self.progress.step} is not saved, since its update was skipped")
        else:
            self.saver.save(self.snapshot)

    def save_at_last(self) -> None:
        """Saves the last step.

        A border is saved before the change of phase, as a resumption reads it: the next phase may stack its layers
        otherwise.
        """
        if self.setup.phase.index and self.progress.step == self.setup.phase.first_step:
            self.saver.finish()
        else:
            self.saver.save_at_last(self.snapshot)

    def change_phase_if_due(self) -> None:
        """Carries the state into the next phase, if this one is over, and takes its programs."""
        step, index = self.progress.step, self.setup.phase.index
        if not self._is_at_border or self.stop.requested:
            return
        self.saver.finish()  # what is being saved lies where the state is now
        with self.account.measure("checkpoint"), running("the change of phase"):
            self.state, notes = enter_phase(self.state, self.setup, self.setups[index + 1])
        self._enter(index + 1)
        for line in notes:
            self.console.note(line)
        with self.account.measure("compile"):
            assert self.ahead is not None, "changed phases before `compile`"
            self.programs = self.ahead.take(index + 1)
        self.history.add_phase(step, self.programs.reports)
        self.observers.observe(PhaseBegun(step, self.setup.describe_phase(), self.programs.reports))
        self.times.begin_phase()

    @property
    def _is_at_border(self) -> bool:
        phase = self.setup.phase
        return self.progress.step >= phase.last_step and phase.index + 1 < len(self.setups)

    def _enter(self, index: int) -> None:
        self.setup = self.setups[index]
        self.evaluator.enter_phase(self.setup)

    def snapshot(self) -> Snapshot:
        """The content of a checkpoint of this very step."""
        trained, _ = split_frozen(self.config.lora, self.state.params)
        state, place = self.state._replace(params=trained), self.setup.batches.get_state()
        return Snapshot(self.progress.step, state, place, self.config_history.to_json(), self.base)

    def end(self) -> int:
        """Tells the observers that the attempt has ended well, and returns its exit status.

        Raises:
          TrainingFailed: the data couldn't be read any more.
        """
        if self.data_failure is not None:
            raise self.data_failure
        step, evaluator = self.progress.step, self.evaluator
        is_completed = step >= self.config.num_steps and step in evaluator.evaluations
        self.observers.observe(
            Ending(
                status="completed" if is_completed else "preempted",
                step=step,
                checkpoint=self.checkpoints.newest,
                evaluation=evaluator.newest,
                unigram_nats_per_token=self.setup.corpus.unigram_nats_per_token,
                memory=measured_memory(jax.local_devices()[0]),
            )
        )
        return COMPLETED if is_completed else PREEMPTED

    def close(self) -> None:
        """Lets go of threads and files; a save in progress is finished."""
        self.trace.close()
        for setup in self.setups:
            setup.batches.close()
        self.saver.close()
        self.observers.close()
        if self.ahead is not None:
            self.ahead.close()
