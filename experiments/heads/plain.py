"""Linear heads without privacy: softmax regression by L-BFGS on features."""

from collections.abc import Callable

import numpy as np
import scipy.optimize
import scipy.special

from experiments.heads.data import Split

Prepare = Callable[[np.ndarray], np.ndarray]
_BLOCKS = "second block doubled, "
PREPARED = (
  "standardised", "standardised, norm 1", "norm 1, centred, norm 1",
  f"{_BLOCKS}norm 1, centred, norm 1",
)  # fmt: skip
PENALTIES = (1e-3, 3e-3, 1e-2)


def accuracy(split: Split, prepared: str, penalty: float, iterations: int = 150) -> float:
  """Accuracy of the head that minimises loss + penalty / 2 |kernel|^2, bias not penalised."""
  prepare = _prepare(prepared, split.x.astype(np.float32))
  x, eval_x = (_with_ones(prepare(each.astype(np.float32))) for each in (split.x, split.eval_x))
  classes = int(split.y.max()) + 1
  targets = np.eye(classes, dtype=np.float32)[split.y]

  def loss(flat: np.ndarray) -> tuple[float, np.ndarray]:
    kernel = flat.reshape(-1, classes).astype(np.float32)
    log_probs = scipy.special.log_softmax(x @ kernel, axis=1)
    gradient = x.T @ (np.exp(log_probs) - targets) / len(x)
    gradient[:-1] += penalty * kernel[:-1]
    value = -np.mean(log_probs[np.arange(len(x)), split.y]) + penalty / 2 * np.sum(kernel[:-1] ** 2)
    return float(value), gradient.ravel().astype(np.float64)

  found = scipy.optimize.minimize(
    loss, np.zeros(x.shape[1] * classes), jac=True, method="L-BFGS-B",
    options={"maxiter": iterations},
  )  # fmt: skip
  return float(np.mean(np.argmax(eval_x @ found.x.reshape(-1, classes), axis=1) == split.eval_y))


def _prepare(name: str, x: np.ndarray) -> Prepare:
  """Rows of mean square 1 in each case, so that one penalty means the same."""
  size = np.sqrt(x.shape[1])
  if name.startswith("standardised"):
    mean, std = x.mean(0), x.std(0)
    scale = size if name.endswith("norm 1") else 0
    return lambda z: scale * _unit((z - mean) / std) if scale else (z - mean) / std
  # The 208 columns of block 15, as in configs/cifar10_features.py.
  factors = np.ones(x.shape[1], np.float32)
  factors[-208:] = 2 if name.startswith(_BLOCKS) else 1
  mean = _unit(x * factors).mean(0)
  return lambda z: size * _unit(_unit(z * factors) - mean)


def _unit(x: np.ndarray) -> np.ndarray:
  return x / np.linalg.norm(x, axis=1, keepdims=True)


def _with_ones(x: np.ndarray) -> np.ndarray:
  return np.concatenate([x, np.ones((len(x), 1), np.float32)], axis=1)
