"""P19: a unit with more than K records is cut by a rule that depends on that unit alone.

And a record that belongs to two units is refused, and one of no unit used by none. Here one unit is
changed in every way that it can be: it loses records, or all of them, gains some, or has them
elsewhere. All others must keep their index and their records, or a step would differ by more than
one unit. The broken variants cut by what others hold, or number units by where their records happen
to stand.

Under add_or_remove_one a record that goes moves those behind it up, so that a cut of any kind lets
another one in; and what is taken as public off the records, such as their classes, may go with it.
"""

import dataclasses
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from support import one_label, small_config, write_npz

from dp_jax.data import ArraySource, SourceInfo, UnitLoader, open_source
from dp_jax.data.sources.source import Head
from dp_jax.privacy import MasterKey, Mechanism, Stream
from dp_jax.training.run import train
from dp_jax.training.setup.open_data import training_units
from dp_jax.training.setup.prepare import Run, prepare

NAMES = ["ann", "bob", "cat", "dan", "eve"]
K = 3
SPEC = one_label((1, 1, 1), 1000, (0.0, 1.0))
# One record a line: (unit, label); a label is unique, so that it says which record it is.
Records = list[tuple[str, int]]
Members = list[list[int]]
Cut = Callable[[Records], Members]


def members(loader: UnitLoader) -> Members:
  """The labels of the records that each unit kept."""
  units, _ = loader.load(np.arange(loader.num_units), loader.num_units)
  masks = units["record_mask"]
  return [labels[mask].tolist() for labels, mask in zip(units["label"], masks, strict=True)]


def load(records: Records, units: Sequence[str] | None = NAMES) -> Members:
  labels = np.array([label for _, label in records], np.int64)
  images = np.zeros((len(records), 1, 1, 1), np.float32)
  info = SourceInfo("made up", len(records), (1, 1, 1), None, (0.0, 1.0), input_dtype="float32")
  ids = [unit for unit, _ in records]
  loader = UnitLoader(
    ArraySource(info, images, labels), SPEC, max_records_per_unit=K, unit_ids=ids, units=units
  )
  return members(loader)


def draw(random: np.random.Generator) -> Records:
  """Each unit with none to eight records, all in one random order."""
  owners = np.repeat(NAMES, random.integers(0, 9, len(NAMES)))
  labels = random.permutation(999)[: len(owners)]
  return [
    (str(unit), int(label)) for unit, label in zip(random.permutation(owners), labels, strict=True)
  ]


def changes(random: np.random.Generator, records: Records, unit: str) -> list[Records]:
  """The same records of all others, in their order, with another content of one unit."""
  others = [record for record in records if record[0] != unit]
  own = [record for record in records if record[0] == unit]
  more = [*own, (unit, 999)]
  reordered = [own[i] for i in random.permutation(len(own))]

  def mixed(content: Records) -> Records:
    result = list(others)
    positions = np.sort(random.integers(0, len(others) + 1, len(content)))
    for position, record in zip(positions, content, strict=True):
      result.insert(int(position), record)
    return result

  return [others, mixed(own[1:]), mixed(own[:-1]), mixed(more), mixed(reordered), [*others, *own],
          [*own, *others]]  # fmt: skip


def moves_others(cut: Cut) -> int:
  """In how many of many changes of one unit another unit changed."""
  random = np.random.default_rng(5)
  moved = 0
  for _ in range(60):
    records = draw(random)
    unit = str(random.choice(NAMES))
    own = NAMES.index(unit)
    before = cut(records)
    for changed in changes(random, records, unit):
      after = cut(changed)
      moved += [*before[:own], *before[own + 1 :]] != [*after[:own], *after[own + 1 :]]
  return moved


def test_no_change_of_one_unit_moves_another():
  assert moves_others(load) == 0


def test_a_unit_is_cut_to_k_and_keeps_what_it_is_cut_to():
  records = draw(np.random.default_rng(1))
  for name, kept in zip(NAMES, load(records), strict=True):
    own = [label for unit, label in records if unit == name]
    assert kept == own[:K]
  assert any(len([1 for unit, _ in records if unit == name]) > K for name in NAMES)


def by_global_order(records: Records) -> Members:
  """Broken: all records are shuffled together, and each unit keeps its first K of that."""
  shuffled = [records[i] for i in np.random.default_rng(0).permutation(len(records))]
  return load(shuffled)


def by_what_is_left(records: Records) -> Members:
  """Broken: a limit on all records together, dealt out in the order in which they stand."""
  return load(records[: 2 * len(NAMES)])


def by_first_occurrence(records: Records) -> Members:
  """Broken: units are numbered in the order in which their ids first occur."""
  first = list(dict.fromkeys(unit for unit, _ in records))
  return load(records, first + [name for name in NAMES if name not in first])


