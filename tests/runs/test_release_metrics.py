"""The accuracy on private held-out data, released with noise of its own."""

import dataclasses
import json
import math
import re

import numpy as np
import pytest
from scipy import stats
from support import flags_of, small_config, write_npz

from dp_jax import cli
from dp_jax.config.run_config import Config
from dp_jax.data.sources.npy_writer import ShardWriter
from dp_jax.evaluation.predictions import PredictionTable
from dp_jax.models.pretrained import weights
from dp_jax.models.pretrained.ancestry import Ancestor
from dp_jax.privacy.calibration.calibrate import calibrate
from dp_jax.privacy.ledger import Ledger
from dp_jax.privacy.master_key import MasterKey
from dp_jax.privacy.sampling import FullBatch
from dp_jax.privacy.spec import PrivacySpec
from dp_jax.runs.release_metrics import (
  CLIP_NORM,
  centred_sum,
  held_out_shares,
  noised_share,
  release_accuracy,
  shares,
)
from dp_jax.training.release import load_release
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
    ([*_flags("x"), "--config.privacy.unit=persn"], "have no such column"),
    ([*_flags("x"), "--config.privacy.unit=record"], "the model protects each 'person'"),
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
  mechanism = calibrate(PrivacySpec(1.0, 1e-6), FullBatch(), 1, CLIP_NORM)
  values = np.full(1000, 0.5)
  draws = [noised_share(values, 1000, mechanism, MasterKey.from_os()) for _ in range(300)]
  expected = mechanism.stddev / 1000
  assert abs(np.std(draws) / expected - 1) < 7 * 0.041
  assert abs(np.mean(draws) - 0.5) < 7 * expected / math.sqrt(300)


def test_the_accuracy_stays_a_fraction():
  mechanism = calibrate(PrivacySpec(0.05, 1e-6), FullBatch(), 1, CLIP_NORM)
  draws = [noised_share(np.ones(3), 3, mechanism, MasterKey.from_os()) for _ in range(20)]
  assert min(draws) >= 0 and max(draws) <= 1 and len(set(draws)) > 1


# Records of each person of the held-out data; some have none that can be read.
RECORDS = {"a": 1, "b": 2, "c": 5, "d": 3, "e": 1, "": 4}


@pytest.fixture(scope="module")
def held_out(run):
  """Writes held-out data of such people, and gives a person's share of right predictions.

  Of each person: how many records, and of how many the label is what the model predicts; None makes
  all labels unreadable.
  """
  folder, config = run
  release = load_release(folder / "run")
  images = np.random.default_rng(1).integers(0, 255, (64, 4, 4, 1), np.uint8)
  predicted = release.predict(images).argmax(axis=1)

  def write(name, people):
    ids = [person for person, (count, _) in people.items() for _ in range(count)]
    labels = predicted[: len(ids)].copy()
    start = 0
    for count, right in people.values():
      own = labels[start : start + count]
      own[:] = 7 if right is None else np.where(np.arange(count) < right, own, 1 - own)
      start += count
    data = write_npz(
      folder / name, images[: len(ids)], labels, splits=("test",), person=np.array(ids)
    )
    private = dataclasses.replace(config.data, path=str(data), declared="private")
    return dataclasses.replace(config, data=private)

  def total(name, people, delta=1e-6):
    values, num_units = held_out_shares(release, write(name, people), delta)
    return centred_sum(values), num_units

  return write, total


