"""The training loop: step, log, evaluate and save, from a checkpoint or the start, to the end or a stop signal."""

from __future__ import annotations

import time
from collections.abc import Sequence

import jax

from trainer.checkpoints.saving import Checkpoints, NotRemovedError
from trainer.compile.history import CompileHistory
from trainer.compile.out_of_memory import running
from trainer.compile.recompilation import Change
from trainer.compile.stages import CompileReport
from trainer.config.changes import ConfigHistory, changes_to_json
from trainer.errors import TrainingFailed
from trainer.evaluate import evaluate
from trainer.observers.loss_plot import draw_losses
from trainer.observers.metrics import VALIDATION_LOSS, MetricsLog
from trainer.observers.record import RunRecord, StepTimes, TimeAccount, measured_memory
from trainer.process.signals import PREEMPTED, StopRequest
from trainer.run.next_commands import next_commands
from trainer.run.prepare import CompiledSteps, Setup, compile_steps
from trainer.run.resume import go_on_from
from trainer.step.flops import StepFlops
from trainer.step.functions import StepMetrics, TrainState
from trainer.terminal.console import Console, Window, format_loss
from trainer.terminal.units import format_seconds
from trainer.workdir import Workdir

COMPLETED = 0

# Steps that the host may be ahead of the device: enough that the device never waits for the host, few enough that a
# stop signal is obeyed soon and only few batches wait in the device's memory.
_MAX_STEPS_AHEAD = 2
_RECORD_EVERY_S = 10.0
# Pauses before the further tries of the last save: whoever reads the warning may make room meanwhile. After a stop
# signal there is only the first, since whoever has sent it may not wait for long.
_SAVE_AGAIN_AFTER_S = (2.0, 8.0, 20.0, 60.0)


