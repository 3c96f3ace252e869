"""Vision transformer: published parameter counts, shapes, and independence of examples."""

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
  rngs,
  traced,
)

from dp_jax.models.build import ModelSpec
from dp_jax.models.vision import vit

TINY = {"input_shape": (32, 16, 3), "num_classes": 3, "depth": 1, "width": 8, "heads": 2}


@pytest.mark.parametrize(("size", "count"), [
  ("ti16", 5_717_416),
  ("s16", 22_050_664),
  ("b16", 86_567_656),
])  # fmt: skip
def test_parameter_counts_are_the_published_ones(size, count):
  assert num_parameters(lambda: vit.build(size, **IMAGENET, rngs=rngs())) == count


def test_shapes_and_compute_dtype():
  def build(dtype):
    return vit.build("ti16", **IMAGENET, depth=2, dtype=dtype, rngs=rngs())

  check_shapes(build, (5, 1000), ((5, 224, 224, 3), jnp.float32))


def test_examples_are_independent_and_everything_has_a_gradient():
  x = images(3, 32, 16, 3)
  check_units(lambda: vit.build("ti16", **TINY, rngs=rngs()), x[:2], x[2])


def test_patches_are_told_apart_by_their_positions_alone():
  """Swapping two patches changes nothing once their positions are swapped too."""
  functional, arrays = filled(lambda: vit.build("ti16", **TINY, rngs=rngs()))
  logits = forward(functional)
  x = images(2, 32, 16, 3)
  swapped = np.concatenate([x[:, 16:], x[:, :16]], axis=1)
  before = logits(arrays, x)
  assert np.abs(logits(arrays, swapped) - before).max() > 1e-3
  arrays["positions"] = arrays["positions"][[0, 2, 1]]
  np.testing.assert_allclose(logits(arrays, swapped), before, rtol=1e-4, atol=1e-5)


def test_sizes_that_do_not_fit_are_refused():
  for size, changes, named in [
    ("l14", {}, "l14.*ti16, s16, b16"),
    ("ti16", {"input_shape": (30, 32, 3)}, "divisible by patch=16"),
    ("ti16", {"heads": 3}, "divisible by heads=3"),
  ]:
    with pytest.raises(ValueError, match=named):
      vit.build(size, **{**TINY, **changes}, rngs=rngs())


def test_it_is_built_by_name():
  sizes = {"size": "ti16", "depth": 2, "width": 8, "heads": 2}
  spec = ModelSpec.from_json(classifier("vit", sizes, (32, 16, 3), 3, (0.0, 1.0)).to_json())
  jaxpr = traced(lambda: spec.build(0), ((1, 32, 16, 3), jnp.float32))
  assert jaxpr.out_avals[0].shape == (1, 3)
  with pytest.raises(ValueError, match="has no widths"):
    classifier("vit", {"widths": 3}, (32, 16, 3), 3, (0.0, 1.0)).build(0)
