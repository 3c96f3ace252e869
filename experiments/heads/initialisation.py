"""How large may a head's initial values be? One private full-batch LAMB step on CIFAR-10 features.

    python -m experiments.heads.initialisation --data=cifar10_efficientnet_lite2_560.npz

Mehta et al. 2022 (arXiv:2205.02973) find that one step from near zero does best under
privacy and that larger initial values hurt. For each standard deviation of the initial kernel, the
learning rate is chosen among LEARNING_RATES on 10,000 of the training rows that the gradient does
not see; accuracy is on the test rows, mean and standard deviation over seeds of the initial values,
the split and the noise.
"""

import argparse
import functools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dp_jax.gradients import compensated as pairs
from dp_jax.gradients.clipping import clipped_grad
from dp_jax.gradients.noise import add_noise
from dp_jax.models.build import ModelSpec
from dp_jax.models.functional import split
from dp_jax.privacy import FullBatch, MasterKey, PrivacySpec, calibrate
from dp_jax.tasks.classification import Classification

STDS = (0.0, 1e-4, 1e-3, 1e-2, 1e-1, 1.0)
LEARNING_RATES = tuple(10.0**power for power in range(-2, 4))
EPSILONS = (1.0, 8.0)
DELTA, CLIP_NORM, HELD_OUT, PIECE = 1e-5, 1.0, 10_000, 4000

Rows = tuple[np.ndarray, np.ndarray]


def load(path: Path) -> tuple[Rows, Rows]:
  """Training and test rows, each of norm 1, and their labels."""
  with np.load(path) as arrays:
    splits = []
    for name in ("train", "test"):
      rows = arrays[f"{name}_features"].astype(np.float32)
      rows /= np.linalg.norm(rows, axis=1, keepdims=True)
      splits.append((rows, arrays[f"{name}_labels"].astype(np.int32)))
  return splits[0], splits[1]


@functools.cache
def clipped_sum(num_features: int) -> Any:
  """The clipped sum over one piece, compiled."""
  spec = ModelSpec("linear", {}, (num_features,), 10, (-1.0, 1.0))
  task = Classification(split(spec.build(0))[0], spec)
  return jax.jit(clipped_grad(functools.partial(task.loss, {}), CLIP_NORM, compensated=True))


def summed_gradient(params: Any, rows: Rows) -> Any:
  """The clipped sum over all rows, as a pair."""
  grad_fn = clipped_sum(rows[0].shape[1])
  total = pairs.zeros_like(params)
  for start in range(0, len(rows[0]), PIECE):
    x, y = (each[start : start + PIECE, None] for each in rows)
    part, _ = grad_fn(params, {"inputs": x, "label": y, "record_mask": np.ones(y.shape, bool)})
    total = pairs.add(total, part)
  return total


def after_one_step(params: Any, gradient: Any) -> Iterator[Any]:
  """The parameters after a LAMB step at each learning rate."""
  for rate in LEARNING_RATES:
    lamb = optax.lamb(rate)
    updates, _ = lamb.update(gradient, lamb.init(params), params)
    yield optax.apply_updates(params, updates)


def accuracy(params: Any, rows: Rows) -> float:
  """Of the head's largest logit."""
  logits = rows[0] @ np.asarray(params["head.kernel"]) + np.asarray(params["head.bias"])
  return float(np.mean(logits.argmax(axis=1) == rows[1]))


def run(train: Rows, test: Rows, std: float, epsilon: float, seed: int) -> tuple[float, float]:
  """Test accuracy and learning rate of one seed."""
  order = np.random.default_rng(seed).permutation(len(train[0]))
  held_out, used = (tuple(each[part] for each in train) for part in np.split(order, [HELD_OUT]))
  kernel = std * jax.random.normal(jax.random.key(seed), (train[0].shape[1], 10))
  params = {"head.bias": jnp.zeros(10), "head.kernel": kernel}
  mechanism = calibrate(PrivacySpec(epsilon, DELTA), FullBatch(), 1, CLIP_NORM)
  total = summed_gradient(params, used)
  key = jax.random.wrap_key_data(np.frombuffer(MasterKey.from_os().derive("noise"), np.uint32))
  noised = add_noise(total, mechanism.stddev, key)
  mean = jax.tree.map(lambda x: x / len(used[0]), noised)
  tried = list(after_one_step(params, mean))
  best = int(np.argmax([accuracy(each, held_out) for each in tried]))
  return accuracy(tried[best], test), LEARNING_RATES[best]


def main() -> None:
  """Prints the table and writes initialisation.json beside this file."""
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--data", type=Path, required=True)
  parser.add_argument("--seeds", type=int, default=5)
  arguments = parser.parse_args()
  train, test = load(arguments.data)
  results = []
  print("| initial std | " + " | ".join(f"epsilon {e:g}" for e in EPSILONS) + " |")
  print("| --- |" + " --- |" * len(EPSILONS))
  for std in STDS:
    cells = []
    for epsilon in EPSILONS:
      outcomes = [run(train, test, std, epsilon, seed) for seed in range(arguments.seeds)]
      values = 100 * np.array([value for value, _ in outcomes])
      cells.append(f"{values.mean():.1f}% ± {values.std(ddof=1):.1f}")
      results.append({
        "std": std, "epsilon": epsilon, "accuracies": [value for value, _ in outcomes],
        "learning_rates": [rate for _, rate in outcomes],
      })  # fmt: skip
    print(f"| {std:g} | " + " | ".join(cells) + " |", flush=True)
  file = Path(__file__).with_suffix(".json")
  file.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
  main()
