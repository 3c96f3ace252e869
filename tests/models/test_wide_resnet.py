"""Wide ResNet: parameter counts, standardised kernels, and independence of examples."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import classifier
from tracing import (
  check_shapes,
  check_units,
  filled,
  forward,
  images,
  num_parameters,
  rngs,
)

from dp_jax.models.build import ModelSpec
from dp_jax.models.vision.wide_resnet import StandardisedConv, WideResNet

CIFAR = {"input_shape": (32, 32, 3), "num_classes": 10}
TINY = {
  "input_shape": (8, 8, 3), "num_classes": 3, "depth": 10, "width": 1, "groups": 1,
}  # fmt: skip


@pytest.mark.parametrize(("depth", "published", "convolutions"), [
  (16, 2_748_890, (5, 5, 5)),  # WRN-16-4 and WRN-40-4 of Zagoruyko and Komodakis
  (40, 8_949_210, (13, 13, 13)),
])  # fmt: skip
def test_parameter_counts(depth, published, convolutions):
  def count(standardise):
    return num_parameters(
      lambda: WideResNet(
        **CIFAR, depth=depth, weight_standardisation=standardise, rngs=rngs()
      )
    )  # fmt: skip

  shortcut_norms = 2 * (16 + 64 + 128)
  assert count(False) == published + shortcut_norms
  channels = 16 + sum(n * width for n, width in zip(convolutions, (64, 128, 256), strict=True))
  assert count(True) == published + shortcut_norms + 2 * channels, "a gain and a bias each"


@pytest.mark.parametrize("standardise", [True, False])
def test_shapes_and_compute_dtype(standardise):
  def build(dtype):
    return WideResNet(**CIFAR, weight_standardisation=standardise, dtype=dtype, rngs=rngs())

  check_shapes(build, (5, 10), ((5, 32, 32, 3), jnp.float32))


@pytest.mark.parametrize("standardise", [True, False])
def test_examples_are_independent_and_everything_has_a_gradient(standardise):
  x = images(3, 8, 8, 3)
  check_units(
    lambda: WideResNet(**TINY, weight_standardisation=standardise, rngs=rngs()), x[:2], x[2]
  )


@pytest.mark.parametrize(("shift", "factor"), [(0.0, 1.0), (5.0, 1.0), (1.0, 100.0)])
def test_a_standardised_kernel_has_the_stated_mean_and_variance(shift, factor):
  """And so does not see the shift and scale of its parameter."""
  functional, arrays = filled(lambda: StandardisedConv(8, 6, 3, 2, jnp.float32, rngs()))
  standardised = jax.jit(lambda a: functional.bind(a).standardised())
  arrays["gain"] = np.arange(1, 7, dtype=np.float32)
  moved = {**arrays, "kernel": factor * arrays["kernel"] + np.float32(shift)}
  kernel = np.asarray(standardised(moved), np.float64)
  np.testing.assert_allclose(kernel.mean((0, 1, 2)), 0, atol=1e-5)
  np.testing.assert_allclose(kernel.var((0, 1, 2)) * 72, np.arange(1, 7) ** 2, rtol=1e-4)
  outputs = forward(functional)(moved, images(2, 8, 8, 8))
  assert outputs.shape == (2, 4, 4, 6)
  np.testing.assert_allclose(
    outputs, forward(functional)(arrays, images(2, 8, 8, 8)), rtol=1e-4, atol=1e-4
  )


def test_a_constant_kernel_is_standardised_to_zero():
  functional, arrays = filled(lambda: StandardisedConv(8, 6, 3, 1, jnp.float32, rngs()))
  arrays["kernel"] = np.ones_like(arrays["kernel"])
  np.testing.assert_array_equal(functional.bind(arrays).standardised(), 0)


def test_sizes_that_do_not_fit_are_refused():
  for changes, named in [({"depth": 18}, "depth=18"), ({"groups": 32}, "groups=32")]:
    with pytest.raises(ValueError, match=named):
      WideResNet(**{**TINY, **changes}, rngs=rngs())


def test_it_is_built_by_name():
  spec = classifier("wide_resnet", {"depth": 10, "width": 1}, (8, 8, 3), 3, (0.0, 1.0))
  again = ModelSpec.from_json(spec.to_json())
  expected = num_parameters(lambda: WideResNet(**TINY, rngs=rngs()))
  assert num_parameters(lambda: again.build(0)) == expected
