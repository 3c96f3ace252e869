"""From an encoded image to pixels of one public shape."""

from __future__ import annotations

import errno
import io
import logging
import math
import os
import warnings
from dataclasses import dataclass
from typing import Any, get_args

import numpy as np
from PIL import Image

from dp_jax.data.sources.options import SourceOptions
from dp_jax.data.sources.source import Interpolation, RecordError, ResizePolicy
from dp_jax.errors import UserError
from dp_jax.files.ordinary import open_regular

RESIZE_POLICIES: tuple[str, ...] = get_args(ResizePolicy)
FORMATS = ("JPEG", "PNG")
_FILTERS = {"bilinear": Image.Resampling.BILINEAR, "bicubic": Image.Resampling.BICUBIC}

_NO_MEMORY = "there is not enough memory to decode an image"

# Larger ones are not read: one record could take all memory. Photographs are far smaller.
MAX_BYTES = 256 * 2**20
MAX_PIXELS = 2**27

# What says nothing of the record: no memory or file handles, a drive that fails or is away. The
# same step would differ when it is repeated. Anything else is wrong with one path or file.
FAULTS_OF_THE_MACHINE = {
  getattr(errno, name) for name in (
    "EIO", "ENOMEM", "EMFILE", "ENFILE", "EINTR", "ENOBUFS", "ESTALE", "ETIMEDOUT", "ENOTCONN",
    "ECONNREFUSED", "ECONNRESET", "ECONNABORTED", "EHOSTDOWN", "EHOSTUNREACH", "ENETDOWN",
    "ENETUNREACH", "EREMOTEIO", "ESHUTDOWN",
  ) if hasattr(errno, name)
}  # fmt: skip


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
      raise UserError(
        f"encoded images need input_shape (height, width, 1 or 3), not {tuple(self.shape)}"
      )
    if self.resize not in RESIZE_POLICIES:
      raise UserError(f"resize {self.resize!r} is not one of {', '.join(RESIZE_POLICIES)}")
    if self.interpolation not in _FILTERS:
      known = ", ".join(_FILTERS)
      raise UserError(f"interpolation {self.interpolation!r} is not one of {known}")
    if not 0 < self.crop_fraction <= 1:
      raise UserError(f"crop_fraction must be above 0 and at most 1, not {self.crop_fraction}")
    if self.resize != "centre_crop" and self.crop_fraction != 1:
      raise UserError(
        f"crop_fraction={self.crop_fraction} has no meaning under resize {self.resize!r}"
      )
    # A warning or a log line would tell of a record; what matters raises. A warning is counted to
    # the module that calls, which may be this one.
    warnings.filterwarnings("ignore", module=r"(PIL\.|dp_jax\.data\.sources\.images)")
    logging.getLogger("PIL").setLevel(logging.CRITICAL)

  def read(self, path: str | os.PathLike[str]) -> np.ndarray:
    """The image in a file: uint8[height, width, channels].

    Raises:
      RecordError: if there is no such ordinary file, or it is too large, or cannot be decoded. Its
        text names the kind of fault alone.
      OSError: if reading failed for a reason that lies outside the file; it does not name the file.
    """
    try:
      with open_regular(path) as file:
        # What looks empty may be a file of the system, of which reading may wait or fail.
        size = os.fstat(file.fileno()).st_size
        content = file.read(MAX_BYTES + 1) if size else b""
    except OSError as error:
      text = error.strerror or "the machine does not say why"
      if error.errno in FAULTS_OF_THE_MACHINE:
        raise OSError(error.errno, f"images cannot be read: {text}") from None
      raise RecordError(f"cannot be read: {text}") from None
    except ValueError:  # a name that no file can have
      raise RecordError("cannot be read: no file can have its name") from None
    except MemoryError:
      raise MemoryError(_NO_MEMORY) from None
    if len(content) > MAX_BYTES:
      raise RecordError(f"cannot be read: a file of more than {MAX_BYTES >> 20} MiB")
    return self.decode(content)

  def decode(self, content: bytes) -> np.ndarray:
    """The image in the bytes of a file: uint8[height, width, channels].

    Raises:
      RecordError: if it cannot be decoded, or has more than 134 million pixels.
    """
    try:
      with Image.open(io.BytesIO(content), formats=FORMATS) as image:
        if math.prod(image.size) > MAX_PIXELS:
          raise RecordError(f"cannot be decoded: more than {MAX_PIXELS:,} pixels")
        return self._pixels(image)
    except RecordError:
      raise
    except MemoryError:
      raise MemoryError(_NO_MEMORY) from None  # NumPy's own says how large the image is
    except Exception as error:
      # Whatever Pillow raises (it has a dozen types) depends on this image.
      raise RecordError(f"cannot be decoded: {type(error).__name__}") from None

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


@dataclass(frozen=True)
class ImageOptions(SourceOptions):
  """Keys of sources that decode images.

  Attributes:
    resize: how encoded images are brought to data.input_shape: centre_crop, stretch or none, as
      `ImageDecoder` says.
    crop_fraction: of centre_crop, how much of the height and width is kept.
    interpolation: bilinear or bicubic, of images that are resized.
  """

  resize: ResizePolicy = "centre_crop"
  crop_fraction: float = 1.0
  interpolation: Interpolation = "bilinear"

  def __post_init__(self) -> None:
    """Refuses a crop that resize does not make."""
    if self.crop_fraction != 1 and self.resize != "centre_crop":
      raise UserError(
        f"data.crop_fraction={self.crop_fraction} is of centre_crop, and"
        f" data.resize={self.resize!r} does not use it: leave it out."
      )

  @property
  def decodes(self) -> bool:
    """Whether the records are encoded images."""
    return True

  def decoding(self) -> dict[str, Any]:
    """How, where they are."""
    names = ("resize", "crop_fraction", "interpolation")
    return {name: getattr(self, name) for name in names} if self.decodes else {}

  def decoder(self, shape: tuple[int, ...] | None) -> ImageDecoder:
    """The decoder to data.input_shape, which must be declared."""
    if shape is None or len(shape) != 3:
      raise UserError(
        "encoded images are brought to one public shape: declare data.input_shape as"
        f" (height, width, channels), for example (224, 224, 3), not {shape}"
      )
    size = (shape[0], shape[1], shape[2])
    return ImageDecoder(size, self.resize, self.crop_fraction, self.interpolation)


def decoding_of(options: SourceOptions) -> dict[str, Any]:
  """How a source decodes images; of one that has none to decode, as if it did by default."""
  return options.decoding() or ImageOptions().decoding()


def _converted(image: Image.Image, mode: str) -> Image.Image:
  """An image of 8 bits a channel, grey ("L") or colour ("RGB")."""
  if image.mode.startswith("I"):  # 16 bits, or 32 that hold 16: Pillow would clip them at 255
    values = np.asarray(image).astype(np.int64)
    image = Image.fromarray(np.clip(values >> 8, 0, 255).astype(np.uint8))
  return image if image.mode == mode else image.convert(mode)
