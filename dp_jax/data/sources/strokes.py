"""Pen strokes of the digits, taken from the fonts that matplotlib ships.

A printed digit differs from a handwritten one first of all in its outline: serifs, and strokes
that swell. Thinning each glyph to its centre line leaves what the two have in common, the path
that a pen would follow.
"""

from __future__ import annotations

import functools
import pathlib

import matplotlib
import numpy as np
from fontTools import ttLib
from PIL import Image, ImageDraw, ImageFont

_DIGIT_NAMES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
# Height in pixels at which glyphs are drawn and thinned.
_GLYPH_HEIGHT = 64


def has_digits(font_file: pathlib.Path) -> bool:
  """Whether the font draws the ten digits, by its character map.

  Fonts without digits show a box in their place, and last-resort fonts one picture for all of
  Latin; some symbol fonts keep other signs at the digits' code points. So the ten characters must
  map to ten glyphs that are named as digits.

  Args:
    font_file: a TrueType file.
  """
  with ttLib.TTFont(font_file, lazy=True) as font:
    character_map = font.getBestCmap() or {}
  glyph_names = [character_map.get(ord(str(digit)), "") for digit in range(10)]
  return len(set(glyph_names)) == 10 and all(
    glyph.startswith((name, f"uni003{digit}"))
    for digit, (glyph, name) in enumerate(zip(glyph_names, _DIGIT_NAMES, strict=True))
  )


def digit_fonts() -> tuple[pathlib.Path, ...]:
  """The TrueType fonts with digits among those of matplotlib, sorted by name."""
  folder = pathlib.Path(matplotlib.get_data_path()) / "fonts" / "ttf"
  return tuple(file for file in sorted(folder.glob("*.ttf")) if has_digits(file))


@functools.cache
def digit_strokes() -> np.ndarray:
  """Centre lines of the ten digits in all fonts.

  Returns:
    float32[num_fonts, 10, num_points, 2], read-only: points (x, y), y downwards, about one
    64th of the digit's height apart, which spans -1..1. The first is a topmost one, and strokes
    with fewer points repeat it.
  """
  fonts = digit_fonts()
  glyphs = [_draw(file, str(digit)) for file in fonts for digit in range(10)]
  width = max(glyph.shape[1] for glyph in glyphs)
  bitmaps = np.zeros((len(glyphs), _GLYPH_HEIGHT + 2, width + 2), bool)
  for bitmap, glyph in zip(bitmaps, glyphs, strict=True):
    bitmap[1 : 1 + glyph.shape[0], 1 : 1 + glyph.shape[1]] = glyph
  thinned = thin(bitmaps)
  num_points = int(thinned.sum((1, 2)).max())
  strokes = np.empty((len(glyphs), num_points, 2), np.float32)
  for stroke, bitmap in zip(strokes, thinned, strict=True):
    rows, columns = np.nonzero(bitmap)
    points = np.stack([columns, rows], 1).astype(np.float32)
    low, high = points.min(0), points.max(0)
    points = (points - (low + high) / 2) / max((high[1] - low[1]) / 2, 1.0)
    stroke[:] = points[0]
    stroke[: len(points)] = points
  by_font = strokes.reshape(len(fonts), 10, num_points, 2)
  by_font.flags.writeable = False
  return by_font


def _draw(font_file: pathlib.Path, character: str) -> np.ndarray:
  """The character as a bitmap, bool[at most _GLYPH_HEIGHT, width], cropped."""
  # Large enough that every font's digits are at least as high as wanted; then reduced.
  font = ImageFont.truetype(str(font_file), 4 * _GLYPH_HEIGHT)
  left, top, right, bottom = (int(side) for side in font.getbbox(character))
  image = Image.new("L", (right - left, bottom - top))
  ImageDraw.Draw(image).text((-left, -top), character, fill=255, font=font)
  scale = _GLYPH_HEIGHT / image.height
  image = image.resize((max(1, round(image.width * scale)), _GLYPH_HEIGHT), Image.Resampling.BOX)
  return np.asarray(image) > 127


def thin(bitmaps: np.ndarray) -> np.ndarray:
  """Thins shapes to lines one pixel wide that stay connected.

  Args:
    bitmaps: bool[n, H, W], False along the border.

  Returns:
    bool[n, H, W].

  Zhang and Suen 1984, "A fast parallel algorithm for thinning digital patterns".
  """
  image = bitmaps.copy()
  changed = True
  while changed:
    changed = False
    for first_pass in (True, False):
      padded = np.pad(image, ((0, 0), (1, 1), (1, 1)))
      # P2..P9 of the paper: clockwise from the neighbour above.
      shifts = ((0, 1), (0, 2), (1, 2), (2, 2), (2, 1), (2, 0), (1, 0), (0, 0))
      height, width = image.shape[1:]
      ring = [padded[:, row : row + height, col : col + width] for row, col in shifts]
      neighbours = np.sum(ring, axis=0, dtype=np.int8)
      turns = np.sum(
        [~here & after for here, after in zip(ring, ring[1:] + ring[:1], strict=True)],
        axis=0,
        dtype=np.int8,
      )
      north, east, south, west = ring[0], ring[2], ring[4], ring[6]
      if first_pass:
        kept_side = (north & east & south) | (east & south & west)
      else:
        kept_side = (north & east & west) | (north & south & west)
      removed = image & (neighbours >= 2) & (neighbours <= 6) & (turns == 1) & ~kept_side
      changed |= bool(removed.any())
      image &= ~removed
  return image
