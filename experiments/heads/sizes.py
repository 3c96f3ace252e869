"""Which method does best at which size of problem: what `solver.method=auto` rests on.

    python -m experiments.heads.sizes FOLDER [MINUTES]    # the .npz files; goes on where it stopped
    python -m experiments.heads.sizes show                # the table as Markdown

Public data: features of CIFAR-10 (560; 1280 from another layer; 60 by a fixed random projection of
the 560; two classes, animal or vehicle) and pixels of MNIST. Test rows are not read: 10,000
training rows are held out, and the first records of the others are fitted.

At each size, each method starts from its settings of `methods.py`, chosen at 40,000 x 560, and its
strength is searched: what trades noise for bias. That is the learning rate of a descent, which
sets how far noise moves the head, and the ridge of the others, in units of the noise in their
matrix. It climbs by factors of 3 for as long as accuracy on the first half of the held-out rows
rises. Methods that would waste much of the budget on a matrix that noise has swallowed climb in
that share too (see KNOBS). The chosen setting is then judged by the other half, with two fresh
seeds. The share of the centre is the same for all methods: see `centre_share`.
"""

import dataclasses
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from dp_jax.privacy.calibration.calibrate import calibrate
from dp_jax.privacy.sampling import FullBatch
from dp_jax.privacy.spec import PrivacySpec
from experiments.heads import data, results
from experiments.heads.methods import DELTA, METHODS, Times, changed, fit, right

SEED, JUDGING_SEEDS, HALF = 200, (300, 301), data.HELD_OUT // 2

# What is climbed in, one after the other, and by which factor.
KNOBS: dict[str, tuple[tuple[str, float], ...]] = {
  "feature_covariance": (("descent.learning_rate", 3.0),),
  "descent": (("descent.learning_rate", 3.0),),
  "DP-FC": (("descent.learning_rate", 3.0), ("damping", 10.0)),
  "least_squares": (("ridge", 3.0), ("moment_share", 2.0)),
  "newton": (("ridge", 3.0), ("hessian_share", 3.0)),
}

# (records, epsilon). Noise in a mean is about in proportion to 1 / (records x epsilon).
Sizes = tuple[tuple[int, float], ...]
ALL: Sizes = ((2000, 0.5), (2000, 2.0), (2000, 8.0), (10_000, 0.5), (10_000, 8.0), (40_000, 0.5),
              (40_000, 8.0))  # fmt: skip
FEW: Sizes = ((2000, 0.5), (2000, 8.0), (10_000, 8.0))
# Beyond so many features ten blocks take minutes a run.
MOST_FOR_NEWTON = 1000
# Rows have norm 1: how long the noise in a centre may be, and the most of the budget for that.
CENTRE_NOISE, MOST_FOR_CENTRE = 0.1, 0.1
FILE_560, FILE_1280 = (f"cifar10_efficientnet_lite2_{d}.npz" for d in (560, 1280))
VEHICLES = (0, 1, 8, 9)


def groups(folder: Path) -> dict[str, tuple[Callable[[], data.Split], Sizes]]:
  """Data to load, and the sizes to try on it, by name."""
  load = lambda name: data.load(folder / name, choosing=True)  # noqa: E731
  return {
    "CIFAR-10, 560 features, 10 classes": (lambda: load(FILE_560), ALL),
    "CIFAR-10, 560 features, 2 classes": (lambda: vehicles(load(FILE_560)), FEW),
    "CIFAR-10, 60 features, 10 classes": (lambda: projected(load(FILE_560), 60), FEW),
    "CIFAR-10, 60 features, 2 classes": (lambda: vehicles(projected(load(FILE_560), 60)), FEW),
    "MNIST, 784 pixels, 10 classes": (lambda: mnist(folder / "mnist.npz"), FEW),
    "CIFAR-10, 1280 features, 10 classes": (lambda: load(FILE_1280), FEW[::2]),
  }


def vehicles(split: data.Split) -> data.Split:
  """Two classes: animal or vehicle."""
  y, eval_y = (np.isin(each, VEHICLES).astype(np.int32) for each in (split.y, split.eval_y))
  return dataclasses.replace(split, y=y, eval_y=eval_y)


def projected(split: data.Split, size: int) -> data.Split:
  """Fewer features: a fixed random projection, which looks at no data."""
  matrix = np.random.default_rng(0).standard_normal((split.x.shape[1], size)).astype(np.float32)
  x, eval_x = (each.astype(np.float32) @ matrix for each in (split.x, split.eval_x))
  return dataclasses.replace(split, x=x, eval_x=eval_x)


