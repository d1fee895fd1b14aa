"""A log window: steps that the host dispatches ahead of the device, timed from idle device to idle device."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from typing import Any

import jax

from trainer.compile.history import CompileHistory
from trainer.data import BatchShare
from trainer.launch.signals import StopRequest
from trainer.loop.setup import Setup
from trainer.loop.skipped_updates import find_failure, tell_skipped
from trainer.observers.observer import MIXTURE, LogWindow, make_entry
from trainer.observers.times import StepTimes, TimeAccount
from trainer.step.flops import StepFlops
from trainer.step.train_step import StepMetrics

# Steps that the host may be ahead of the device. With these the device never waits for the host, a stop signal is still
# obeyed soon, and few batches wait in the device's memory.
_MAX_STEPS_AHEAD = 2


class RunningWindow:
    """Collects the steps of a window; the device is idle when it begins.

    Args:
      setup: of the run.
      account: of its time.
      first_step: of the window.
    """

    def __init__(self, setup: Setup, account: TimeAccount, first_step: int):
        self._setup, self._account, self._first_step = setup, account, first_step
        self._begun = time.perf_counter()
        self._waited, self._compiled = account.seconds("data_wait"), account.seconds("compile")
        self._metrics: list[StepMetrics] = []  # on the device
        self._history: list[StepMetrics] = []  # the same on the host
        self._flops = StepFlops(0, 0)
        self._mixture_before = setup.batches.mixture()

    @property
    def num_steps(self) -> int:
        """Steps that were dispatched."""
        return len(self._metrics)

    def is_over(self, times: StepTimes, stop: StopRequest) -> bool:
        """True if the device has to be waited for now: to log, to evaluate, to save or to stop.

        Args:
          times: of the attempt's steps. Its first step is a window of its own, so that a first loss shows soon.
          stop: the stop signals.
        """
        config, step = self._setup.config, self._first_step + self.num_steps - 1
        at_length = config.evaluation.lengths_every_num_steps if config.evaluation.lengths else None
        periods = (
            config.log_every_num_steps,
            config.evaluation.every_num_steps,
            at_length or config.evaluation.every_num_steps,
            config.checkpoint.every_num_steps,
        )
        is_due = step == self._setup.phase.last_step or any(step % period == 0 for period in periods)
        return self.num_steps > 0 and (times.first_s is None or stop.requested or is_due)

    def add(self, batch: BatchShare, metrics: StepMetrics) -> int | None:
        """Counts a step that was dispatched, and waits if the host is too far ahead.

        Args:
          batch: on the host. The FLOPs of the whole batch count, not only of the sequences that this process has read.
          metrics: on the device, which may not have computed them yet.

        Returns:
          The last step that is known to be done; None: nothing was waited for.
        """
        self._metrics.append(metrics)
        flops = self._setup.flops.of_documents(batch.document_lengths, self._first_step + len(self._metrics) - 1)
        self._flops = StepFlops(*map(sum, zip(self._flops, flops, strict=True)))
        if len(self._metrics) <= _MAX_STEPS_AHEAD:
            return None
        jax.block_until_ready(self._metrics[-1 - _MAX_STEPS_AHEAD])
        return self._first_step + len(self._metrics) - 1 - _MAX_STEPS_AHEAD

    def wait(self, state: Any) -> None:
        """Waits until the device has finished the last step, and reads the metrics of all steps."""
        jax.block_until_ready(state)
        self._history = jax.device_get(self._metrics)

    def result(self, times: StepTimes, compiles: CompileHistory) -> LogWindow:
        """The losses and the speed of the steps, after `wait`.

        Args:
          times: of the attempt's steps; these are added.
          compiles: tells which steps waited for a recompile.
        """
        metrics = self._history
        # A recompile is no part of a step's speed.
        seconds = time.perf_counter() - self._begun - (self._account.seconds("compile") - self._compiled)
        data_wait_s = self._account.seconds("data_wait") - self._waited
        peak = self._setup.peak_flops_per_s
        capacity = None if peak is None else seconds * peak * len(self._setup.devices)
        mfu = None if capacity is None else (self._flops.causal / capacity, self._flops.noncausal / capacity)
        num_tokens = sum(int(each.num_tokens) for each in metrics)
        times.add_window(len(metrics), seconds, num_tokens, mfu)
        step, num_steps = self._first_step + len(metrics) - 1, self._setup.run.num_steps
        optimizer = self._setup.config.optimizer
        speed = {
            "step_s": seconds / len(metrics),
            "data_wait_s": data_wait_s,
            "tokens_per_s": num_tokens / seconds,
            "mfu_causal": mfu and mfu[0],
            "mfu_noncausal": mfu and mfu[1],
        }
        phase = self._setup.phase_number
        entries = [_values(each, compiles, number, phase) for number, each in enumerate(metrics, self._first_step)]
        mixture = self._setup.batches.mixture()
        entries[-1] |= speed | _shares(self._mixture_before, mixture)
        return LogWindow(
            step=step,
            num_steps=num_steps,
            loss=float(metrics[-1].loss),
            step_s=seconds / len(metrics),
            data_wait_s=data_wait_s,
            tokens_per_s=num_tokens / seconds,
            mfu_causal=mfu and mfu[0],
            left_s=(times.typical_step_s() or seconds) * (num_steps - step),
            entries=[make_entry(number, entry) for number, entry in enumerate(entries, self._first_step)],
            mixture=mixture,
            num_skipped=int(metrics[-1].num_skipped),
            is_amid_skipped=bool(metrics[-1].num_skipped_in_a_row),
            skipped=tell_skipped(metrics, self._first_step, optimizer),
            failure=find_failure(metrics, self._first_step, optimizer),
        )


def _values(metrics: StepMetrics, compiles: CompileHistory, step: int, phase: int | None) -> dict[str, float | None]:
    values: dict[str, float | None] = {
        "loss": float(metrics.loss),
        "z_loss": float(metrics.z_loss),
        "grad_norm": float(metrics.grad_norm),
        "learning_rate": float(metrics.learning_rate),
        "num_targets": int(metrics.num_targets),
        "num_tokens": int(metrics.num_tokens),
        "num_skipped": int(metrics.num_skipped),
    }
    of_routers = {"load_balance_loss": metrics.load_balance_loss, "router_z_loss": metrics.router_z_loss}
    values |= {name: float(value) for name, value in of_routers.items() if value is not None}
    if metrics.num_losses_recomputed is not None:
        values["num_losses_recomputed"] = int(metrics.num_losses_recomputed)
    if metrics.window is not None:
        values["window"] = int(metrics.window)
    if phase is not None:
        values["phase"] = phase
    recompile_s = compiles.recompile_seconds("train_step", step)
    return values | ({"recompile_s": recompile_s} if recompile_s else {})


def _shares(before: Mapping[str, Any] | None, after: Mapping[str, Any] | None) -> dict[str, float]:
    """The shares of a window's tokens by source and by length of the documents; empty: the data is no mixture."""
    if before is None or after is None:
        return {}
    drawn: Counter[str] = Counter()
    for sign, mixture in ((-1, before), (1, after)):
        for name, source in mixture.items():
            drawn[f"{MIXTURE}/{name}"] += sign * source["num_tokens"]
            for least, count in source["num_tokens_by_length"].items():
                drawn[f"{MIXTURE}_lengths/{least}"] += sign * count
    total = sum(count for name, count in drawn.items() if name.startswith(f"{MIXTURE}/"))
    return {name: count / total for name, count in drawn.items()} if total else {}
