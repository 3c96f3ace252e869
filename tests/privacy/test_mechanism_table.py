"""The closed table: which rows exist, and what each hands to its accountants."""

import itertools

import dp_accounting
import pytest
from dp_accounting import dp_event, pld, rdp
from dp_accounting.privacy_accountant import NeighboringRelation as Relation
from scipy import stats

from dp_jax.privacy import FixedSize, FullBatch, Mechanism, Poisson, Stream, TruncatedPoisson
from dp_jax.privacy.sampling.schemes import rows, scheme_of
from dp_jax.privacy.spec import ADJACENCIES

NOISE, STEPS, DELTA = 2.0, 12, 1e-5
SCHEMES = {
  "full_batch": FullBatch(),
  "poisson": Poisson(0.1),
  "truncated_poisson": TruncatedPoisson(0.1, 30, 100),
  "fixed_size": FixedSize(10, 100),
  "stream": Stream(25, 100),
}

Gaussian = dp_accounting.GaussianDpEvent
Composed = dp_accounting.SelfComposedDpEvent


def poisson(noise_multiplier):
  return dp_accounting.PoissonSampledDpEvent(0.1, Gaussian(noise_multiplier))


# Written out by hand, row by row: event, relation, accountants.
BY_HAND = {
  ("full_batch", "zero_out"): (Composed(Gaussian(2.0), 12), Relation.ADD_OR_REMOVE_ONE, "apr"),
  ("full_batch", "add_or_remove_one"): (
    Composed(Gaussian(2.0), 12),
    Relation.ADD_OR_REMOVE_ONE,
    "apr",
  ),
  ("full_batch", "replace_one"): (Composed(Gaussian(1.0), 12), Relation.ADD_OR_REMOVE_ONE, "apr"),
  ("poisson", "zero_out"): (Composed(poisson(2.0), 12), Relation.ADD_OR_REMOVE_ONE, "pr"),
  ("poisson", "add_or_remove_one"): (Composed(poisson(2.0), 12), Relation.ADD_OR_REMOVE_ONE, "pr"),
  ("poisson", "replace_one"): (Composed(poisson(2.0), 12), Relation.REPLACE_ONE, "p"),
  ("truncated_poisson", "zero_out"): (
    Composed(dp_event.TruncatedSubsampledGaussianDpEvent(100, 0.1, 30, 2.0), 12),
    Relation.REPLACE_SPECIAL,
    "p",
  ),
  ("fixed_size", "replace_one"): (
    Composed(dp_accounting.SampledWithoutReplacementDpEvent(100, 10, Gaussian(1.0)), 12),
    Relation.REPLACE_ONE,
    "r",
  ),
  # Twelve steps of 25 of 100 units are three passes.
  ("stream", "zero_out"): (Composed(Gaussian(2.0), 3), Relation.ADD_OR_REMOVE_ONE, "apr"),
  ("stream", "replace_one"): (Composed(Gaussian(1.0), 3), Relation.ADD_OR_REMOVE_ONE, "apr"),
}
LETTERS = {"a": "analytic_gaussian", "p": "pld", "r": "rdp"}


def epsilon_by_hand(event, relation, accountant):
  if accountant == "analytic_gaussian":
    noise = event.event.noise_multiplier / event.count**0.5
    return dp_accounting.get_epsilon_gaussian(noise, DELTA)
  if accountant == "pld":
    return pld.PLDAccountant(relation).compose(event).get_epsilon(DELTA)
  return rdp.RdpAccountant(None, relation).compose(event).get_epsilon(DELTA)


@pytest.mark.parametrize(("scheme", "adjacency"), BY_HAND)
def test_event_and_epsilon_of_a_row(scheme, adjacency):
  event, relation, letters = BY_HAND[scheme, adjacency]
  for accountant in [LETTERS[each] for each in letters]:
    mechanism = Mechanism(SCHEMES[scheme], NOISE, STEPS, 1.0, adjacency, accountant)
    assert mechanism.event() == event
    assert mechanism.row.relation == relation
    by_hand = epsilon_by_hand(event, relation, accountant)
    assert mechanism.epsilon(DELTA) == pytest.approx(by_hand, rel=2e-4)


# What else is accounted by: (rate of a release, steps of it, units drawn each on its own, draws).
USE = {
  "full_batch": (1.0, 1, False, False),
  "poisson": (0.1, 1, True, True),
  "truncated_poisson": (0.1, 1, False, True),
  "fixed_size": (0.1, 1, False, True),
  # A pass of four steps uses every unit.
  "stream": (1.0, 4, False, False),
}


