"""Noised least squares: the second and the cross moment, and a ridge that adapts to the data."""

import dataclasses

import jax.numpy as jnp
import numpy as np

from dp_jax.privacy.shares import Part
from dp_jax.solvers.feature_units import FeatureData
from dp_jax.solvers.head import ROW_NORM, Head, Preprocessing
from dp_jax.solvers.noised import Releases, noise_edge
from dp_jax.solvers.statistics import (
  EXCHANGED_POSITIVE,
  accumulate,
  cross_moment,
  second_moment,
)

MOMENT = "second moment of the features"
CROSS = "cross moment of features and labels"
EIGENVALUE = "smallest eigenvalue of the second moment"

# Quantile of a standard normal: the noised eigenvalue is above the true one by less, but for 2%.
_LOWER = 2.05
# An eigenvalue that is still smaller after the ridge, by bad luck, counts as this share of it.
_LEAST = 0.1


@dataclasses.dataclass(frozen=True)
class LeastSquares:
  """Ridge regression on one-hot labels from noised moments.

  Under zero_out or add_or_remove_one a unit changes the second moment by at most R^2 in Frobenius
  norm, the cross moment by at most R in Frobenius norm, and the smallest eigenvalue by at most R^2
  (Weyl's inequality), with R = 1 the norm of a row; under replace_one by sqrt(2) R^2, 2 R and R^2
  (`statistics.py` derives them).

  Attributes:
    preprocessing: of the rows.
    moment_share, eigenvalue_share: of the budget; the cross moment has the rest. Under replace_one
      0.26 and 0.02 keep about the proportions of the noise that the defaults have under zero_out.
    ridge: multiplies the ridge that brings the noised matrix's eigenvalues above zero.

  Wang 2018, arXiv:1803.02596, Algorithm 2 (AdaSSP), with Gaussian noise accounted as one release.
  """

  preprocessing: Preprocessing = dataclasses.field(default_factory=Preprocessing)
  moment_share: float = 0.4
  eigenvalue_share: float = 0.05
  ridge: float = 1.0

  def parts(self) -> tuple[Part, ...]:
    """What is released."""
    before = self.preprocessing.parts()
    rest = 1 - sum(part.share for part in before) - self.moment_share - self.eigenvalue_share
    square = ROW_NORM**2
    return (
      *before,
      Part(MOMENT, self.moment_share, 1, square, EXCHANGED_POSITIVE * square),
      Part(EIGENVALUE, self.eigenvalue_share, 1, square, square),
      Part(CROSS, rest, 1, ROW_NORM),
    )

  def solve(self, data: FeatureData, releases: Releases) -> Head:
    """Releases the statistics and solves for the head. Logits are scores around zero."""
    centre = self.preprocessing.centre(data, releases)
    rows = self.preprocessing.rows(data, centre)
    moment = accumulate(rows, second_moment(ROW_NORM, exact=releases.exact))
    upper = np.triu(np.asarray(moment.sum, np.float64) + np.asarray(moment.error, np.float64))
    exact = upper + np.triu(upper, 1).T
    # In float64, so that what the computation of an eigenvalue rounds is far below the noise.
    smallest = releases.scalar(EIGENVALUE, float(np.linalg.eigvalsh(exact)[0]))
    noised = releases.symmetric(MOMENT, moment)
    cross = accumulate(rows, cross_moment(ROW_NORM, data.num_classes, exact=releases.exact))
    cross_noised = np.asarray(releases.vector(CROSS, cross), np.float64)
    least = smallest - _LOWER * releases.mechanisms[EIGENVALUE].stddev
    edge = self.ridge * noise_edge(releases.mechanisms[MOMENT], data.num_features)
    kernel = _ridge_solution(noised, cross_noised, max(0.0, edge - max(0.0, least)), edge)
    bias = jnp.zeros(data.num_classes)
    return self.preprocessing.head(jnp.asarray(kernel, jnp.float32), bias, centre)


def _ridge_solution(moment: np.ndarray, cross: np.ndarray, ridge: float, edge: float) -> np.ndarray:
  """(moment + ridge I)^-1 of the cross moment with labels that sum to zero."""
  values, vectors = np.linalg.eigh(moment)
  values = np.maximum(values + ridge, _LEAST * edge)
  targets = cross - cross.mean(axis=1, keepdims=True)
  return vectors @ ((vectors.T @ targets) / values[:, None])
