"""Frozen models up to their head."""

import hashlib

import jax
import numpy as np
import pytest
from support import classifier

from dp_jax.models.functional import split
from dp_jax.models.pretrained import weights
from dp_jax.models.pretrained.backbones import load_backbone

SPEC = classifier(
  "vit", {"size": "ti16", "depth": 1, "width": 8, "heads": 2, "patch": 4}, (8, 8, 3), 5, (0.0, 1.0)
)


@pytest.fixture
def file(tmp_path):
  return _save(tmp_path, declared="public", ancestry=())


def _save(folder, **about):
  arrays = split(SPEC.build(3))[1]
  path = folder / "vit.safetensors"
  path.write_bytes(weights.to_bytes(arrays, SPEC, **about))
  return path


def _load(file, **changes):
  arguments = {
    "layers": ("pooled",), "input_shape": (8, 8, 3), "value_range": (0.0, 255.0), **changes
  }  # fmt: skip
  name = arguments.pop("name", "vit")
  return load_backbone(name, "lite0", str(file), **arguments)


def test_a_saved_transformer_gives_what_its_head_reads(file):
  backbone = _load(file)
  assert backbone.num_features == 8 and backbone.warnings == ()
  raw = np.random.default_rng(0).integers(0, 256, (3, 8, 8, 3), np.uint8)
  features = jax.jit(backbone.forward)(backbone.arrays, raw)
  model, arrays = split(SPEC.build(3))
  logits = model.bind(arrays)(raw.astype(np.float32) / 255 * 2 - 1)
  expected = features @ arrays["head.kernel"] + arrays["head.bias"]
  np.testing.assert_allclose(logits, expected, atol=1e-5)


def test_the_digest_is_of_the_file_and_the_preprocessing_is_told(file):
  backbone = _load(file)
  assert backbone.weights_digest == hashlib.sha256(file.read_bytes()).hexdigest()
  assert backbone.preprocessing["mapped_to_one"] == 255.0
  assert backbone.preprocessing["input_shape"] == [8, 8, 3]


def test_one_channel_is_repeated(file):
  one, three = _load(file, input_shape=(8, 8, 1)), _load(file)
  grey = np.random.default_rng(0).integers(0, 256, (2, 8, 8, 1), np.uint8)
  colour = np.repeat(grey, 3, axis=-1)
  np.testing.assert_array_equal(one.forward(one.arrays, grey), three.forward(three.arrays, colour))


def test_imagenet_weights_see_the_values_that_they_were_trained_on():
  """(pixel - 127) / 128, also where the data has its pixels in 0..1."""
  seen = {}
  for value_range in ((0.0, 255.0), (0.0, 1.0)):
    backbone = load_backbone(
      "efficientnet_lite", "lite0", "imagenet", layers=("block0", "pooled"),
      input_shape=(32, 32, 3), value_range=value_range,
    )  # fmt: skip
    assert backbone.num_features == 16 + 1280
    about = backbone.preprocessing
    seen[value_range] = about["mapped_to_minus_one"], about["mapped_to_one"]
  assert seen == {(0.0, 255.0): (-1.0, 255.0), (0.0, 1.0): (-1 / 255, 1.0)}
  assert (127 - -1.0) * (2 / (255.0 - -1.0)) - 1 == 0


@pytest.mark.parametrize(("changes", "named"), [
  ({"layers": ("pooled", "block7")}, "block7"),
  ({"layers": ()}, "choose among pooled"),
  ({"input_shape": (16, 16, 3)}, "declare data.input_shape"),
  ({"input_shape": (8, 8, 2)}, "declare data.input_shape"),
  ({"input_shape": (64,)}, "takes images"),
  ({"name": "resnet"}, "holds a 'vit', not a 'resnet'"),
])  # fmt: skip
def test_what_does_not_fit_is_refused(file, changes, named):
  with pytest.raises(ValueError, match=named):
    _load(file, **changes)


def test_weights_that_private_data_trained_without_protection_are_refused(tmp_path):
  with pytest.raises(ValueError, match="trained without privacy on data declared private"):
    _load(_save(tmp_path, declared="private"))
  warned = _load(_save(tmp_path, declared="private", protected=True)).warnings
  assert "the guarantees add up" in warned[0]


def test_unknown_names_and_sizes_are_refused():
  for name, size, named in (
    ("vit", "lite0", "give a safetensors file"), ("efficientnet_lite", "b7", "b7.*lite0, lite2"),
  ):  # fmt: skip
    with pytest.raises(ValueError, match=named):
      load_backbone(
        name, size, "imagenet", layers=("pooled",), input_shape=(8, 8, 3), value_range=(0.0, 1.0)
      )
