"""The closed form of a zero head's clipped gradient: its sum, and its sensitivity."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import classifier

from dp_jax.gradients.clipping import clipped_grad
from dp_jax.models.functional import split
from dp_jax.solvers import class_sums
from dp_jax.solvers.closed_form import ClosedFormSum, zero_head
from dp_jax.tasks.opening import build_task

FEATURES = 20


def _task(link="softmax", classes=5, bias=True, smoothing=0.0, features=FEATURES, value_range=None):
  spec = classifier("linear", {"use_bias": bias}, (features,), classes, value_range or (-1.0, 1.0))
  model, arrays = split(spec.build(0))
  zeros = {name: jnp.zeros_like(value) for name, value in arrays.items()}
  return build_task(model, spec, label_smoothing=smoothing, link=link), zeros


def _units(classes, records=1, count=96, seed=0):
  rng = np.random.default_rng(seed)
  sizes = rng.uniform(0.05, 2, (count, 1, 1))  # some are clipped, some are not
  return {
    "inputs": (sizes * rng.standard_normal((count, records, FEATURES))).astype(np.float32),
    "label": rng.integers(0, classes, (count, records), np.int32),
    "record_mask": rng.random((count, records)) < 0.8,
  }, rng.random(count) < 0.9


def _head(task, arrays, clip_norm=1.0, clipping="flat"):
  return zero_head(task, arrays, {}, clip_norm, clipping)


def _exact(pair):
  """A pair as one float64 vector."""
  values = [np.add(pair.sum[k], pair.error[k], dtype=np.float64).ravel() for k in pair.sum]
  return np.concatenate(values)


def _add(total, units, mask=None):
  return total.add(units["inputs"], units["label"], mask, units["record_mask"])


@pytest.mark.parametrize("link", ["softmax", "sigmoid"])
@pytest.mark.parametrize(("classes", "records", "bias", "smoothing", "clipping"), [
  (5, 1, True, 0.0, "flat"), (5, 1, False, 0.0, "flat"), (2, 1, True, 0.0, "flat"),
  (5, 3, True, 0.0, "flat"), (2, 3, True, 0.0, "flat"), (2, 3, False, 0.2, "flat"),
  (3, 4, True, 0.1, "automatic"), (7, 1, True, 0.1, "automatic"),
])  # fmt: skip
def test_it_is_the_general_paths_sum(link, classes, records, bias, smoothing, clipping):
  task, arrays = _task(link, classes, bias, smoothing)
  units, mask = _units(classes, records)
  general = clipped_grad(
    functools.partial(task.loss, {}), 1.0, engine="vmap", clipping=clipping, compensated=True
  )
  expected, aux = jax.jit(general)(arrays, units, mask)
  total = ClosedFormSum(_head(task, arrays, clipping=clipping), "zero_out")
  ours = _add(total, units, mask)
  want, got = _exact(expected), _exact(total.total())
  assert np.linalg.norm(got - want) <= 3e-7 * np.linalg.norm(want)
  np.testing.assert_allclose(ours.norms, aux.norms, rtol=1e-6)
  np.testing.assert_allclose(ours.losses, aux.losses, rtol=1e-6)
  assert total.head.sensitivity("replace_one") == general.sensitivity("replace_one") == 2.0


@pytest.mark.parametrize("records", [1, 3])
def test_a_record_with_a_label_that_is_no_class_is_blank(records):
  task, arrays = _task()
  units, _ = _units(5, records)
  units["label"][:6, 0] = [-1, 5, 99, -(2**31), 2**31 - 1, -5]
  blank = {**units, "label": units["label"].copy(), "record_mask": units["record_mask"].copy()}
  blank["label"][:6, 0], blank["record_mask"][:6, 0] = 0, False
  totals = []
  for each in (units, blank):
    total = ClosedFormSum(_head(task, arrays), "zero_out")
    _add(total, each)
    totals.append(_exact(total.total()))
  np.testing.assert_array_equal(*totals)


def test_raw_values_are_mapped_as_the_task_maps_them():
  task, arrays = _task(value_range=(0.0, 255.0))
  units, _ = _units(5)
  units["inputs"] = np.random.default_rng(0).integers(0, 256, units["inputs"].shape, np.uint8)
  expected, _ = clipped_grad(
    functools.partial(task.loss, {}), 1.0, engine="vmap", compensated=True
  )(arrays, units)
  total = ClosedFormSum(_head(task, arrays), "zero_out")
  _add(total, units)
  want = _exact(expected)
  assert np.linalg.norm(_exact(total.total()) - want) <= 3e-7 * np.linalg.norm(want)


@pytest.mark.parametrize("adjacency", ["zero_out", "add_or_remove_one"])
def test_shards_and_threads_change_nothing(adjacency, monkeypatch):
  """97 units in shards of 10, and in pieces of 20: the last ones are short."""
  monkeypatch.setattr(class_sums, "_ROWS", 20)
  monkeypatch.setattr(class_sums, "_EXACT_ROWS", 20)
  task, arrays = _task()
  units, _ = _units(5, count=97)
  head = _head(task, arrays)
  totals = []
  for size, threads in ((97, 1), (97, 3), (10, 1), (10, 2)):
    total = ClosedFormSum(head, adjacency, threads)
    for start in range(0, 97, size):
      _add(total, {name: value[start : start + size] for name, value in units.items()})
    totals.append(_exact(total.total()))
  np.testing.assert_array_equal(totals[0], totals[1])
  np.testing.assert_array_equal(totals[2], totals[3])
  near = {"rtol": 1e-12, "atol": 1e-13} if adjacency == "add_or_remove_one" else {"atol": 1e-6}
  np.testing.assert_allclose(totals[2], totals[0], **near)


def test_an_error_in_one_piece_ends_the_call(monkeypatch):
  monkeypatch.setattr(class_sums, "_ROWS", 10)
  task, arrays = _task()
  units, _ = _units(5)
  total = ClosedFormSum(_head(task, arrays), "zero_out", 3)
  monkeypatch.setattr(class_sums.ClassSums, "_piece_sums", lambda *_: 1 / 0)
  with pytest.raises(ZeroDivisionError):
    _add(total, units)


@pytest.mark.parametrize("change", ["kernel", "bias", "model", "frozen"])
def test_only_a_head_of_zeros_qualifies(change):
  task, arrays = _task()
  frozen = {}
  if change in ("kernel", "bias"):
    arrays[f"head.{change}"] = arrays[f"head.{change}"].at[0].set(1e-30)
  if change == "model":
    spec = classifier(
      "convnet", {"widths": (4,), "strides": (1,), "groups": 2}, (5, 5, 1), 3, (0, 1)
    )
    model, fresh = split(spec.build(0))
    task, arrays = build_task(model, spec), jax.tree.map(jnp.zeros_like, fresh)
  if change == "frozen":
    frozen = {"head.kernel": arrays.pop("head.kernel")}
  assert zero_head(task, arrays, frozen, 1.0, "flat") is None


# P1. What one unit may hold: (records, FEATURES) and labels. C is 1.
_ROW = np.full(FEATURES, 0.3)
CONTENTS = {
  "ordinary": ([_ROW], [0]),
  "large": ([1e4 * _ROW], [1]),
  "huge": ([1e30 * _ROW], [1]),
  "near the top of float32": ([1.1e38 * _ROW], [1]),
  "tiny": ([1e-30 * _ROW], [0]),
  "NaN": ([np.where(np.arange(FEATURES) == 3, np.nan, _ROW)], [0]),
  "infinite": ([np.where(np.arange(FEATURES) == 3, -np.inf, _ROW)], [0]),
  "cancelling records of one class": ([1e6 * _ROW, -1e6 * _ROW * (1 + 1e-7)], [0, 0]),
  "records that cancel exactly": ([1e35 * _ROW, -1e35 * _ROW], [0, 0]),
  "huge cancelling records": ([1e35 * _ROW, -1e35 * _ROW * (1 + 1e-7)], [0, 0]),
  "the same record in both classes": ([1e20 * _ROW, 1e20 * _ROW], [0, 1]),
  "nearly the same record in both classes": ([1e20 * _ROW, 1e20 * _ROW * (1 + 1e-7)], [0, 1]),
  "three records": ([5 * _ROW, -_ROW, 1e20 * _ROW], [0, 1, 0]),
}  # fmt: skip


def _with(units, index, content):
  rows, labels = content
  units = {name: value.copy() for name, value in units.items()}
  units["record_mask"][index] = np.arange(3) < len(rows)
  with np.errstate(over="ignore"):
    units["inputs"][index, : len(rows)] = np.asarray(rows)
  units["label"][index, : len(rows)] = labels
  return units


CHANGES = {"zero_out": ("zeroed", "blank"), "add_or_remove_one": ("zeroed", "blank", "removed")}


def _movements(kind, link, bias, records):
  """The largest movement of the sum by one unit, for each content, change and position."""
  task, arrays = _task(link, 2, bias)
  base, _ = _units(2, 3, count=70)
  if records == 1:
    base["record_mask"][:, 1:] = False
  movements = {}
  for name, content in CONTENTS.items():
    if len(content[0]) > records:
      continue
    for index in (0, 33, 69):
      units = {k: v[:, :records] for k, v in _with(base, index, content).items()}
      for adjacency, changes in CHANGES.items():
        totals = []
        for what in ("whole", *changes):
          total = kind(_head(task, arrays), adjacency)
          _add(total, *_changed(units, index, what))
          totals.append(_exact(total.total()))
        moved = max(np.linalg.norm(totals[0] - other) for other in totals[1:])
        assert np.isfinite(totals[0]).all(), name
        movements[name] = max(moved, movements.get(name, 0.0))
  return movements


def _changed(units, index, what):
  """(units, mask) without the unit of an index, in some way."""
  mask = np.ones(70, bool)
  units = {k: v.copy() for k, v in units.items()}
  if what == "zeroed":
    mask[index] = False
  elif what == "blank":
    units["record_mask"][index] = False
  elif what == "removed":
    units, mask = {k: np.delete(v, index, 0) for k, v in units.items()}, mask[1:]
  return units, mask


@pytest.mark.parametrize("link", ["softmax", "sigmoid"])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("records", [1, 3])
def test_one_unit_moves_the_sum_by_at_most_the_clip_norm(link, bias, records):
  movements = _movements(ClosedFormSum, link, bias, records)
  assert max(movements.values()) <= 1.0, movements
  assert movements["large"] > 0.998  # it is clipped to just below C, not to less


class _ForgetsBias(ClosedFormSum):
  def _row_norms(self, rows):
    return np.sqrt(class_sums.squared_norms(rows))


class _ScalesBeforeItAdds(ClosedFormSum):
  """Records of a unit that cancel are added one by one, as if each were its own unit's."""

  def _add_units(self, rows, labels, real):
    norms = ClosedFormSum(self.head, "zero_out", 1)._add_units(rows, labels, real)
    scales = self.head.scales(norms) / np.maximum(real.sum(axis=1), 1)
    for slot in range(labels.shape[1]):
      some = np.where(real[:, slot], scales, 0)
      self._rows.add(rows[:, slot], labels[:, slot], lambda x, piece, s=some: (x, s[piece]))
    return norms


