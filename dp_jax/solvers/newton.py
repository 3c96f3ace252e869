"""Newton's method on a softmax head: a noised Hessian a class, and a noised gradient."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np

from dp_jax.errors import UserError
from dp_jax.gradients import compensated as pairs
from dp_jax.privacy.shares import Part
from dp_jax.solvers.descent import GRADIENT, gradient_sum
from dp_jax.solvers.feature_units import FeatureData
from dp_jax.solvers.head import ROW_NORM, Head, Preprocessing
from dp_jax.solvers.noised import Releases, noise_edge
from dp_jax.solvers.statistics import EXCHANGED_POSITIVE, accumulate, weighted_moments

HESSIAN = "Hessian of the loss, a block a class"

# sum_c (p_c (1 - p_c))^2 is at most 4/27 for any probabilities: three of one third.
CURVATURE_BOUND = math.sqrt(4 / 27)
# Float32 pairs of the sum and of a shard's, a block in flight, and the float64 copy.
_BYTES = 4 * 2 * 2 + 4 + 8


@dataclasses.dataclass(frozen=True)
class Newton:
  """Newton steps from zero, with the diagonal blocks of the softmax Hessian, one a class.

  Block c is the mean of p_c (1 - p_c) x x^T. Under zero_out or add_or_remove_one a unit changes all
  blocks together by at most R^2 sqrt(4/27) in Frobenius norm, with R = 1 the norm of a row; under
  replace_one by sqrt(2) times that, since they are positive semidefinite (`statistics.py` derives
  it), and the gradient by two clip norms.

  Attributes:
    preprocessing: of the rows.
    steps: Newton steps, each of which pays for a Hessian and a gradient.
    hessian_share: of the budget; the gradients have what is left. Under replace_one 0.33 keeps the
      proportion of the noise that the default has under zero_out.
    clip_norm: the bound on a unit's gradient.
    ridge: in units of the largest eigenvalue of the noise in a block.
    memory_budget: bytes that the blocks may take.

  Mehta et al. 2023, arXiv:2211.13403, Section 4 (DP-Newton).
  """

  preprocessing: Preprocessing = dataclasses.field(default_factory=Preprocessing)
  steps: int = 1
  hessian_share: float = 0.5
  clip_norm: float = 1.0
  ridge: float = 1.0
  memory_budget: int = 2**31

  def parts(self) -> tuple[Part, ...]:
    """What is released."""
    before = self.preprocessing.parts()
    rest = 1 - sum(part.share for part in before) - self.hessian_share
    bound = ROW_NORM**2 * CURVATURE_BOUND
    return (
      *before,
      Part(HESSIAN, self.hessian_share, self.steps, bound, EXCHANGED_POSITIVE * bound),
      Part(GRADIENT, rest, self.steps, self.clip_norm),
    )

  def solve(self, data: FeatureData, releases: Releases) -> Head:
    """Releases Hessians and gradients, and returns the head after the last step.

    Raises:
      ValueError: if the blocks exceed the memory budget; it says what they would take.
    """
    self.check_memory(data.num_features, data.num_classes)
    centre = self.preprocessing.centre(data, releases)
    rows = self.preprocessing.rows(data, centre)
    kernel = jnp.zeros((data.num_features, data.num_classes))
    accumulate_gradient = gradient_sum(releases.mechanisms[GRADIENT].clip_norm)
    edge = noise_edge(releases.mechanisms[HESSIAN], data.num_features)
    hessian = weighted_moments(ROW_NORM, _curvature, CURVATURE_BOUND, exact=releases.exact)
    for step in range(self.steps):
      total = accumulate(rows, hessian, kernel)
      blocks = releases.symmetric(HESSIAN, total, step)
      gradient = pairs.zeros_like({"kernel": kernel})
      for units, mask in rows:
        gradient = accumulate_gradient({"kernel": kernel}, gradient, units, mask)
      noised = np.asarray(releases.vector(GRADIENT, gradient, step)["kernel"], np.float64)
      kernel = kernel - jnp.asarray(_solve(blocks, noised, self.ridge * edge), jnp.float32)
    return self.preprocessing.head(kernel, jnp.zeros(data.num_classes), centre)

  def check_memory(self, num_features: int, num_classes: int) -> None:
    """Refuses blocks that do not fit."""
    needed = _BYTES * num_classes * num_features**2
    if needed > self.memory_budget:
      raise UserError(
        f"the Hessian of {num_classes} classes on {num_features} features takes"
        f" {needed / 2**30:.3g} GiB, over the {self.memory_budget / 2**30:.3g} GiB allowed; use"
        " feature_covariance, which needs one matrix, or raise memory_budget."
      )


def _curvature(x: jax.Array, kernel: jax.Array) -> jax.Array:
  probabilities = jax.nn.softmax(jnp.matmul(x, kernel))
  return probabilities * (1 - probabilities)


def _solve(blocks: np.ndarray, gradient: np.ndarray, ridge: float) -> np.ndarray:
  """(H_c + ridge)^-1 g_c for each class, with eigenvalues of H_c below zero counted as zero."""
  columns = []
  for block, column in zip(blocks, gradient.T, strict=True):
    values, vectors = np.linalg.eigh(block)
    columns.append(vectors @ ((vectors.T @ column) / (np.maximum(values, 0.0) + ridge)))
  return np.stack(columns, axis=1)
