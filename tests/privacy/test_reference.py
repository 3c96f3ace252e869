"""Published settings: noise multipliers within 1e-4, relative, of a reference computation."""

import dataclasses
import json
import pathlib

import pytest

from dp_jax.privacy import FullBatch, Mechanism, Poisson, PrivacySpec, SamplerTailError, calibrate
from dp_jax.privacy.accounting.tails import MAX_SHARE_OF_DELTA

ROWS = json.loads((pathlib.Path(__file__).parent / "reference_noise_multipliers.json").read_text())[
  "rows"
]
ACCOUNTANTS = ("analytic_gaussian", "rdp", "pld")
# Calibrating by PLD takes seconds for some; that its epsilon is right shows the same.
QUICK = [row for row in ROWS if row["epsilon"] <= 2][::3]
FULL_BATCH = [row for row in ROWS if row["sampling"] == "full_batch"]


def mechanism_of(row, accountant):
  sampling = FullBatch() if row["sampling"] == "full_batch" else Poisson(row["sampling_rate"])
  return Mechanism(sampling, row[accountant], row["steps"], accountant=accountant)


def cases(rows, accountants):
  return [(row, each) for row in rows for each in accountants if each in row]


@pytest.mark.parametrize(("row", "accountant"), cases(ROWS, ACCOUNTANTS))
def test_epsilon_at_the_reference_noise(row, accountant):
  # Epsilon falls at least as fast as noise rises, so 1e-4 of it bounds 1e-4 of the noise.
  found = mechanism_of(row, accountant).account(row["delta"], sampler_tails=False)
  assert found.epsilon == pytest.approx(row["epsilon"], rel=1e-4)
  assert found.accountant == accountant


@pytest.mark.parametrize(
  ("row", "accountant"),
  [
    *cases(ROWS, ("rdp",)),
    *cases(FULL_BATCH, ("analytic_gaussian",)),
    *cases(QUICK, ("pld",)),
  ],
)
def test_calibrated_noise(row, accountant):
  reference = mechanism_of(row, accountant)
  spec = PrivacySpec(row["epsilon"], row["delta"], accountant=accountant)
  if reference.tail_delta() > MAX_SHARE_OF_DELTA * row["delta"]:
    # So little noise that the sampler's range would show: that is refused instead.
    with pytest.raises(SamplerTailError, match="standard deviations"):
      reference.account(row["delta"])
    with pytest.raises(ValueError, match="is the least whose tails"):
      calibrate(spec, reference.sampling, row["steps"])
    return
  found = calibrate(spec, reference.sampling, row["steps"])
  assert found.noise_multiplier == pytest.approx(row[accountant], rel=1e-4)
  assert dataclasses.replace(found, noise_multiplier=row[accountant]) == reference