class _AddsAllToClasses(ClosedFormSum):
  def _added_by_columns(self, absent):
    return np.zeros(len(absent), bool)


class _KeepsWhatIsNotFinite(ClosedFormSum):
  def _add_rows(self, rows, labels, real):
    norms = super()._add_rows(rows, labels, real)
    scales = self.head.scales(norms)
    self._rows.sums += np.eye(2)[labels].T @ (scales[:, None] * rows)
    return norms


def test_broken_variants_are_caught():
  assert max(_movements(_ForgetsBias, "softmax", True, 1).values()) > 1.0
  assert max(_movements(_ScalesBeforeItAdds, "softmax", False, 3).values()) > 1.0
  assert max(_movements(_AddsAllToClasses, "softmax", False, 3).values()) > 1.0
  with pytest.raises(AssertionError, match="NaN"):
    _movements(_KeepsWhatIsNotFinite, "softmax", False, 1)


class _PlainFloat32(ClosedFormSum):
  """Keeps its sums in float32."""

  def __init__(self, *arguments):
    super().__init__(*arguments)
    self._rows.sums = self._rows.sums.astype(np.float32)


class _RoundsUnderRemoval(ClosedFormSum):
  """Adds some rows in float32 first, also where later ones move to other places."""

  def __init__(self, head, adjacency):
    super().__init__(head, "zero_out")


