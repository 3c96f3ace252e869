"""The noise of solvers: a key of its own for each class, matrix and step, and the right size.

Estimates are within six standard errors, so that false alarms are below 1e-6.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dp_jax.gradients import compensated as pairs
from dp_jax.gradients.noise.add_noise import add_noise
from dp_jax.privacy.master_key import MasterKey
from dp_jax.privacy.mechanism import Mechanism
from dp_jax.privacy.sampling import FullBatch
from dp_jax.solvers.noised import Releases, noise_edge

KEY = MasterKey(bytes(range(32)))
D = 128
MECHANISM = Mechanism(FullBatch(), 3.0, 4, 0.5)


def _releases(key=KEY):
  return Releases({"a": MECHANISM, "b": MECHANISM}, key)


def _zero(*shape):
  return pairs.zeros_like(jnp.zeros(shape))


def _correlation(x, y):
  return abs(np.corrcoef(np.ravel(x), np.ravel(y))[0, 1]) * np.sqrt(np.size(x))


def test_symmetric_noise_has_the_accounted_size():
  noise = _releases().symmetric("a", _zero(D, D))
  assert (noise == noise.T).all()
  above = noise[np.triu_indices(D, 1)]
  stddev = MECHANISM.stddev
  assert np.std(np.diag(noise)) == pytest.approx(stddev, rel=6 / np.sqrt(2 * D))
  assert np.std(above) == pytest.approx(stddev / np.sqrt(2), rel=6 / np.sqrt(2 * above.size))
  # The norm that is accounted is the Frobenius norm: its square is sum over the diagonal plus
  # twice what is above it, and each term has variance stddev^2.
  terms = np.concatenate([np.diag(noise), np.sqrt(2) * above]) / stddev
  assert np.mean(terms**2) == pytest.approx(1, rel=6 * np.sqrt(2 / terms.size))


def test_the_noise_of_a_sum_has_the_accounted_size_in_each_array():
  total = pairs.zeros_like({"kernel": jnp.zeros((D, D)), "bias": jnp.zeros(2**13)})
  for noise in jax.tree.leaves(_releases().vector("a", total)):
    assert np.std(noise) == pytest.approx(MECHANISM.stddev, rel=6 / np.sqrt(2 * noise.size))


def test_the_edge_is_that_of_the_noise():
  largest = np.linalg.eigvalsh(_releases().symmetric("a", _zero(512, 512)))[-1]
  assert largest == pytest.approx(noise_edge(MECHANISM, 512), rel=0.05)


def test_noise_differs_between_classes_matrices_and_steps():
  releases = _releases()
  classes = releases.symmetric("a", _zero(3, D, D))
  draws = [
    *classes,
    releases.symmetric("b", _zero(3, D, D))[0],
    releases.symmetric("a", _zero(3, D, D), step=1)[0],
    np.asarray(releases.vector("a", _zero(D, D), step=2)),
    np.asarray(releases.vector("b", _zero(D, D), step=2)),
  ]
  for i, first in enumerate(draws):
    for second in draws[:i]:
      assert _correlation(np.triu(first), np.triu(second)) < 9
  # Diagonal and triangle of one matrix too.
  assert _correlation(np.diag(draws[0]), [*draws[0][0, 1:], draws[0][1, 2]]) < 6


def test_one_key_for_all_classes_is_caught():
  """The broken variant of the published code: vmap over classes with the key closed over."""
  key = jax.random.wrap_key_data(jnp.zeros(2, jnp.uint32), impl="threefry2x32")
  draws = np.asarray(jax.vmap(lambda x: add_noise(x, 1.5, key))(jnp.zeros((2, D, D))))
  assert _correlation(np.triu(draws[0]), np.triu(draws[1])) > 9


def test_the_same_release_is_the_same_noise_and_another_key_another():
  first, again = (_releases().vector("a", _zero(D), step=3) for _ in range(2))
  assert (first == again).all()
  other = _releases(MasterKey(bytes(32))).vector("a", _zero(D), step=3)
  assert not (first == other).any()


def test_what_was_not_planned_is_refused():
  with pytest.raises(ValueError, match="'c' was not planned"):
    _releases().vector("c", _zero(D))
  with pytest.raises(ValueError, match="step 4"):
    _releases().vector("a", _zero(D), step=4)


@pytest.mark.parametrize("again", ["vector", "symmetric", "scalar"])
def test_a_release_is_made_once(again):
  """The noise of one on two sums would show their difference."""
  releases = _releases()
  releases.vector("a", _zero(D, D), step=1)
  with pytest.raises(ValueError, match="step 1 of 'a' was released before"):
    getattr(releases, again)("a", 0.0 if again == "scalar" else _zero(D, D), step=1)
  releases.vector("b", _zero(D, D), step=1)


def test_a_scalar_has_the_noise_of_one_coordinate():
  releases = _releases()
  found = [releases.scalar("a", 1e4, step) for step in range(4)]
  assert len(set(found)) == 4
  assert max(abs(value - 1e4) for value in found) < 6 * MECHANISM.stddev
