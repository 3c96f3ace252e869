"""How long it takes to group ten million records into units, and to read a table of a million rows.

    python experiments/benchmarks/tables.py

Prints processor seconds, and writes them with the machine and the date to tables.json beside this
file. Takes about a minute and 5 GB.
"""

import datetime
import functools
import json
import os
import pathlib
import tempfile
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from dp_jax.data import open_source
from dp_jax.data.sources.csv_source import Csv
from dp_jax.data.unit_index import UnitIndex

RECORDS, UNITS, ROWS, COLUMNS = 10**7, 10**6, 10**6, 20
HERE = pathlib.Path(__file__).resolve()


def seconds(work: Callable[[], Any]) -> float:
  """Processor time of one call, which other work on the machine changes little."""
  start = time.process_time()
  work()
  return round(time.process_time() - start, 2)


def grouping() -> dict[str, float]:
  """Of whole numbers and of strings, in random order, at most 8 records a unit."""
  numbers = np.random.default_rng(0).integers(0, UNITS, RECORDS)
  text = np.array([f"patient{i:07d}" for i in range(UNITS)])[numbers]
  return {
    "group 10^7 records, ids whole numbers": seconds(lambda: UnitIndex.from_ids(numbers, 8)),
    "group 10^7 records, ids strings": seconds(lambda: UnitIndex.from_ids(text, 8)),
  }


def reading() -> dict[str, float]:
  """Of a file of 10^6 rows, once as it should be and once with a cell that is no number."""
  random = np.random.default_rng(1)
  names = [f"c{i}" for i in range(COLUMNS)]
  rows = [",".join(map(str, row)) for row in random.random((ROWS // 10, COLUMNS)).round(4)] * 10
  spec = Csv(
    label_columns=("label",), class_names=("0", "1"), features=tuple(names),
    feature_ranges=((0.0, 1.0),) * COLUMNS, eval_fraction=0.2,
  )  # fmt: skip
  found = {}
  for kind in ("well-formed", "with malformed cells"):
    lines = [f"{row},{i % 2},p{i // 3}" for i, row in enumerate(rows)]
    if kind != "well-formed":
      lines[7] = "x," * COLUMNS + "0,p2"
    with tempfile.TemporaryDirectory() as folder:
      file = pathlib.Path(folder) / "table.csv"
      file.write_text("\n".join([",".join([*names, "label", "person"]), *lines]))
      open_table = functools.partial(
        open_source, "csv", "train", spec, path=str(file), unit="person"
      )
      found[f"open a split of 10^6 rows of 22 columns, {kind}"] = seconds(open_table)
  return found


def main() -> None:
  """Measures and writes."""
  found = {**grouping(), **reading()}
  for name, value in found.items():
    print(f"{value:7.2f} s  {name}")
  record = {
    "processor_seconds": found,
    "machine": f"{os.cpu_count()} cores, {os.uname().machine}",
    "date": datetime.date.today().isoformat(),
  }
  HERE.with_suffix(".json").write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
  main()
