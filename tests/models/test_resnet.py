"""ResNet with GroupNorm: published parameter counts, shapes, and independence of examples."""

import jax.numpy as jnp
import numpy as np
import pytest
from support import classifier
from tracing import (
  IMAGENET,
  check_shapes,
  check_units,
  filled,
  forward,
  images,
  num_parameters,
  products,
  rngs,
  traced,
)

from dp_jax.models.build import ModelSpec
from dp_jax.models.vision import resnet
from dp_jax.models.vision.resnet import Block, ResNet

TINY = {"input_shape": (8, 8, 3), "num_classes": 3, "width": 4, "groups": 1, "stem": "3x3"}


@pytest.mark.parametrize(("depth", "preactivation", "count"), [
  (18, False, 11_689_512),  # torchvision's resnet18 and resnet50
  (50, False, 25_557_032),
  (50, True, 25_549_352),  # timm's resnetv2_50
])  # fmt: skip
def test_parameter_counts_are_the_published_ones(depth, preactivation, count):
  sizes = {"depth": depth, "preactivation": preactivation}
  assert num_parameters(lambda: ResNet(**IMAGENET, **sizes, rngs=rngs())) == count


@pytest.mark.parametrize("preactivation", [False, True])
def test_shapes_and_compute_dtype(preactivation):
  def build(dtype):
    return ResNet(
      input_shape=(32, 32, 3), num_classes=10, width=16, groups=16, stem="3x3",
      preactivation=preactivation, dtype=dtype, rngs=rngs(),
    )  # fmt: skip

  check_shapes(build, (5, 10), ((5, 32, 32, 3), jnp.float32))


@pytest.mark.parametrize(("stem", "first", "last"), [("7x7", 112, 7), ("3x3", 224, 28)])
def test_stems(stem, first, last):
  jaxpr = traced(
    lambda: ResNet(**IMAGENET, stem=stem, rngs=rngs()), ((1, 224, 224, 3), jnp.float32)
  )
  shapes = [equation.outvars[0].aval.shape for equation in products(jaxpr)]
  assert shapes[0] == (1, first, first, 64)
  assert shapes[-2:] == [(1, last, last, 512), (1, 1000)]


@pytest.mark.parametrize("bottleneck", [False, True])
@pytest.mark.parametrize("preactivation", [False, True])
def test_examples_are_independent_and_everything_has_a_gradient(
  monkeypatch, preactivation, bottleneck
):
  monkeypatch.setitem(resnet.STAGES, 6, ((2, 1), bottleneck))  # shallow, to compile quickly
  x = images(3, 8, 8, 3)
  check_units(
    lambda: ResNet(**TINY, depth=6, preactivation=preactivation, rngs=rngs()), x[:2], x[2]
  )


@pytest.mark.parametrize("preactivation", [False, True])
def test_a_block_whose_branch_is_zero_passes_its_input_on(preactivation):
  functional, arrays = filled(
    lambda: Block(
      4, 4, 1, bottleneck=False, groups=1, preactivation=preactivation, dtype=jnp.float32,
      rngs=rngs(),
    )
  )  # fmt: skip
  # Whichever comes last in the branch.
  for name in ("convs.1.kernel", "norms.1.scale", "norms.1.bias"):
    arrays[name] = np.zeros_like(arrays[name])
  x = images(2, 8, 8, 4)
  expected = x if preactivation else np.maximum(x, 0)
  np.testing.assert_array_equal(forward(functional)(arrays, x), expected)


def test_sizes_that_do_not_fit_are_refused():
  for changes, named in [
    ({"depth": 34}, "depth=34"),
    ({"groups": 3}, "divisible by groups=3"),
    ({"stem": "5x5"}, "5x5"),
  ]:
    with pytest.raises(ValueError, match=named):
      ResNet(**{**TINY, **changes}, rngs=rngs())


def test_it_is_built_by_name():
  sizes = {key: TINY[key] for key in ("width", "groups", "stem")}
  spec = classifier("resnet", sizes, TINY["input_shape"], 3, (0.0, 1.0))
  again = ModelSpec.from_json(spec.to_json())
  expected = num_parameters(lambda: ResNet(**TINY, rngs=rngs()))
  assert num_parameters(lambda: again.build(0)) == expected
