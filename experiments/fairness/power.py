"""How often `compare` finds a gap that was planted, and one that is not there.

    python -m experiments.fairness.power [--repeats=1000] [--out=FILE.json]

Each repeat draws 2,000 people with two records each, 30% of them in group f, and two models that
are right on the same people more often than chance would have it, as two models trained on the
same data are. Both are right on 80% of the records of the others, and either on as many of group f
or on 6 points less. With a planted gap, the first is right on 8 points less again of group f, so
that its gap to the overall widens by 5.6 points and the largest gap by 8. The false alarms should
be 5% +- 2, and the power above 90%. (A largest gap cannot be negative: where there is none at all,
its false alarms are fewer.)
"""

import argparse
import json
import time
from pathlib import Path

import numpy as np
from scipy.special import ndtri

from dp_jax.evaluation.gaps import compare_tables
from dp_jax.evaluation.predictions import PredictionTable

PEOPLE, RESAMPLES, PLANTED, BOTH = 2000, 1000, 0.08, 0.06


def pair(
  rng: np.random.Generator, planted: float, both: float
) -> tuple[PredictionTable, PredictionTable]:
  """Two models on the same people.

  Args:
    rng: draws.
    planted: how much less of group f the first is right on than the second.
    both: how much less of group f than of the others the second is right on.
  """
  units = np.arange(2 * PEOPLE) // 2
  is_f = (rng.random(PEOPLE) < 0.3)[units]
  # A third of the variance is the person's, a third the record's, a third the model's.
  shared = rng.standard_normal(PEOPLE)[units] + rng.standard_normal(len(units))
  accuracies = 0.8 - (both + planted) * is_f, 0.8 - both * is_f
  tables = []
  for accuracy in accuracies:
    own = (shared + rng.standard_normal(len(units))) / np.sqrt(3)
    right = own < ndtri(accuracy)
    tables.append(PredictionTable.of_labels(
      record=np.arange(len(units)), unit=units, label=np.zeros(len(units), np.int32),
      predicted=np.where(right, 0, 1).astype(np.int32),
      label_probability=np.where(right, 0.9, 0.1).astype(np.float32),
      score=np.zeros(0, np.float32), groups={"sex": np.where(is_f, "f", "m")},
    ))  # fmt: skip
  return tables[0], tables[1]


def study(repeats: int, planted: float, both: float = BOTH) -> dict[str, dict[str, float]]:
  """The share of each verdict, for the gap of group f and the largest gap."""
  rng = np.random.default_rng(1)
  verdicts: dict[str, list[str]] = {}
  for seed in range(repeats):
    found = compare_tables(
      pair(rng, planted, both), ("first", "second"), ["sex"], "accuracy", private=False,
      resamples=RESAMPLES, seed=seed,
    )  # fmt: skip
    for change in found.changes:
      if change.name != "sex m":  # the mirror image of f
        verdicts.setdefault(change.name, []).append(change.verdict)
  return {
    name: {verdict: told.count(verdict) / repeats for verdict in sorted(set(told))}
    for name, told in verdicts.items()
  }


def main() -> None:
  """Prints the shares, and writes them."""
  parser = argparse.ArgumentParser()
  parser.add_argument("--repeats", type=int, default=1000)
  parser.add_argument("--out")
  args = parser.parse_args()
  start = time.perf_counter()
  content = {
    "command": f"python -m experiments.fairness.power --repeats={args.repeats}",
    "repeats": args.repeats, "people": PEOPLE, "resamples": RESAMPLES,
    "shares": [
      {"planted": planted, "both": both, "verdicts": study(args.repeats, planted, both)}
      for both in (0.0, BOTH) for planted in (0.0, PLANTED)
    ],
  }  # fmt: skip
  content["seconds"] = round(time.perf_counter() - start, 1)
  print(json.dumps(content, indent=2))
  if args.out:
    Path(args.out).write_text(json.dumps(content, indent=2) + "\n")


if __name__ == "__main__":
  main()
