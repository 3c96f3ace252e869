"""P1 for people: whoever owns 30 records moves the un-noised sum by at most the clip norm.

A run is prepared from files and a configuration that names the column of people. The person is
removed (their records are not in the file), blanked (a list of units still names them), or has
other records. The broken variant takes each record for a unit: then that person moves the sum by
many times the clip norm.
"""

import jax
import numpy as np
import pytest
from support import small_config, write_npz

from dp_jax.training.setup.prepare import prepare
from dp_jax.training.step import build_step

CLIP_NORM = 0.5
OTHERS = [f"p{i}" for i in range(20)]
PEOPLE = ["owner", *OTHERS]
OWNED = 30


def _files(folder, owned):
  """One record for each of the others, and `owned` similar ones of one person among them."""
  rng = np.random.default_rng(0)
  images = np.concatenate([rng.random((20, 4, 4, 1)), 0.9 + 0.1 * rng.random((30, 4, 4, 1))])
  labels = np.concatenate([rng.integers(0, 3, 20), np.full(30, 2)])
  people = np.array(OTHERS + ["owner"] * OWNED)
  order = rng.permutation(50)
  order = order[order < 20 + owned]
  return write_npz(folder, images[order].astype(np.float32), labels[order], person=people[order])


def _sum(folder, unit, owned, *, blank=(), units=None, limit=OWNED):
  """The un-noised clipped sum over all units but `blank`, as one vector in float64."""
  config = small_config(
    data={"source": "npz", "path": str(_files(folder, owned)), "num_classes": 3,
          "max_records_per_unit": None if unit == "record" else limit, "units": units},
    model={"name": "linear"}, privacy__unit=unit, privacy__clip_norm=CLIP_NORM,
  )  # fmt: skip
  run = prepare(config)
  step = build_step(
    run.task.loss, run.optimizer, clip_norm=CLIP_NORM, stddev=1.0, expected_batch_size=1.0,
    ema=0.0, engine="vmap",
  )  # fmt: skip
  units, mask = run.loader.load(np.arange(run.loader.num_units), 64)
  mask[list(blank)] = False
  total, _ = step.accumulate(
    run.params, run.frozen, step.zeros(run.params), units, mask, np.arange(64, dtype="u4"),
    jax.random.key(0),
  )  # fmt: skip
  leaves = zip(jax.tree.leaves(total.sum), jax.tree.leaves(total.error), strict=True)
  return np.concatenate([(np.float64(a) + np.float64(b)).ravel() for a, b in leaves])


def _moved(before, after):
  return np.linalg.norm(before - after)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
  return _sum(tmp_path_factory.mktemp("whole"), "person", OWNED)


@pytest.mark.parametrize("owned", [0, 1, 7])
def test_a_person_with_30_records_moves_the_sum_by_at_most_the_clip_norm(whole, tmp_path, owned):
  """Removed, or left with fewer; the sum does move, by nearly all that it may."""
  moved = _moved(whole, _sum(tmp_path, "person", owned))
  assert moved <= CLIP_NORM
  assert owned or moved > 0.9 * CLIP_NORM


def test_a_blank_person_who_is_on_the_list_counts_as_one_who_is_not_there(whole, tmp_path):
  (tmp_path / "units.txt").write_text("\n".join(sorted(PEOPLE)))
  listed = str(tmp_path / "units.txt")
  np.testing.assert_array_equal(_sum(tmp_path, "person", OWNED, units=listed), whole)
  gone = _sum(tmp_path, "person", 0, units=listed)
  assert _moved(whole, gone) <= CLIP_NORM
  np.testing.assert_allclose(
    gone, _sum(tmp_path, "person", OWNED, blank=[0], units=listed), atol=1e-6
  )


def test_records_beyond_the_limit_do_not_move_the_sum(tmp_path):
  cut = _sum(tmp_path, "person", OWNED, limit=4)
  assert _moved(cut, _sum(tmp_path, "person", 0, limit=4)) <= CLIP_NORM


def test_clipping_each_record_by_itself_is_caught(tmp_path):
  """Broken: the unit is the record."""
  moved = _moved(_sum(tmp_path, "record", OWNED), _sum(tmp_path, "record", 0))
  assert moved > 20 * CLIP_NORM
