"""Decoding of images: shapes, the two ways to resize, and what a bad file does."""

import builtins
import errno
import io

import numpy as np
import pytest
from PIL import Image

from dp_jax.data import RecordError
from dp_jax.data.sources.images import ImageDecoder


def _ramp(height: int, width: int) -> np.ndarray:
  """Red grows to the right, green downwards: where a pixel comes from can be read off it."""
  image = np.zeros((height, width, 3), np.uint8)
  image[..., 0] = np.linspace(0, 255, width)[None, :]
  image[..., 1] = np.linspace(0, 255, height)[:, None]
  return image


def _encoded(image: Image.Image | np.ndarray, kind: str = "PNG", **options) -> bytes:
  out = io.BytesIO()
  image = image if isinstance(image, Image.Image) else Image.fromarray(image)
  image.save(out, kind, **options)
  return out.getvalue()


def test_png_of_the_right_size_comes_back_as_it_is():
  pixels = np.random.default_rng(0).integers(0, 256, (6, 9, 3), np.uint8)
  for resize in ("centre_crop", "stretch", "none"):
    decoded = ImageDecoder((6, 9, 3), resize).decode(_encoded(pixels))
    assert decoded.dtype == np.uint8
    np.testing.assert_array_equal(decoded, pixels)


def test_centre_crop_keeps_proportions_and_stretch_keeps_the_borders():
  wide = _encoded(_ramp(40, 80))
  crop = ImageDecoder((20, 20, 3)).decode(wide)
  whole = ImageDecoder((20, 20, 3), "stretch").decode(wide)
  # The middle half of the width, 64..191 of the ramp, against all of it; the full height in both.
  assert abs(int(crop[10, 0, 0]) - 64) < 6 and abs(int(crop[10, -1, 0]) - 191) < 6
  assert whole[10, 0, 0] < 8 and whole[10, -1, 0] > 247
  for image in (crop, whole):
    assert image[0, 10, 1] < 8 and image[-1, 10, 1] > 247
  inner = ImageDecoder((20, 20, 3), crop_fraction=0.5).decode(wide)
  assert abs(int(inner[0, 10, 1]) - 64) < 8 and abs(int(inner[-1, 10, 1]) - 191) < 8
  assert ImageDecoder((20, 20, 3), "none").decode(wide).shape == (40, 80, 3)


def test_a_large_jpeg_is_decoded_smaller_and_looks_the_same(monkeypatch):
  image = _encoded(_ramp(512, 640), "JPEG", quality=95)
  decoder = ImageDecoder((64, 64, 3))
  fast = decoder.decode(image)
  sizes = []
  resize = Image.Image.resize
  monkeypatch.setattr(
    Image.Image, "resize", lambda self, *a, **k: (sizes.append(self.size), resize(self, *a, **k))[1]
  )
  decoder.decode(image)
  assert sizes == [(80, 64)]
  monkeypatch.setattr(Image.Image, "draft", lambda self, mode, size: None)
  assert np.abs(fast.astype(int) - decoder.decode(image)).max() <= 3
  # With a crop, what is kept is still as large as what is asked for.
  sizes.clear()
  monkeypatch.undo()
  assert ImageDecoder((64, 64, 3), crop_fraction=0.875).decode(image).shape == (64, 64, 3)


@pytest.mark.parametrize("channels", [1, 3])
def test_modes_become_grey_or_colour(channels):
  grey = np.full((4, 5), 77, np.uint8)
  deep = Image.fromarray(np.full((4, 5), 77 * 256 + 5, np.uint16))
  colour = Image.fromarray(np.repeat(grey[..., None], 3, 2))
  transparent = colour.convert("RGBA")
  transparent.putalpha(10)
  palette = colour.quantize(4)
  palette.info["transparency"] = bytes([0] * 200)
  decoder = ImageDecoder((4, 5, channels), "none")
  images = [Image.fromarray(grey), deep, colour, transparent, palette]
  for content in [*map(_encoded, images), _encoded(colour.convert("CMYK"), "JPEG", quality=100)]:
    decoded = decoder.decode(content)
    assert decoded.shape == (4, 5, channels)
    assert np.abs(decoded.astype(int) - 77).max() <= 3


def test_what_cannot_be_decoded_is_an_error_of_its_record(tmp_path):
  decoder = ImageDecoder((8, 8, 3))
  noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8)
  for kind in ("PNG", "JPEG"):
    whole = _encoded(noise, kind)
    for content in (b"", b"text", whole[:20], whole[: len(whole) // 2]):
      with pytest.raises(RecordError, match="cannot be decoded"):
        decoder.decode(content)
  with pytest.raises(RecordError, match="UnidentifiedImageError"):
    decoder.decode(_encoded(noise, "BMP"))  # only the two formats are tried
  for path in (tmp_path / "missing.png", tmp_path, tmp_path / "missing" / "a.png"):
    with pytest.raises(RecordError, match="cannot be read"):
      decoder.read(path)
  (tmp_path / "good.png").write_bytes(_encoded(noise))
  assert decoder.read(tmp_path / "good.png").shape == (8, 8, 3)


def test_what_lies_outside_the_file_is_no_error_of_a_record(monkeypatch):
  """Else a step would silently lose records that it had before the crash."""
  decoder = ImageDecoder((8, 8, 3))
  for error in (OSError(errno.EMFILE, "too many open files"), OSError(errno.EIO, "drive")):

    def fails(*arguments, error=error, **options):
      raise error

    monkeypatch.setattr(builtins, "open", fails)
    with pytest.raises(OSError, match=str(error.strerror)) as caught:
      decoder.read("a.png")
    assert not isinstance(caught.value, ValueError)


def test_impossible_shapes_and_policies():
  cases = [
    (((8, 8, 2),), r"\(height, width, 1 or 3\), not \(8, 8, 2\)"),
    (((8,),), "height, width"),
    (((0, 8, 3),), "height, width"),
    (((8, 8, 3), "crop"), "'crop' is not one of centre_crop, stretch, none"),
    (((8, 8, 3), "centre_crop", 0.0), "crop_fraction must be above 0"),
    (((8, 8, 3), "stretch", 0.5), "no meaning under resize 'stretch'"),
  ]
  for arguments, message in cases:
    with pytest.raises(ValueError, match=message):
      ImageDecoder(*arguments)
