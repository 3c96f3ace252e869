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


def compare(model: str, repeats: int, folder: Path) -> dict[str, Any]:
  """Library -> its version and its result for a row, or why there is none.

  Args:
    model: a row of the benchmark.
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
      done = subprocess.run(
        [python, "-m", module, f"--models={model}", f"--repeats={repeats}"],
        check=True, stdout=subprocess.PIPE, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)},
      )  # fmt: skip
      printed = json.loads(done.stdout.splitlines()[-1])
      found[library] = {**printed.pop("results")[model], **printed}
    except (subprocess.CalledProcessError, OSError) as error:
      print(f"{library}: {error}", file=sys.stderr)
      found[library] = {"failed": str(error)}
  return found


def table(rows: dict[str, Any], compared: dict[str, Any], titles: dict[str, str]) -> str:
  """Time ratios of this project and the others, each to its own plain step, in Markdown."""
  lines = [
    "| model, batch | auto | ghost | vmap | jax_privacy (its best microbatch) | Opacus ghost"
    " | Opacus hooks |",
    "| --- | --- | --- | --- | --- | --- | --- |",
  ]
  for name, others in compared.items():
    engines = rows[name]["engines"]
    cells = [
      f"{engines[e]['time_ratio']:.2f}" if e in engines else "" for e in ("auto", "ghost", "vmap")
    ]
    x, y = others["jax_privacy"], others["opacus"]
    cells.append("failed" if "failed" in x else f"{x['time_ratio']:.2f} ({x['microbatch_size']})")
    for mode in ("ghost", "hooks"):
      ratio = y.get(f"{mode}_time_ratio")
      cells.append("failed" if "failed" in y else f"{ratio:.2f}" if ratio else "over 4 GiB")
    lines.append(f"| {titles[name]}, {rows[name]['batch']} | {' | '.join(cells)} |")
  return "\n".join(lines)
