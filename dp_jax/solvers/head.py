"""What a solver gives, and the preprocessing that all of them share."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from dp_jax.models.feature_head import Blocks, feature_map
from dp_jax.privacy.shares import Part
from dp_jax.solvers.feature_units import FeatureData, Rows
from dp_jax.solvers.noised import Releases
from dp_jax.solvers.statistics import accumulate, row_sum, second_moment

CENTRE = "mean of the features"
# Rows have norm 1 when a solver sees them.
ROW_NORM = 1.0


@dataclasses.dataclass(frozen=True)
class Head:
  """A linear head on normalised features; every array is noised or public.

  Attributes:
    kernel: float32[d, C].
    bias: float32[C].
    power, centre, transform, blocks: see `feature_map`.
  """

  kernel: jax.Array
  bias: jax.Array
  power: float = 1.0
  centre: jax.Array | None = None
  transform: jax.Array | None = None
  blocks: Blocks = ()

  def logits(self, features: jax.Array) -> jax.Array:
    """float[N, d] -> float32[N, C]."""
    x = jnp.asarray(features)
    rows = feature_map(x, self.power, self.centre, self.transform, self.blocks)
    return rows @ self.kernel + self.bias

  def arrays(self) -> dict[str, jax.Array]:
    """The arrays by the names that the model `feature_head` has for them."""
    optional = {"centre": self.centre, "transform": self.transform}
    return {
      **{name: value for name, value in optional.items() if value is not None},
      "head.bias": self.bias,
      "head.kernel": self.kernel,
    }


@dataclasses.dataclass(frozen=True)
class PublicStatistics:
  """Mean and second moment of public features, which cost nothing.

  Attributes:
    centre: float32[d], the mean of the rows of norm 1.
    moment: float64[d, d], the mean of x x^T over the rows after centring, of norm 1 again.
  """

  centre: np.ndarray
  moment: np.ndarray


def public_statistics(
  data: FeatureData, power: float = 1.0, blocks: Blocks = ()
) -> PublicStatistics:
  """Statistics of features that nobody's privacy depends on, such as those of a public data set."""
  total = accumulate(Rows(data, power, blocks=blocks), row_sum(ROW_NORM))
  centre = np.asarray((total.sum + total.error) / data.num_units)
  rows = Rows(data, power, jnp.asarray(centre), blocks=blocks)
  moment = accumulate(rows, second_moment(ROW_NORM))
  return PublicStatistics(
    centre, (np.asarray(moment.sum, np.float64) + np.asarray(moment.error)) / data.num_units
  )


@dataclasses.dataclass(frozen=True)
class Preprocessing:
  """How rows are normalised before a solver sees them.

  Attributes:
    power: x becomes sign(x) |x|^power, with the rows then scaled to norm 1.
    blocks: (columns, factor) of each block of columns, such as one layer's: the columns are
      multiplied by the factor first; () leaves them.
    centre_share: of the budget, for a noised mean that is subtracted; 0 subtracts none, or the
      public one.
    public: statistics of public features. The mean is the part that carries over worst to other
      records, so a share for a noised one may be worth its cost.
  """

  power: float = 1.0
  centre_share: float = 0.0
  public: PublicStatistics | None = None
  blocks: Blocks = ()

  def parts(self) -> list[Part]:
    """What it releases: the sum of rows, to which a unit adds at most 1."""
    if self.centre_share == 0:
      return []
    return [Part(CENTRE, self.centre_share, 1, ROW_NORM)]

  def centre(self, data: FeatureData, releases: Releases) -> jax.Array | None:
    """The centre, float32[d]: noised, public, or none."""
    if self.centre_share == 0:
      return None if self.public is None else jnp.asarray(self.public.centre, jnp.float32)
    total = accumulate(self.rows(data, None), row_sum(ROW_NORM))
    return releases.vector(CENTRE, total) / data.num_units

  def rows(
    self, data: FeatureData, centre: jax.Array | None, transform: jax.Array | None = None
  ) -> Rows:
    """The normalised rows."""
    return Rows(data, self.power, centre, transform, self.blocks)

  def head(
    self, kernel: jax.Array, bias: jax.Array, centre: jax.Array | None,
    transform: jax.Array | None = None,
  ) -> Head:  # fmt: skip
    """A head on such rows."""
    return Head(kernel, bias, self.power, centre, transform, self.blocks)
