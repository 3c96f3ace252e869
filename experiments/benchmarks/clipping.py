"""Time and memory of clipped gradients, as ratios to the plain non-private gradient.

    python -m experiments.benchmarks.clipping                     all rows, with clipping.json
    python -m experiments.benchmarks.clipping --models=head,lora --engines=ghost --quick
    python -m experiments.benchmarks.clipping --compare           jax_privacy and Opacus too

One process for all engines of a row; runs are interleaved (plain, ghost, vmap, plain, ...), so that
what else the machine does falls on all of them alike. The time of an engine is its median, its
ratio the median of the ratios to the plain run beside it. Memory is XLA's temporary memory of the
compiled function, without arguments and results.
"""

import argparse
import datetime
import json
import os
import platform
import shlex
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import flax
import jax
import jax.numpy as jnp

from dp_jax.gradients.clipping import MEMORY_BUDGET, clipped_grad
from experiments.benchmarks import clipping_compare
from experiments.benchmarks.clipping_models import ROWS, Case, Row

# Per-unit gradients of vmap beyond this are not tried.
VMAP_LIMIT = 8 * 2**30
# Short steps are repeated more often: for so many seconds an engine, and at most so many times.
LEAST_SECONDS, MOST_REPEATS = 3.0, 25
HERE = Path(__file__).parent


def compiled_engine(engine: str, row: Row, case: Case, args: tuple[Any, ...]) -> Any:
  """Compiles (params, frozen, units) -> gradient of one engine."""
  if engine == "plain":

    def run(params: Any, frozen: Any, units: Any) -> Any:
      def total(p: Any) -> jax.Array:
        return jnp.sum(jax.vmap(lambda unit: case.loss(p, frozen, unit))(units))

      return jax.grad(total)(params)
  else:

    def run(params: Any, frozen: Any, units: Any) -> Any:
      grad_fn = clipped_grad(
        lambda p, unit, key: case.loss(p, frozen, unit), 1.0, engine=engine,
        microbatch_size=row.microbatch_size,
        memory_budget=MEMORY_BUDGET if row.memory_budget is None else row.memory_budget,
      )  # fmt: skip
      return grad_fn(params, units)

  return jax.jit(run).lower(*args).compile()


def measure(row: Row, engines: list[str], repeats: int, batch: int) -> dict[str, Any]:
  """Time and memory of each engine on one row, and their ratios to plain."""
  case = row.make(batch)
  args = jax.device_put((case.params, case.frozen, case.units))
  size = sum(x.size for x in jax.tree.leaves(case.params))
  tried = [e for e in engines if e != "vmap" or 4 * size * batch <= VMAP_LIMIT]
  compiled = {e: compiled_engine(e, row, case, args) for e in tried}
  for function in compiled.values():
    start = time.perf_counter()
    jax.block_until_ready(function(*args))
    repeats = max(repeats, min(MOST_REPEATS, int(LEAST_SECONDS / (time.perf_counter() - start))))
  times: dict[str, list[float]] = {e: [] for e in tried}
  for _ in range(repeats):
    for engine, function in compiled.items():
      start = time.perf_counter()
      jax.block_until_ready(function(*args))
      times[engine].append(time.perf_counter() - start)
  memory = {e: f.memory_analysis().temp_size_in_bytes for e, f in compiled.items()}
  result: dict[str, Any] = {"parameters": size, "batch": batch, "engines": {}}
  for engine in tried:
    ratios = [t / p for t, p in zip(times[engine], times["plain"], strict=True)]
    result["engines"][engine] = {
      "seconds": statistics.median(times[engine]),
      "time_ratio": statistics.median(ratios),
      "temporary_bytes": memory[engine],
      "memory_ratio": memory[engine] / memory["plain"],
    }
  result["not_tried"] = {
    e: f"per-unit gradients of {4 * size * batch / 2**30:.1f} GiB"
    for e in engines
    if e not in tried
  }
  return result


def describe_machine() -> dict[str, Any]:
  """What numbers depend on."""
  model = platform.processor()
  if os.path.exists("/proc/cpuinfo"):
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((x.split(":")[1].strip() for x in lines if x.startswith("model name")), model)
  return {
    "device": jax.devices()[0].device_kind,
    "platform": jax.devices()[0].platform,
    "cpu": model,
    "cores": os.cpu_count(),
    "python": platform.python_version(),
    "jax": jax.__version__,
    "flax": flax.__version__,
  }