@pytest.mark.parametrize("broken", [by_global_order, by_what_is_left, by_first_occurrence])
def test_a_rule_that_looks_at_others_is_caught(broken):
  assert moves_others(broken) > 20


def test_numbering_by_first_occurrence_moves_whole_batches_of_a_stream():
  """Why indices matter: data read in order draw them without randomness."""
  records = [(name, i) for i, name in enumerate(NAMES)]
  later = [*records[1:], records[0]]  # the first unit's record now stands last
  sampler = Mechanism(Stream(1, 5), 4.0, 5).sampler(MasterKey(bytes(32)), 5)

  def differ(cut: Cut) -> int:
    before, after = cut(records), cut(later)
    steps = [sampler.indices(step) for step in range(5)]
    return sum([before[i] for i in step] != [after[i] for i in step] for step in steps)

  assert differ(load) == 0
  assert differ(by_first_occurrence) == 5


def test_a_unit_that_is_gone_leaves_the_others_in_their_order():
  """Without a list of units, one less is one less: add_or_remove_one."""
  random = np.random.default_rng(2)
  for _ in range(30):
    records = draw(random)
    there = sorted({unit for unit, _ in records})
    gone = str(random.choice(there))
    before = load(records, None)
    after = load([record for record in records if record[0] != gone], None)
    del before[there.index(gone)]
    assert after == before


@pytest.mark.parametrize("two", [("ann", "bob"), ["ann", "bob"], {"ann", "bob"}, np.array([1, 2])])
def test_a_record_of_two_units_is_refused(two):
  with pytest.raises(ValueError, match="record 1 has a unit id that is no one number"):
    UnitLoader(blank_source(2), SPEC, unit_ids=["ann", two])


@pytest.mark.parametrize(
  ("ids", "units"), [(["ann", None, "bob"], None), (["ann", "", "bob"], None),
                     ([4, np.nan, 7], None), (["ann", "eve", "bob"], ["bob", "ann"])],
)  # fmt: skip
def test_a_record_of_no_unit_is_used_by_none(ids, units):
  """Neither one unit that all of them share, nor one each, which would split a person."""
  loader = UnitLoader(blank_source(3), SPEC, unit_ids=ids, units=units)
  assert loader.num_units == 2 and sorted(loader.members.ravel()) == [0, 2]
  assert loader.unit_of_records[1] == -1 and list(loader.bad_records) == [1]
  with pytest.raises(ValueError, match=r"record 1 of made up: .* no unit"):
    UnitLoader(blank_source(3), SPEC, unit_ids=ids, units=units, strict=True)


def test_no_change_of_one_unit_moves_another_in_a_run_from_a_config(tmp_path):
  """The same from `privacy.unit` and a public list, through files and `prepare`."""
  (tmp_path / "units.txt").write_text("\n".join(NAMES))

  def cut(records: Records) -> Members:
    return members(run_of(tmp_path, records, units=str(tmp_path / "units.txt")).loader)

  random = np.random.default_rng(11)
  records = [*draw(random), *((name, 900 + i) for i, name in enumerate(NAMES))]
  before = cut(records)
  for unit in ("ann", "cat"):
    own = NAMES.index(unit)
    for changed in changes(random, records, unit):
      after = cut(changed)
      assert [*before[:own], *before[own + 1 :]] == [*after[:own], *after[own + 1 :]]


def test_a_cut_of_all_records_together_is_refused(tmp_path):
  """data.num_records would be `by_what_is_left`."""
  with pytest.raises(ValueError, match=r"data\.num_records=5 has no place where units are grouped"):
    run_of(tmp_path, [(name, i) for i, name in enumerate(NAMES)], num_records=5)


def of_records(count: int, cut: str = "") -> ArraySource:
  """Records of their own units; the label says which."""
  info = SourceInfo("made up", count, (1, 1, 1), None, (0.0, 1.0), input_dtype="float32", cut=cut)
  return ArraySource(info, np.zeros((count, 1, 1, 1), np.float32), np.arange(count))


def without(source: ArraySource, gone: int) -> ArraySource:
  rows = source.gather(np.delete(np.arange(len(source)), gone))
  info = dataclasses.replace(source.info, num_records=len(source) - 1)
  return ArraySource(info, rows["inputs"], rows["label"])


@pytest.mark.parametrize(("cut", "gone"), [(slice(4), 2), (slice(-4, None), 7), (slice(2, 6), 1)])
def test_a_cut_lets_another_record_in(cut, gone):
  """The broken variant: one record less changes two units, so the sum moves by up to 2 C."""

  def kept(source: Any) -> np.ndarray:
    return source.gather(np.arange(len(source)))["label"]

  whole, less = kept(of_records(10)), kept(without(of_records(10), gone))
  assert len({*whole} ^ {*less}) == 1
  assert len({*whole[cut]} ^ {*less[cut]}) == 2
  head = Head(of_records(10), 4)
  np.testing.assert_array_equal(kept(head), whole[:4])
  assert head.info.cut == "data.num_records=4"


