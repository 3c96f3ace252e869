"""What the guarantee is worth to someone who is several units."""

import math

import numpy as np
import pytest
from scipy import stats

from dp_jax.privacy import FixedSize, FullBatch, Mechanism, Poisson, Stream
from dp_jax.privacy.group_privacy import account_group

DELTA = 1e-5


def test_a_group_of_one_is_the_unit():
  mechanism = Mechanism(Poisson(0.05), 4.0, 50)
  assert account_group(mechanism, 1, DELTA) == mechanism.account(DELTA)


@pytest.mark.parametrize("adjacency", ["zero_out", "replace_one"])
@pytest.mark.parametrize("sampling", [FullBatch(), Stream(50, 100)])
def test_gaussians_scale(sampling, adjacency):
  found = account_group(Mechanism(sampling, 12.0, 4, adjacency=adjacency), 3, DELTA)
  assert found.epsilon == Mechanism(sampling, 4.0, 4, adjacency=adjacency).epsilon(DELTA)
  assert "scaled Gaussian" in found.reason


def test_poisson_takes_a_mixture_of_gaussians():
  mechanism = Mechanism(Poisson(0.05), 8.0, 50)
  found = account_group(mechanism, 4, DELTA)
  assert "mixture of Gaussians" in found.reason
  # Units that are drawn together always would be worse; one unit alone is better.
  worst = Mechanism(Poisson(0.05), 2.0, 50).epsilon(DELTA)
  assert mechanism.epsilon(DELTA) < found.epsilon < worst


def test_one_step_of_a_group_by_integration():
  # delta(epsilon) of sum_j Binomial(k, q)(j) N(j, s^2) against N(0, s^2), on a grid.
  rate, noise, size = 0.2, 3.0, 3
  epsilon = account_group(Mechanism(Poisson(rate), noise, 1), size, DELTA).epsilon
  x = np.linspace(-40.0, 45.0, 400_001)
  mixture = sum(
    stats.binom.pmf(j, size, rate) * stats.norm.pdf(x, j, noise) for j in range(size + 1)
  )
  plain = stats.norm.pdf(x, 0, noise)
  width = x[1] - x[0]
  both = [
    np.maximum(mixture - math.exp(epsilon) * plain, 0).sum() * width,
    np.maximum(plain - math.exp(epsilon) * mixture, 0).sum() * width,
  ]
  assert max(both) == pytest.approx(DELTA, rel=1e-3)


def test_a_large_group_is_cut_off_on_the_safe_side():
  found = [account_group(Mechanism(Poisson(0.001), 30.0, 20), k, DELTA).epsilon for k in (8, 100)]
  assert 0 <= found[0] < found[1] < math.inf


def test_the_generic_bound():
  mechanism = Mechanism(FixedSize(20, 200), 12.0, 20, adjacency="replace_one")
  found = account_group(mechanism, 2, DELTA)
  assert "generic" in found.reason
  # Two units at (e, d) each have (2 e, d (1 + exp(e))).
  single = float(found.reason.split("delta ")[1].split(";")[0])
  epsilon = mechanism.epsilon(single)
  assert found.epsilon == pytest.approx(2 * epsilon, rel=1e-9)
  assert single * (1 + math.exp(epsilon)) <= DELTA


def test_the_generic_bound_can_be_empty():
  mechanism = Mechanism(FixedSize(20, 200), 1.5, 200, adjacency="replace_one")
  found = account_group(mechanism, 20, DELTA)
  assert found.epsilon == math.inf and "promises nothing" in found.reason


def test_no_noise_has_no_bound():
  assert account_group(Mechanism(Poisson(0.05), 0.0, 50), 4, DELTA).epsilon == math.inf
  assert account_group(Mechanism(FullBatch(), 0.0, 50), 4, DELTA).epsilon == math.inf


def test_bad_sizes():
  with pytest.raises(ValueError, match="group_size is 0"):
    account_group(Mechanism(FullBatch(), 2.0, 1), 0, DELTA)
