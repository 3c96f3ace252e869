"""`fit` on arrays, as scikit-learn has it: `python -m experiments.examples.fit_on_arrays`.

Seconds on 2 CPU cores. Calibration, checkpoints, resume, ledger, release and report are those of
the command line: give the same call again after a crash, and it goes on.
"""

import tempfile
from typing import Any

import flax.nnx as nnx
import numpy as np
from sklearn.datasets import load_breast_cancer

import dp_jax


def fit(x: np.ndarray, y: np.ndarray, patient: np.ndarray, workdir: str, **privacy: Any) -> Any:
  """A linear classifier that is private for each patient; returns the result of the run."""
  arrays = {"inputs": x.astype(np.float32), "label": y, "patient": patient}
  config = {"data": {"num_classes": 2, "value_range": (-4.0, 4.0), "declared": "public"},
            "privacy": {"unit": "patient", "sampling_rate": 0.2, **privacy},
            "train": {"steps": 60, "learning_rate": 2.0}, "mesh": "data:1"}  # fmt: skip
  model = nnx.Linear(x.shape[1], 2, rngs=nnx.Rngs(0))
  return dp_jax.train(config, workdir, model=model, source=arrays, eval_source=arrays)


def main(workdir: str) -> Any:
  """Fits to the measurements of 569 tumours, two of which stand for one patient."""
  x, y = load_breast_cancer(return_X_y=True)
  public_mean, public_scale = x.mean(axis=0), x.std(axis=0)  # in earnest: from public data
  x = np.clip((x - public_mean) / public_scale, -4, 4)
  return fit(x, y, np.arange(len(x)) // 2, workdir, epsilon=3.0, delta=1e-4)


if __name__ == "__main__":
  with tempfile.TemporaryDirectory() as folder:
    print(main(f"{folder}/run").summary())
