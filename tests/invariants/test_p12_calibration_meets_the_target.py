"""P12: the calibrated noise meets the target: recomputed epsilon at most it, and within 1e-3."""

import dataclasses
import math

import pytest

from dp_jax.privacy import FixedSize, FullBatch, Mechanism, Poisson, PrivacySpec, Stream, calibrate

CASES = [
  (PrivacySpec(1.0, 1e-5), FullBatch(), 1),
  (PrivacySpec(8.0, 1e-6, adjacency="replace_one"), FullBatch(), 30),
  (PrivacySpec(0.5, 1e-4), Poisson(0.25), 80),
  (PrivacySpec(3.0, 1e-6, accountant="rdp"), Poisson(0.01), 500),
  (PrivacySpec(1.0, 1e-5, adjacency="replace_one"), FixedSize(20, 1000), 200),
  (PrivacySpec(2.0, 1e-5), Stream(20, 1000), 200),
]


def meets_target(mechanism: Mechanism, spec: PrivacySpec) -> bool:
  epsilon = mechanism.epsilon(spec.delta)
  return spec.epsilon * (1 - 1e-3) <= epsilon <= spec.epsilon


def binary_search(spec, sampling, steps, *, safe_side, tolerance=1e-4):
  """A plain search, which ends on the side that it is told to."""
  start = Mechanism(sampling, 1.0, steps, 1.0, spec.adjacency, spec.accountant)
  too_little, enough = 0.3, 200.0
  while enough / too_little > 1 + tolerance:
    middle = math.sqrt(too_little * enough)
    found = dataclasses.replace(start, noise_multiplier=middle)
    if found.epsilon(spec.delta) <= spec.epsilon:
      enough = middle
    else:
      too_little = middle
  return dataclasses.replace(start, noise_multiplier=enough if safe_side else too_little)


@pytest.mark.parametrize(("spec", "sampling", "steps"), CASES)
def test_calibrated_noise_meets_the_target(spec, sampling, steps):
  assert meets_target(calibrate(spec, sampling, steps), spec)


@pytest.mark.parametrize(("spec", "sampling", "steps"), [CASES[0], CASES[3], CASES[5]])
def test_a_search_that_stops_on_the_wrong_side_is_caught(spec, sampling, steps):
  assert meets_target(binary_search(spec, sampling, steps, safe_side=True), spec)
  assert not meets_target(binary_search(spec, sampling, steps, safe_side=False), spec)


def test_a_search_that_stops_too_early_is_caught():
  spec, sampling, steps = CASES[0]
  assert not meets_target(binary_search(spec, sampling, steps, safe_side=True, tolerance=0.1), spec)


@pytest.mark.parametrize(("spec", "sampling", "steps"), CASES)
def test_a_little_less_noise_would_miss_it(spec, sampling, steps):
  found = calibrate(spec, sampling, steps)
  less = dataclasses.replace(found, noise_multiplier=0.999 * found.noise_multiplier)
  assert less.epsilon(spec.delta) > spec.epsilon
