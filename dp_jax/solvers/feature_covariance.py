"""Gradient descent that knows the shape of the features: one noised second moment, then steps."""

import dataclasses

import jax.numpy as jnp
import numpy as np

from dp_jax.errors import UserError
from dp_jax.privacy.shares import Part
from dp_jax.solvers.descent import GRADIENT, Descent, descend
from dp_jax.solvers.feature_units import FeatureData, Rows
from dp_jax.solvers.head import ROW_NORM, Head, Preprocessing
from dp_jax.solvers.least_squares import MOMENT
from dp_jax.solvers.noised import Releases, noise_edge
from dp_jax.solvers.statistics import EXCHANGED_POSITIVE, accumulate, second_moment


@dataclasses.dataclass(frozen=True)
class FeatureCovariance:
  """Noised gradients of a softmax head, preconditioned by a noised second moment M of the rows.

  Rows are first multiplied by (M + ridge)^-whiten and scaled to norm 1 again, which shares a
  gradient's bounded norm out more evenly over the directions; gradients are then multiplied by
  (M' + damping)^-precondition, with M' the moment of those rows. With whiten 0 and precondition 1
  this is DP-FC. Without a moment (share 0 and none public) it is plain gradient descent.

  Under zero_out or add_or_remove_one a unit changes M by at most R^2 = 1 in Frobenius norm, and the
  sum of gradients by at most their clip norm; under replace_one M by sqrt(2), since it is positive
  semidefinite (`statistics.py` derives it), and the gradients by two clip norms.

  Attributes:
    preprocessing: of the rows.
    descent: the steps.
    moment_share: of the budget; the gradients have what is left. Under replace_one 0.05 keeps the
      proportion of the noise that the default has under zero_out.
    whiten, precondition: the powers, from 0 to 1.
    ridge: in units of the largest eigenvalue of the noise in M; of a public M, of its mean
      eigenvalue.
    damping: in units of the mean eigenvalue of M'.

  Mehta et al. 2023, arXiv:2211.13403, Section 4 (DP-FC).
  """

  preprocessing: Preprocessing = dataclasses.field(default_factory=Preprocessing)
  descent: Descent = dataclasses.field(default_factory=Descent)
  moment_share: float = 0.1
  whiten: float = 0.25
  precondition: float = 0.3
  ridge: float = 0.3
  damping: float = 2.0

  def parts(self) -> tuple[Part, ...]:
    """What is released."""
    parts = self.preprocessing.parts()
    if self.moment_share > 0:
      if self.preprocessing.public is not None:
        raise UserError(
          f"moment_share={self.moment_share}, but public statistics give the moment; set it to 0."
        )
      square = ROW_NORM**2
      parts = [*parts, Part(MOMENT, self.moment_share, 1, square, EXCHANGED_POSITIVE * square)]
    rest = 1 - sum(part.share for part in parts)
    return (*parts, Part(GRADIENT, rest, self.descent.steps, self.descent.clip_norm))

  def solve(self, data: FeatureData, releases: Releases) -> Head:
    """Releases mean, moment and gradients, and returns the head that they lead to."""
    centre = self.preprocessing.centre(data, releases)
    rows = self.preprocessing.rows(data, centre)
    transform, preconditioner = self._matrices(rows, releases)
    if transform is not None:
      rows = self.preprocessing.rows(data, centre, transform)
    params = descend(rows, releases, self.descent, preconditioner)
    return self.preprocessing.head(params["kernel"], params["bias"], centre, transform)

  def _matrices(
    self, rows: Rows, releases: Releases
  ) -> tuple[jnp.ndarray | None, np.ndarray | None]:
    """(whitening, preconditioner): functions of a noised or public moment alone."""
    public, size = self.preprocessing.public, rows.data.num_features
    if public is not None:
      moment, edge = public.moment, np.trace(public.moment) / size
    elif self.moment_share > 0:
      total = accumulate(rows, second_moment(ROW_NORM, exact=releases.exact))
      moment = releases.symmetric(MOMENT, total) / rows.data.num_units
      edge = noise_edge(releases.mechanisms[MOMENT], size) / rows.data.num_units
    else:
      return None, None
    noised, vectors = np.linalg.eigh(moment)
    values = np.maximum(noised, 0.0)
    white = (values + self.ridge * edge) ** -self.whiten
    white /= white.max()
    # What the moment of the new rows is, but for their scaling to norm 1.
    # Its trace is 1; taken with the eigenvalues below zero, since those above hold as much noise.
    after = values * white**2
    after /= max((noised * white**2).sum(), 0.1 * after.sum(), 1e-30)
    factors = (after + self.damping / size) ** -self.precondition
    factors /= max((factors * after).max(), 1e-30)
    transform = jnp.asarray((vectors * white) @ vectors.T, jnp.float32) if self.whiten else None
    return transform, (vectors * factors) @ vectors.T