def table(rows: dict[str, Any]) -> str:
  """The results as a Markdown table."""
  lines = [
    "| model, batch | engine | ms | time ratio | at most | memory MiB | memory ratio | at most |",
    "| --- | --- | --- | --- | --- | --- | --- | --- |",
  ]
  for name, result in rows.items():
    row = ROWS[name]
    for engine, x in result["engines"].items():
      targets = ["", ""]
      if engine == "ghost":
        targets = [f"{t:g}" if t else "" for t in (row.target_time, row.target_memory)]
      lines.append(
        f"| {row.title}, {result['batch']} | {engine} | {1000 * x['seconds']:.0f}"
        f" | {x['time_ratio']:.2f} | {targets[0]} | {x['temporary_bytes'] / 2**20:.0f}"
        f" | {x['memory_ratio']:.2f} | {targets[1]} |"
      )
    for engine, why in result["not_tried"].items():
      lines.append(f"| {row.title}, {result['batch']} | {engine} | {why} | | | | | |")
  return "\n".join(lines)


def plot(rows: dict[str, Any], path: Path) -> None:
  """Bars of time and memory ratios."""
  import matplotlib

  matplotlib.use("Agg")
  import matplotlib.pyplot as plt

  figure, axes = plt.subplots(1, 2, figsize=(11, 4.5), sharey=True)
  engines = [e for e in ("ghost", "auto", "vmap") if any(e in r["engines"] for r in rows.values())]
  height = 0.8 / max(1, len(engines))
  for axis, key, title in zip(
    axes, ("time_ratio", "memory_ratio"), ("time", "temporary memory"), strict=True
  ):
    for shift, engine in enumerate(engines):
      found = [(i, r["engines"][engine][key]) for i, r in enumerate(rows.values())
               if engine in r["engines"]]  # fmt: skip
      places = [i + shift * height for i, _ in found]
      axis.barh(places, [v for _, v in found], height, label=engine)
    axis.axvline(1, color="black", linewidth=0.8)
    axis.set_xlabel(f"{title}, as a multiple of the plain gradient")
  axes[0].set_yticks(range(len(rows)), [f"{ROWS[n].title}, {r['batch']}" for n, r in rows.items()])
  axes[0].invert_yaxis()
  axes[1].legend()
  figure.tight_layout()
  figure.savefig(path, dpi=110)


def parse(arguments: list[str]) -> argparse.Namespace:
  """Reads the command line."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--models", default=",".join(ROWS), help=f"of {', '.join(ROWS)}")
  parser.add_argument("--engines", default="ghost,auto,vmap", help="of ghost, auto, vmap, loop")
  parser.add_argument("--repeats", type=int, default=5)
  parser.add_argument("--batch", type=int, default=0, help="in the place of each row's own")
  parser.add_argument("--compare", action="store_true", help="also jax_privacy and Opacus")
  parser.add_argument(
    "--environments", type=Path, default=Path(tempfile.gettempdir()) / "dp_jax_compare",
    help="folder of the virtual environments that --compare makes",
  )  # fmt: skip
  parser.add_argument("--quick", action="store_true", help="two repeats, nothing written")
  parser.add_argument("--output", type=Path, default=HERE / "clipping.json", help="JSON, and a png")
  options = parser.parse_args(arguments)
  unknown = [name for name in options.models.split(",") if name not in ROWS]
  if unknown:
    parser.error(f"--models={','.join(unknown)} is not of {', '.join(ROWS)}")
  return options


def main() -> None:
  """Measures, prints and writes."""
  options = parse(sys.argv[1:])
  engines = ["plain", *options.engines.split(",")]
  rows: dict[str, Any] = {}
  compared: dict[str, Any] = {}
  for name in options.models.split(","):
    repeats = 2 if options.quick else options.repeats
    rows[name] = measure(ROWS[name], engines, repeats, options.batch or ROWS[name].batch)
    print(table({name: rows[name]}).split("\n", 2)[2], flush=True)
    jax.clear_caches()
    if options.compare and ROWS[name].memory_budget is None:
      compared[name] = clipping_compare.compare(name, min(3, repeats), options.environments)
      print(json.dumps(compared[name]), flush=True)
  print("\n" + table(rows))
  if compared:
    titles = {name: ROWS[name].title for name in rows}
    print("\n" + clipping_compare.table(rows, compared, titles))
  if options.quick:
    return
  command = shlex.join(["python", "-m", "experiments.benchmarks.clipping", *sys.argv[1:]])
  for row in rows.values():
    row["measured"] = {"command": command, "date": datetime.date.today().isoformat()}
  machine = describe_machine()
  if options.output.exists():  # rows of another run on the same machine stay
    before = json.loads(options.output.read_text())
    if before["machine"] == machine:
      rows = {n: {**before["rows"], **rows}[n] for n in ROWS if n in rows or n in before["rows"]}
      compared = {**before["compared"], **compared}
  result = {"machine": machine, "rows": rows, "compared": compared}
  options.output.write_text(json.dumps(result, indent=1) + "\n")
  plot(rows, options.output.with_suffix(".png"))


if __name__ == "__main__":
  main()
