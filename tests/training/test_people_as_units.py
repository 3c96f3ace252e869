"""People as units, from a configuration to the statement."""

import json

import numpy as np
import pytest
from support import key_file, small_config, without_hashes, write_npz

from dp_jax.runs.using import evaluate_release, predict_release
from dp_jax.statement.verify import verify_release
from dp_jax.training.checkpoints.workdir import compare
from dp_jax.training.release import load_release
from dp_jax.training.run import train
from dp_jax.training.setup.open_data import read_groups
from dp_jax.training.setup.prepare import prepare

RECORDS = 90


@pytest.fixture(scope="module")
def data(tmp_path_factory):
  """40 people: p0 with 30 records, p1 with 22, the others with one each."""
  rng = np.random.default_rng(0)
  people = np.array(["p0"] * 30 + ["p1"] * 22 + [f"p{i}" for i in range(2, 40)])
  return write_npz(
    tmp_path_factory.mktemp("data"), rng.integers(0, 255, (RECORDS, 4, 4, 1), np.uint8),
    rng.integers(0, 3, RECORDS), person=rng.permutation(people), age=np.arange(RECORDS),
    image_taken=np.zeros((RECORDS, 2)),
  )  # fmt: skip


def config_of(data, **changes):
  values = {"source": "npz", "path": str(data), "num_classes": 3, "declared": "public"}
  for name in [name for name in changes if name.startswith("data__")]:
    values[name.removeprefix("data__")] = changes.pop(name)
  return small_config(
    data=values, model={"name": "linear"}, train__steps=2, privacy__sampling_rate=0.5,
    **{"privacy__unit": "person", **changes},
  )  # fmt: skip


@pytest.mark.parametrize("declared", ["private", "public"])
def test_the_statement_names_column_limit_and_what_is_left_out(data, tmp_path, declared):
  """`privacy.unit` is all that is set; how many records are cut is not public on private data."""
  config = config_of(data, data__declared=declared)
  text = train(config, tmp_path / "run", progress=False).statement
  beyond = (30 - 8) + (22 - 8)
  release = tmp_path / "run" / "release"
  record = json.loads((release / "privacy.json").read_text())
  assert "for each person" in text and "blanking out any one person" in text
  assert "the mean over its first 8 records" in text
  assert (f"{beyond} records beyond" in text) == (declared == "public")
  assert record["unit"] == "person" and record["max_records_per_unit"] == 8
  public = record["treated_as_public"]
  assert public["num_units"] == 40
  assert public["units"] == "which values of person occur in the data"
  assert public.get("records_left_out") == (beyond if declared == "public" else None)
  kept = json.loads((tmp_path / "run" / "private" / "units.json").read_text())
  assert kept["records_beyond_max_records_per_unit"] == beyond
  card = (release / "model_card.md").read_text()
  assert "| unit | person |" in card and "| records of a unit, at most | 8 |" in card
  found = verify_release(release)
  assert not found.problems and "the mean over its first 8 records" in str(found)


def test_evaluation_and_prediction_are_of_every_record(data, tmp_path):
  config = config_of(data)
  train(config, tmp_path / "run", progress=False)
  entry = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
  assert entry["metrics"]["num_records"] == RECORDS
  predict_release(tmp_path / "run", config, tmp_path / "out.csv")
  lines = (tmp_path / "out.csv").read_text().splitlines()
  assert len(lines) == 1 + RECORDS and lines[-1].startswith(f"{RECORDS - 1},")
  assert evaluate_release(tmp_path / "run", config)["accuracy"] is not None
  images = np.load(data / "test.npz")["image"]
  probabilities = load_release(tmp_path / "run").predict(images)
  assert probabilities.shape == (RECORDS, 3)


def test_a_run_with_another_unit_or_limit_is_refused_by_name(data, tmp_path):
  train(config_of(data), tmp_path / "run", progress=False)
  for changes, message in (
    ({"privacy__unit": "age"}, "privacy.unit was 'person', is 'age'"),
    ({"privacy__unit": "record"}, "privacy.unit was 'person', is 'record'"),
    ({"data__max_records_per_unit": 4}, "data.max_records_per_unit was None, is 4"),
  ):
    with pytest.raises(ValueError, match=message):
      train(config_of(data, **changes), tmp_path / "run", progress=False)


def test_the_fingerprint_holds_the_ids_and_the_list(data, tmp_path):
  units, other = tmp_path / "units.txt", tmp_path / "other"
  units.write_text("\n".join(f"p{i}" for i in range(41)))
  before = prepare(config_of(data, data__units=str(units)))
  assert before.loader.num_units == 41  # p40 has no record, and is there all the same
  units.write_text("\n".join(f"p{i}" for i in range(40)))
  after = prepare(config_of(data, data__units=str(units)))
  differences = " ".join(compare(before.fingerprint(), after.fingerprint()))
  assert "units_digest was" in differences and "num_units was 41, is 40" in differences
  arrays = dict(np.load(data / "train.npz"))
  people = np.roll(arrays.pop("person"), 1)
  write_npz(other, arrays.pop("image"), arrays.pop("label"), person=people)
  moved = prepare(config_of(other, data__units=str(units)))
  assert "the records differ" in compare(after.fingerprint(), moved.fingerprint())


