"""Every model by its name: sizes, the compute dtype, and inputs that it does not take."""

import jax.numpy as jnp
import pytest
from support import classifier
from tracing import check_shapes

from dp_jax.models.build import MODELS, VECTORS, ModelSpec

SIZES = {
  "convnet": {"widths": (4,), "strides": (2,), "groups": 2},
  "efficientnet_lite": {"size": "lite0"},
  "feature_head": {"power": 0.5, "centred": True},  # a whitening product stays float32
  "linear": {},
  "resnet": {"depth": 18, "width": 4, "groups": 2},
  "vit": {"size": "ti16", "depth": 1, "width": 8, "heads": 2, "patch": 4},
  "wide_resnet": {"depth": 10, "width": 1, "groups": 8},
}


def _spec(name, shape=(8, 8, 1), **sizes):
  spec = classifier(name, {**SIZES[name], **sizes}, shape, 3, (0.0, 1.0))
  return ModelSpec.from_json(spec.to_json())


def test_all_models_are_here():
  assert SIZES.keys() == MODELS.keys()


@pytest.mark.parametrize("name", SIZES)
def test_a_model_is_built_from_its_description_and_computes_in_either_dtype(name):
  shape = (64,) if name == "feature_head" else (8, 8, 1)
  check_shapes(lambda dtype: _spec(name, shape).build(0, dtype), (2, 3), ((2, *shape), jnp.float32))


@pytest.mark.parametrize(("name", "sizes", "named"), [
  ("convnet", {"depth": 3}, "depth"),
  ("efficientnet_lite", {"size": "lite9"}, "size='lite9' is not one of lite0, lite2"),
  ("feature_head", {}, "takes vectors"),
  ("linear", {"width": 3}, "width"),
  ("resnet", {"patch": 4}, "patch"),
  ("resnet", {"depth": 19}, "depth=19 is not one of 18, 50"),
  ("resnet", {"groups": 3}, "width=4 must be divisible by groups=3"),
  ("vit", {"size": "huge"}, "size='huge' is not one of"),
  ("vit", {"patch": 5}, "divisible by patch=5"),
  ("vit", {"heads": 3}, "heads"),
  ("wide_resnet", {"depth": 11}, "depth=11 must be 4 more"),
  ("wide_resnet", {"strides": (1,)}, "strides"),
])  # fmt: skip
def test_a_size_that_a_model_does_not_have_is_refused_by_name(name, sizes, named):
  with pytest.raises(ValueError, match=named) as error:
    _spec(name, **sizes).build(0)
  assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", sorted(set(SIZES) - set(VECTORS)))
def test_models_of_images_refuse_feature_vectors(name):
  with pytest.raises(ValueError, match="takes images"):
    _spec(name, shape=(64,)).build(0)
