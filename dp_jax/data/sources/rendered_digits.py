"""Public digits: drawn here with fonts, so that they look somewhat like scans of handwriting.

No record of anyone is in them. Each is the centre line of a printed digit, bent, sheared and
rotated, drawn with a pen of some width at full height into a 32x32 bitmap with its aspect kept,
centred, and counted in 4x4 blocks, which is how the scans of the UCI optical digits were reduced
to 8x8 values of 0..16.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from scipy import special

from dp_jax.data.sources.digits import CLASS_NAMES, IMAGE_SHAPE, VALUE_RANGE
from dp_jax.data.sources.options import Context, SourceOptions
from dp_jax.data.sources.source import ArraySource, SourceInfo
from dp_jax.errors import UserError

DEFAULT_NUM_RECORDS = 20_000

_BITMAP = 32
_BLOCK = 4
# How many digits are drawn at once: a compromise between call overhead and cache.
_CHUNK = 512
# Uniform draws that each record has to itself, by what they are for. Waves take the rest.
_FONT, _ASPECT, _SHEAR, _ROTATE, _PEN, _CURVE, _BOW, _HABIT = range(8)
_FOOT, _SIZE, _SLOPE, _PLACE = range(8, 12)
_WAVE = 12
_WAVES_PER_AXIS = 2
_NUM_DRAWS = _WAVE + 2 * _WAVES_PER_AXIS * 4
# Points of a stroke that is added to a digit.
_ADDED_POINTS = 24


@dataclass(frozen=True)
class Style:
  """How much the drawings vary. All but the pen act on a digit whose height spans -1..1.

  The defaults were chosen by the accuracy, on the scans, of a network that saw rendered digits
  only. They are therefore not independent of the scans, which the demonstration declares public;
  for private data, keep them as they are.

  Attributes:
    aspect: standard deviation of the logarithm of the stretch in width.
    shear: standard deviation of the horizontal shift per unit of height.
    rotation: standard deviation of the angle, in radians.
    curve: standard deviation of the vertical shift of the middle of a digit.
    loop: mean of that shift for 6 (downwards) and 9 (upwards), whose loops are written smaller
      than they are printed.
    bow: standard deviation of the horizontal shift of the middle.
    wave: standard deviation of the amplitude of each of the waves that bend a digit.
    wave_number: the largest angular frequency of a wave, in radians per unit of length.
    no_foot: how often a 1 is written without the bar that it stands on.
    flag: how often a 1 gets a longer upstroke than the printed one.
    crossbar: how often a 7 is crossed.
    pen_width: smallest and largest pen width, in pixels of the 32x32 bitmap.
    pen_width_of_one: the same for a 1, which is written smaller, hence magnified more.
  """

  aspect: float = 0.2
  shear: float = 0.3
  rotation: float = 0.2
  curve: float = 0.2
  loop: float = 0.25
  bow: float = 0.1
  wave: float = 0.17
  wave_number: float = 2.5
  no_foot: float = 0.6
  flag: float = 0.5
  crossbar: float = 0.5
  pen_width: tuple[float, float] = (3.0, 8.0)
  pen_width_of_one: tuple[float, float] = (4.0, 11.0)


DEFAULT_STYLE = Style()


@dataclass(frozen=True)
class RenderedDigitsOptions(SourceOptions):
  """Drawings have no keys of their own: data.seed and data.num_records say which to make."""

  MAKES_RECORDS = True
  READS_PATH = False

  def open(self, split: str, context: Context) -> ArraySource:
    """Renders "train" or "test", 20,000 drawings unless data.num_records says how many."""
    count = DEFAULT_NUM_RECORDS if context.num_records is None else context.num_records
    return open_rendered_digits(split, seed=context.seed, num_records=count)


def open_rendered_digits(
  split: str,
  *,
  seed: int = 0,
  num_records: int = DEFAULT_NUM_RECORDS,
  style: Style = DEFAULT_STYLE,
) -> ArraySource:
  """Renders digits.

  Record i is a function of (split, seed, style, i) alone: asking for more records appends to
  them. Labels go round 0..9.

  Args:
    split: "train" or "test", two disjoint streams of drawings.
    seed: picks the drawings.
    num_records: how many.
    style: how much they vary.

  Returns:
    A source of uint8[8, 8, 1] images with values 0..16 and labels 0..9.

  Raises:
    ValueError: if `split` is neither "train" nor "test", or num_records is below 1.
  """
  if split not in ("train", "test"):
    raise UserError(f"rendered_digits has the splits train and test, not {split!r}")
  if num_records < 1:
    raise UserError(f"num_records must be at least 1, not {num_records}")
  labels = np.arange(num_records, dtype=np.int64) % 10
  entropy = np.random.SeedSequence([seed, ("train", "test").index(split)])
  # One uniform double is one 64-bit output of the counter, so row i is the same for any length.
  draws = np.random.Generator(np.random.Philox(entropy)).random((num_records, _NUM_DRAWS))
  images = np.empty((num_records, *IMAGE_SHAPE), np.uint8)
  for start in range(0, num_records, _CHUNK):
    chunk = slice(start, start + _CHUNK)
    images[chunk, :, :, 0] = _render(labels[chunk], draws[chunk], style)
  info = SourceInfo(
    name=f"rendered_digits/{split}",
    num_records=num_records,
    input_shape=IMAGE_SHAPE,
    num_classes=10,
    value_range=VALUE_RANGE,
    class_names=CLASS_NAMES,
  )
  return ArraySource(info, images, labels)


def _render(labels: np.ndarray, draws: np.ndarray, style: Style) -> np.ndarray:
  """Draws digits: uint8[n, 8, 8] from labels [n] and uniforms float64[n, _NUM_DRAWS]."""
  from dp_jax.data.sources.strokes import digit_strokes  # it needs fonts, of large packages

  strokes = digit_strokes()
  fonts = (draws[:, _FONT] * len(strokes)).astype(np.int64)
  x, y = np.moveaxis(strokes[fonts, labels].astype(np.float64), -1, 0)
  x, y = _add_habits(x, y, labels, draws, style)
  x, y = _wave(x, y, draws, style)
  x, y = _bend(x, y, labels, draws, style)
  low, high = np.where(labels[:, None] == 1, style.pen_width_of_one, style.pen_width).T
  radius = (low + (high - low) * draws[:, _PEN]) / 2
  return count_blocks(draw_rows(*_fit(x, y, radius), radius))


def _between(low: float, high: float, draw: np.ndarray) -> np.ndarray:
  """Uniform on low..high, from one uniform draw for each record: [n, 1]."""
  return low + (high - low) * draw[:, None]


def _normal(draw: np.ndarray) -> np.ndarray:
  """Normal, from one uniform draw for each record: [n, 1].

  Limited to 2.5 standard deviations, so that no digit is bent into another.
  """
  return np.clip(special.ndtri(draw), -2.5, 2.5)[:, None]


def _add_habits(
  x: np.ndarray, y: np.ndarray, labels: np.ndarray, draws: np.ndarray, style: Style
) -> tuple[np.ndarray, np.ndarray]:
  """Writes 1 and 7 as a hand does: [n, num_points] to [n, num_points + _ADDED_POINTS]."""
  is_one, is_seven = labels[:, None] == 1, labels[:, None] == 7
  top_x, top_y = x[:, :1], y[:, :1]  # strokes list their points from the top
  footless = is_one & (draws[:, _FOOT, None] < style.no_foot) & (y > 0.9)
  x, y = np.where(footless, top_x, x), np.where(footless, top_y, y)
  size, slope, place = draws[:, _SIZE], draws[:, _SLOPE], draws[:, _PLACE]
  along = np.linspace(0.0, 1.0, _ADDED_POINTS)
  length, angle = _between(0.3, 1.0, size), _between(0.5, 1.2, slope)
  flag_x = top_x - along * length * np.cos(angle)
  flag_y = top_y + along * length * np.sin(angle)
  height = _between(-0.2, 0.3, place)
  stem = abs(y - height) < 0.06
  middle = (x * stem).sum(1, keepdims=True) / np.maximum(stem.sum(1, keepdims=True), 1)
  across = (2 * along - 1) * _between(0.25, 0.5, size)
  bar_x, bar_y = middle + across, height + _between(-0.3, 0.1, slope) * across
  flagged = is_one & (draws[:, _HABIT, None] < style.flag)
  crossed = is_seven & (draws[:, _HABIT, None] < style.crossbar)
  # A digit without an added stroke repeats its top point instead.
  added_x = np.where(flagged, flag_x, np.where(crossed, bar_x, top_x))
  added_y = np.where(flagged, flag_y, np.where(crossed, bar_y, top_y))
  return np.concatenate([x, added_x], 1), np.concatenate([y, added_y], 1)


def _wave(
  x: np.ndarray, y: np.ndarray, draws: np.ndarray, style: Style
) -> tuple[np.ndarray, np.ndarray]:
  """Shifts points [n, num_points] by plane waves of random direction, speed and phase."""
  waves = draws[:, _WAVE:].reshape(len(draws), 2, _WAVES_PER_AXIS, 4)
  moved = [x, y]
  for axis in range(2):
    for wave in range(_WAVES_PER_AXIS):
      size, angle, speed, phase = waves[:, axis, wave].T
      direction = _between(0.0, 2 * np.pi, angle)
      along = np.cos(direction) * x + np.sin(direction) * y
      argument = style.wave_number * speed[:, None] * along + _between(0.0, 2 * np.pi, phase)
      moved[axis] = moved[axis] + style.wave * _normal(size) * np.sin(argument)
  return moved[0], moved[1]


def _bend(
  x: np.ndarray, y: np.ndarray, labels: np.ndarray, draws: np.ndarray, style: Style
) -> tuple[np.ndarray, np.ndarray]:
  """Moves the middle of digits, then stretches, shears and rotates them: [n, num_points]."""
  loop = np.where(labels == 6, style.loop, np.where(labels == 9, -style.loop, 0.0))[:, None]
  middle = np.clip(1 - y * y, -0.5, 1.0)
  y = y + (style.curve * _normal(draws[:, _CURVE]) + loop) * middle
  x = x + style.bow * _normal(draws[:, _BOW]) * middle
  x = x * np.exp(style.aspect * _normal(draws[:, _ASPECT]))
  x = x - style.shear * _normal(draws[:, _SHEAR]) * y
  angle = style.rotation * _normal(draws[:, _ROTATE])
  return np.cos(angle) * x - np.sin(angle) * y, np.sin(angle) * x + np.cos(angle) * y


def _fit(x: np.ndarray, y: np.ndarray, radius: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """Scales strokes [n, num_points] so that the drawn digit fills the bitmap, and centres them.

  Both axes scale alike: to full height, or to full width for the few that are wider than high.
  """
  centred, extents = [], []
  for axis in (x, y):
    low, high = axis.min(1, keepdims=True), axis.max(1, keepdims=True)
    centred.append(axis - (low + high) / 2)
    extents.append((high - low) / 2)
  room = _BITMAP / 2 - radius[:, None]
  scale = room / np.maximum(np.maximum(*extents), 1e-6)
  return centred[0] * scale + _BITMAP / 2, centred[1] * scale + _BITMAP / 2


def draw_rows(x: np.ndarray, y: np.ndarray, radius: np.ndarray) -> np.ndarray:
  """Draws discs around points into 32x32 bitmaps, one row of pixels to an integer.

  Args:
    x: float[n, num_points], in pixels from the left edge.
    y: float[n, num_points], in pixels from the top edge.
    radius: float[n], that of the pen in pixels. A pixel is set if its centre is covered.

  Returns:
    uint32[n, 32]; bit j of a row is its pixel j from the left.
  """
  rows = np.zeros((len(x), _BITMAP), np.uint32)
  owner = np.broadcast_to(np.arange(len(x))[:, None], x.shape)
  reach = math.ceil(float(radius.max())) if len(x) else 0
  nearest = np.floor(y).astype(np.int64)
  for offset in range(-reach, reach + 1):
    row = nearest + offset
    squared = radius[:, None] ** 2 - (row + 0.5 - y) ** 2
    half = np.sqrt(np.maximum(squared, 0.0))
    first = np.clip(np.ceil(x - half - 0.5), 0, _BITMAP).astype(np.uint64)
    end = np.clip(np.floor(x + half - 0.5) + 1, 0, _BITMAP).astype(np.uint64)
    hit = (squared >= 0) & (row >= 0) & (row < _BITMAP) & (first < end)
    one = np.uint64(1)
    bits = ((one << end[hit]) - (one << first[hit])).astype(np.uint32)
    np.bitwise_or.at(rows, (owner[hit], row[hit]), bits)
  return rows


def count_blocks(rows: np.ndarray) -> np.ndarray:
  """Counts set pixels in 4x4 blocks: uint8[n, 8, 8] from the rows of `draw_rows`."""
  num_blocks = _BITMAP // _BLOCK
  shifts = np.arange(0, _BITMAP, _BLOCK, dtype=np.uint32)
  pieces = (rows[:, :, None] >> shifts) & np.uint32(2**_BLOCK - 1)
  counts = np.bitwise_count(pieces).reshape(len(rows), num_blocks, _BLOCK, num_blocks)
  return counts.sum(2, dtype=np.uint8)
