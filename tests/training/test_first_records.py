"""Data of which nothing can be used end a run before it spends anything; how, tells nothing."""

import json
import logging

import numpy as np
import pytest
from PIL import Image
from support import flags_of, one_label, small_config, write_npz

from dp_jax.cli import main
from dp_jax.data.sources.source import ArraySource, RecordError, SourceInfo, Unlabelled
from dp_jax.data.units import UnitLoader
from dp_jax.privacy.spec import PrivacySpec
from dp_jax.training.run import train
from dp_jax.training.setup import first_records
from dp_jax.training.setup.first_records import (
  COUNT,
  FACT,
  REMINDER,
  check_all_records,
  check_first_records,
)
from dp_jax.training.setup.prepare import prepare

TABLE = {
  "source": "csv", "features": ["dose", "age"], "feature_ranges": [[0.0, 1.0], [0.0, 100.0]],
  "label_columns": ["ill"], "class_names": ["0", "1"], "split_column": "part",
}  # fmt: skip


def _table(folder, row=lambda i: f"0.5,{i},{i % 2}"):
  """80 rows a split; `row` gives dose, age and ill."""
  lines = ["dose,age,ill,person,part"]
  lines += [f"{row(i)},p{i},{part}" for part in ("train", "test") for i in range(80)]
  (folder / "table.csv").write_text("\n".join(lines))
  return {**TABLE, "path": str(folder / "table.csv")}


def _images(folder, root="", labels=("0", "1")):
  """A table of image paths, of which the files are there only if `root` is "scans"."""
  (folder / "scans").mkdir()
  for i in range(6):
    Image.new("RGB", (8, 8), (40 * i, 0, 0)).save(folder / "scans" / f"{i}.png")
  lines = ["path,ill,part"]
  lines += [f"{i}.png,{labels[i % 2]},{part}" for part in ("train", "test") for i in range(6)]
  (folder / "table.csv").write_text("\n".join(lines))
  return {
    "source": "csv", "path": str(folder / "table.csv"), "image_column": "path",
    "image_root": str(folder / root), "input_shape": [8, 8, 3], "label_columns": ["ill"],
    "class_names": ["0", "1"], "split_column": "part",
  }  # fmt: skip


def _arrays(folder, images=None, labels=None):
  images = np.ones((80, 4), np.float32) if images is None else images
  data = write_npz(folder / "npz", images, np.arange(80) % 3 if labels is None else labels)
  return {"source": "npz", "path": str(data), "num_classes": 3}


def _several(folder):
  data = _table(folder, lambda i: "0.5,,")
  return {**data, "features": ["dose"], "feature_ranges": [[0.0, 1.0]],
          "label_columns": ["ill", "age"], "class_names": None}  # fmt: skip


def _trailing_commas(folder):
  for split in ("train", "test"):
    rows = [f"0.5,{i},{i % 2}," for i in range(80)]
    (folder / f"{split}.csv").write_text("\n".join(["dose,age,ill", *rows]))
  return {**TABLE, "path": str(folder), "split_column": None}


def _listed(folder):
  """A list of units, none of whom is in the data."""
  (folder / "units.txt").write_text("\n".join(f"{i}" for i in range(80)))
  return {**_table(folder), "units": str(folder / "units.txt")}


UNUSABLE = {
  "wrong root of images": lambda folder: _images(folder, "elsewhere"),
  "a class that is not listed": lambda folder: _images(folder, "scans", ("yes", "no")),
  "one cell too many": _trailing_commas,
  "decimal commas": lambda folder: _table(folder, lambda i: f'"0,5",{i},{i % 2}'),
  "a column of text": lambda folder: _table(folder, lambda i: f"low,{i},{i % 2}"),
  "labels to be ignored": lambda folder: _table(folder, lambda i: f"0.5,{i},-1"),
  "no label": lambda folder: _table(folder, lambda i: f"0.5,{i},"),
  "no label of several": _several,
  "labels from 5": lambda folder: _arrays(folder, labels=5 + np.arange(80) % 3),
  "labels of -1": lambda folder: _arrays(folder, labels=np.full(80, -1)),
  "not finite": lambda folder: _arrays(folder, images=np.full((80, 4), np.nan, np.float32)),
  "units that are not listed": _listed,
  "features without a value": lambda folder: _table(folder, lambda i: f",NA,{i % 2}"),
  "other ranges than declared": lambda folder: _table(folder, lambda i: f"5{i},120,{i % 2}"),
}


