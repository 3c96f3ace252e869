"""Runs the other libraries of the clipping benchmark, each in an environment made for it."""

import json
import os
import subprocess
import sys
import venv
from pathlib import Path
from typing import Any

import flax
import jax

ROOT = Path(__file__).parents[2]
LIBRARIES = {
  "jax_privacy": (
    "experiments.benchmarks.clipping_jax_privacy",
    ["jax-privacy==2.0.0", f"jax=={jax.__version__}", f"flax=={flax.__version__}"],
  ),
  "opacus": ("experiments.benchmarks.clipping_opacus", ["torch==2.13.0", "opacus==1.6.0"]),
}


def compare(models: list[str], repeats: int, folder: Path) -> dict[str, Any]:
  """Library -> its versions and results, or why there are none.

  Args:
    models: rows of the benchmark.
    repeats: timed runs of each.
    folder: where the environments are made; one that is there is used.
  """
  found: dict[str, Any] = {}
  for library, (module, packages) in LIBRARIES.items():
    python = folder / library / "bin" / "python"
    try:
      if not python.exists():
        venv.create(folder / library, with_pip=True)
        subprocess.run([python, "-m", "pip", "install", "-q", *packages], check=True)
      command = [python, "-m", module, f"--models={','.join(models)}", f"--repeats={repeats}"]
      done = subprocess.run(
        command, check=True, stdout=subprocess.PIPE, cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
      )  # fmt: skip
      found[library] = json.loads(done.stdout.splitlines()[-1])
    except (subprocess.CalledProcessError, OSError) as error:
      print(f"{library}: {error}", file=sys.stderr)
      found[library] = {"failed": str(error), "results": {}}
  return found


def table(found: dict[str, Any], titles: dict[str, str]) -> str:
  """Ratios of the other libraries, each to its own plain step, as a Markdown table."""
  lines = [
    "| model | jax_privacy (its best microbatch) | Opacus hooks | Opacus ghost |",
    "| --- | --- | --- | --- |",
  ]
  for name, title in titles.items():
    cells = []
    x = found["jax_privacy"]["results"].get(name)
    if x and x["time_ratio"]:
      cells.append(f"{x['time_ratio']:.2f} ({x['microbatch_size']})")
    else:
      cells.append(x["why"] if x else "")
    y = found["opacus"]["results"].get(name, {})
    for mode in ("hooks", "ghost"):
      ratio = y.get(f"{mode}_time_ratio")
      cells.append(f"{ratio:.2f}" if ratio else "out of memory" if y else "")
    lines.append(f"| {title} | {' | '.join(cells)} |")
  return "\n".join(lines)
