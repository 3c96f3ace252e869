"""Settings of a method, chosen on held-out training rows of CIFAR-10 by a dozen changes.

    python -m experiments.heads.choose FILE METHOD

Starts from a first guess. Each change is tried in its turn, and kept where the mean accuracy at two
budgets and two seeds rises: one setting for all budgets. Heads are fitted on 40,000 of the 50,000
training rows and judged by the other 10,000. Test rows are not read. The outcome is added to
results.json.
"""

import sys
from pathlib import Path
from typing import Any

import numpy as np

from dp_jax.solvers.descent import Descent
from dp_jax.solvers.feature_covariance import FeatureCovariance
from dp_jax.solvers.head import Preprocessing
from dp_jax.solvers.least_squares import LeastSquares
from dp_jax.solvers.newton import Newton
from dp_jax.solvers.solve import Method
from experiments.heads import data, results
from experiments.heads.methods import Times, accuracy, changed

# Their noise, relative to the number of rows, is about that of epsilon 1 and 4 on all rows.
EPSILONS, SEEDS = (1.25, 5.0), (100, 101)

_CENTRED = Preprocessing(centre_share=0.02)
STARTS: dict[str, Method] = {
  "descent": FeatureCovariance(
    Preprocessing(), Descent(steps=60, clip_norm=0.25, learning_rate=1000.0), moment_share=0.0
  ),
  "DP-FC": FeatureCovariance(
    Preprocessing(centre_share=0.006), Descent(steps=30, clip_norm=0.25, learning_rate=40.0),
    moment_share=0.1, whiten=0.0, precondition=1.0, damping=2.0,
  ),
  "least_squares": LeastSquares(_CENTRED, moment_share=0.4, eigenvalue_share=0.05, ridge=1.0),
  "newton": Newton(_CENTRED, steps=1, hessian_share=0.5, clip_norm=1.0, ridge=1.0),
}  # fmt: skip

Change = dict[str, Any]
_BEFORE = "preprocessing.centre_share"
_DESCENT: tuple[Change, ...] = (
  {"descent.schedule": "constant", "descent.average": 0.5},
  {_BEFORE: 0.006},
  {"descent.learning_rate": Times(3)},
  {"descent.learning_rate": Times(1 / 3)},
  {"descent.clip_norm": Times(2)},
  {"descent.clip_norm": Times(0.5)},
  {"descent.steps": Times(2)},
  {"descent.steps": Times(0.5)},
  {"descent.learning_rate": Times(0.1), "descent.momentum": 0.9},
  {"descent.learning_rate": Times(1.7)},
  {"descent.learning_rate": Times(0.6)},
  {"descent.clip_norm": Times(0.7)},
)
_MOMENT: tuple[Change, ...] = (
  {"moment_share": Times(2)},
  {"moment_share": Times(0.5)},
  {"damping": Times(3)},
  {"damping": Times(1 / 3)},
)
_LEAST_SQUARES: tuple[Change, ...] = (
  {_BEFORE: 0.006},
  {_BEFORE: 0.05},
  {"moment_share": 0.2},
  {"moment_share": 0.3},
  {"moment_share": 0.5},
  {"moment_share": 0.6},
  {"ridge": 0.5},
  {"ridge": 0.25},
  {"ridge": 2.0},
  {"eigenvalue_share": 0.01},
  {"eigenvalue_share": 0.01, "ridge": Times(0.5)},
  {"preprocessing.power": 0.7},
)
_NEWTON: tuple[Change, ...] = (
  {_BEFORE: 0.006},
  {"ridge": Times(0.3)},
  {"ridge": Times(3)},
  {"hessian_share": 0.3},
  {"hessian_share": 0.7},
  {"clip_norm": 0.5},
  {"clip_norm": 0.25},
  {"steps": 2},
  {"steps": 3},
  {"steps": 5},
  {"ridge": Times(2)},
  {"ridge": Times(0.5)},
)


# What is tried, in order.
CHANGES: dict[str, tuple[Change, ...]] = {
  "descent": _DESCENT,
  "DP-FC": (*_DESCENT, *_MOMENT),
  "least_squares": _LEAST_SQUARES,
  "newton": _NEWTON,
}


def _shown(value: Any) -> str:
  return f"x {float(value):.3g}" if isinstance(value, Times) else f"= {value}"


def choose(path: Path, name: str) -> None:
  """Tries all changes to a method's settings, and records what was kept."""
  split = data.load(path, choosing=True)
  best, most, tried = STARTS[name], -1.0, []
  for change in ({}, *CHANGES[name]):
    method = changed(best, change)
    found = [np.mean([accuracy(split, method, e, seed) for seed in SEEDS]) for e in EPSILONS]
    kept = float(np.mean(found)) > most
    text = ", ".join(f"{path} {_shown(value)}" for path, value in change.items()) or "none"
    percents = ", ".join(f"{100 * x:.2f}" for x in found)
    tried.append(f"{text}: {percents}{', kept' if kept else ''}")
    print(tried[-1], flush=True)
    if kept:
      best, most = method, float(np.mean(found))
  results.record("choose", path.stem, name, {"tried": tried, "chosen": repr(best)})


if __name__ == "__main__":
  if len(sys.argv) != 3 or sys.argv[2] not in STARTS:
    sys.exit(__doc__)
  choose(Path(sys.argv[1]), sys.argv[2])
