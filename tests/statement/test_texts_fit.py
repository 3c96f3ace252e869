"""Every text belongs to the mechanism that it describes: a solver is no loop, and draws nothing."""

import dataclasses
import itertools
import re

import matplotlib.pyplot as plt
import numpy as np
import pytest
from made_up_runs import ROW_RUNS, bound, make_facts, row_record

from dp_jax import privacy
from dp_jax.privacy.ledger import Ledger
from dp_jax.privacy.mechanism import Mechanism
from dp_jax.privacy.sampling import draws
from dp_jax.privacy.sampling.schemes import scheme_of
from dp_jax.privacy.shares import Part, calibrate_parts, joint
from dp_jax.report import sections
from dp_jax.statement import attacker, model_card, privacy_json
from dp_jax.statement.sentences import own_releases

LOOP = re.compile(
  r"each step|\bsteps?\b|gradients of the units|DP-SGD|dp-sgd|mean gradient|intermediate model"
  r"|sampling rate|batch drawn|starting|stopped early"
)


def _solver_facts(parts=3, **changes):
  """Facts of a solver of so many releases."""
  spec = privacy.PrivacySpec(epsilon=1.0, delta=1e-5, unit=changes.pop("unit", "scan"))
  shares = [Part(f"sum {i} of the rows", 1 / parts) for i in range(parts)]
  mechanisms = dict(zip((p.purpose for p in shares), calibrate_parts(spec, shares), strict=True))
  ledger = changes.pop("ledger", Ledger())
  ledger.reserve_all(mechanisms, unit=spec.unit)
  mechanism = joint(tuple(mechanisms.values()))
  return make_facts(
    spec=spec, mechanism=mechanism, parts=mechanisms, ledger_entries=ledger.to_list(),
    expected_batch_size=mechanism.expected_batch_size(1437), pretrained_weights=None, **changes,
  )  # fmt: skip


def _texts(record):
  """All that is said of a run in words, but for what was not covered."""
  del record["not_covered"][:]
  return "\n".join([
    record["statement"], record["statement_long"].split("Not covered:")[0],
    record["statement_long"].split("2b. ")[1], *record["nist_sp_800_226"].values(),
    model_card.model_card(record), sections.cite_section(record).body.split("BibTeX")[0],
  ])  # fmt: skip


@pytest.mark.parametrize(("parts", "declared"), itertools.product([1, 3], ["public", "private"]))
def test_nothing_is_said_of_steps_where_there_are_none(parts, declared):
  record = bound(privacy_json.privacy_record(_solver_facts(parts, declared=declared)))
  found = LOOP.findall(_texts(record).replace("before the first step of", ""))
  assert not found, found
  assert "holds no other release" in record["nist_sp_800_226"]["other_releases"]
  assert "With all" not in record["statement"]
  assert own_releases(record) == parts
  assert "no units are drawn" in record["statement_long"]


def test_other_releases_of_a_solver_are_those_of_others():
  ledger = Ledger()
  spec = privacy.PrivacySpec(epsilon=1.0, delta=1e-5, unit="scan")
  ledger.reserve(privacy.calibrate(spec, privacy.FullBatch(), 1), "training", unit="scan")
  record = privacy_json.privacy_record(_solver_facts(2, ledger=ledger))
  assert "holds 3 releases" in record["nist_sp_800_226"]["other_releases"]
  assert "2 releases of its own, 3 with those of other runs" in record["statement_long"]
  assert "With all 3 releases" in record["statement"]


@pytest.mark.parametrize("name", ROW_RUNS)
def test_both_generators_are_named_where_both_draw(name):
  record = row_record(name)
  drawn = record["sampling"] in ("poisson", "truncated_poisson", "fixed_size")
  assert drawn == scheme_of(record["sampling"]).DRAWS
  for text in (record["statement_long"], record["nist_sp_800_226"]["threat_model"]):
    assert "threefry2x32 with keys of 64 bits" in text
    assert ("Philox with keys of 128 bits" in text) == drawn


def test_the_statement_follows_the_code_that_draws(monkeypatch):
  """One constant is read by both: another generator stands in the statement, and draws."""
  facts = make_facts(sampling=privacy.Poisson(0.25), steps=4)
  monkeypatch.setattr(draws, "GENERATOR", "PCG64")
  monkeypatch.setattr(privacy_json, "GENERATOR", "other")
  monkeypatch.setattr(privacy_json, "GENERATOR_KEY_BITS", 32)
  with pytest.raises(TypeError):  # which takes no key
    draws.step_generator(privacy.MasterKey.from_os(), "sampling", 0)
  record = privacy_json.privacy_record(facts)
  assert "PCG64 with keys of 128 bits" in record["statement_long"]
  assert "other with keys of 32 bits" in record["statement_long"]


