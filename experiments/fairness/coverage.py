"""How often 95% intervals hold the truth, on people with several records each.

    python -m experiments.fairness.coverage [--repeats=1000] [--out=FILE.json]

Each repeat draws 400 people with 1 to 9 records (5 on average) and a score for each. How well a
person is classified is a property of the person, so records of one person go together. The truth
comes from one draw of 400,000 people. Intervals over people should hold it in 93 to 97 of 100
repeats; intervals over records, as if they were independent, should fall short.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np

from dp_jax.evaluation.fairness import fairness, measure
from dp_jax.evaluation.predictions import PredictionTable

PEOPLE, RESAMPLES = 400, 600


def draw(rng: np.random.Generator, people: int) -> PredictionTable:
  """Predictions for people of two groups; a third is in group f, which is harder."""
  records = rng.integers(1, 10, people)
  units = np.repeat(np.arange(people), records)
  is_f = rng.random(people) < 1 / 3
  hard = rng.standard_normal(people) + 0.4 * is_f
  label = (rng.random(people) < 0.4)[units]
  noise = 0.6 * rng.standard_normal(len(units)) + 0.8 * rng.standard_normal(people)[units]
  score = (2.0 * label - 1.0) * (1.0 - 0.5 * hard[units]) + noise
  predicted = score > 0
  return PredictionTable.of_labels(
    record=np.arange(len(units)), unit=units, label=label.astype(np.int32),
    predicted=predicted.astype(np.int32),
    label_probability=np.full(len(units), 0.5, np.float32), score=score.astype(np.float32),
    groups={"sex": np.where(is_f, "f", "m")[units]},
  )  # fmt: skip


def figures(table: PredictionTable, metric: str, **options: Any) -> dict[str, Any]:
  """The intervals of a table: overall, of group f, and of its gap."""
  (measured,) = measure([table], ["sex"], metric, private=False, **options)
  found = fairness(measured)
  group = found.groups[0]
  return {"overall": found.overall, "group f": group.value, "gap of group f": group.gap}


def main() -> None:
  """Prints the table, and writes it."""
  parser = argparse.ArgumentParser()
  parser.add_argument("--repeats", type=int, default=1000)
  parser.add_argument("--out")
  args = parser.parse_args()
  start = time.perf_counter()
  result = study(args.repeats)
  content = {
    "command": f"python -m experiments.fairness.coverage --repeats={args.repeats}",
    "seconds": round(time.perf_counter() - start, 1), "repeats": args.repeats, "people": PEOPLE,
    "resamples": RESAMPLES, "coverage": result,
  }  # fmt: skip
  print(json.dumps(content, indent=2))
  if args.out:
    Path(args.out).write_text(json.dumps(content, indent=2) + "\n")


def study(
  repeats: int, large: int = 400_000, resamples: int = RESAMPLES
) -> dict[str, dict[str, float]]:
  """Coverage of each interval, resampling people and resampling records.

  Args:
    repeats: how often to draw people.
    large: people of the draw that stands for the truth.
    resamples: of each bootstrap.
  """
  rng = np.random.default_rng(0)
  metrics = ("accuracy", "auroc")
  everyone = draw(rng, large)
  truth = {metric: figures(everyone, metric, resamples=1) for metric in metrics}
  held: dict[str, dict[str, list[bool]]] = {"people": {}, "records": {}}
  for seed in range(repeats):
    table = draw(rng, PEOPLE)
    apart = table.of_people(np.arange(len(table.label)), table.groups, {})
    for kind, own in (("people", table), ("records", apart)):
      for metric in metrics:
        for name, interval in figures(own, metric, resamples=resamples, seed=seed).items():
          inside = interval.low <= truth[metric][name].value <= interval.high
          held[kind].setdefault(f"{metric}, {name}", []).append(inside)
  return {
    kind: {name: float(np.mean(inside)) for name, inside in found.items()}
    for kind, found in held.items()
  }


if __name__ == "__main__":
  main()
