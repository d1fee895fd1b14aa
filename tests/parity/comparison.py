"""Whether a case's loss and gradients are one device's, and whether one device's are the oracle's.

In float64 each may differ by 1e-12, relative, which leaves room for sums in another order and for nothing else. float32
is held to its own rounding: to what one device's float32 is off from one device's float64.
"""

from __future__ import annotations

import functools
import re
import traceback
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
        self.one_device = self.model.run(Placement())

    @functools.cached_property
    def rounding(self) -> dict[str, float]:
        """How far one device's float32 is off."""
        return _differences(self.model.run(Placement(dtype="float32")), self.one_device)

    def judge_one_device(self) -> Verdict:
        """Compares one device with the oracle."""
        return self._judge(_differences(self.one_device, self.model.oracle()), "float64")

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
        return self._judge(_differences(outcome, self.one_device), case.placement.dtype)

    def _judge(self, found: dict[str, float], dtype: str) -> Verdict:
        """Whether no difference is more than rounding. NaN is."""
        allowed = self._allowed(dtype)
        excess = {name: np.nan_to_num(found[name] / allowed[name], nan=np.inf) for name in found}
        name = max(excess, key=excess.__getitem__)
        return Verdict(
            excess[name] <= 1, f"{name} differs by {found[name]:.1e}, of which {allowed[name]:.1e} is allowed"
        )

    def _allowed(self, dtype: str) -> dict[str, float]:
        if dtype == "float64":
            return dict.fromkeys(("loss", *self.one_device.gradients), FLOAT64_TOLERANCE)
        # A loss, or a parameter of few numbers, can be right by luck; what is usual is the median.
        usual = float(np.median(list(self.rounding.values())))
        return {name: FLOAT32_FACTOR * max(off, usual) for name, off in self.rounding.items()}


def _differences(outcome: Outcome, expected: Outcome) -> dict[str, float]:
    """Norm of the difference over norm of the expected value, of the loss and of each parameter's gradient."""
    assert outcome.gradients.keys() == expected.gradients.keys()
    pairs = {name: (outcome.gradients[name], expected.gradients[name]) for name in expected.gradients}
    pairs["loss"] = outcome.loss, expected.loss
    return {name: float(np.linalg.norm(a - b) / np.linalg.norm(b)) for name, (a, b) in pairs.items()}