def mnist(path: Path) -> data.Split:
  """Pixels as features; 10,000 of the training rows are held out."""
  with np.load(path) as arrays:
    x, y = arrays["train_images"].reshape(-1, 784), arrays["train_labels"].astype(np.int32)
  order = np.random.default_rng(0).permutation(len(x))
  fitted, held = order[: -data.HELD_OUT], order[-data.HELD_OUT :]
  return data.Split(x[fitted], y[fitted], x[held], y[held])


def climb(method: Any, path: str, factor: float, score: Callable[[Any], float], at: float) -> Any:
  """(method, score) after multiplying a setting up, or else down, while the score rises."""
  best, most = method, at
  for step in (Times(factor), Times(1 / factor)):
    while True:
      tried = changed(best, {path: step})
      try:
        found = score(tried)
      except ValueError:  # shares that leave nothing
        break
      if found <= most:
        break
      best, most = tried, found
    if best is not method:
      break
  return best, most


def centre_share(split: data.Split, epsilon: float) -> float:
  """What brings the length of the noise in the mean of the rows to 0.1, at least 0.006.

  That is what it has at 40,000 x 560; 0, for no centre, where it would cost a tenth of the budget.
  """
  noise = calibrate(PrivacySpec(epsilon, DELTA), FullBatch(), 1, 1.0).noise_multiplier
  count, size = split.x.shape
  needed = size * (noise / (CENTRE_NOISE * count)) ** 2
  return 0.0 if needed > MOST_FOR_CENTRE else max(0.006, needed)


def chosen(name: str, start: Any, split: data.Split, epsilon: float) -> Any:
  """The method at the strength that does best on the first half of the rows to judge by."""

  def score(method: Any) -> float:
    return float(np.mean(right(fit(split, method, epsilon, SEED), split)[:HALF]))

  start = changed(start, {"preprocessing.centre_share": centre_share(split, epsilon)})
  best, most = start, score(start)
  for path, factor in KNOBS[name]:
    best, most = climb(best, path, factor, score, most)
  return best


def settings(name: str, method: Any) -> dict[str, float]:
  """Where it was climbed to."""
  found = {"centre_share": round(method.preprocessing.centre_share, 4)}
  for path, _ in KNOBS[name]:
    outer, _, last = path.rpartition(".")
    found[last] = round(float(getattr(getattr(method, outer) if outer else method, last)), 5)
  return found


def cells(folder: Path) -> Iterator[tuple[str, data.Split, int, float]]:
  """(group, the records to fit, their number, epsilon), one after the other."""
  for group, (load, sizes) in groups(folder).items():
    whole = load()
    for count, epsilon in sizes:
      yield group, dataclasses.replace(whole, x=whole.x[:count], y=whole.y[:count]), count, epsilon


def run(folder: Path, minutes: float) -> None:
  """All sizes that are not recorded, for so many minutes."""
  end = time.monotonic() + 60 * minutes
  done = results.read().get("sizes", {})
  for group, split, count, epsilon in cells(folder):
    for name in KNOBS:
      cell = f"{count} records, epsilon {epsilon:g}"
      if name == "newton" and split.x.shape[1] > MOST_FOR_NEWTON:
        continue
      if name in done.get(group, {}).get(cell, {}):
        continue
      if time.monotonic() > end:
        return
      start = time.monotonic()
      method = chosen(name, METHODS[name], split, epsilon)
      judged = [
        float(np.mean(right(fit(split, method, epsilon, seed), split)[HALF:]))
        for seed in JUDGING_SEEDS
      ]
      found = {"accuracy": judged, "settings": settings(name, method),
               "seconds": round(time.monotonic() - start, 1)}  # fmt: skip
      results.record("sizes", group, cell, name, found)


def show() -> None:
  """The table as Markdown; the best of each row, and what is within 0.5 points of it, in bold."""
  print("| data | records | epsilon |", " | ".join(KNOBS), "|")
  for group, rows in results.read().get("sizes", {}).items():
    order = lambda cell: [float(x.split()[-1 if "eps" in x else 0]) for x in cell.split(", ")]  # noqa: E731
    for cell in sorted(rows, key=order):
      found = {name: 100 * np.mean(each["accuracy"]) for name, each in rows[cell].items()}
      top = max(found.values())
      texts = [
        "" if name not in found
        else f"**{found[name]:.1f}**" if found[name] > top - 0.5 else f"{found[name]:.1f}"
        for name in KNOBS
      ]  # fmt: skip
      count, epsilon = (f"{value:g}" for value in order(cell))
      print(f"| {group} | {count} | {epsilon} |", " | ".join(texts), "|")


if __name__ == "__main__":
  if len(sys.argv) < 2:
    sys.exit(__doc__)
  if sys.argv[1] == "show":
    show()
  else:
    run(Path(sys.argv[1]), float(sys.argv[2]) if len(sys.argv) > 2 else 30.0)
