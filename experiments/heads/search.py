"""Search for settings of `feature_covariance` on held-out training rows, by a NumPy prototype.

    python -m experiments.heads.search FILE MINUTES [EPSILON]

The prototype makes the same releases with NumPy's noise, several seeds in one matrix product, so
that a setting takes a second or two; it is not private. Each setting is fitted on 40,000 of the
50,000 training rows and judged by the other 10,000, with two splits and two seeds each. EPSILON is
the target on all rows; on 40,000 it is raised so that noise per row is the same. Hill climbing from
`START`; every setting that is tried is printed. Test rows are not read.
"""

import dataclasses
import sys
import time
from pathlib import Path

import numpy as np

from dp_jax.privacy.calibration.calibrate import calibrate
from dp_jax.privacy.sampling import FullBatch
from dp_jax.privacy.spec import PrivacySpec
from experiments.heads import data

DELTA, SPLITS, SEEDS = 1e-5, 2, 2


@dataclasses.dataclass(frozen=True)
class Settings:
  """As in `dp_jax.solvers`, and what was tried beyond it.

  Attributes:
    average: the share of the last iterates whose mean is the head; 0 takes the last.
    loss: of a record.
    scale: multiplies rows before the head.
    smoothing: of labels.
    decay: weight decay, in units of the largest curvature.
    keep: of the second moment's eigenvectors, the rest is dropped; 0 keeps all.
    class_power: the gradient is multiplied with this negative power of the classes' covariance.
    early_noise: of the steps before those that are averaged, relative to the later ones.
    robust: residuals are multiplied with this power of the label's probability.
    second: multiplies the last 208 features after each part is scaled to norm 1; 0 leaves both.
  """

  power: float = 1.0
  centre_share: float = 0.006
  moment_share: float = 0.05
  whiten: float = 0.35
  ridge: float = 0.5
  precondition: float = 0.3
  damping: float = 3.0
  steps: int = 60
  clip_norm: float = 0.18
  learning_rate: float = 85.0
  momentum: float = 0.0
  schedule: str = "cosine"
  average: float = 0.0
  loss: str = "softmax"
  scale: float = 1.0
  smoothing: float = 0.0
  decay: float = 0.0
  keep: int = 0
  class_power: float = 0.0
  second: float = 0.0
  early_noise: float = 1.0
  robust: float = 0.0


START = Settings()


def noise_of(epsilon: float) -> float:
  """Noise multiplier of one Gaussian release."""
  return calibrate(PrivacySpec(epsilon, DELTA), FullBatch(), 1, 1.0).noise_multiplier


def unit(x: np.ndarray) -> np.ndarray:
  """Rows of norm 1."""
  return x / np.maximum(np.linalg.norm(x, axis=1, keepdims=True), 1e-12)


def accuracies(split: data.Split, s: Settings, noise: float, seeds: range) -> list[float]:
  """Of the rows to judge by, one a seed. `noise` is relative to one release of the whole budget."""
  x, eval_x = (base(each, s) for each in (split.x, split.eval_x))
  found = []
  for seed in seeds:
    rng = np.random.default_rng(1000 + seed)
    z, eval_z, preconditioner = prepared(x, eval_x, s, noise, rng)
    kernel = descend(z, split.y, s, noise, preconditioner, rng)
    found.append(float(np.mean(np.argmax(eval_z @ kernel, axis=1) == split.eval_y)))
  return found


def base(x: np.ndarray, s: Settings) -> np.ndarray:
  """What needs no data."""
  x = x.astype(np.float32)
  if s.power != 1:
    x = np.sign(x) * np.abs(x) ** s.power
  if s.second:
    x = np.concatenate([unit(x[:, :352]), s.second * unit(x[:, 352:])], axis=1)
  return unit(x)