def _config(data, **changes):
  unit = "person" if "units" in data else "record"
  data = {"declared": "private", **data}
  return small_config(data=data, model={"name": "linear"}, privacy__unit=unit, **changes)


@pytest.mark.parametrize("kind", UNUSABLE)
def test_private_data_of_no_use_are_refused_in_fixed_words(tmp_path, kind):
  with pytest.raises(ValueError) as raised:
    prepare(_config(UNUSABLE[kind](tmp_path)))
  text = str(raised.value)
  assert text.startswith("none of the first 64 records of data.train_split='train' can be used")
  # Nothing in it depends on the kind, so nothing on the records.
  with pytest.raises(ValueError) as other:
    prepare(_config(_arrays(tmp_path / "other", labels=np.full(80, 7))))
  assert text == str(other.value)


@pytest.mark.parametrize("row", [",50,1", "1,,1", "9,100,1", "0,101,1"])
def test_one_feature_within_its_range_will_do(tmp_path, row):
  prepare(_config(_table(tmp_path, lambda i: row if i == 60 else ",101,0")))


def test_the_command_line_spends_nothing_and_says_one_line(tmp_path, capsys):
  data = UNUSABLE["wrong root of images"](tmp_path)
  ledger, run = tmp_path / "ledger.jsonl", tmp_path / "run"
  where = [f"--workdir={run}", f"--ledger={ledger}", "--ledger_epsilon=8", "--ledger_delta=1e-2"]
  assert main(["train", *flags_of(_config(data)), *where]) == 2
  told = capsys.readouterr().err
  assert told.startswith("error: none of the first 64 records") and told.count("\n") == 1
  assert ".png" not in told
  assert not ledger.exists() and not run.exists()


@pytest.mark.parametrize(
  ("kind", "named"),
  [
    ("decimal commas", "record 0 of table.csv/train: column 'dose' holds what is no finite number"),
    ("one cell too many", "record 0 of train.csv/train: the row has 4 cells, not 3"),
    ("not finite", "hold numbers that are not finite"),
    ("labels to be ignored", "Every label is to be ignored"),
    ("other ranges than declared", "record 0 .*: no feature has a value within its declared range"),
    ("wrong root of images", "record 0 of table.csv/train: cannot be read: No such file"),
  ],
)
def test_of_public_data_the_column_and_the_kind_are_named(tmp_path, kind, named):
  with pytest.raises(ValueError, match=named):
    prepare(_config({**UNUSABLE[kind](tmp_path), "declared": "public"}))


def test_a_held_out_split_of_no_use_is_refused_too(tmp_path):
  data = _table(tmp_path)
  text = (tmp_path / "table.csv").read_text()
  (tmp_path / "table.csv").write_text(text.replace("0.5", "low").replace("low", "0.5", 80))
  with pytest.raises(ValueError, match=r"first 64 records of data.eval_split='test' can be used"):
    prepare(_config(data))


class _Records(ArraySource):
  """Records of which some cannot be used, by index."""

  def __init__(self, count, bad, error=RecordError):
    info = SourceInfo("made up", count, (1,), 2, (0.0, 1.0), input_dtype="float32")
    super().__init__(info, np.zeros((count, 1), np.float32), np.zeros(count, int))
    self._bad, self._error = bad, error
    self.asked = 0

  def gather(self, indices):
    self.asked += len(indices)
    return [self._error("secret") if i in self._bad else self[i] for i in indices]


def _look(source, **units):
  loader = UnitLoader(source, one_label((1,), 2, (0.0, 1.0)), **units)
  check_first_records(loader, "the split", private=True)


def test_the_first_records_are_so_many_and_no_more():
  _look(_Records(1000, range(COUNT - 1)))
  source = _Records(1000, range(COUNT))
  with pytest.raises(ValueError, match="none of the first 64 records of the split"):
    _look(source)
  assert source.asked == COUNT


