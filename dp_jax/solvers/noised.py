"""The noised releases of solvers: each draws from a key of its own, and pays as accounted."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dp_jax.errors import UserError
from dp_jax.gradients.compensated import Compensated
from dp_jax.gradients.noise.add_noise import add_noise
from dp_jax.gradients.noise.jax_keys import step_key
from dp_jax.privacy.master_key import MasterKey
from dp_jax.privacy.mechanism import Mechanism

_add_noise = jax.jit(add_noise, static_argnums=1)


@dataclasses.dataclass(frozen=True)
class Releases:
  """What a solver may release: by purpose, the mechanism that was entered in the ledger.

  Attributes:
    mechanisms: by purpose.
    key: the master key. The key of a release is a hash of it, its purpose and its step; it is given
      out once, since the same noise on two sums would show their difference.
    noised: False adds no noise and gives no guarantee: for the same head without privacy, whose
      other settings are still in units of the noise that was planned.
  """

  mechanisms: Mapping[str, Mechanism]
  key: MasterKey
  noised: bool = True
  _claimed: set[tuple[str, int]] = dataclasses.field(
    default_factory=set, init=False, repr=False, compare=False
  )

  @property
  def exact(self) -> bool:
    """Whether neighbours may lack a unit, so that sums have to be exact wherever a unit stands."""
    return any(each.adjacency == "add_or_remove_one" for each in self.mechanisms.values())

  def vector(self, purpose: str, total: Compensated, step: int = 0) -> Any:
    """A sum with independent noise of the mechanism's stddev in each coordinate.

    Args:
      purpose: of the mechanism.
      total: an array or a tree of them, as a pair. Neighbours move all of it together, in L2, by at
        most the mechanism's clip norm, or twice that under replace_one.
      step: which of the planned steps this is; each is released once.
    """
    mechanism, key = self._claim(purpose, step)
    return self._answer(total, mechanism.stddev, key)

  def symmetric(self, purpose: str, total: Compensated, step: int = 0) -> np.ndarray:
    """A symmetric matrix, or a stack of them, with symmetric noise.

    Neighbours move the matrices, all taken together, by at most the mechanism's clip norm in
    Frobenius norm, or twice that under replace_one. The upper triangle alone is drawn, and
    mirrored: its diagonal with the mechanism's stddev, the rest with stddev / sqrt(2). In the
    coordinates (diagonal, sqrt(2) x above it) the norm is the Frobenius norm, and the noise has the
    mechanism's stddev in each.

    Args:
      purpose: of the mechanism.
      total: float32[..., d, d] pair; only the upper triangle is read.
      step: as for `vector`.

    Returns:
      float64[..., d, d], exactly symmetric. It may have negative eigenvalues.
    """
    mechanism, key = self._claim(purpose, step)
    size = total.sum.shape[-1]
    rows, columns = np.triu_indices(size, 1)
    parts = (
      (np.arange(size), np.arange(size), mechanism.stddev),
      (rows, columns, mechanism.stddev / math.sqrt(2)),
    )
    noised = np.zeros(total.sum.shape, np.float64)
    for index, (i, j, stddev) in enumerate(parts):
      if not len(i):
        continue
      part = Compensated(total.sum[..., i, j], total.error[..., i, j])
      answer = self._answer(part, stddev, jax.random.fold_in(key, index))
      values = np.asarray(answer, np.float64)
      noised[..., i, j] = values
      noised[..., j, i] = values
    return noised

  def scalar(self, purpose: str, value: float, step: int = 0) -> float:
    """A number, with noise; neighbours move it as they do a `vector`."""
    high = np.float32(value)
    pair = Compensated(jnp.asarray(high), jnp.asarray(np.float32(value - float(high))))
    return float(self.vector(purpose, pair, step))

  def _answer(self, total: Compensated, stddev: float, key: jax.Array) -> Any:
    if self.noised:
      return _add_noise(total, stddev, key)
    return jax.tree.map(lambda s, e: s + e, total.sum, total.error)

  def _claim(self, purpose: str, step: int) -> tuple[Mechanism, jax.Array]:
    """The mechanism of a planned release, and the key of its noise, for the one time it is made.

    Raises:
      ValueError: if the purpose or the step was not planned, or was claimed before.
    """
    if purpose not in self.mechanisms:
      raise UserError(
        f"{purpose!r} was not planned; releases are {', '.join(self.mechanisms) or 'none'}."
      )
    mechanism = self.mechanisms[purpose]
    if not 0 <= step < mechanism.steps:
      raise UserError(f"step {step} of {purpose!r}, of which {mechanism.steps} were planned.")
    if (purpose, step) in self._claimed:
      raise UserError(f"step {step} of {purpose!r} was released before: plan another step.")
    self._claimed.add((purpose, step))
    return mechanism, step_key(self.key, purpose, step)


def noise_edge(mechanism: Mechanism, size: int) -> float:
  """About the largest eigenvalue of the noise that `Releases.symmetric` adds to a d x d matrix.

  With variance s^2 / 2 off the diagonal it is 2 sqrt(d s^2 / 2) = s sqrt(2 d), to a few percent.

  Wigner 1958; Bandeira and van Handel 2016, arXiv:1408.6185.
  """
  return mechanism.stddev * math.sqrt(2 * size)
