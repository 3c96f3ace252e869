"""The accuracy on private held-out data, released with noise of its own."""

import json
import math

import numpy as np
import pytest
from support import flags_of, small_config, write_npz

from dp_jax import cli
from dp_jax.privacy.calibration import calibrate
from dp_jax.privacy.keys import MasterKey
from dp_jax.privacy.ledger import Ledger
from dp_jax.privacy.sampling import FullBatch
from dp_jax.privacy.spec import PrivacySpec
from dp_jax.training.release_metrics import noised_share, shares
from dp_jax.training.run import train

PEOPLE = 60


@pytest.fixture(scope="module")
def run(tmp_path_factory):
  """A private run on 60 people with two records each."""
  folder = tmp_path_factory.mktemp("metrics")
  rng = np.random.default_rng(0)
  data = write_npz(
    folder / "data", rng.integers(0, 255, (2 * PEOPLE, 4, 4, 1), np.uint8),
    rng.integers(0, 2, 2 * PEOPLE), person=np.arange(2 * PEOPLE) % PEOPLE,
  )  # fmt: skip
  config = small_config(
    data={"source": "npz", "path": str(data), "num_classes": 2}, model={"name": "linear"},
    privacy={"epsilon": 4.0, "delta": 1e-3, "sampling": "full_batch", "unit": "person"},
    train__steps=2,
  )  # fmt: skip
  train(config, folder / "run", progress=False)
  return folder, config


def _evaluate(folder, config, *flags):
  return cli.main(["evaluate", str(folder / "run"), *flags_of(config), *flags])


def _flags(ledger, epsilon=5.0):
  return [
    "--release_metrics", f"--release_epsilon={epsilon}", "--release_delta=1e-6",
    f"--ledger={ledger}", "--json",
  ]  # fmt: skip


def test_each_release_is_noised_and_paid_for(run, tmp_path, capsys):
  folder, config = run
  ledger = tmp_path / "held_out.jsonl"
  released = []
  for count in (1, 2):
    assert _evaluate(folder, config, *_flags(ledger)) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["ledger"]["releases"] == count == len(Ledger(ledger).releases)
    released.append(found)
  first, second = released
  assert 4.99 < first["epsilon"] <= 5 < second["ledger"]["epsilon"]
  assert first["num_units"] == PEOPLE and first["unit"] == "person"
  assert first["accuracy"] != second["accuracy"]  # fresh noise
  assert "for each person of that split" in first["statement"]
  lines = (folder / "run" / "released_metrics.jsonl").read_text().splitlines()
  assert [json.loads(line) for line in lines] == released


def test_a_budget_that_is_spent_releases_nothing(run, tmp_path, capsys):
  folder, config = run
  path = tmp_path / "budget.jsonl"
  mechanism = calibrate(PrivacySpec(4.0, 1e-6, "person"), FullBatch(), steps=1)
  Ledger(path, PrivacySpec(5.0, 1e-6, "person")).reserve(mechanism, "evaluation", unit="person")
  before = (folder / "run" / "released_metrics.jsonl").read_bytes()
  assert _evaluate(folder, config, *_flags(path)) == 2
  out, err = capsys.readouterr()
  assert out == "" and "over the ledger's budget" in err
  assert (folder / "run" / "released_metrics.jsonl").read_bytes() == before


@pytest.mark.parametrize(
  ("flags", "said"),
  [
    (["--release_metrics"], "needs --release_epsilon"),
    (["--release_epsilon=1"], "go with --release_metrics"),
    ([*_flags("x"), "--config.privacy.adjacency=add_or_remove_one"], "keeps secret"),
  ],
)
def test_bad_input_is_one_line(run, capsys, flags, said):
  folder, config = run
  assert _evaluate(folder, config, *flags) == 2
  assert said in capsys.readouterr().err


def test_one_person_moves_the_sum_by_at_most_one():
  """Whatever the person's records; counting records would move it by as many as there are."""
  from made_up_work_directories import people_table

  table = people_table(0.7)
  values = shares(table)
  assert len(values) == table.num_units and values.min() >= 0 and values.max() <= 1
  np.testing.assert_allclose(values.mean(), np.mean(table.predicted == table.label))
  records = np.bincount(table.unit, table.predicted == table.label)
  assert records.max() > 1  # the broken variant


def test_the_noise_has_the_calibrated_spread():
  """300 draws: their spread is within 7 of its standard errors (4.1%), below 1e-10 to fail."""
  mechanism = calibrate(PrivacySpec(1.0, 1e-6), FullBatch(), steps=1)
  values = np.full(1000, 0.5)
  draws = [noised_share(values, 1000, mechanism, MasterKey.from_os()) for _ in range(300)]
  expected = mechanism.stddev / 1000
  assert abs(np.std(draws) / expected - 1) < 7 * 0.041
  assert abs(np.mean(draws) - 0.5) < 7 * expected / math.sqrt(300)


def test_the_accuracy_stays_a_fraction():
  mechanism = calibrate(PrivacySpec(0.05, 1e-6), FullBatch(), steps=1)
  draws = [noised_share(np.ones(3), 3, mechanism, MasterKey.from_os()) for _ in range(20)]
  assert min(draws) >= 0 and max(draws) <= 1 and len(set(draws)) > 1