@pytest.mark.parametrize("steps", [1, 2])
def test_one_step_is_one(steps):
  record = bound(privacy_json.privacy_record(make_facts(steps=steps)))
  text = _texts(record)
  assert not re.search(r"\b1 steps\b", text)
  assert ("1 step" in text) == (steps == 1)


def test_a_record_is_no_group_of_records():
  spec = privacy.PrivacySpec(epsilon=1.0, delta=1e-5)
  record = privacy_json.privacy_record(make_facts(spec=spec, max_records_per_unit=1))
  text = _texts(bound(record))
  for odd in ("one record of each record", "One record, with one record", "record, holding one"):
    assert odd not in text
  assert "One record by itself" in text and "Training read all records" in text


@pytest.mark.parametrize("num_units", [7, 1437, 60_000, 1_281_167])
def test_a_share_of_one_over_the_number_is_shown_as_it_is(num_units):
  spec = privacy.PrivacySpec(epsilon=1.0, delta=0.6 / num_units, unit="scan")
  mechanism = privacy.calibrate(spec, privacy.FullBatch(), 1)
  ledger = Ledger()
  ledger.reserve(mechanism, "training", unit="scan")
  facts = make_facts(
    spec=spec, mechanism=mechanism, num_units=num_units, ledger_entries=ledger.to_list(),
    expected_batch_size=float(num_units),
  )  # fmt: skip
  text = privacy_json.privacy_record(facts)["nist_sp_800_226"]["privacy_parameters"]
  assert "Delta is 0.6 / N and" in text


@pytest.mark.parametrize("steps", [1, 2, 3, 25])
def test_the_drawn_epsilon_is_never_below_what_is_spent(steps, monkeypatch):
  """The curve as it is drawn, read off the axes, at every step."""
  mechanism = Mechanism(privacy.Poisson(0.25), 1.0, steps)
  record = {"mechanism": mechanism.to_dict(), "delta": 1e-5, "steps": steps,
            "target": {"epsilon": 9.0}}  # fmt: skip
  drawn = []
  monkeypatch.setattr(
    sections.plots.fig, "to_svg",
    lambda figure, *_: drawn.append(figure.axes[0].lines[0]) or "<svg></svg>",
  )  # fmt: skip
  sections.epsilon_section(record)
  (line,) = drawn
  plt.close("all")
  x, y = (np.asarray(each, float) for each in (line.get_xdata(), line.get_ydata()))
  assert line.get_drawstyle() == "steps-pre" and x[0] == 0
  for step in range(1, steps + 1):
    height = y[np.searchsorted(x, step)]  # a staircase that stands at the later point
    spent = mechanism.epsilon(1e-5, step)
    assert height >= spent * (1 - 1e-12)
    if step in (1, steps):
      assert height == pytest.approx(spent, rel=1e-12)
  # The broken variant: straight lines from (0, 0), at the middle of the first step.
  assert np.interp(0.5, x, y) < mechanism.epsilon(1e-5, 1)


def test_the_drawn_bound_on_an_attacker_is_never_below_the_bound(record):
  points = np.array(attacker.curve(record))
  assert (np.diff(points[:, 0]) > 0).all()
  lines = attacker._lines(Mechanism.from_dict(record["mechanism"]), record["delta"])
  rates = np.linspace(0, 1, 2001)
  exact = np.min(lines[:, :1] + lines[:, 1:] * rates, axis=0)
  assert (np.interp(rates, *points.T) >= exact - 1e-12).all()
  # The broken variant: chords between evenly spaced points.
  few = np.linspace(0, 1, 61)
  chords = np.interp(rates, few, np.min(lines[:, :1] + lines[:, 1:] * few, axis=0))
  assert (chords < exact - 1e-4).any()


def test_a_changed_mechanism_changes_its_texts(record):
  """The broken variant of all above: one text for every mechanism."""
  solver = privacy_json.privacy_record(dataclasses.replace(_solver_facts()))
  for name in ("algorithm_and_correctness", "utility", "query_model", "tuning"):
    assert solver["nist_sp_800_226"][name] != record["nist_sp_800_226"][name]
