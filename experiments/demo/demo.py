"""The main job on real data: public pre-training, private fine-tuning, comparison, report.

`make demo` runs it once. `python -m experiments.demo.demo --seeds=5` repeats it on five splits
with five initial models and prints mean and standard deviation. A run that was stopped goes on.
"""

import statistics
from collections.abc import Mapping
from pathlib import Path

from absl import app, flags, logging

from configs import digits, digits_finetune, rendered_digits
from dp_jax.config.run_config import Config
from dp_jax.report.html import render_report
from dp_jax.runs.using import evaluate_release
from dp_jax.training.run import Result, train

_FOLDER = flags.DEFINE_string("folder", "runs/demo", "where the runs go")
_SEEDS = flags.DEFINE_integer("seeds", 1, "how many splits and initial models")
_EPSILON = flags.DEFINE_float("epsilon", 0.5, "target of the private runs")

# Faint and heavy writing: cut points of the mean pixel value, about its quartiles.
INK = (4.5, 5.25)
LABELS = {
  "rendered": "rendered digits alone (public)",
  "private": "private, from public weights",
  "scratch": "private, from scratch",
  "plain": "no privacy, from public weights",
}


def run_demo(folder: Path, seed: int, epsilon: float) -> dict[str, Result | float]:
  """One public pre-training and three fine-tunings.

  Args:
    folder: gets a work directory for each.
    seed: picks the split of the scans and the initial model.
    epsilon: target of the private runs.

  Returns:
    The results of "private", "scratch" and "plain", and the accuracy of the "rendered" weights.
  """
  public = rendered_digits.get_config()
  public.seed = seed
  train(Config.from_dict(public.to_dict()), folder / "pretrain", label="pre-train on rendered")
  weights = str(folder / "pretrain" / "unprotected" / "params.safetensors")
  results: dict[str, Result | float] = {}
  for name, module in (
    ("private", digits_finetune),
    ("scratch", digits),
    ("plain", digits_finetune),
  ):
    config = module.get_config()
    config.seed = config.data.seed = seed
    config.data.groups, config.data.group_bins = ("ink",), (INK,)
    config.privacy.epsilon = epsilon
    config.privacy.enabled = name != "plain"
    config.model.weights = None if name == "scratch" else weights
    final = Config.from_dict(config.to_dict())
    results[name] = train(final, folder / name, label=LABELS[name])
  results["rendered"] = evaluate_release(folder / "pretrain", final)["accuracy"]
  return results


def accuracy(result: Result | float) -> float:
  """Held-out accuracy, a fraction."""
  return result if isinstance(result, float) else result.metrics["test"]["accuracy"]


def table(runs: list[Mapping[str, Result | float]], epsilon: float) -> str:
  """Accuracy of each variant, with mean and standard deviation over several seeds."""
  spent = {"private": f"{epsilon:g}", "scratch": f"{epsilon:g}"}
  spread = f" (mean and standard deviation of {len(runs)})" if len(runs) > 1 else ""
  lines = [f"{'':32} {'epsilon':>8}  held-out accuracy{spread}"]
  for name, label in LABELS.items():
    values = [100 * accuracy(run[name]) for run in runs]
    cell = f"{statistics.mean(values):5.1f}%"
    if len(values) > 1:
      cell += f" +- {statistics.stdev(values):.1f}"
    lines.append(f"{label:32} {spent.get(name, '-'):>8}  {cell}")
  return "\n".join(lines)


def main(argv: list[str]) -> None:
  """Runs the demo and prints what it found."""
  if len(argv) > 1 or _SEEDS.value < 1:
    raise app.UsageError("give no arguments and at least one seed")
  logging.set_verbosity(logging.WARNING)  # orbax narrates every file at INFO
  folder = Path(_FOLDER.value)
  runs = []
  for seed in range(_SEEDS.value):
    here = folder if seed == 0 else folder / f"seed{seed}"
    runs.append(run_demo(here, seed, _EPSILON.value))
  private = runs[0]["private"]
  assert isinstance(private, Result)
  others = {name: folder / name for name in ("plain", "scratch")}
  report = render_report(folder / "private", others)
  report.chmod(0o644)
  print(f"\n{table(runs, _EPSILON.value)}\n\n{private.statement}\n")
  print(f"verify:  dp-jax verify {folder}/private/release\nreport:  {report}")


if __name__ == "__main__":
  app.run(main)
