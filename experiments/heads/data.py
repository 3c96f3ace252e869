"""CIFAR-10 features for the studies of this folder."""

import dataclasses
from pathlib import Path

import numpy as np

# Rows of the training split that are held out where settings are chosen.
HELD_OUT = 10_000


@dataclasses.dataclass(frozen=True)
class Split:
  """Features and labels to fit on, and to judge by."""

  x: np.ndarray
  y: np.ndarray
  eval_x: np.ndarray
  eval_y: np.ndarray


def load(path: Path, *, choosing: bool, seed: int = 0) -> Split:
  """The features.

  Args:
    path: an .npz file with train_features, train_labels, test_features and test_labels.
    choosing: take the last 10,000 of the training rows, in a fixed random order, in place of the
      test rows, which are then not read.
    seed: of that order.
  """
  with np.load(path) as arrays:
    x, y = arrays["train_features"], arrays["train_labels"].astype(np.int32)
    if not choosing:
      return Split(x, y, arrays["test_features"], arrays["test_labels"].astype(np.int32))
  order = np.random.default_rng(seed).permutation(len(x))
  fit, held = order[:-HELD_OUT], order[-HELD_OUT:]
  return Split(x[fit], y[fit], x[held], y[held])
