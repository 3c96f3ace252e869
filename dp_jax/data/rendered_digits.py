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

from dp_jax.data.digits import CLASS_NAMES, IMAGE_SHAPE, VALUE_RANGE
from dp_jax.data.source import ArraySource, SourceInfo
from dp_jax.data.strokes import digit_strokes

DEFAULT_NUM_RECORDS = 20_000

_BITMAP = 32
_BLOCK = 4
# How many digits are drawn at once: a compromise between call overhead and cache.
_CHUNK = 512
# Uniform draws that each record has to itself, and what they are for.
_FONT, _ASPECT, _SHEAR, _ROTATE, _PEN, _WAVE = 0, 1, 2, 3, 4, 5
_WAVES_PER_AXIS = 2
_NUM_DRAWS = _WAVE + 2 * _WAVES_PER_AXIS * 4


@dataclass(frozen=True)
class Style:
  """How much the drawings vary. All but the pen act on a digit whose height spans -1..1.

  Attributes:
    aspect: standard deviation of the logarithm of the stretch in width.
    shear: standard deviation of the horizontal shift per unit of height.
    rotation: standard deviation of the angle, in radians.
    wave: standard deviation of the amplitude of each of the waves that bend a digit.
    wave_number: the largest angular frequency of a wave, in radians per unit of length.
    pen_width: smallest and largest pen width, in pixels of the 32x32 bitmap.
  """

  aspect: float = 0.2
  shear: float = 0.2
  rotation: float = 0.12
  wave: float = 0.1
  wave_number: float = 2.5
  pen_width: tuple[float, float] = (3.0, 6.0)


DEFAULT_STYLE = Style()


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
    raise ValueError(f"rendered_digits has the splits train and test, not {split!r}")
  if num_records < 1:
    raise ValueError(f"num_records must be at least 1, not {num_records}")
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
    image_shape=IMAGE_SHAPE,
    num_classes=10,
    value_range=VALUE_RANGE,
    class_names=CLASS_NAMES,
  )
  return ArraySource(info, images, labels)


def _render(labels: np.ndarray, draws: np.ndarray, style: Style) -> np.ndarray:
  """Draws digits: uint8[n, 8, 8] from labels [n] and uniforms float64[n, _NUM_DRAWS]."""
  strokes = digit_strokes()
  fonts = (draws[:, _FONT] * len(strokes)).astype(np.int64)
  x, y = np.moveaxis(_bend(strokes[fonts, labels], draws, style), -1, 0)
  low, high = style.pen_width
  radius = (low + (high - low) * draws[:, _PEN]) / 2
  return count_blocks(draw_rows(*_fit(x, y, radius), radius))


def _bend(points: np.ndarray, draws: np.ndarray, style: Style) -> np.ndarray:
  """Waves, stretches, shears and rotates: float64[n, num_points, 2] to the same shape."""
  # Normal draws, cut at 2.5 standard deviations so that no digit becomes another.
  normal = special.ndtri(np.clip(draws, 0.0062, 0.9938))[:, :, None]
  x, y = points[..., 0].astype(np.float64), points[..., 1].astype(np.float64)
  waves = draws[:, _WAVE:].reshape(len(draws), 2, _WAVES_PER_AXIS, 4, 1)
  bent = []
  for axis, start in ((0, x), (1, y)):
    moved = start
    for wave in range(_WAVES_PER_AXIS):
      size, angle, speed, phase = np.moveaxis(waves[:, axis, wave], 1, 0)
      angle, phase = 2 * np.pi * angle, 2 * np.pi * phase
      along = np.cos(angle) * x + np.sin(angle) * y
      amplitude = style.wave * special.ndtri(np.clip(size, 0.0062, 0.9938))
      moved = moved + amplitude * np.sin(style.wave_number * speed * along + phase)
    bent.append(moved)
  x, y = bent
  x = x * np.exp(style.aspect * normal[:, _ASPECT]) - style.shear * normal[:, _SHEAR] * y
  angle = style.rotation * normal[:, _ROTATE]
  return np.stack(
    [np.cos(angle) * x - np.sin(angle) * y, np.sin(angle) * x + np.cos(angle) * y], -1
  )


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
