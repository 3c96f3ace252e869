"""Private linear heads on frozen features of CIFAR-10: every method, epsilon and seed.

Commands (FILE: an .npz file with train_features, train_labels, test_features, test_labels):
  python -m experiments.heads.study table FILE METHOD [EPSILON...]  # 5 seeds on the test rows
  python -m experiments.heads.study plain FILE           # without privacy
  python -m experiments.heads.study init FILE            # one LAMB step from heads of several sizes
  python -m experiments.heads.study show                 # the tables as Markdown
Results are added to results.json. How settings were chosen: `choose.py` and `search.py`; other
sizes of problem: `sizes.py`.
"""

import hashlib
import sys
import time
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import optax

from dp_jax.gradients import compensated as pairs
from dp_jax.gradients.noise.add_noise import add_noise
from dp_jax.gradients.noise.jax_keys import step_key
from dp_jax.privacy.calibration.calibrate import calibrate
from dp_jax.privacy.master_key import MasterKey
from dp_jax.privacy.sampling import FullBatch
from dp_jax.privacy.spec import PrivacySpec
from dp_jax.solvers.descent import gradient_sum
from dp_jax.solvers.feature_units import Rows, array_data
from experiments.heads import data, plain, results
from experiments.heads.methods import DELTA, METHODS, accuracy, configured

SEEDS, EPSILONS = 5, (0.5, 1.0, 2.0, 4.0, 8.0)
# As a METHOD: that of configs/cifar10_features.py.
CONFIG = "config"


def table(path: Path, name: str, *epsilons: str) -> None:
  """Five seeds a budget on the test rows, after training on all training rows."""
  split = data.load(path, choosing=False)
  for epsilon in map(float, epsilons or EPSILONS):
    method = configured(path, epsilon) if name == CONFIG else METHODS[name]
    start = time.monotonic()
    found = [accuracy(split, method, epsilon, seed) for seed in range(SEEDS)]
    seconds = (time.monotonic() - start) / SEEDS
    results.record("table", path.stem, name, str(epsilon), {"accuracy": found, "seconds": seconds})


def without_privacy(path: Path) -> None:
  """All penalties and preparations on held-out rows; the best of them on the test rows."""
  split = data.load(path, choosing=True)
  tried = {
    (prepared, penalty): plain.accuracy(split, prepared, penalty)
    for prepared in plain.PREPARED
    for penalty in plain.PENALTIES
  }
  print(tried)
  prepared, penalty = max(tried, key=lambda each: tried[each])
  split = data.load(path, choosing=False)
  found = {each: plain.accuracy(split, *each) for each in [(prepared, penalty)]}
  # The most that any of them reaches on the test rows: nothing that was chosen could do better.
  every = {each: plain.accuracy(split, *each) for each in tried if each not in found} | found
  best = found[(prepared, penalty)]
  results.record("plain", path.stem, "chosen", f"{prepared}, {penalty:g}", best)
  top = max(every, key=lambda each: every[each])
  results.record("plain", path.stem, "best on test rows", f"{top[0]}, {top[1]:g}", every[top])


def init(path: Path) -> None:
  """One full-batch LAMB step from heads of several standard deviations, private and not."""
  split = data.load(path, choosing=False)
  rows = Rows(array_data(split.x, split.y, 10, shard_size=5000))
  evals = next(iter(Rows(array_data(split.eval_x, split.eval_y, 10, shard_size=10000))))[0]
  eval_x = evals["inputs"][:, 0]
  clip_norm = 1.0
  step = gradient_sum(clip_norm)
  for epsilon in (1.0, 4.0, None):
    for std in (0.0, 1e-3, 1e-2, 0.1, 1.0, 10.0):
      found = []
      for seed in range(SEEDS):
        normal = np.random.default_rng(seed).standard_normal((split.x.shape[1], 10))
        params = {"kernel": jnp.asarray(std * normal, jnp.float32)}
        total = pairs.zeros_like(params)
        for units, mask in rows:
          total = step(params, total, units, mask)
        if epsilon is None:
          gradient = pairs.collapse(total)
        else:
          stddev = calibrate(PrivacySpec(epsilon, DELTA), FullBatch(), 1, clip_norm).stddev
          key = MasterKey(hashlib.sha256(f"init study {seed}".encode()).digest(), is_test=True)
          gradient = add_noise(total, stddev, step_key(key, "noise", 0))
        # As large a step as there is room for: the direction alone is judged at std 0.
        optimizer = optax.lamb(1.0)
        updates, _ = optimizer.update(gradient, optimizer.init(params), params)
        kernel = optax.apply_updates(params, updates)["kernel"]
        found.append(float(np.mean(np.argmax(np.asarray(eval_x @ kernel), 1) == split.eval_y)))
      results.record("init", path.stem, str(epsilon), str(std), found)


def show() -> None:
  """The tables as Markdown."""
  found = results.read()
  percent = lambda xs: f"{100 * np.mean(xs):.1f} ± {100 * np.std(xs, ddof=1):.1f}"  # noqa: E731
  for file, methods in found.get("table", {}).items():
    print(f"\n{file}: epsilon", *EPSILONS, sep=" | ")
    for name, row in methods.items():
      cells = [percent(row[str(e)]["accuracy"]) if str(e) in row else "" for e in EPSILONS]
      seconds = np.mean([each["seconds"] for each in row.values()])
      print(f"| {name} |", " | ".join(cells), f"| {seconds:.0f} s |")
  for group, rows in found.get("init", {}).items():
    print(f"\ninit: {group}")
    for name, row in rows.items():
      ordered = sorted(row.items(), key=lambda each: float(each[0]))
      print(f"| {name} |", " | ".join(f"{key}: {percent(value)}" for key, value in ordered), "|")
  print(found.get("plain"))


def main() -> None:
  """Runs one command."""
  command, *rest = sys.argv[1:] or ["help"]
  commands = {"table": table, "plain": without_privacy, "init": init, "show": show}
  if command not in commands:
    sys.exit(__doc__)
  commands[command](*[Path(each) if index == 0 else each for index, each in enumerate(rest)])


if __name__ == "__main__":
  main()