UNBOUNDED = {"adjacency": "add_or_remove_one", "sampling_rate": 0.3, "expected_batch_size": 3.0,
             "epsilon": 4.0, "delta": 1e-3}  # fmt: skip


def test_a_cut_is_refused_under_add_or_remove_one_before_anything_is_written(tmp_path):
  images = np.zeros((12, 1, 1, 1), np.float32)
  write_npz(tmp_path / "data", images, np.arange(12))
  data = {"source": "npz", "path": str(tmp_path / "data"), "num_classes": 12, "num_records": 10}
  config = small_config(data=data, model={"name": "linear"}, privacy=UNBOUNDED)
  with pytest.raises(
    ValueError, match=r"data\.num_records=10 has no place under .*add_or"
  ) as error:
    train(config, tmp_path / "run", progress=False)
  said = str(error.value)
  assert "make the cut in the data themselves" in said and "'zero_out'" in said
  assert not (tmp_path / "run").exists()
  whole = {name: value for name, value in data.items() if name != "num_records"}
  assert prepare(small_config(data=whole, model={"name": "linear"}, privacy=UNBOUNDED))
  blank = {"epsilon": 4.0, "delta": 1e-3, "sampling_rate": 0.3}
  for privacy in (blank, {**blank, "adjacency": "replace_one"}):
    assert prepare(small_config(data=data, model={"name": "linear"}, privacy=privacy))


@pytest.mark.parametrize("cut", ["the split 'train[:50%]'", "the manifest's data.num_records=4"])
@pytest.mark.parametrize("privacy", [{"adjacency": "add_or_remove_one"}, {"unit": "person"}])
def test_whoever_made_the_cut_it_is_refused(cut, privacy):
  config = small_config(data={"source": "npz", "num_classes": 10}, privacy={**UNBOUNDED, **privacy})
  with pytest.raises(ValueError, match="lets another one in") as error:
    training_units(config, of_records(4, cut), SPEC)
  assert str(error.value).startswith(cut)
  if "unit" not in privacy:
    assert training_units(config, of_records(4), SPEC)


def test_drawn_digits_are_as_many_as_asked_for_and_no_cut():
  assert open_source("rendered_digits", "train", num_records=10).info.cut == ""


def test_a_cut_goes_with_the_features_that_are_made_of_it(tmp_path):
  np.save(tmp_path / "train_inputs_00000.npy", np.zeros((4, 2), np.float32))
  np.save(tmp_path / "train_labels_00000.npy", np.zeros(4, np.int64))
  manifest = {"splits": {"train": [4]}, "origin": {"cut": {"train": "data.num_records=4"}}}
  (tmp_path / "manifest.json").write_text(json.dumps(manifest))
  source = open_source("npy", "train", path=str(tmp_path))
  assert source.info.cut == "the manifest's data.num_records=4"


def test_classes_that_records_have_are_refused_under_add_or_remove_one(tmp_path):
  """A class of one image would go with it, and the model would have one output less."""
  for split in ("train", "test"):
    for name in ("a", "b"):
      (tmp_path / split / name).mkdir(parents=True)
      image = Image.fromarray(np.zeros((6, 6), np.uint8))
      image.save(tmp_path / split / name / "1.png")
  data = {"source": "folder", "path": str(tmp_path), "input_shape": (6, 6, 1)}
  model = {"name": "linear"}
  with pytest.raises(ValueError, match=r"class_names=None .*those that records have; declare"):
    prepare(small_config(data=data, model=model, privacy=UNBOUNDED))
  declared = {**data, "class_names": ("a", "b")}
  assert prepare(small_config(data=declared, model=model, privacy=UNBOUNDED)).task.task.num_classes
  assert prepare(small_config(data=data, model=model))


def run_of(folder: Path, records: Records, **data: Any) -> Run:
  """What `prepare` makes of these records in a file, with persons as units."""
  images = np.zeros((len(records), 1, 1, 1), np.float32)
  labels = np.array([label for _, label in records])
  write_npz(folder, images, labels, person=np.array([unit for unit, _ in records]))
  config = small_config(
    data={"source": "npz", "path": str(folder), "num_classes": 1000, "max_records_per_unit": K,
          **data},
    model={"name": "linear"}, privacy__unit="person",
  )  # fmt: skip
  return prepare(config)


def blank_source(count: int) -> ArraySource:
  info = SourceInfo("made up", count, (1, 1, 1), None, (0.0, 1.0), input_dtype="float32")
  return ArraySource(info, np.zeros((count, 1, 1, 1), np.float32), np.zeros(count, np.int64))