def test_what_a_release_uses_and_by_how_much_neighbours_differ():
  for name, sampling in SCHEMES.items():
    found = (sampling.tail_rate, sampling.steps_per_release, sampling.INDEPENDENT, sampling.DRAWS)
    assert found == USE[name], name
  for row in rows():
    factor = 2.0 if row.adjacency == "replace_one" else 1.0
    assert row.sensitivity_factor == factor, (row.scheme, row.adjacency)


@pytest.mark.parametrize(
  ("name", "setting"),
  [
    ("poisson", "cap"),
    ("full_batch", "cap"),
    ("full_batch", "sampling_rate"),
    ("fixed_size", "cap"),
    ("fixed_size", "sampling_rate"),
    ("stream", "cap"),
    ("stream", "sampling_rate"),
  ],
)
def test_a_setting_that_a_scheme_does_not_use_is_refused(name, setting):
  given = {"sampling_rate": None, "expected_batch_size": 10, "cap": None}
  assert scheme_of(name).from_settings(given, 100).name == name
  with pytest.raises(ValueError, match=rf"privacy\.{setting}=0\.5 has no meaning under .*{name}"):
    scheme_of(name).from_settings({**given, setting: 0.5}, 100)


def test_the_table_has_no_other_row():
  assert {(row.scheme, row.adjacency) for row in rows()} == set(BY_HAND)
  assert len(rows()) == len(BY_HAND)
  for row in rows():
    letters = BY_HAND[row.scheme, row.adjacency][2]
    assert set(row.accountants) == {LETTERS[each] for each in letters}


@pytest.mark.parametrize(
  ("scheme", "adjacency"), sorted(set(itertools.product(SCHEMES, ADJACENCIES)) - set(BY_HAND))
)
def test_other_pairs_are_refused_with_the_nearest_row(scheme, adjacency):
  with pytest.raises(ValueError, match=f"nearest row: {scheme} under"):
    Mechanism(SCHEMES[scheme], NOISE, STEPS, adjacency=adjacency)


@pytest.mark.parametrize(
  ("scheme", "adjacency", "accountant", "nearest"),
  [
    ("poisson", "zero_out", "analytic_gaussian", "pld"),
    ("poisson", "replace_one", "rdp", "pld"),
    ("truncated_poisson", "zero_out", "rdp", "pld"),
    ("fixed_size", "replace_one", "pld", "rdp"),
  ],
)
def test_other_accountants_are_refused_with_the_nearest(scheme, adjacency, accountant, nearest):
  with pytest.raises(ValueError, match=f"nearest that can: '{nearest}'"):
    Mechanism(SCHEMES[scheme], NOISE, STEPS, 1.0, adjacency, accountant)


def test_something_else_as_a_scheme_is_refused():
  with pytest.raises(ValueError, match="sampling is 'shuffled'"):
    Mechanism("shuffled", NOISE, STEPS)


def test_events_of_fewer_steps():
  mechanism = Mechanism(Poisson(0.1), NOISE, STEPS)
  assert mechanism.event(5) == Composed(poisson(2.0), 5)
  assert mechanism.event(0) == dp_accounting.NoOpDpEvent()
  assert mechanism.parts(5) == ((poisson(2.0), 5),)
  stream = Mechanism(Stream(25, 100), NOISE, STEPS)
  assert [stream.parts(steps)[0][1] for steps in (1, 4, 5, 8, 9)] == [1, 1, 2, 2, 3]


def test_truncation_over_its_cliff_is_refused():
  def at(cap):
    return Mechanism(TruncatedPoisson(0.01, cap, 60000), 1.0, 1000)

  with pytest.raises(ValueError, match=r"over the cliff.*jumps from 1.828 to 11.11") as error:
    at(600).account(1e-5)
  # The cap that the message names is harmless: it cuts nothing, but for a hundredth of delta.
  named = int(str(error.value).split("to at least ")[1].split(",")[0])
  assert 600 < named < 1000
  assert 1000 * stats.binom.sf(named, 60000, 0.01) <= 0.01 * 1e-5


def test_the_cliff_does_not_stop_a_running_job():
  mechanism = Mechanism(TruncatedPoisson(0.1, 10, 100), 6.0, 20)
  assert mechanism.epsilon(1e-5, steps=19) > 0
  with pytest.raises(ValueError, match="over the cliff"):
    mechanism.epsilon(1e-5)


def test_a_cap_below_the_average_batch_is_refused():
  with pytest.raises(ValueError, match=r"below the average batch of 600.*nearest row: fixed_size"):
    TruncatedPoisson(0.01, 599, 60000)
