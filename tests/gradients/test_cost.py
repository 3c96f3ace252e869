"""Which engine "auto" takes, and that the loop keeps what was promised of its sums."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dp_jax.gradients import compensated as pairs
from dp_jax.gradients.clipping import MEMORY_BUDGET, clipped_grad
from dp_jax.gradients.engines import cost
from dp_jax.gradients.ghost.explain import explain
from dp_jax.gradients.ghost.traced import trace


def _layer(params, unit, key):
  del key
  return jnp.sum(jnp.tanh(unit @ params["w"]) ** 2)


def _scanned(params, unit, key):
  """Half of the operations, as often as there are layers."""
  del key
  return jnp.sum(jax.lax.scan(lambda c, w: (jnp.tanh(c @ w), None), unit, params["w"])[0])


def _convolved(stride, params, unit, key):
  del key
  out = jax.lax.conv_general_dilated(
    unit[None, :, : params["k"].shape[1]], params["k"], (stride,), "VALID",
    dimension_numbers=("NHC", "HIO", "NHC"),
  )  # fmt: skip
  return _layer(params, unit, None) + jnp.sum(out)


def _shape(*shape):
  return jax.ShapeDtypeStruct(shape, jnp.float32)


def _is_cheaper(loss, params, unit, memory_budget=MEMORY_BUDGET):
  """Traced as `explain` does: nothing is computed."""
  found = []
  jax.eval_shape(lambda p, u: found.append(trace(loss, p, u, None)), params, unit)
  return cost.loop_is_cheaper(found[0], params, memory_budget)


@pytest.fixture
def one_device(monkeypatch):
  monkeypatch.setattr(jax, "device_count", lambda: 1)


@pytest.mark.usefixtures("one_device")
def test_many_tokens_are_looped_and_few_are_not():
  params = {"w": _shape(256, 256)}
  assert _is_cheaper(_layer, params, _shape(196, 256))
  assert not _is_cheaper(_layer, params, _shape(16, 256))
  # The Gram matrix of one token costs nothing, however much the rest does.
  assert not _is_cheaper(_layer, params, _shape(1, 256))
  assert not _is_cheaper(_layer, params, _shape(196, 256), memory_budget=256 * 256 * 8 - 1)


@pytest.mark.usefixtures("one_device")
def test_norms_that_are_a_small_share_are_no_reason():
  """As those of low-rank adapters beside what is frozen."""
  frozen = jnp.zeros((256, 8192))

  def loss(params, unit, key):
    return _layer(params, unit, key) + jnp.sum(jnp.tanh(unit @ frozen))

  assert not _is_cheaper(loss, {"w": _shape(256, 8)}, _shape(196, 256))


@pytest.mark.usefixtures("one_device")
def test_convolutions_are_not_looped_but_patches_are():
  params, unit = {"w": _shape(256, 256), "k": _shape(4, 3, 8)}, _shape(196, 256)
  assert not _is_cheaper(functools.partial(_convolved, 2), params, unit)
  assert _is_cheaper(functools.partial(_convolved, 4), params, unit)


def test_not_where_units_may_lie_on_several_devices(monkeypatch):
  params, unit = {"w": _shape(256, 256)}, _shape(196, 256)
  assert jax.device_count() > 1 and not _is_cheaper(_layer, params, unit)
  monkeypatch.setattr(jax, "device_count", lambda: 1)
  monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
  assert not _is_cheaper(_layer, params, unit)


def test_operations_are_counted_in_every_layer():
  def loss(w, x):
    return _scanned({"w": w}, x, None)

  jaxpr = jax.make_jaxpr(loss)(jnp.zeros((5, 16, 16)), jnp.zeros((10, 16))).jaxpr
  assert cost.product_flops(jaxpr) == 5 * 2 * 10 * 16 * 16
  patches = jax.make_jaxpr(functools.partial(_convolved, 4))(
    {"w": jnp.zeros((32, 4)), "k": jnp.zeros((4, 3, 8))}, jnp.zeros((16, 32)), None
  )
  assert cost.product_flops(patches.jaxpr) == 2 * 16 * 32 * 4 + 2 * 4 * 12 * 8


@pytest.mark.usefixtures("one_device")
def test_auto_loops_and_says_so():
  rng = np.random.default_rng(0)
  params = {"w": jnp.asarray(rng.standard_normal((64, 32)), jnp.float32)}
  units = jnp.asarray(rng.standard_normal((5, 196, 64)), jnp.float32)
  mask = np.array([True, True, False, True, True])
  auto = clipped_grad(_layer, 1.0)
  assert explain(auto, params, units).startswith("loop: gradients of 2 units, 16,384 bytes, since")
  total, aux = auto(params, units, mask)
  same, _ = clipped_grad(_layer, 1.0, engine="loop")(params, units, mask)
  np.testing.assert_array_equal(total["w"], same["w"])
  expected, reference = clipped_grad(_layer, 1.0, engine="vmap")(params, units, mask)
  np.testing.assert_allclose(total["w"], expected["w"], rtol=1e-5, atol=1e-6)
  np.testing.assert_allclose(aux.norms, reference.norms, rtol=1e-5)
  assert "loop" not in explain(clipped_grad(_layer, 1.0, engine="ghost"), params, units)


@pytest.mark.parametrize("size", [1, 2, 31, 70])
@pytest.mark.parametrize("microbatch_size", [None, 7, 100])
@pytest.mark.parametrize("exact", [False, True])
def test_every_unit_is_added_once(size, microbatch_size, exact):
  """In blocks of 32, and as pairs, whatever the number."""
  units = jnp.asarray(2.0 ** np.arange(-size, 0)[:, None], jnp.float32)
  grad_fn = clipped_grad(
    lambda w, unit, key: jnp.sum(w * unit), 1.0, engine="loop", microbatch_size=microbatch_size,
    compensated=True, exact=exact,
  )  # fmt: skip
  pair, aux = grad_fn(jnp.zeros(1), units)
  total = pairs.collapse(pair)
  np.testing.assert_allclose(total, np.asarray(units, np.float64).sum(), rtol=1e-6)
  np.testing.assert_allclose(aux.norms, units[:, 0], rtol=1e-6)


def test_a_reference_between_units_is_refused():
  reference = jax.new_ref(jnp.zeros(()))

  def loss(w, unit, key):
    del key
    before = reference[...]
    reference[...] = before + jnp.mean(unit)
    return jnp.sum(w) * before

  with pytest.raises(ValueError, match="mutable reference"):
    clipped_grad(loss, 1.0, engine="loop")(jnp.zeros(3), jnp.ones((4, 3)))


def test_equations_without_outputs_or_of_other_kinds_are_counted():
  """A callback has no output; products in groups count, and the dearest branch of a `cond`."""

  def flops(function, *shapes):
    return cost.product_flops(jax.make_jaxpr(function)(*(jnp.zeros(s) for s in shapes)).jaxpr)

  def shown(x, w):
    jax.debug.callback(lambda: None)
    return x @ w

  def branches(x, w):
    return jax.lax.cond(x[0, 0] > 0, lambda: x @ w @ w, lambda: x @ w)

  def groups(x, w):
    return jax.lax.ragged_dot(x, w, jnp.array([2, 3], jnp.int32))

  assert flops(shown, (5, 4), (4, 4)) == 2 * 5 * 4 * 4
  assert flops(branches, (5, 4), (4, 4)) == 2 * 2 * 5 * 4 * 4
  assert flops(groups, (5, 4), (2, 4, 3)) == 2 * 5 * 4 * 3


@pytest.mark.parametrize(
  "options",
  [{"rhs_dilation": (2,)}, {"lhs_dilation": (2,)}, {"feature_group_count": 3},
   {"batch_group_count": 2}],
)  # fmt: skip
def test_a_convolution_is_a_product_of_patches_only_where_nothing_else_is_asked_for(options):
  groups = options.get("feature_group_count", 1)

  def convolve(x, k):
    numbers = ("NHC", "HIO", "NHC")
    return jax.lax.conv_general_dilated(x, k, (4,), ((0, 0),), dimension_numbers=numbers, **options)

  jaxpr = jax.make_jaxpr(convolve)(jnp.zeros((2, 16, 3)), jnp.zeros((4, 3 // groups, 6))).jaxpr
  assert np.isinf(cost.product_flops(jaxpr))