def test_those_without_a_label_or_a_unit_do_not_count_among_them():
  _look(_Records(1000, range(999), Unlabelled))
  ids = [""] * 500 + [f"p{i}" for i in range(500)]
  _look(_Records(1000, range(500)), unit_ids=ids)
  with pytest.raises(ValueError, match="none of the first"):
    _look(_Records(1000, range(1000), Unlabelled))
  # A unit's first record is used, and the others are cut off.
  with pytest.raises(ValueError, match="none of the first"):
    _look(_Records(1000, (0, 500)), unit_ids=["a"] * 500 + ["b"] * 500)


def test_an_error_of_the_disk_does_not_name_the_file_of_a_private_record():
  class Away(_Records):
    def gather(self, indices):
      raise OSError(5, "Input/output error", "/scans/person17.png")

  with pytest.raises(OSError, match="a record cannot be read: Input/output error") as raised:
    _look(Away(3, ()))
  assert "person17" not in str(raised.value)


def test_a_private_run_reminds_of_the_list_of_bad_records(tmp_path, caplog):
  """In words that are fixed: that they do not depend on the records is P15."""
  caplog.set_level(logging.INFO, "dp_jax")
  config = _config(_arrays(tmp_path), train__steps=1)
  for _ in range(2):  # the second time it is complete
    caplog.clear()
    train(config, tmp_path / "run", progress=False)
    assert [each for each in caplog.messages if "bad_records" in each] == [REMINDER]
  assert not (tmp_path / "run" / "private" / "bad_records.json").exists()
  record = json.loads((tmp_path / "run" / "release" / "privacy.json").read_text())
  assert record["treated_as_public"]["first_records"] == FACT


def _folder(root):
  for split in ("train", "test"):
    for i in range(12):
      file = root / split / "ab"[i % 2] / f"{i:02d}.png"
      file.parent.mkdir(parents=True, exist_ok=True)
      Image.new("RGB", (8, 8), (20 * i, 0, 0)).save(file)
  return {"source": "folder", "path": str(root), "input_shape": [8, 8, 3], "declared": "public"}


def test_a_bad_image_of_public_data_is_named_before_the_shared_budget_is_touched(tmp_path, capsys):
  config = _config(_folder(tmp_path / "images"), train__steps=1)
  first, second = tmp_path / "images" / "train" / "a" / "04.png", tmp_path / "images/test/b/11.png"
  whole = {file: file.read_bytes() for file in (first, second)}
  for file, content in whole.items():
    file.write_bytes(content[:-30])  # its header can still be read
  ledger, budget = tmp_path / "ledger.jsonl", PrivacySpec(4.2, 1e-3, "record", "zero_out")

  def run():
    return train(config, tmp_path / "run", ledger_file=ledger, ledger_budget=budget)

  with pytest.raises(ValueError, match=rf"record 2 of folder/train: cannot be .*\({first}\)"):
    run()
  assert not ledger.exists()
  first.write_bytes(whole[first])
  with pytest.raises(ValueError, match=rf"record 11 of folder/test: cannot be .*\({second}\)"):
    run()
  assert not ledger.exists()
  second.write_bytes(whole[second])
  assert run().steps == 1  # the same command goes on, with the whole budget
  assert "reading all records: step 2/2, " in capsys.readouterr().err
  assert ledger.exists()


def test_that_every_record_is_read_can_be_left_out_and_is_not_repeated(tmp_path, monkeypatch):
  config = _config(_folder(tmp_path))
  bad = tmp_path / "test" / "b" / "11.png"
  content = bad.read_bytes()
  bad.write_bytes(b"0" * len(content))
  run = prepare(config)
  loaders, where = [run.loader, run.eval_loader], str(tmp_path)
  for shown in (True, False):  # the first time, the training split is read
    with pytest.raises(
      ValueError, match=r"record 11 of folder/test( is malformed|: cannot be decoded)"
    ) as raised:
      check_all_records(loaders, where, shown=shown, progress=False)
    assert (str(bad) in str(raised.value)) == shown
  bad.write_bytes(content)
  read, calls = first_records.read_records, []
  monkeypatch.setattr(first_records, "read_records", lambda *a: calls.append(a) or read(*a))
  for _ in range(2):
    check_all_records(loaders, where, shown=True, progress=False)
  assert len(calls) == 1
  check_all_records(loaders, where + "/other", shown=True, progress=False)
  assert len(calls) == 3
  assert small_config(data__check="first").data.check == "first"
