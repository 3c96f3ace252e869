"""P8: padding contributes exactly zero, also when it holds NaN."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import classifier

import dp_jax
from dp_jax.tasks.opening import build_task


def loss_fn(params, unit, key):
  del key
  return jnp.sum(jnp.tanh(unit @ params) ** 2)


PARAMS = jnp.asarray(np.random.default_rng(0).standard_normal((3, 2)), jnp.float32)
UNITS = np.random.default_rng(1).standard_normal((6, 3)).astype(np.float32)
MASK = np.array([1, 1, 1, 1, 0, 0], bool)


def _multiplied_by_mask(params, units, mask):
  """The broken variant: multiplies by the mask, and 0 * NaN is NaN."""
  grads = jax.vmap(jax.grad(loss_fn), (None, 0, None))(params, units, None)
  norms = jnp.sqrt(jnp.sum(grads**2, axis=(1, 2)))
  scales = jnp.minimum(1.0, 1 / norms) * mask
  return jnp.sum(grads * scales[:, None, None], axis=0)


def _clipped(params, units, mask):
  return dp_jax.clipped_grad(loss_fn, 1.0)(params, units, mask)[0]


def _is_unmoved_by_padding(total_of, filler):
  padded = UNITS.copy()
  padded[~MASK] = filler
  return np.array_equal(total_of(PARAMS, padded, MASK), total_of(PARAMS, UNITS, MASK))


@pytest.mark.parametrize("filler", [0.0, 1.0, 1e30, np.nan, np.inf, -np.inf])
def test_padding_adds_exactly_zero(filler):
  assert _is_unmoved_by_padding(_clipped, filler)


def test_multiplying_by_the_mask_is_caught():
  assert not _is_unmoved_by_padding(_multiplied_by_mask, np.nan)


@pytest.mark.parametrize("microbatch_size", [1, 2, 4])
def test_padding_of_inner_microbatches_too(microbatch_size):
  grad_fn = dp_jax.clipped_grad(loss_fn, 1.0, microbatch_size=microbatch_size)
  padded = UNITS.copy()
  padded[~MASK] = np.nan
  np.testing.assert_array_equal(grad_fn(PARAMS, padded, MASK)[0], grad_fn(PARAMS, UNITS, MASK)[0])


def test_a_masked_record_inside_a_unit_adds_zero():
  """A unit of K records with a mask: the masked ones move neither its loss nor its gradient."""
  from dp_jax.models.functional import split

  spec = classifier("convnet", {"widths": (4,), "strides": (1,), "groups": 2}, (4, 4, 1), 3, (0, 1))
  model, arrays = split(spec.build(0))
  task = build_task(model, spec)
  image = np.random.default_rng(2).random((2, 4, 4, 1)).astype(np.float32)
  mask = np.array([True, False])

  def grad_with(filler, label):
    unit = {
      "inputs": np.stack([image[0], np.full_like(image[1], filler)]),
      "label": np.array([1, label], np.int32),
      "record_mask": mask,
    }
    return jax.grad(task.loss, argnums=1)({}, arrays, unit, None)

  expected = grad_with(0.0, 0)
  for filler, label in [(np.nan, 0), (np.inf, 99), (1e30, -5)]:
    got = grad_with(filler, label)
    assert all(np.array_equal(got[name], expected[name]) for name in expected)
  assert any(np.any(expected[name] != 0) for name in expected)


def test_a_unit_that_is_not_finite_counts_as_zero():
  bad = UNITS.copy()
  bad[2] = np.nan
  without = MASK.copy()
  without[2] = False
  np.testing.assert_array_equal(_clipped(PARAMS, bad, MASK), _clipped(PARAMS, UNITS, without))