class TrainingLoop:
    """One attempt at a run.

    Args:
      setup: data, devices and model.
      workdir: where everything is written.
      console, record, account: told what happens.
      stop: asked after every step.
    """

    def __init__(
        self,
        setup: Setup,
        workdir: Workdir,
        console: Console,
        record: RunRecord,
        account: TimeAccount,
        stop: StopRequest,
    ):
        self._setup, self._config, self._workdir = setup, setup.config, workdir
        self._console, self._record, self._account, self._stop = console, record, account, stop
        self._checkpoints = Checkpoints(workdir.checkpoints, setup.config.checkpoint.num_kept, console.note)
        self._times = StepTimes()
        self._history = CompileHistory(setup.config.compilation.cache_dir)
        self._config_history = ConfigHistory(setup.config)
        self._step = 0
        """Steps behind the state, of which the device may still have some to do."""
        self._begun_step = 0
        """The newest that will be done whatever is asked of the loop."""
        self._finished_step = 0
        """The newest that is known to be done."""
        self._state: TrainState
        self._programs: CompiledSteps
        self._metrics: MetricsLog | None = None
        self._last_record = time.perf_counter()

    def restore_and_compile(self) -> None:
        """Everything before the first step."""
        with self._account.measure("checkpoint"), running("restoring"):
            restored = self._checkpoints.restore_newest(self._setup.functions.abstract_state)
        if restored is not None:
            for damaged in restored.damaged:
                self._console.note(f"{damaged}; it is kept, and the run goes on from the one before")
            self._config_history, changes = go_on_from(restored, self._setup, self._workdir)
            self._state, self._step = restored.state, restored.step
            done = "; no step is left to make" if self._step >= self._config.num_steps else ""
            self._console.note(
                f"resumed at step {self._step}/{self._config.num_steps} from {self._workdir.checkpoints}{done}"
            )
            for change in changes:
                self._console.note(change)
        self._begun_step = self._step
        self._set_finished(self._step)
        with self._account.measure("compile"), self._console.working("compiling"):
            self._programs = compile_steps(
                self._setup.functions, with_init=restored is None, on_recompile=self._recompiled
            )
            if self._programs.init_state is not None:
                with running("init_state"):
                    self._state = jax.block_until_ready(self._programs.init_state())
        self._history.add_first(self._programs.reports)
        self._console.compiled(self._programs.reports)
        # Cut off before the record has `compile`, by which the next attempt knows that the log is this one's.
        self._metrics = MetricsLog(
            self._workdir.metrics, self._workdir.tensorboard, self._step, self._console, self._programs.reports
        )
        self._record.update(
            resumed_from=None
            if restored is None
            else {"step": restored.step, "passed_over": {str(item.path): item.reason for item in restored.damaged}},
            config_changes=changes_to_json(self._config_history.changes),
            compile=self._history.to_json(),
        )

    def train(self) -> int:
        """Steps to the end, or to a stop signal; returns the exit status."""
        config = self._config
        self._console.start_steps(self._step, config.num_steps)
        with self._history.watch((self._programs.train_step, self._programs.eval_step), lambda: self._step):
            self._evaluate_if_due()
            while self._step < config.num_steps and not self._stop.requested:
                self._run_window()
                self._evaluate_if_due()
                if self._step % config.checkpoint.every_num_steps == 0:
                    self._save()
                for warning in self._history.take_warnings():
                    self._console.warning(warning)
                self._update_record()
            self._save_at_last()
        self._console.stop_steps()
        completed = self._step >= config.num_steps and self._step in self._log.evaluations
        self._finish("completed" if completed else "preempted")
        return COMPLETED if completed else PREEMPTED

    def under_way(self) -> str:
        """What a stop has to wait for before it saves; may be asked by any thread."""
        num_steps, step_s = self._begun_step - self._finished_step, self._times.typical_step_s()
        if num_steps <= 0:
            return "what is under way"
        about = "" if step_s is None else f" (about {format_seconds(num_steps * step_s)})"
        return f"{num_steps} step{'s' if num_steps > 1 else ''}{about}"

    def close(self) -> None:
        """Lets go of threads and files; a save in progress is finished.

        If that save fails it is only noted: `train` waits for the last one, so here another error is ending the run.
        """
        self._console.stop_steps()
        self._setup.batches.close()
        if self._metrics is not None:
            self._metrics.close()
        try:
            self._checkpoints.close()
        except TrainingFailed as failure:
            self._console.warning(str(failure))

    @property
    def _log(self) -> MetricsLog:
        assert self._metrics is not None
        return self._metrics

    def _recompiled(self, report: CompileReport, changes: Sequence[Change]) -> None:
        """Tells of a program that was compiled again, before it first runs."""
        in_training = report.name == "train_step"  # a step under way isn't counted yet
        recompile = self._history.add_recompile(self._step + in_training, report, changes)
        self._account.move(recompile.seconds, "step" if in_training else "evaluation", "compile")
        self._console.warning(str(recompile))
        self._record.update(compile=self._history.to_json())
        self._log.write_recompile(recompile)

    def _run_window(self) -> None:
        """Steps until the device has to be waited for anyway: to log, to evaluate, to save or to stop.

        The attempt's first step is a window of its own, so that a first loss shows soon.
        """
        first_step, begun = self._step + 1, time.perf_counter()
        waited, compiled = self._account.seconds("data_wait"), self._account.seconds("compile")
        ahead: list[StepMetrics] = []
        flops, num_tokens = StepFlops(0, 0), 0
        while True:
            self._begun_step = self._step + 1
            with self._account.measure("data_wait"):
                batch = next(self._setup.batches)
            with self._account.measure("step"), running("train_step"):
                self._state, metrics = self._programs.train_step(self._state, self._setup.put(batch))
                self._step += 1
                ahead.append(metrics)
                flops = StepFlops(*map(sum, zip(flops, self._setup.flops(batch["segment_ids"]), strict=True)))
                num_tokens += batch["segment_ids"].size
                if len(ahead) > _MAX_STEPS_AHEAD:
                    jax.block_until_ready(ahead[-1 - _MAX_STEPS_AHEAD])
                    self._set_finished(self._step - _MAX_STEPS_AHEAD)
            self._console.advance(self._finished_step)
            if self._window_ends():
                break
        with self._account.measure("step"), running("train_step"):
            jax.block_until_ready(self._state)
            history: list[StepMetrics] = jax.device_get(ahead)
        self._set_finished(self._step)
        # A recompile is no part of a step's speed.
        seconds = time.perf_counter() - begun - (self._account.seconds("compile") - compiled)
        data_wait_s = self._account.seconds("data_wait") - waited
        self._log_window(first_step, history, seconds, num_tokens, flops, data_wait_s)

    def _window_ends(self) -> bool:
        config, step = self._config, self._step
        periods = (config.log_every_num_steps, config.evaluation.every_num_steps, config.checkpoint.every_num_steps)
        first_of_attempt = self._times.first_s is None
        return (
            first_of_attempt
            or step == config.num_steps
            or self._stop.requested
            or any(step % period == 0 for period in periods)
        )

    def _log_window(
        self,
        first_step: int,
        history: Sequence[StepMetrics],
        seconds: float,
        num_tokens: int,
        flops: StepFlops,
        data_wait_s: float,
    ) -> None:
        capacity = seconds * self._setup.peak.flops_per_s * len(self._setup.devices)
        mfu_causal, mfu_noncausal = flops.causal / capacity, flops.noncausal / capacity
        self._times.add_window(len(history), seconds, num_tokens, (mfu_causal, mfu_noncausal))
        rows: list[dict[str, float | None]] = [
            {
                "step": first_step + index,
                "loss": float(metrics.loss),
                "z_loss": float(metrics.z_loss),
                "grad_norm": float(metrics.grad_norm),
                "learning_rate": float(metrics.learning_rate),
                "num_targets": int(metrics.num_targets),
            }
            for index, metrics in enumerate(history)
        ]
        for step, row in enumerate(rows, first_step):
            if recompile_s := self._history.recompile_seconds("train_step", step):
                row["recompile_s"] = recompile_s
        rows[-1] |= {
            "step_s": seconds / len(history),
            "data_wait_s": data_wait_s,
            "tokens_per_s": num_tokens / seconds,
            "mfu_causal": mfu_causal,
            "mfu_noncausal": mfu_noncausal,
        }
        self._log.write(rows)
        self._refuse_non_finite(first_step, history)
        step_s = self._times.typical_step_s() or seconds
        window = Window(
            step=self._step,
            num_steps=self._config.num_steps,
            loss=float(history[-1].loss),
            step_s=seconds / len(history),
            data_wait_s=data_wait_s,
            tokens_per_s=num_tokens / seconds,
            mfu_causal=mfu_causal,
            left_s=step_s * (self._config.num_steps - self._step),
        )
        self._console.window(window)

    def _refuse_non_finite(self, first_step: int, history: Sequence[StepMetrics]) -> None:
        bad = next((index for index, metrics in enumerate(history) if not metrics.finite), None)
        if bad is None:
            return
        self._finish_save(tries_again=False)
        newest = self._checkpoints.newest
        raise TrainingFailed(
            f"step {first_step + bad}: loss {float(history[bad].loss)}, gradient norm {float(history[bad].grad_norm)}: "
            f"not finite, so the run stops; the last good checkpoint is {newest or 'not there yet'}. A lower "
            "optimizer.learning_rate, a longer warm-up or a smaller optimizer.clip_norm may help, from there on "
            "or, in a new --workdir, from the start"
        )

    def _evaluate_if_due(self) -> None:
        """Evaluates at the end and every so many steps, unless an earlier attempt has, or a stop signal hurries."""
        step, config = self._step, self._config
        due = step >= config.num_steps or (step > 0 and step % config.evaluation.every_num_steps == 0)
        if not due or step in self._log.evaluations or self._stop.requested:
            return
        with self._account.measure("evaluation"), running("eval_step"):
            batches, bytes_per_token = self._setup.validation_batches, self._setup.corpus.bytes_per_token
            result = evaluate(self._programs.eval_step, self._state.params, batches, bytes_per_token)
        self._log.write(
            [{"step": step, VALIDATION_LOSS: result.nats_per_token, "validation_bits_per_byte": result.bits_per_byte}]
        )
        self._console.evaluation(step, result)
        if self._setup.samples is not None:
            with self._account.measure("evaluation"), running("sampling"):
                for prompt, text in self._setup.samples.write(self._state.params, self._setup.functions.mesh):
                    self._console.sample(step, prompt, text)

    def _save(self) -> None:
        """Starts saving, unless this very step is saved already. A failure is told, and the next save tries again."""
        self._finish_save()
        if not self._is_saved():
            try:
                self._start_save()
            except TrainingFailed as failure:
                self._tell_failed_save(failure)

    def _save_at_last(self) -> None:
        """Saves this very step, with further tries where that fails; if none succeeds, the run has failed."""
        self._save()
        self._finish_save()
        for num_tries, pause_s in enumerate(_SAVE_AGAIN_AFTER_S, 1):
            if self._is_saved():
                return
            is_last = num_tries == len(_SAVE_AGAIN_AFTER_S) or self._stop.requested
            if self._stop.wait(pause_s):
                time.sleep(_SAVE_AGAIN_AFTER_S[0])
            try:
                self._start_save()
                with self._account.measure("checkpoint"):
                    self._checkpoints.wait()
            except TrainingFailed as failure:
                if is_last and not self._is_saved():
                    raise TrainingFailed(f"{failure}, then run the same command again") from failure
                self._tell_failed_save(failure)

    def _is_saved(self) -> bool:
        return self._step == self._checkpoints.newest_step

    def _start_save(self) -> None:
        with self._account.measure("checkpoint"):
            place, config_history = self._setup.batches.get_state(), self._config_history.to_json()
            self._checkpoints.save(self._step, self._state, place, config_history)

    def _finish_save(self, *, tries_again: bool = True) -> None:
        """Waits for the save in progress, and tells if it failed, and whether another will be made."""
        with self._account.measure("checkpoint"):
            try:
                self._checkpoints.wait()
            except TrainingFailed as failure:
                self._tell_failed_save(failure, tries_again=tries_again)

    def _tell_failed_save(self, failure: TrainingFailed, *, tries_again: bool = True) -> None:
        is_missing = not isinstance(failure, NotRemovedError)
        self._console.warning(f"{failure}. The next save tries again" if tries_again and is_missing else str(failure))

    def _set_finished(self, step: int) -> None:
        self._finished_step = step
        self._record.put(step=step)

    def _update_record(self) -> None:
        # Each update waits for the disk, so a run of fast steps must not make one for every window.
        if time.perf_counter() - self._last_record > _RECORD_EVERY_S:
            self._record.update(compile=self._history.to_json(), steps=self._times.to_json())
            self._last_record = time.perf_counter()

    def _finish(self, status: str) -> None:
        """The record's last word, and the closing summary."""
        evaluations, unigram = self._log.evaluations, self._setup.corpus.unigram_nats_per_token
        newest = evaluations[max(evaluations)] if evaluations else None
        self._record.update(
            status=status,
            compile=self._history.to_json(),
            memory=measured_memory(self._setup.devices[0]),
            evaluation=None if newest is None else newest | {"unigram_nats_per_token": unigram},
            **({} if self._times.first_s is None else {"steps": self._times.to_json()}),
        )
        facts: dict[str, str | list[str]] = {}
        if newest is not None:
            loss = format_loss(newest[VALIDATION_LOSS], newest.get("validation_bits_per_byte"))
            facts["validation"] = (
                f"{loss} at step {newest['step']}; the corpus's unigram entropy is {unigram:.4f} nats/token"
            )
        facts["time"] = ", ".join(
            f"{name.removesuffix('_s').replace('_', ' ')} {format_seconds(seconds)}"
            for name, seconds in self._record["time"].items()
        )
        written = [
            self._workdir.config,
            self._workdir.record,
            self._workdir.metrics,
            self._workdir.tensorboard,
            self._checkpoints.newest or self._workdir.checkpoints,
        ]
        if self._draw_losses():
            written.append(self._workdir.loss_picture)
        facts["written"] = [f"{path}{'/' if path.is_dir() else ''}" for path in written]
        has_checkpoint = self._checkpoints.newest is not None
        done = f"step {self._step} of {self._config.num_steps}"
        if status == "completed":
            title = f"completed: {done}"
        elif has_checkpoint:
            title = f"stopped and saved at {done}; run the same command again to go on"
        else:
            title = f"stopped at {done}, with nothing to save yet; run the same command again"
        commands = next_commands(self._config, self._workdir, has_checkpoint=has_checkpoint)
        self._console.closing(title, facts, commands)

    def _draw_losses(self) -> bool:
        """Whether there is a picture of the losses. It is an extra: a run that has ended well doesn't fail for it."""
        try:
            return draw_losses(
                self._workdir.metrics,
                self._workdir.loss_picture,
                title=self._config.name,
                unigram_nats_per_token=self._setup.corpus.unigram_nats_per_token,
            )
        except Exception as error:
            self._console.warning(f"{self._workdir.loss_picture} can't be drawn: {type(error).__name__}: {error}")
            return False
