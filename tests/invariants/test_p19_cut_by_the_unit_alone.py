"""P19: a unit with more than K records is cut by a rule that depends on that unit alone.

And a record that belongs to two units is refused, and one of no unit used by none. Here one unit is
changed in every way that it can be: it loses records, or all of them, gains some, or has them
elsewhere. All others must keep their index and their records, or a step would differ by more than
one unit. The broken variants cut by what others hold, or number units by where their records happen
to stand.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import small_config, write_npz

from dp_jax.data import ArraySource, RecordSpec, SourceInfo, UnitLoader
from dp_jax.privacy import MasterKey, Mechanism, Stream
from dp_jax.training.prepare import Run, prepare

NAMES = ["ann", "bob", "cat", "dan", "eve"]
K = 3
SPEC = RecordSpec((1, 1, 1), 1000, (0.0, 1.0))
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
  with pytest.raises(ValueError, match="record 1 has the unit id"):
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