def prepared(
  x: np.ndarray, eval_x: np.ndarray, s: Settings, noise: float, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
  """(rows, rows to judge by, preconditioner) from a noised mean and second moment."""
  count, size = x.shape
  if s.centre_share:
    std = noise / np.sqrt(s.centre_share)
    centre = (x.sum(0) + std * rng.standard_normal(size, dtype=np.float32)) / count
    x, eval_x = unit(x - centre), unit(eval_x - centre)
  if not s.moment_share:
    return x, eval_x, None
  std = noise / np.sqrt(s.moment_share)
  normal = np.triu(rng.standard_normal((size, size)))
  symmetric = np.diag(np.diag(normal)) + (np.triu(normal, 1) + np.triu(normal, 1).T) / np.sqrt(2)
  noised, vectors = np.linalg.eigh((x.T @ x + std * symmetric) / count)
  edge = std * np.sqrt(2 * size) / count
  values = np.maximum(noised, 0)
  white = (values + s.ridge * edge) ** -s.whiten
  if s.keep:
    white[: size - s.keep] = 0
  white /= white.max()
  after = values * white**2
  after /= max((noised * white**2).sum(), 0.1 * after.sum())
  factors = (after + s.damping / size) ** -s.precondition
  factors /= (factors * after).max()
  transform = ((vectors * white) @ vectors.T).astype(np.float32)
  matrix = ((vectors * factors) @ vectors.T).astype(np.float32)
  return unit(x @ transform), unit(eval_x @ transform), matrix


def descend(
  x: np.ndarray, y: np.ndarray, s: Settings, noise: float, matrix: np.ndarray | None,
  rng: np.random.Generator,
) -> np.ndarray:  # fmt: skip
  """The head after noised steps."""
  classes = int(y.max()) + 1
  rest = 1 - s.centre_share - s.moment_share
  std = noise * s.clip_norm * np.sqrt(s.steps / rest)
  targets = (1 - s.smoothing) * np.eye(classes, dtype=np.float32)[y] + s.smoothing / classes
  kernel = np.zeros((x.shape[1], classes), np.float32)
  velocity, mean, first = np.zeros_like(kernel), np.zeros_like(kernel), (1 - s.average) * s.steps
  class_matrix = None
  early = np.ceil(first)
  # The same budget: sum of 1 / noise^2 over the steps.
  late_std = std * np.sqrt((early / s.early_noise**2 + s.steps - early) / s.steps)
  for step in range(s.steps):
    residuals = s.scale * derivatives(s.loss, s.scale * (x @ kernel), targets)
    if s.robust:
      residuals *= np.maximum(1 - np.abs(residuals[np.arange(len(y)), y]), 0)[:, None] ** s.robust
    norms = np.sqrt(np.einsum("ij,ij->i", residuals, residuals))[:, None]
    residuals *= np.minimum(1, s.clip_norm / np.maximum(norms, 1e-12))
    gradient = x.T @ residuals
    gradient += (late_std * (s.early_noise if step < first else 1)) * rng.standard_normal(
      gradient.shape, dtype=np.float32
    )
    gradient /= len(x)
    if matrix is not None:
      gradient = matrix @ gradient
    if s.class_power:
      if class_matrix is None:
        class_matrix = class_preconditioner(gradient, s.class_power)
      gradient = gradient @ class_matrix
    velocity = s.momentum * velocity + gradient + s.decay * kernel / s.learning_rate
    kernel = kernel - s.learning_rate * rate(s.schedule, step / s.steps) * velocity
    if step >= first:
      mean += kernel
  return mean / np.ceil(s.average * s.steps) if s.average else kernel


def rate(schedule: str, done: float) -> float:
  """Of the peak rate."""
  if schedule == "cosine":
    return 0.5 * (1 + np.cos(np.pi * done))
  return 1 - done if schedule == "linear" else 1.0


def derivatives(loss: str, logits: np.ndarray, targets: np.ndarray) -> np.ndarray:
  """Of the loss by the logits."""
  if loss == "softmax":
    exponentials = np.exp(logits - logits.max(axis=1, keepdims=True))
    return exponentials / exponentials.sum(axis=1, keepdims=True) - targets
  if loss == "sigmoid":
    return 1 / (1 + np.exp(-logits)) - targets
  if loss == "squared":
    return logits - (targets - targets.mean(axis=1, keepdims=True))
  raise ValueError(loss)


def class_preconditioner(gradient: np.ndarray, power: float) -> np.ndarray:
  """From the first gradient alone: large where classes are far apart, so it is divided out."""
  values, vectors = np.linalg.eigh(gradient.T @ gradient)
  factors = (np.maximum(values, 0) + 0.1 * values.max()) ** -power
  return ((vectors * factors / factors.min()) @ vectors.T).astype(np.float32)


def splits(path: Path) -> list[data.Split]:
  """Of the training rows."""
  return [data.load(path, choosing=True, seed=seed) for seed in range(SPLITS)]


def judged(rows: list[data.Split], s: Settings, noise: float) -> float:
  """Mean accuracy over splits and seeds."""
  return float(np.mean([accuracies(each, s, noise, range(SEEDS)) for each in rows]))


def changed(s: Settings, rng: np.random.Generator) -> Settings:
  """One to three numbers multiplied by something."""
  names = ("centre_share", "moment_share", "whiten", "ridge", "precondition", "damping", "steps",
           "clip_norm", "learning_rate", "power", "second", "scale")  # fmt: skip
  moved = {}
  for name in rng.choice(names, rng.integers(1, 4), replace=False):
    value = getattr(s, str(name)) * float(np.exp(0.3 * rng.standard_normal()))
    moved[str(name)] = max(1, round(value)) if name == "steps" else value
  return dataclasses.replace(s, **moved)


def main() -> None:
  """Hill climbing for so many minutes."""
  if len(sys.argv) < 3:
    sys.exit(__doc__)
  epsilon = float(sys.argv[3]) if len(sys.argv) > 3 else 1.0
  rows, end = splits(Path(sys.argv[1])), time.monotonic() + 60 * float(sys.argv[2])
  noise = noise_of(epsilon) * len(rows[0].x) / (len(rows[0].x) + data.HELD_OUT)
  rng, best, most = np.random.default_rng(0), START, 0.0
  while time.monotonic() < end:
    tried = changed(best, rng) if most else START
    found = judged(rows, tried, noise)
    print(f"{found:.4f}{' *' if found > most else ''} {tried}", flush=True)
    if found > most:
      best, most = tried, found


if __name__ == "__main__":
  main()
