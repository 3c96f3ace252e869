"""From an encoded image to pixels of one public shape."""

from __future__ import annotations

import errno
import io
import math
import os
import warnings
from dataclasses import dataclass
from typing import get_args

import numpy as np
from PIL import Image

from dp_jax.data.source import Interpolation, RecordError, ResizePolicy

RESIZE_POLICIES: tuple[str, ...] = get_args(ResizePolicy)
FORMATS = ("JPEG", "PNG")
_FILTERS = {"bilinear": Image.Resampling.BILINEAR, "bicubic": Image.Resampling.BICUBIC}

# What is wrong with one path. Other errors of the operating system (no memory, no file handles, a
# network drive that is away) say nothing of the record: the same step would differ when repeated.
_FAULTS_OF_A_RECORD = (
  errno.ENOENT,
  errno.ENOTDIR,
  errno.EISDIR,
  errno.EACCES,
  errno.ELOOP,
  errno.ENAMETOOLONG,
  errno.EINVAL,
)


@dataclass(frozen=True)
class ImageDecoder:
  """Decodes JPEG and PNG to uint8[height, width, channels], a function of the file alone.

  A JPEG that is at least twice as large as needed is decoded at a half, quarter or eighth of its
  size, which the format allows without decoding the rest. Transparency is dropped, 16 bits a
  pixel are cut to 8, and an orientation in the metadata is not applied.

  Attributes:
    shape: (height, width, 1 or 3): grey or colour, whatever the file holds.
    resize: "centre_crop" takes the largest centred part with the proportions of `shape`, as for
      evaluation on ImageNet, and scales it; "stretch" scales the whole; "none" keeps the size,
      so that an image of another one is malformed.
    crop_fraction: how much of the height and width of that centred part is kept; 0.875 is usual
      on ImageNet (224 of 256).
    interpolation: "bilinear" or "bicubic"; either averages over what it makes smaller.
  """

  shape: tuple[int, int, int]
  resize: ResizePolicy = "centre_crop"
  crop_fraction: float = 1.0
  interpolation: Interpolation = "bilinear"

  def __post_init__(self) -> None:
    """Refuses what cannot be decoded to."""
    if len(self.shape) != 3 or min(self.shape) < 1 or self.shape[2] not in (1, 3):
      raise ValueError(
        f"encoded images need input_shape (height, width, 1 or 3), not {tuple(self.shape)}"
      )
    if self.resize not in RESIZE_POLICIES:
      raise ValueError(f"resize {self.resize!r} is not one of {', '.join(RESIZE_POLICIES)}")
    if self.interpolation not in _FILTERS:
      known = ", ".join(_FILTERS)
      raise ValueError(f"interpolation {self.interpolation!r} is not one of {known}")
    if not 0 < self.crop_fraction <= 1:
      raise ValueError(f"crop_fraction must be above 0 and at most 1, not {self.crop_fraction}")
    if self.resize != "centre_crop" and self.crop_fraction != 1:
      raise ValueError(
        f"crop_fraction={self.crop_fraction} has no meaning under resize {self.resize!r}"
      )
    # A warning would tell of a record; what matters raises.
    warnings.filterwarnings("ignore", module=r"PIL\.")

  def read(self, path: str | os.PathLike[str]) -> np.ndarray:
    """The image in a file: uint8[height, width, channels].

    Raises:
      RecordError: if there is no such file, or it cannot be decoded.
      OSError: if reading failed for a reason that lies outside the file.
    """
    try:
      with open(path, "rb") as file:
        content = file.read()
    except OSError as error:
      if error.errno not in _FAULTS_OF_A_RECORD:
        raise
      raise RecordError(f"cannot be read: {error.strerror}") from error
    return self.decode(content)

  def decode(self, content: bytes) -> np.ndarray:
    """The image in the bytes of a file: uint8[height, width, channels].

    Raises:
      RecordError: if it cannot be decoded.
    """
    try:
      with Image.open(io.BytesIO(content), formats=FORMATS) as image:
        return self._pixels(image)
    except MemoryError:
      raise
    except Exception as error:
      # Whatever Pillow raises (it has a dozen types) depends on this image.
      raise RecordError(f"cannot be decoded: {type(error).__name__}") from error

  def _pixels(self, image: Image.Image) -> np.ndarray:
    height, width, channels = self.shape
    mode = "L" if channels == 1 else "RGB"
    if self.resize == "none":
      image = _converted(image, mode)
    else:
      enough = math.ceil(width / self.crop_fraction), math.ceil(height / self.crop_fraction)
      image.draft(mode, enough)  # does nothing to what is no JPEG
      image, box = _converted(image, mode), self._box(*image.size)
      if box != (0, 0, width, height):
        image = image.resize((width, height), _FILTERS[self.interpolation], box=box)
    pixels = np.asarray(image)
    return pixels[..., None] if channels == 1 else pixels

  def _box(self, width: int, height: int) -> tuple[float, float, float, float]:
    """The part of an image that is scaled: left, top, right, bottom."""
    if self.resize == "stretch":
      return 0.0, 0.0, float(width), float(height)
    scale = min(width / self.shape[1], height / self.shape[0]) * self.crop_fraction
    kept = scale * self.shape[1], scale * self.shape[0]
    left, top = (width - kept[0]) / 2, (height - kept[1]) / 2
    return left, top, left + kept[0], top + kept[1]


def _converted(image: Image.Image, mode: str) -> Image.Image:
  """An image of 8 bits a channel, grey ("L") or colour ("RGB")."""
  if image.mode.startswith("I"):  # 16 bits, or 32 that hold 16: Pillow would clip them at 255
    values = np.asarray(image).astype(np.int64)
    image = Image.fromarray(np.clip(values >> 8, 0, 255).astype(np.uint8))
  return image if image.mode == mode else image.convert(mode)