def test_what_does_not_fit_is_refused(data, tmp_path):
  (tmp_path / "empty").write_text("\n")
  (tmp_path / "words").write_text("one\ntwo")
  for changes, message in (
    ({"privacy__unit": "patient"}, "train.npz/train has no column 'patient'; its columns: age, pe"),
    ({"privacy__unit": "image_taken"}, "no column 'image_taken'"),
    ({"privacy__unit": ""}, "privacy.unit='' must name a column"),
    ({"data__max_records_per_unit": 0}, "data.max_records_per_unit=0 must be at least 1"),
    ({"privacy__unit": "record", "data__max_records_per_unit": 2}, "must be 1 where each record"),
    ({"privacy__unit": "record", "data__units": "x"}, "data.units='x' lists units, but"),
    ({"data__units": "/no/such"}, "data.units='/no/such' cannot be read"),
    ({"data__units": str(tmp_path / "empty")}, "lists no unit"),
    ({"data__units": str(tmp_path / "words"), "privacy__unit": "age"}, "lists what is no number"),
    ({"data__groups": ["weight"]}, "no column 'weight'"),
    ({"data__groups": ["age"], "data__group_bins": [[30], [60]]}, "one entry for each of data.gr"),
  ):
    with pytest.raises(ValueError, match=message):
      prepare(config_of(data, **changes))


def test_groups_are_bands_of_every_record(data):
  config = config_of(data, data__groups=["age", "person"], data__group_bins=[[30.0, 60.0], []])
  run = prepare(config)
  groups = read_groups(config.data, run.eval_loader.source)
  assert groups["age"].tolist() == ["below 30"] * 30 + ["30 to 60"] * 30 + ["60 and above"] * 30
  assert (groups["person"] == "p0").sum() == 30


def test_how_many_records_people_have_shows_nowhere(tmp_path, capfd):
  """P15: two private data sets of the same 30 people, with other and more records, some of nobody.

  With one key, all that is shown but the noised parameters, their hash and times is the same.
  """
  shown = []
  for name, beyond, of_nobody in (("a", 0, 0), ("b", 25, 6)):
    rng = np.random.default_rng(beyond)
    people = [f"p{i}" for i in range(30)] + ["p7"] * beyond + [""] * of_nobody
    count = len(people)
    data = write_npz(
      tmp_path / name / "data", rng.integers(0, 255, (count, 4, 4, 1), np.uint8),
      rng.integers(0, 3, count), person=np.array(people),
    )  # fmt: skip
    config = config_of(data, data__declared="private")
    run = tmp_path / name / "run"
    train(config, run, test_key_file=key_file(tmp_path), progress=False)
    notes = run / "private" / "bad_records.json"
    assert (len(json.loads(notes.read_text())["train"]) if notes.exists() else 0) == of_nobody
    files = ("release/privacy.json", "release/model_card.md", "report.html", "config.json")
    texts = {file: (run / file).read_text().replace(str(data), "DATA") for file in files}
    shown.append({f: without_hashes(text, run / "release") for f, text in texts.items()})
    assert capfd.readouterr() == ("", "")
  assert shown[0] == shown[1]


def test_ids_that_look_alike_are_told_of_public_data_and_kept_of_private(tmp_path, capfd):
  """A person under two spellings is two units; what cannot be two is one, and counted."""
  people = ["ann", "Ann", "7", "07", "bob", "bob ", "cat", "NA", "unknown"]
  rng = np.random.default_rng(0)
  images, labels = rng.integers(0, 255, (9, 4, 4, 1), np.uint8), rng.integers(0, 3, 9)
  data = write_npz(tmp_path / "data", images, labels, person=np.array(people))
  config = config_of(data, data__declared="private", privacy__delta=1e-4)
  run = prepare(config)
  assert run.loader.num_units == 6 and run.warnings == ()
  train(config, tmp_path / "run", progress=False)
  assert capfd.readouterr() == ("", "")
  kept = json.loads((tmp_path / "run/private/unit_ids_that_look_alike.json").read_text())
  assert kept == [["07", "7"], ["Ann", "ann"]]
  record = json.loads((tmp_path / "run/release/privacy.json").read_text())
  assert "'7' and '07' are two units" in record["treated_as_public"]["unit_ids"]
  with pytest.raises(ValueError, match=r"record 7 of train.npz/train: has no unit id"):
    prepare(config_of(data, privacy__delta=1e-4))
  write_npz(tmp_path / "data", images[:7], labels[:7], person=np.array(people[:7]))
  _, respelled, alike = prepare(config_of(data, privacy__delta=1e-4)).warnings
  assert respelled.startswith("1 values of person are not written as they are compared")
  assert alike.startswith("4 values of person look like others") and "'07' and '7'" in alike


def test_people_in_both_splits_are_named_on_public_data_alone(data, tmp_path):
  """The file of this test has the same people in both."""
  (warning,) = prepare(config_of(data, privacy__delta=1e-4)).warnings
  assert "40 values of person are in both splits" in warning
  assert prepare(config_of(data, privacy__delta=1e-4, data__declared="private")).warnings == ()
  arrays = dict(np.load(data / "train.npz"))
  image, label, people = (arrays[name] for name in ("image", "label", "person"))
  write_npz(tmp_path, image, label, splits=("train",), person=people)
  write_npz(tmp_path, image, label, splits=("test",), person=np.char.add("q", people))
  assert prepare(config_of(tmp_path, privacy__delta=1e-4)).warnings == ()
