"""Rendered digits: deterministic, in range, and from fonts that draw digits."""

import dataclasses
import pathlib

import matplotlib
import numpy as np
import pytest
from scipy import ndimage

from dp_jax.data import open_source
from dp_jax.data.sources import rendered_digits, strokes


def _images(num_records: int, split: str = "train", seed: int = 0) -> np.ndarray:
  source = open_source("rendered_digits", split, seed=seed, num_records=num_records)
  return source.gather(np.arange(num_records))["inputs"]


def test_record_depends_on_seed_split_and_index_alone():
  long = _images(1500)  # more than one chunk
  for num_records in (1, 99, 700):
    np.testing.assert_array_equal(_images(num_records), long[:num_records])
  for other in (_images(700, seed=1), _images(700, split="test")):
    differing = (other != long[:700]).any((1, 2, 3))
    assert differing.mean() > 0.99


def test_ranges_and_classes():
  source = open_source("rendered_digits", "train", num_records=500)
  batch = source.gather(np.arange(500))
  assert source.info.input_shape == batch["inputs"].shape[1:] == (8, 8, 1)
  assert batch["inputs"].dtype == np.uint8
  assert batch["inputs"].min() == 0 and batch["inputs"].max() == 16
  np.testing.assert_array_equal(np.bincount(batch["label"]), np.full(10, 50))
  # Each digit fills the height (or the width) and is centred.
  rows, columns = batch["inputs"][..., 0].any(2), batch["inputs"][..., 0].any(1)
  full = (rows[:, 0] & rows[:, -1]) | (columns[:, 0] & columns[:, -1])
  assert full.all()
  assert (columns[:, ::-1] == columns).mean() > 0.8
  # The ten classes look different: their mean images are far apart in 0..16 pixels.
  means = np.stack([batch["inputs"][batch["label"] == d].mean(0).ravel() for d in range(10)])
  distances = np.linalg.norm(means[:, None] - means[None], axis=-1)
  assert distances[~np.eye(10, dtype=bool)].min() > 5.0


def test_a_nearest_centre_rule_transfers_to_the_scans():
  """Chance is 10%; a rendering that mirrored or mixed up classes would fall to it."""
  rendered, scans = _images(2000).reshape(2000, -1), open_source("digits", "train")
  centres = np.stack([rendered[np.arange(2000) % 10 == digit].mean(0) for digit in range(10)])
  batch = scans.gather(np.arange(len(scans)))
  pixels = batch["inputs"].reshape(len(scans), -1)
  nearest = ((pixels[:, None] - centres[None]) ** 2).sum(-1).argmin(1)
  assert (nearest == batch["label"]).mean() > 0.5


def test_fonts_without_digits_are_left_out():
  chosen = {file.stem for file in strokes.digit_fonts()}
  folder = pathlib.Path(matplotlib.get_data_path()) / "fonts" / "ttf"
  everything = {file.stem for file in folder.glob("*.ttf")}
  assert {"DejaVuSans", "cmr10", "STIXGeneral"} <= chosen
  # No digits at all; other signs at their code points; one picture for all of Latin.
  boxes = {"STIXSizOneSymReg", "STIXNonUni", "DejaVuSansDisplay", "cmex10", "cmsy10"}
  boxes |= {stem for stem in everything if stem.startswith("LastResort")}
  assert len(boxes & everything) >= 5 and not boxes & chosen


def test_strokes_of_a_font_are_ten_different_thin_lines():
  lines = strokes.digit_strokes()
  assert lines.shape[1] == 10 and lines.shape[3] == 2
  assert abs(lines[..., 1]).max() == 1.0  # full height
  for font in lines:
    assert len({digit.tobytes() for digit in font}) == 10


def test_thin_keeps_lines_and_connection():
  bitmap = np.zeros((1, 20, 30), bool)
  bitmap[0, 4:9, 3:27] = True  # a bar five pixels thick
  bitmap[0, 4:18, 12:17] = True  # and a leg
  thinned = strokes.thin(bitmap)[0]
  assert not (thinned & ~bitmap[0]).any()
  blocks = thinned[:-1, :-1] & thinned[1:, :-1] & thinned[:-1, 1:] & thinned[1:, 1:]
  assert not blocks.any()
  assert ndimage.label(thinned, np.ones((3, 3)))[1] == 1
  assert thinned[:, 3:27].any(0).sum() > 18 and thinned[4:18].any(1).sum() > 8


def test_draw_rows_matches_discs_drawn_pixel_by_pixel():
  rng = np.random.default_rng(0)
  x, y = rng.uniform(-1, 33, (2, 6, 5))
  radius = rng.uniform(0.6, 4.0, 6)
  centres = np.arange(32) + 0.5
  squared = (centres[None, None, None, :] - x[..., None, None]) ** 2
  squared = squared + (centres[None, None, :, None] - y[..., None, None]) ** 2
  expected = (squared <= radius[:, None, None, None] ** 2).any(1)
  rows = rendered_digits.draw_rows(x, y, radius)
  drawn = (rows[:, :, None] >> np.arange(32, dtype=np.uint32)) & 1
  np.testing.assert_array_equal(drawn.astype(bool), expected)
  counts = expected.reshape(6, 8, 4, 8, 4).sum((2, 4))
  np.testing.assert_array_equal(rendered_digits.count_blocks(rows), counts)


def test_count_is_checked():
  with pytest.raises(ValueError, match="num_records must be at least 1"):
    rendered_digits.open_rendered_digits("train", num_records=0)


def test_habits_change_only_their_own_digits():
  def drawn(**changes):
    style = rendered_digits.Style(no_foot=0.0, flag=0.0, crossbar=0.0)
    style = dataclasses.replace(style, **changes)
    source = rendered_digits.open_rendered_digits("train", num_records=200, style=style)
    return source.gather(np.arange(200))["inputs"]

  plain = drawn()
  for changes, digit in (({"no_foot": 1.0}, 1), ({"flag": 1.0}, 1), ({"crossbar": 1.0}, 7)):
    changed = (drawn(**changes) != plain).any((1, 2, 3)).reshape(20, 10).mean(0)
    assert changed[digit] > 0.8 and changed.sum() == changed[digit]
