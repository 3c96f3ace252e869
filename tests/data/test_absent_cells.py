"""Cells that stand for no value, and declarations that beat that rule."""

import dataclasses

import numpy as np
import pytest
from support import one_label

from dp_jax.data import UnitLoader, check_records, open_source
from dp_jax.data.group_columns import bands
from dp_jax.data.sources.absent import ABSENT
from dp_jax.data.sources.csv_source import Csv
from dp_jax.data.sources.options import Context

SPEC = Csv(
  label_columns=("grade",),
  class_names=("None", "Mild", "NA"),
  features=("bp",),
  feature_ranges=((0.0, 10.0),),
)
NAMES = ["None", "Mild", "NA", "nan", "N/A", "null", "<NA>", ".", "-", "#N/A"]


def _open(folder, rows, spec=SPEC, header="grade,bp,ward", name="train", path=None, **keys):
  (folder / "train.csv").write_text("\n".join([header, *rows]) + "\n")
  return open_source("csv", name, spec, path=str(path or folder), **keys)


@pytest.mark.parametrize("name", NAMES)
def test_a_declared_class_is_one_whatever_it_is_called(tmp_path, name):
  spec = dataclasses.replace(SPEC, class_names=("well", name))
  source = _open(tmp_path, ["well,1,a", f"{name},1,a", f" {name} ,1,a", ",1,a"], spec)
  loader = UnitLoader(source, one_label((1,), 2, (-1.0, 1.0)), strict=True)
  units, _ = loader.load(np.arange(4), 4)
  assert units["record_mask"][:, 0].tolist() == [True, True, True, False]
  assert units["label"][:3, 0].tolist() == [0, 1, 1]


def test_all_records_of_a_class_called_none_are_used(tmp_path):
  rows = [f"{SPEC.class_names[i % 3]},{i % 10},a" for i in range(300)]
  loader = UnitLoader(_open(tmp_path, rows), one_label((1,), 3, (-1.0, 1.0)), strict=True)
  units, _ = loader.load(np.arange(300), 300)
  assert units["record_mask"].all()
  assert np.bincount(units["label"][:, 0]).tolist() == [100, 100, 100]


@pytest.mark.parametrize("cell", ["n/a", "#N/A", "<NA>", ".", "NA", "nan", "NULL", "-", "?", ""])
def test_a_feature_without_a_value_takes_the_default(tmp_path, cell):
  spec = dataclasses.replace(SPEC, feature_defaults=(2.0,), missing_indicators=True)
  source = _open(tmp_path, [f"Mild,{cell},a", "Mild,5,a"], spec)
  check_records(source, one_label((2,), 3, (-1.0, 1.0)))
  np.testing.assert_allclose(source.gather(np.arange(2))["inputs"], [[-0.6, 1], [0, 0]], atol=1e-6)


@pytest.mark.parametrize("cell", ["none of these", "5,0", "x", "inf", "unknown"])
def test_a_feature_that_is_no_number_is_malformed(tmp_path, cell):
  source = _open(tmp_path, [f'Mild,"{cell}",a', "Mild,5,a"])
  with pytest.raises(ValueError, match=r"record 0 of .*: column 'bp' holds what is no finite"):
    check_records(source, one_label((1,), 3, (-1.0, 1.0)))


def test_groups_and_splits_are_as_they_are_written(tmp_path):
  wards = ["None", "NA", "null", "nan", ""]
  source = _open(tmp_path, [f"Mild,1,{ward}" for ward in wards])
  assert source.column("ward").tolist() == wards
  assert bands(source.column("ward"), ()).tolist() == [*wards[:4], "missing"]
  spec = dataclasses.replace(SPEC, split_column="ward")
  rows = [f"Mild,{i},{ward}" for i, ward in enumerate(wards)]
  for i, ward in enumerate(wards[:4]):
    split = _open(tmp_path, rows, spec, name=ward, path=tmp_path / "train.csv")
    assert split.column("bp").tolist() == [str(i)]


def test_what_is_declared_missing_is_so_everywhere_and_nothing_else_is(tmp_path):
  rows = ["Mild,-9,refused", "Mild,-9.0,NA", "refused,3,b", "Mild,NA,b"]
  source = _open(tmp_path, rows, missing_values=("-9", "refused"))
  loader = UnitLoader(source, one_label((1,), 3, (-1.0, 1.0)))
  units, _ = loader.load(np.arange(4), 4)
  assert units["record_mask"][:, 0].tolist() == [True, True, False, False]
  assert units["inputs"][:2].ravel().tolist() == [0, 0]  # the middle of the range
  assert list(loader.bad_records) == [3]  # NA is not declared
  assert source.column("ward").tolist() == ["", "NA", "b", "b"]
  with pytest.raises(
    ValueError, match=r"data\.missing_values=\('NA',\) has 'NA', which data\.class"
  ):
    _open(tmp_path, rows, missing_values=("NA",))


def test_several_labels_are_blank_by_the_same_table(tmp_path):
  spec = Csv(
    label_columns=("a", "b"), class_names=(), features=("bp",), feature_ranges=((0.0, 10.0),)
  )
  cells = [cell for cell in ABSENT if "," not in cell]
  source = _open(tmp_path, [f"1,{cell},1" for cell in cells], spec, header="a,b,bp")
  assert (source.gather(np.arange(len(cells)))["label"] == [1, -1]).all()


@pytest.mark.parametrize(("changes", "said"), [
  ({"class_names": ("0", "9.0"), "missing_values": ("9",)}, "has '9.0', which data.class_names"),
  ({"class_names": ("well", "None "), "missing_values": ("None",)}, "has 'None '"),
  ({"class_names": ("1", "1.0")}, "names a class twice"),
  ({"class_names": ("a", " a")}, "names a class twice"),
])  # fmt: skip
def test_declarations_that_contradict_each_other_are_refused(changes, said):
  """Else all records of a class would vanish, or be of another one."""

  def check(class_names, missing_values=None):
    spec = dataclasses.replace(SPEC, class_names=class_names)
    spec.check(Context(missing_values=missing_values))

  with pytest.raises(ValueError, match=said):
    check(**changes)
  check(("nan", "inf"), ("1", "-inf"))
