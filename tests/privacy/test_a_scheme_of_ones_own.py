"""A sampling scheme is one class and one line: nothing else knows which there are."""

import dataclasses
from typing import ClassVar

import dp_accounting
import numpy as np
import pytest
from support import small_config

from dp_jax.privacy import FullBatch, MasterKey, Mechanism, Poisson, PrivacySpec, calibrate
from dp_jax.privacy.sampling import schemes
from dp_jax.privacy.sampling.scheme import ADD_REMOVE, Row, Scheme
from dp_jax.statement.sentences import sampling_phrase, sampling_words
from dp_jax.training.setup.target import make_mechanism


def _every_other_step(sampling, noise_multiplier):
  """Of two steps, of which a unit is in one: no more than one full release."""
  return dp_accounting.GaussianDpEvent(noise_multiplier)


@dataclasses.dataclass(frozen=True)
class Halves(Scheme):
  """The units are cut into two halves once, which take turns."""

  name: ClassVar[str] = "halves"
  ROWS: ClassVar = (
    Row("halves", "zero_out", _every_other_step, ADD_REMOVE, ("analytic_gaussian", "pld"), 1.0),
  )
  CLAUSE: ClassVar[str] = "one of two halves of the data ({size} units), which take turns"
  WORDS: ClassVar[str] = "halves that take turns, at rate {rate}"

  @property
  def sampling_rate(self):
    return 0.5

  @property
  def tail_rate(self):
    return 1.0

  @property
  def steps_per_release(self):
    return 2

  def draw(self, generator, num_units, step):
    del generator
    return np.arange(step % 2, num_units, 2)

  @classmethod
  def from_settings(cls, given, num_units):
    cls.refuse(given, "cap", "sampling_rate", "expected_batch_size")
    return cls()


@pytest.fixture(autouse=True)
def _one_line(monkeypatch):
  monkeypatch.setattr(schemes, "SCHEMES", (*schemes.SCHEMES, Halves))


def test_it_is_calibrated_drawn_accounted_and_read_back():
  spec = PrivacySpec(1.0, 1e-5)
  mechanism = calibrate(spec, Halves(), 10)
  gaussian = calibrate(spec, schemes.FullBatch(), 5)
  assert mechanism.noise_multiplier == pytest.approx(gaussian.noise_multiplier, rel=1e-6)
  assert Mechanism.from_dict(mechanism.to_dict()) == mechanism
  sampler = mechanism.sampler(MasterKey(bytes(32)), 7)
  assert [sampler.indices(step).tolist() for step in (0, 1, 2)] == [
    [0, 2, 4, 6], [1, 3, 5], [0, 2, 4, 6],
  ]  # fmt: skip
  with pytest.raises(ValueError, match="nearest row: halves under 'zero_out'"):
    Mechanism(Halves(), 1.0, 1, adjacency="replace_one")


def test_a_configuration_names_it_and_the_statement_describes_it():
  config = small_config(privacy={"epsilon": 4.0, "delta": 1e-3, "sampling": "halves"})
  _, mechanism = make_mechanism(config, 200)
  assert mechanism.sampling == Halves() and mechanism.expected_batch_size(200) == 100
  record = {
    "sampling": "halves", "sampling_rate": 0.5, "expected_batch_size": 100.0, "steps": 8,
    "mechanism": mechanism.to_dict(),
  }  # fmt: skip
  expected = "one of two halves of the data (100 units), which take turns"
  assert sampling_phrase(record) == expected
  assert sampling_words(record) == "halves that take turns, at rate 0.5"
  with pytest.raises(ValueError, match=r"privacy\.cap=3 has no meaning under sampling 'halves'"):
    make_mechanism(
      small_config(privacy={"epsilon": 4.0, "delta": 1e-3, "sampling": "halves", "cap": 3}), 200
    )


def test_a_scheme_that_is_not_listed_is_refused(monkeypatch):
  monkeypatch.setattr(schemes, "SCHEMES", schemes.SCHEMES[:-1])
  with pytest.raises(ValueError, match="use one of poisson, full_batch"):
    Mechanism(Halves(), 1.0, 1)
  with pytest.raises(ValueError, match="sampling"):
    schemes.sampling_from_dict({"name": "halves"})
  with pytest.raises(ValueError, match=r"privacy\.sampling='halves' is not one of poisson"):
    small_config(privacy={"epsilon": 4.0, "delta": 1e-3, "sampling": "halves"})


@pytest.mark.parametrize("listed", [FullBatch(), Poisson(0.01)])
def test_a_subclass_does_not_inherit_the_accounting(listed):
  """It would draw the same ten units in every step, and pay for random ones."""

  class Favours(type(listed)):
    def draw(self, generator, num_units, step):
      return np.arange(10)

  Mechanism(listed, 1.0, 1)
  with pytest.raises(ValueError, match="use one of poisson, full_batch"):
    Mechanism(Favours(**dataclasses.asdict(listed)), 1.0, 1)