def _people(**changes):
  return {**{person: (count, count // 2) for person, count in RECORDS.items()}, **changes}


def test_neighbours_of_the_held_out_data_move_the_sum_as_accounted(held_out):
  """Blanked at most C, exchanged at most 2C, whatever the records are; and no smaller C would do.

  Against counts of records, "c" moves by 5; against units that are made up for records without an
  id, "" moves by 4.
  """
  _, total = held_out
  worst, best, blank = (lambda count, share=share: (count, share and share(count)) for share in (
    lambda count: 0, lambda count: count, None
  ))  # fmt: skip
  blanked, exchanged = [], []
  for person in ("a", "c"):
    sums = {
      how: total(f"{person}{index}", _people(**{person: change}))
      for index, (how, change) in enumerate({
        "worst": worst(RECORDS[person]), "best": best(RECORDS[person]), "more": best(20),
        "blank": blank(RECORDS[person]),
      }.items())
    }  # fmt: skip
    assert {num_units for _, num_units in sums.values()} == {5}
    (zero, _), *others = sums.pop("blank"), *(each for each, _ in sums.values())
    blanked += [abs(other - zero) for other in others]
    exchanged += [abs(one - other) for one in others for other in others]
  assert 0.99 * CLIP_NORM < max(blanked) <= CLIP_NORM
  assert 1.98 * CLIP_NORM < max(exchanged) <= 2 * CLIP_NORM
  changed = [total(f"none{i}", _people(**{"": each}))[0] for i, each in enumerate([(4, 4), (4, 0)])]
  assert changed[0] == changed[1]  # a record without a unit is not used


@pytest.mark.parametrize(("adjacency", "moved"), [("zero_out", 0.5), ("replace_one", 1.0)])
def test_no_more_noise_is_paid_for_than_the_sum_needs(run, held_out, tmp_path, adjacency, moved):
  """Against the curve of the Gaussian mechanism, by what neighbours move the sum.

  Balle and Wang 2018, arXiv:1805.06530, theorem 8.
  """
  write, _ = held_out
  config = write("whole", _people())
  privacy = dataclasses.replace(config.privacy, adjacency=adjacency)
  config = dataclasses.replace(config, privacy=privacy)
  found = release_accuracy(run[0] / "run", config, 3.0, 1e-4, tmp_path / "ledger")
  mu, epsilon = moved / (found["stddev"] * found["num_units"]), found["epsilon"]
  delta = stats.norm.cdf(mu / 2 - epsilon / mu)
  delta -= math.exp(epsilon) * stats.norm.cdf(-mu / 2 - epsilon / mu)
  assert 0.98e-4 < delta <= 1e-4


@pytest.mark.parametrize(("changes", "delta", "said"), [
  ({"unit": "persn"}, 1e-6, "have no such column: an accuracy that is released needs to know"),
  ({"unit": "record"}, 1e-6, "but the model protects each 'person': name the column"),
  ({}, 0.2, r"delta 0.2 is not below one over the number of units of 'test', 5"),
  ({}, 0.5, r"delta 0.5 is not below one over the number of units"),
])  # fmt: skip
def test_a_guarantee_that_the_data_do_not_bear_out_is_refused(
  run, held_out, tmp_path, changes, delta, said
):
  """Before anything is released or paid for; and no other column is named."""
  config = held_out[0]("whole", _people())
  config = dataclasses.replace(config, privacy=dataclasses.replace(config.privacy, **changes))
  with pytest.raises(ValueError, match=said) as refused:
    release_accuracy(run[0] / "run", config, 1.0, delta, tmp_path / "ledger")
  assert "columns:" not in str(refused.value) and not (tmp_path / "ledger").exists()


def test_ids_that_say_nothing_are_refused_without_a_word_of_them(run, held_out, tmp_path):
  config = held_out[0]("nobody", {"": (6, 3)})
  with pytest.raises(ValueError, match="does not say whose the records are") as refused:
    release_accuracy(run[0] / "run", config, 1.0, 1e-6, tmp_path / "ledger")
  assert refused.value.__cause__ is None and refused.value.__suppress_context__


@pytest.mark.parametrize(("about", "said"), [
  ({"protected": False}, "trained without differential privacy, and its accuracy tells of its"),
  ({"protected": True, "test_key": True}, "trained with the noise of a test key"),
  ({"protected": True, "guarantee": {
    "epsilon": 1.0, "delta": 1e-5, "unit": "family", "adjacency": "zero_out"
  }}, r"has a guarantee for each family \(zero-out\): the two .* do not add up for one person"),
  # A person of many records is not protected by a guarantee for each of them.
  ({"protected": True, "guarantee": {
    "epsilon": 1.0, "delta": 1e-5, "unit": "record", "adjacency": "zero_out"
  }}, "has a guarantee for each record .* do not add up for one person"),
  ({"protected": True, "guarantee": {
    "epsilon": 1.0, "delta": 1e-5, "unit": "person", "adjacency": "replace_one"
  }}, r"for each person \(replace-one\): the two are of different kinds and do not add up"),
  ({"protected": True, "guarantee": {
    "epsilon": 1.0, "delta": 1e-5, "unit": "person", "adjacency": "zero_out"
  }}, "one person that is in the training data too is covered by the sum of both"),
])  # fmt: skip
def test_what_the_model_itself_promises_is_said(run, held_out, tmp_path, about, said):
  spec, arrays = weights.load(run[0] / "run/release/params.safetensors")
  model = tmp_path / "run" / "unprotected"
  model.mkdir(parents=True)
  content = weights.to_bytes(arrays, spec, **about, ancestry=())
  (model / "params.safetensors").write_bytes(content)
  config = held_out[0]("whole", _people())
  found = release_accuracy(tmp_path / "run", config, 1.0, 1e-6, tmp_path / "ledger")
  assert re.search(said, found["statement"])


def test_a_cut_that_lets_others_in_is_refused(run, held_out, tmp_path):
  """P19: without "a", whose record is the first, another person's would be among the first 5."""
  config = held_out[0]("whole", _people())
  config = dataclasses.replace(config, data=dataclasses.replace(config.data, num_records=5))
  for enabled in (True, False):  # of the model that would be trained: this is a release anyway
    privacy = dataclasses.replace(config.privacy, enabled=enabled)
    config = dataclasses.replace(config, privacy=privacy)
    with pytest.raises(ValueError, match="num_records=5 has no place under"):
      release_accuracy(run[0] / "run", config, 1.0, 1e-6, tmp_path / "ledger")
  assert not (tmp_path / "ledger").exists()


def test_the_weights_behind_the_model_are_said(run, held_out, tmp_path):
  """The accuracy tells of their data too."""
  spec, arrays = weights.load(run[0] / "run/release/params.safetensors")
  of_release = {"epsilon": 3.0, "delta": 1e-5, "unit": "person", "adjacency": "zero_out"}
  behind = (
    Ancestor("first.safetensors", "ab" * 32, True, "private", **of_release),
    Ancestor("open.safetensors", "cd" * 32, False, "private"),
  )
  model = tmp_path / "run" / "unprotected"
  model.mkdir(parents=True)
  (model / "params.safetensors").write_bytes(
    weights.to_bytes(arrays, spec, declared="public", ancestry=behind)
  )
  config = held_out[0]("whole", _people())
  said = release_accuracy(tmp_path / "run", config, 1.0, 1e-6, tmp_path / "ledger")["statement"]
  assert "'first.safetensors'" in said and "(3.0, 1e-05) for each person" in said
  assert "the guarantees add up" in said
  assert "('open.safetensors') hold records declared private that nothing protects" in said


def test_a_split_that_other_records_cut_is_refused(run, tmp_path):
  """P19: without one person's records, those of others would be in it."""
  folder, config = run
  writer = ShardWriter(
    tmp_path / "npy", num_classes=2, value_range=(0.0, 255.0),
    origin={"cut": {"test": "data.num_records=6"}},
  )  # fmt: skip
  images = np.zeros((6, 4, 4, 1), np.uint8)
  writer.append("test", images, np.arange(6) % 2, {"person": np.arange(6)})
  writer.close()
  values = config.to_dict()
  values["data"] |= {"source": "npy", "path": str(tmp_path / "npy")}
  config = Config.from_dict(values)
  for enabled in (True, False):  # what is released here is private all the same
    privacy = dataclasses.replace(config.privacy, enabled=enabled)
    other = dataclasses.replace(config, privacy=privacy)
    with pytest.raises(ValueError, match=r"the manifest's data\.num_records=6 has no place under"):
      release_accuracy(folder / "run", other, 1.0, 1e-6, tmp_path / "ledger")
  assert not (tmp_path / "ledger").exists()


def test_a_record_of_which_no_label_is_known_is_neither_right_nor_wrong():
  """It would count as wrong, and a person of such records as one who is always misjudged."""
  label = np.array([[1, 0], [-1, -1], [-1, 1], [-1, -1]])
  table = PredictionTable.of_labels(
    record=np.arange(4), unit=np.array([0, 0, 1, 2]), label=label, predicted=np.ones((4, 2), int),
    label_probability=np.full((4, 2), 0.5), score=np.zeros((4, 2)),
  )  # fmt: skip
  assert shares(table).tolist() == [0.5, 1.0]