def _aligned(labels):
  """Units in one direction, and places of some that are at the bound.

  Norms repeat after four, so that what rounds differently does so everywhere in the same way.
  """
  count, dim = 1_281_167, 2
  task, arrays = _task("sigmoid", 2, False, features=dim)
  sizes = np.random.default_rng(0).uniform(0.9, 1.4, 4).astype(np.float32)[np.arange(count) % 4]
  places = [0, count // 2, count - 1]
  sizes[places] = 3.0
  rows = np.stack([sizes, np.zeros_like(sizes)], axis=1)
  classes = np.zeros(count, np.int64) if labels == "sorted" else np.arange(count) % 2
  return _head(task, arrays), rows, classes, places


def _sum_of_shards(kind, adjacency, head, rows, classes, mask):
  total, shard = kind(head, adjacency), 2**16
  for start in range(0, len(rows), shard):
    part = slice(start, start + shard)
    total.add(rows[part], classes[part], mask[part])
  return _exact(total.total())


def _off(kind, adjacency):
  """How far the movement by a unit at the bound is from C (1 - 2^-10), at most."""
  off = []
  for labels in ("sorted", "mixed"):
    head, rows, classes, places = _aligned(labels)
    everything = np.ones(len(rows), bool)
    whole = _sum_of_shards(kind, adjacency, head, rows, classes, everything)
    for place in places:
      keep = np.arange(len(rows)) != place
      without = rows, classes, keep
      if adjacency == "add_or_remove_one":
        without = rows[keep], classes[keep], everything[keep]
      moved = np.linalg.norm(whole - _sum_of_shards(kind, adjacency, head, *without))
      off.append(abs(moved - (1 - 2**-10)))
  return max(off)


def test_one_of_1281167_aligned_units_moves_the_sum_by_at_most_the_clip_norm():
  """Blanked, or taken out, which moves every later unit to another shard and place."""
  assert _off(ClosedFormSum, "add_or_remove_one") < 1e-8
  assert _off(ClosedFormSum, "zero_out") < 1e-5


@pytest.mark.parametrize("kind", [_PlainFloat32, _RoundsUnderRemoval])
def test_broken_sums_of_many_units_are_caught(kind):
  assert _off(kind, "add_or_remove_one") > 2**-10


def test_many_rows_in_plain_float32_are_caught(monkeypatch):
  monkeypatch.setattr(class_sums, "PLAIN", 2**17)
  monkeypatch.setattr(class_sums, "_ROWS", 2**17)
  assert _off(ClosedFormSum, "zero_out") > 2**-10


@pytest.mark.parametrize("case", ["sorted", "mixed", "one class", "few classes", "many classes"])
def test_a_sum_is_of_one_class_and_few_rows_nearby(case):
  rng = np.random.default_rng(0)
  classes = {"one class": 1, "few classes": 3, "many classes": 5000}.get(case, 40)
  labels = rng.integers(0, classes, 16_384)
  labels = np.sort(labels) if case == "sorted" else labels
  kept = rng.random(16_384) < 0.9
  sum_of, class_of = class_sums.assign(labels, kept, classes)
  np.testing.assert_array_equal(class_of[sum_of], labels[kept])
  counts = np.bincount(sum_of)
  assert counts.min() >= 1 and counts.max() <= class_sums.PLAIN and len(counts) == len(class_of)
  # Where one row is left out, others of its class alone may go into other sums.
  for place in np.flatnonzero(kept)[::4000]:
    fewer = kept & (np.arange(16_384) != place)
    other, _ = class_sums.assign(labels, fewer, classes)
    before, after = (
      {tuple(np.flatnonzero(mask)[members == number]) for number in range(members.max() + 1)}
      for mask, members in ((kept, sum_of), (fewer, other))
    )
    assert sum(map(len, before - after)) <= class_sums.PLAIN + 1
