"""Settings of a method, chosen on held-out training rows of CIFAR-10 by a dozen changes.

    python -m experiments.heads.choose FILE METHOD

Each change is tried in its turn, and kept where the mean accuracy at two budgets and two seeds
rises: one setting for all budgets. Heads are fitted on 40,000 of the 50,000 training rows and
judged by the other 10,000. Test rows are not read. The outcome is added to results.json.
"""

import sys
from pathlib import Path
from typing import Any

import numpy as np

from dp_jax.solvers.least_squares import LeastSquares
from dp_jax.solvers.newton import Newton
from experiments.heads import data, results
from experiments.heads.methods import METHODS, Times, accuracy, changed

# Their noise, relative to the number of rows, is about that of epsilon 1 and 4 on all rows.
EPSILONS, SEEDS = (1.25, 5.0), (100, 101)

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


def changes_of(name: str) -> tuple[Change, ...]:
  """What is tried for a method, in order."""
  if isinstance(METHODS[name], LeastSquares):
    return _LEAST_SQUARES
  if isinstance(METHODS[name], Newton):
    return _NEWTON
  return _DESCENT if METHODS[name].parts()[-1].share == 1 else (*_DESCENT, *_MOMENT)


def _shown(value: Any) -> str:
  return f"x {float(value):.3g}" if isinstance(value, Times) else f"= {value}"


def choose(path: Path, name: str) -> None:
  """Tries all changes to a method's settings, and records what was kept."""
  split = data.load(path, choosing=True)
  best, most, tried = METHODS[name], -1.0, []
  for change in ({}, *changes_of(name)):
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
  if len(sys.argv) != 3 or sys.argv[2] not in METHODS:
    sys.exit(__doc__)
  choose(Path(sys.argv[1]), sys.argv[2])
