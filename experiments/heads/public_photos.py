"""Public images for the second moment of features: crops of two photos that scikit-learn ships.

    python -m experiments.heads.public_photos FOLDER
    python -m dp_jax features --config=configs/imagenet_features.py --out=OUT
        --config.data.path=FOLDER --config.data.eval_split=train --config.data.declared=public
        --config.data.input_shape='(160,160,3)' --config.backbone.layers="('block20','block15')"

What a head needs to know of features beyond its own data is which directions are long and which are
short, and that hangs on the model more than on the images. Each image is a crop of 32 x 32 pixels,
turned, mirrored, with other colours, and more often than not with an oval cut out of another crop
pasted in, since variety is what makes the moment carry over to other images. Saved as JPEG of
quality 75, as the CIFAR-10 of this study. `configs/cifar10_public` holds the result.
"""

import sys
from pathlib import Path

import numpy as np
from PIL import Image
from sklearn.datasets import load_sample_images

SEED, COUNT, SIDE, MARGIN = 0, 2000, 32, 8
PASTED = 0.6


def main() -> None:
  """Writes the images."""
  if len(sys.argv) != 2:
    sys.exit(__doc__)
  write(Path(sys.argv[1]), COUNT)


def write(folder: Path, count: int) -> None:
  """Writes FOLDER/train/PHOTO/NUMBER.jpg; the photo is the one that the background is from."""
  shipped = load_sample_images()
  photos = [Image.fromarray(image) for image in shipped.images]
  names = [Path(name).stem for name in shipped.filenames]
  rng = np.random.default_rng(SEED)
  for number in range(count):
    which = int(rng.integers(len(photos)))
    pixels = crop(photos[which], rng)
    if rng.random() < PASTED:
      mask = oval(rng)
      pixels = pixels * (1 - mask) + crop(photos[int(rng.integers(len(photos)))], rng) * mask
    path = folder / "train" / names[which] / f"{number:05d}.jpg"
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8)).save(path, quality=75)


def crop(photo: Image.Image, rng: np.random.Generator) -> np.ndarray:
  """A random part of a photo, float[SIDE, SIDE, 3]: any place, size, turn and colours."""
  shape = np.exp(rng.uniform(-0.4, 0.4))
  share = rng.uniform(0.1, 1) ** 0.7
  width = min(photo.width, max(MARGIN, int(photo.width * share * shape)))
  height = min(photo.height, max(MARGIN, int(photo.height * share / shape)))
  left = int(rng.integers(photo.width - width + 1))
  top = int(rng.integers(photo.height - height + 1))
  side = SIDE + 2 * MARGIN
  small = photo.crop((left, top, left + width, top + height)).resize(
    (side, side), Image.Resampling.BICUBIC
  )
  turned = small.rotate(rng.uniform(-25, 25), Image.Resampling.BILINEAR)
  pixels = np.asarray(turned, float)[MARGIN:-MARGIN, MARGIN:-MARGIN]
  if rng.random() < 0.5:
    pixels = pixels[:, ::-1]
  if rng.random() < 0.5:
    pixels = pixels[..., rng.permutation(3)]
  if rng.random() < 0.2:
    pixels = 255 - pixels
  pixels = 255 * (pixels / 255) ** np.exp(rng.uniform(-0.5, 0.5))
  return pixels * rng.uniform(0.7, 1.3) + rng.uniform(-25, 25) + rng.uniform(-20, 20, (1, 1, 3))


def oval(rng: np.random.Generator) -> np.ndarray:
  """A mask float[SIDE, SIDE, 1] from 0 to 1: diamond, oval or box, turned, soft or hard."""
  y, x = np.mgrid[:SIDE, :SIDE] - rng.uniform(8, 24, 2)[:, None, None]
  angle, across = rng.uniform(0, np.pi), rng.uniform(4, 14, 2)
  along = (x * np.cos(angle) + y * np.sin(angle)) / across[0]
  aside = (y * np.cos(angle) - x * np.sin(angle)) / across[1]
  power, edge = rng.choice([1, 2, 8]), rng.choice([3, 10])
  inside = 1.1 - np.abs(along) ** power - np.abs(aside) ** power
  return np.clip(inside * edge, 0, 1)[..., None]


if __name__ == "__main__":
  main()
