"""Every number that a user gives is checked, and the message says what to give instead."""

import json
import math

import numpy as np
import pytest

from dp_jax.privacy import (
  FixedSize,
  FullBatch,
  Mechanism,
  Poisson,
  PrivacySpec,
  Stream,
  TruncatedPoisson,
  calibrate,
  calibrate_rate,
  calibrate_steps,
  sampling_from_dict,
)

NOT_A_NUMBER = [
  True,
  "1",
  None,
  math.nan,
  math.inf,
  -math.inf,
  1j,
  pytest.param(10**400, id="huge"),
]
SPEC = PrivacySpec(1.0, 1e-5)


@pytest.mark.parametrize("epsilon", [0, -1.0, *NOT_A_NUMBER])
def test_epsilon(epsilon):
  with pytest.raises(ValueError, match="epsilon is"):
    PrivacySpec(epsilon, 1e-5)


@pytest.mark.parametrize("delta", [0, 1, -0.1, 1.5, *NOT_A_NUMBER])
def test_delta(delta):
  with pytest.raises(ValueError, match="delta is"):
    PrivacySpec(1.0, delta)
  with pytest.raises(ValueError, match="delta is"):
    Mechanism(FullBatch(), 1.0, 1).account(delta)


@pytest.mark.parametrize("rate", [0, -0.1, 1.1, 1e-30, *NOT_A_NUMBER])
def test_rate(rate):
  with pytest.raises(ValueError, match="sampling rate is"):
    Poisson(rate)
  with pytest.raises(ValueError, match="sampling rate is"):
    TruncatedPoisson(rate, 10, 100)


@pytest.mark.parametrize("steps", [0, -1, 1.5, *NOT_A_NUMBER])
def test_steps(steps):
  with pytest.raises(ValueError, match="steps is"):
    Mechanism(FullBatch(), 1.0, steps)
  with pytest.raises(ValueError, match="steps is"):
    calibrate(SPEC, FullBatch(), steps)
  with pytest.raises(ValueError, match="steps is"):
    calibrate_rate(SPEC, steps, 1.0)


@pytest.mark.parametrize("clip_norm", [0, -1.0, *NOT_A_NUMBER])
def test_clip_norm(clip_norm):
  with pytest.raises(ValueError, match="clip_norm is"):
    Mechanism(FullBatch(), 1.0, 1, clip_norm)


@pytest.mark.parametrize("noise_multiplier", [-1.0, *NOT_A_NUMBER])
def test_noise_multiplier(noise_multiplier):
  with pytest.raises(ValueError, match="noise_multiplier is"):
    Mechanism(FullBatch(), noise_multiplier, 1)
  with pytest.raises(ValueError, match="noise_multiplier is"):
    calibrate_steps(SPEC, FullBatch(), noise_multiplier)


@pytest.mark.parametrize("size", [0, -1, 2.5, *NOT_A_NUMBER])
def test_sizes(size):
  for make in (
    lambda: FixedSize(size, 10),
    lambda: FixedSize(1, size),
    lambda: Stream(size, 10),
    lambda: TruncatedPoisson(0.1, size, 10),
    lambda: TruncatedPoisson(0.1, 10, size),
  ):
    with pytest.raises(ValueError, match=" is "):
      make()


def test_a_batch_larger_than_the_data():
  with pytest.raises(ValueError, match="more than the 10 units"):
    FixedSize(11, 10)


@pytest.mark.parametrize(
  ("name", "value"), [("adjacency", "add_one"), ("accountant", "moments"), ("unit", "")]
)
def test_words(name, value):
  with pytest.raises(ValueError, match=f"{name} is '{value}'"):
    PrivacySpec(1.0, 1e-5, **{name: value})


def test_steps_beyond_the_plan():
  mechanism = Mechanism(Poisson(0.1), 2.0, 10)
  assert mechanism.epsilon(1e-5, steps=0) == 0
  assert 0 < mechanism.epsilon(1e-5, steps=5) < mechanism.epsilon(1e-5)
  with pytest.raises(ValueError, match="beyond the 10 planned"):
    mechanism.epsilon(1e-5, steps=11)
  with pytest.raises(ValueError, match="steps is -1"):
    mechanism.event(steps=-1)


def test_numpy_numbers_pass_and_become_plain():
  mechanism = Mechanism(Poisson(np.float32(0.5)), np.float64(2), np.int64(7), np.float64(3))
  assert type(mechanism.steps) is int and type(mechanism.noise_multiplier) is float
  assert type(mechanism.sampling.rate) is float
  assert mechanism.stddev == 6.0


SCHEMES = [
  FullBatch(),
  Poisson(1 / 3),
  TruncatedPoisson(0.1, 20, 100),
  FixedSize(7, 100),
  Stream(7, 100),
]


@pytest.mark.parametrize("sampling", SCHEMES)
def test_round_trip_through_json(sampling):
  adjacency = "replace_one" if sampling.name == "fixed_size" else "zero_out"
  mechanism = Mechanism(sampling, 1 / 7, 11, 0.3, adjacency, declared_batch_size=1.5)
  assert Mechanism.from_dict(json.loads(json.dumps(mechanism.to_dict()))) == mechanism
  assert sampling_from_dict(json.loads(json.dumps(sampling.to_dict()))) == sampling
  spec = PrivacySpec(1 / 3, 1e-7, "patient", adjacency, "rdp")
  assert PrivacySpec.from_dict(json.loads(json.dumps(spec.to_dict()))) == spec


def test_unknown_keys_are_refused():
  with pytest.raises(ValueError, match="unknown keys"):
    sampling_from_dict({"name": "poisson", "rate": 0.1, "cap": 3})
  with pytest.raises(ValueError, match="lacks"):
    sampling_from_dict({"name": "poisson"})
  with pytest.raises(ValueError, match="sampling is 'shuffled'"):
    sampling_from_dict({"name": "shuffled"})
  data = Mechanism(FullBatch(), 1.0, 1).to_dict()
  with pytest.raises(ValueError, match="unknown keys"):
    Mechanism.from_dict({**data, "sigma": 1.0})


def test_expected_batch_size():
  assert Mechanism(FullBatch(), 1.0, 1).expected_batch_size(50) == 50
  assert Mechanism(Poisson(0.1), 1.0, 1).expected_batch_size(55) == pytest.approx(5.5)
  assert Mechanism(Stream(7, 100), 1.0, 1).expected_batch_size(100) == 7
  assert Mechanism(FullBatch(), 1.0, 1, declared_batch_size=9).expected_batch_size(50) == 9


def test_add_or_remove_one_needs_a_declared_batch_size():
  # Neighbours differ in number there, so dividing by it would tell them apart.
  with pytest.raises(ValueError, match="must be declared"):
    Mechanism(Poisson(0.1), 1.0, 1, adjacency="add_or_remove_one").expected_batch_size(50)
  declared = Mechanism(Poisson(0.1), 1.0, 1, adjacency="add_or_remove_one", declared_batch_size=5.0)
  assert declared.expected_batch_size(50) == declared.expected_batch_size(51) == 5.0
