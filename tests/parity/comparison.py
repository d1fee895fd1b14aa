"""Whether a case's loss and gradients are one device's, and whether one device's are the oracle's.

In float64 each may differ by 1e-12, relative, which leaves room for sums in another order and for nothing else. float32
is held to its own rounding: to what one device's float32 is off from one device's float64.
"""

from __future__ import annotations

import dataclasses
import re
import traceback
from collections.abc import Mapping
from contextlib import nullcontext
from typing import NamedTuple

import numpy as np

from tests.parity.cases import Case, Placement, Problem
from tests.parity.faults import injected
from tests.parity.model import Model, Outcome

FLOAT64_TOLERANCE = 1e-12
# Two float32 evaluations of one function round independently of each other, each by about as much. A norm over a
# parameter's few dozen numbers, or one loss, varies by less than this factor.
FLOAT32_FACTOR = 4


class Verdict(NamedTuple):
    """What came of a case."""

    passed: bool
    text: str
    """What was found, or what was expected."""


class Comparison:
    """One problem's results on one device, which its cases are compared with."""

    def __init__(self, problem: Problem):
        self.model = Model(problem)
        self._one_device: dict[Placement, Outcome] = {}

    def on_one_device(self, placement: Placement) -> Placement:
        """The placement on one device, in float64, that another is compared with."""
        # The load of experts is balanced in each micro-batch. All else is the same however a batch is cut.
        return Placement(accumulation=placement.accumulation if self.model.config.moe is not None else 1)

    def judge_one_device(self, placement: Placement) -> Verdict:
        """Compares one device with the oracle.

        Args:
          placement: one of `on_one_device`.
        """
        found = _differences(self._run(placement), self.model.oracle(placement.accumulation))
        return _judge(found, dict.fromkeys(found, FLOAT64_TOLERANCE))

    def judge(self, case: Case, fault: str | None = None) -> Verdict:
        """Runs a case.

        Args:
          case: of this problem.
          fault: one of `tests.parity.faults.FAULTS`, injected into the case but not into what it is compared with.
        """
        try:
            with injected(fault) if fault else nullcontext():
                outcome = self.model.run(case.placement)
        except ValueError as error:
            expected = case.expected_refusal
            is_expected = expected is not None and re.search(expected, str(error)) is not None
            return Verdict(is_expected, f"refused: {error}")
        except Exception as error:  # the other cases are worth running all the same
            traceback.print_exc()
            return Verdict(False, f"{type(error).__name__}: {error}")
        if case.expected_refusal is not None:
            return Verdict(False, f"ran, and was to be refused with {case.expected_refusal!r}")
        one_device = self.on_one_device(case.placement)
        found = _differences(outcome, self._run(one_device))
        is_float64 = case.placement.dtype == "float64"
        return _judge(found, dict.fromkeys(found, FLOAT64_TOLERANCE) if is_float64 else self._rounding(one_device))

    def _run(self, placement: Placement) -> Outcome:
        """A placement on one device, which is run once."""
        if placement not in self._one_device:
            self._one_device[placement] = self.model.run(placement)
        return self._one_device[placement]

    def _rounding(self, placement: Placement) -> dict[str, float]:
        """What float32 is allowed, by how far it is off on one device."""
        in_float32 = dataclasses.replace(placement, dtype="float32")
        rounding = _differences(self._run(in_float32), self._run(placement))
        # A loss, or a parameter of few numbers, can be right by luck; what is usual is the median.
        usual = float(np.median(list(rounding.values())))
        return {name: FLOAT32_FACTOR * max(off, usual) for name, off in rounding.items()}


def _judge(found: Mapping[str, float], allowed: Mapping[str, float]) -> Verdict:
    """Whether no difference is more than rounding. NaN is."""
    excess = {name: np.nan_to_num(found[name] / allowed[name], nan=np.inf) for name in found}
    name = max(excess, key=excess.__getitem__)
    return Verdict(excess[name] <= 1, f"{name} differs by {found[name]:.1e}, of which {allowed[name]:.1e} is allowed")


def _differences(outcome: Outcome, expected: Outcome) -> dict[str, float]:
    """Norm of the difference over norm of the expected value, of the loss and of each parameter's gradient."""
    assert outcome.gradients.keys() == expected.gradients.keys()
    pairs = {name: (outcome.gradients[name], expected.gradients[name]) for name in expected.gradients}
    pairs["loss"] = outcome.loss, expected.loss
    return {name: float(np.linalg.norm(a - b) / np.linalg.norm(b)) for name, (a, b) in pairs.items()}
