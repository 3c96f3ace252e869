"""Time of the figures of all groups: 100,000 records, 2,000 resamples.

    python -m experiments.benchmarks.bootstrap [--records=100000] [--out=FILE.json]

Two classes, groups by sex (2), race (3) and age band (3) and all their combinations: 47 groups.
"""

import argparse
import json
import os
import resource
import time
from pathlib import Path

import numpy as np

from dp_jax.evaluation.bootstrap import RESAMPLES
from dp_jax.evaluation.fairness import fairness, measure
from dp_jax.evaluation.gaps import compare_tables
from dp_jax.evaluation.predictions import PredictionTable


def draw(records: int, each: int) -> PredictionTable:
  """Made-up predictions, `each` records a person."""
  rng = np.random.default_rng(0)
  units = np.arange(records) // each
  label = rng.random(records) < 0.2
  score = (rng.standard_normal(records) + label).astype(np.float32)
  groups = {
    name: np.array([f"{name}{i}" for i in range(count)])[rng.integers(0, count, records)[units]]
    for name, count in (("sex", 2), ("race", 3), ("age", 3))
  }
  return PredictionTable.of_labels(
    record=np.arange(records), unit=units, label=label.astype(np.int32),
    predicted=(score > 0.5).astype(np.int32),
    label_probability=np.full(records, 0.5, np.float32), score=score, groups=groups,
  )  # fmt: skip


def main() -> None:
  """Prints seconds for each metric, for one run (also of processor time) and for two compared."""
  parser = argparse.ArgumentParser()
  parser.add_argument("--records", type=int, default=100_000)
  parser.add_argument("--out")
  args = parser.parse_args()
  columns = ["sex", "race", "age"]
  rows = []
  for each in (1, 5):
    table = draw(args.records, each)
    for metric in ("accuracy", "auroc", "loss"):
      start, before = time.perf_counter(), time.process_time()
      (measured,) = measure([table], columns, metric, private=False)
      groups = len(fairness(measured).groups)
      one, processor = time.perf_counter() - start, time.process_time() - before
      start = time.perf_counter()
      compare_tables((table, table), ("a", "b"), columns, metric, private=False)
      two = time.perf_counter() - start
      rows.append({
        "records": args.records, "records_a_person": each, "metric": metric, "groups": groups,
        "resamples": RESAMPLES, "seconds": round(one, 2), "processor_seconds": round(processor, 2),
        "seconds_compare": round(two, 2),
      })  # fmt: skip
      print(rows[-1], flush=True)
  content = {
    "command": f"python -m experiments.benchmarks.bootstrap --records={args.records}",
    "cores": os.cpu_count(), "rows": rows,
    "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
  }  # fmt: skip
  print(content["peak_mib"], "MiB")
  if args.out:
    Path(args.out).write_text(json.dumps(content, indent=2) + "\n")


if __name__ == "__main__":
  main()
