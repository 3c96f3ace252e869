"""The methods of the studies of this folder, with the settings that were chosen for them."""

import dataclasses
import hashlib
import runpy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from dp_jax.config.run_config import Config
from dp_jax.privacy.master_key import MasterKey
from dp_jax.privacy.spec import PrivacySpec
from dp_jax.solvers.descent import Descent
from dp_jax.solvers.feature_covariance import FeatureCovariance
from dp_jax.solvers.feature_units import array_data
from dp_jax.solvers.head import Head, Preprocessing
from dp_jax.solvers.least_squares import LeastSquares
from dp_jax.solvers.newton import Newton
from dp_jax.solvers.solve import Method, solve
from dp_jax.training.setup.prepare import prepare
from experiments.heads import data

DELTA = 1e-5

METHODS: dict[str, Method] = {
  "feature_covariance": FeatureCovariance(
    Preprocessing(centre_share=0.006),
    Descent(
      steps=60, clip_norm=0.18, learning_rate=85.0, schedule="constant", average=0.5
    ),
    moment_share=0.05, whiten=0.35, precondition=0.3, ridge=0.5, damping=3.0,
  ),
  "DP-FC": FeatureCovariance(
    Preprocessing(centre_share=0.006), Descent(steps=30, clip_norm=0.125, learning_rate=68.0),
    moment_share=0.1, whiten=0.0, precondition=1.0, damping=2.0,
  ),
  "descent": FeatureCovariance(
    Preprocessing(centre_share=0.006),
    Descent(
      steps=120, clip_norm=0.25, learning_rate=1000.0, schedule="constant", average=0.5
    ),
    moment_share=0.0,
  ),
  "one LAMB step": FeatureCovariance(
    Preprocessing(), Descent(steps=1, clip_norm=1.0, learning_rate=1.0, optimizer="lamb"),
    moment_share=0.0,
  ),
  "least_squares": LeastSquares(
    Preprocessing(centre_share=0.006), moment_share=0.5, eigenvalue_share=0.01, ridge=1.0
  ),
  "newton": Newton(
    Preprocessing(centre_share=0.02), steps=5, hessian_share=0.7, clip_norm=0.5, ridge=0.15
  ),
}  # fmt: skip


def configured(path: Path, epsilon: float) -> Method:
  """The method of configs/cifar10_features.py for a budget, as a run on the file takes it."""
  file = Path(__file__).parents[2] / "configs" / "cifar10_features.py"
  config = runpy.run_path(str(file))["get_config"]()
  config.data.path, config.privacy.epsilon = str(path), epsilon
  config.data.declared = "public"  # all data of the study are
  solving = prepare(Config.from_dict(config.to_dict())).solving
  if solving is None:
    raise ValueError(f"{file} has no solver")
  return solving.method


class Times(float):
  """A factor, where a plain number would take the place of a setting."""


def changed(method: Method, changes: Mapping[str, Any]) -> Any:
  """The method with settings changed: {"descent.steps": 30, "ridge": Times(2)}."""
  new: Any = method
  for path, value in changes.items():
    *outer, name = path.split(".")
    thing = getattr(new, outer[0]) if outer else new
    before = getattr(thing, name)
    if isinstance(value, Times):
      value = max(1, round(before * value)) if isinstance(before, int) else float(before * value)
    thing = dataclasses.replace(thing, **{name: value})
    new = dataclasses.replace(new, **{outer[0]: thing}) if outer else thing
  return new


def fit(split: data.Split, method: Method, epsilon: float, seed: int) -> Head:
  """A private head; the seed stands for the secret key."""
  classes = int(split.y.max()) + 1
  units = array_data(split.x, split.y, classes, shard_size=5000)
  key = MasterKey(hashlib.sha256(f"head study {seed}".encode()).digest(), is_test=True)
  return solve(units, method, PrivacySpec(epsilon, DELTA), key=key).head


def right(head: Head, split: data.Split) -> np.ndarray:
  """bool[N]: which of the rows to judge by are classified rightly."""
  scores = np.asarray(jax.jit(head.logits)(split.eval_x))
  return np.argmax(scores, axis=1) == split.eval_y


def accuracy(split: data.Split, method: Method, epsilon: float, seed: int) -> float:
  """Accuracy of a private head."""
  return float(np.mean(right(fit(split, method, epsilon, seed), split)))
