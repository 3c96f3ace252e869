"""A primitive is its name and its parameters: rearrangements of weights, against a float64 loop."""

import functools
import types

import float64_loop
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from comparison import normal, plan_of
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from dp_jax.gradients.ghost import structure

UNITS = normal(4, 3, 4)
IDS = jnp.asarray(np.random.default_rng(1).integers(0, 6, (4, 5)), jnp.int32)


def _total(x):
  return jnp.sum(jnp.tanh(x) ** 2 * jnp.linspace(0.5, 1.5, x.size, dtype=x.dtype).reshape(x.shape))


def _product(rearrange):
  """Of data with a rearranged weight."""
  return lambda p, u, k: _total(u @ rearrange(p["w"]))


def _scan(w, u, **options):
  return _total(lax.scan(lambda c, layer: (jnp.tanh(c @ layer), None), u, w, **options)[0])


def _conv(k, u):
  numbers = ("NHC", "HIO", "NHC")
  return _total(lax.conv_general_dilated(u[None], k, (1,), "SAME", dimension_numbers=numbers))


def _barrier(p, u, k):
  a, x, b = lax.optimization_barrier((p["w"], u, p["v"]))
  return _total(x @ a) + _total(x @ b)


# name: (loss, params, units, rule of the parameter w)
CASES = {
  "reshape F": (
    _product(lambda w: w.reshape(4, 6, order="F")), {"w": normal(6, 4)}, UNITS, "product"
  ),
  "reshape F of three axes": (
    _product(lambda w: w.reshape(4, 6, order="F")), {"w": normal(2, 3, 4)}, UNITS, "product"
  ),
  "ravel F": (
    _product(lambda w: w.ravel(order="F").reshape(4, 6)), {"w": normal(6, 4)}, UNITS, "product"
  ),
  "reshape with dimensions": (
    _product(lambda w: lax.reshape(w, (4, 6), dimensions=(1, 0, 2))), {"w": normal(2, 3, 4)},
    UNITS, "product",
  ),
  "a square weight, transposed by a reshape, used twice": (
    lambda p, u, k: _total(u @ lax.reshape(p["w"], (4, 4), dimensions=(1, 0))) + _total(u @ p["w"]),
    {"w": normal(4, 4)}, UNITS, "instantiate",
  ),
  "the same, used twice alike": (
    lambda p, u, k:
      _total(u @ lax.reshape(p["w"], (4, 4), dimensions=(1, 0))) + _total(u @ p["w"].T),
    {"w": normal(4, 4)}, UNITS, "product",
  ),
  "permuted by einsum": (
    lambda p, u, k: _total(jnp.einsum("tc,bca->tba", u, p["w"])), {"w": normal(2, 4, 3)}, UNITS,
    "product",
  ),
  "transpose, then reshape": (
    _product(lambda w: w.T.reshape(4, 6)), {"w": normal(6, 4)}, UNITS, "product"
  ),
  "rot90": (_product(jnp.rot90), {"w": normal(6, 4)}, UNITS, "product"),
  "flipped, and as it is": (
    lambda p, u, k: _total(u @ p["w"][::-1]) + _total(u @ p["w"]), {"w": normal(4, 4)}, UNITS,
    "instantiate",
  ),
  "broadcast_in_dim that adds axes": (
    _product(lambda w: lax.broadcast_in_dim(w, (1, 4, 1, 3), (1, 3))[0, :, 0]),
    {"w": normal(4, 3)}, UNITS, "product",
  ),
  "broadcast_in_dim that repeats": (
    _product(lambda w: lax.broadcast_in_dim(w, (4, 5), (0, 1))), {"w": normal(4, 1)}, UNITS,
    "instantiate",
  ),
  "reversed scan": (
    lambda p, u, k: _scan(p["w"], u, reverse=True), {"w": normal(3, 4, 4)}, UNITS, "product"
  ),
  "scan over transposed layers": (
    lambda p, u, k: _scan(lax.reshape(p["w"], (4, 4, 4), dimensions=(1, 0, 2)), u),
    {"w": normal(4, 4, 4)}, UNITS, "instantiate",
  ),
  "scan over flipped layers": (
    lambda p, u, k: _scan(p["w"][::-1], u), {"w": normal(3, 4, 4)}, UNITS, "instantiate"
  ),
  "convolution with a kernel in order F": (
    lambda p, u, k: _conv(p["w"].reshape(3, 4, 5, order="F"), u), {"w": normal(5, 4, 3)}, UNITS,
    "convolution",
  ),
  "convolution with a flipped kernel": (
    lambda p, u, k: _conv(jnp.flip(p["w"], 0), u), {"w": normal(2, 4, 3)}, UNITS, "convolution"
  ),
  "transposed convolution": (
    lambda p, u, k: _total(lax.conv_transpose(
      u[None], p["w"], (2,), "SAME", dimension_numbers=("NHC", "HIO", "NHC"),
      transpose_kernel=True)),
    {"w": normal(3, 5, 4)}, UNITS, "convolution",
  ),
  "table in order F": (
    lambda p, u, k: _total(p["w"].reshape(6, 4, order="F")[u]), {"w": normal(3, 8)}, IDS, "lookup"
  ),
  "tied table in order F": (
    lambda p, u, k: _total(p["w"][u] @ p["w"].reshape(4, 6, order="F")), {"w": normal(6, 4)}, IDS,
    "instantiate",
  ),
  "inside jit and remat": (
    lambda p, u, k: _total(jax.jit(jax.checkpoint(
      lambda w, x: jnp.sin(x @ w.reshape(4, 6, order="F"))))(p["w"], u)),
    {"w": normal(6, 4)}, UNITS, "product",
  ),
  "weights and data in one barrier": (
    _barrier, {"w": normal(4, 4), "v": normal(4, 4)}, UNITS, "product"
  ),
  "weights mapped in the loss": (
    lambda p, u, k: _total(jax.vmap(lambda w: u @ w, in_axes=2, out_axes=1)(p["w"])),
    {"w": normal(4, 3, 2)}, UNITS, "product",
  ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_rearranged_weights(name):
  loss, params, units, rule = CASES[name]
  assert float64_loop.errors(loss, params, units, ("ghost",))["ghost"] < 1e-4
  assert plan_of(loss, params, units)["w"] == rule


def _step(rng, shape):
  """One rearrangement of an array of this shape, and the shape after it."""
  order = tuple(int(i) for i in rng.permutation(len(shape)))
  sides = [d for d in range(1, 25) if 24 % d == 0]
  first = int(rng.choice(sides))
  second = int(rng.choice([d for d in sides if 24 // first % d == 0]))
  new = (first, second, 24 // first // second)
  axis = int(rng.integers(len(shape)))
  steps = [
    (lambda w: w.transpose(order), tuple(shape[i] for i in order)),
    (lambda w: w.reshape(new), new),
    (lambda w: w.reshape(new, order="F"), new),
    (lambda w: lax.reshape(w, new, dimensions=order), new),
    (lambda w: jnp.expand_dims(w, axis), (*shape[:axis], 1, *shape[axis:])),
    (jnp.squeeze, tuple(d for d in shape if d != 1)),
    (jax.jit(lambda w: w.reshape(new[::-1]).T), new),
    (lambda w: jnp.flip(w, axis), shape),
    (lambda w: lax.optimization_barrier((w, jnp.sin(w)))[0], shape),
    (lambda w: jnp.moveaxis(w, axis, 0), (shape[axis], *shape[:axis], *shape[axis + 1 :])),
  ]
  return steps[rng.integers(len(steps))]


def _chain(rng):
  steps, shape = [], (4, 6)
  for _ in range(rng.integers(1, 6)):
    step, shape = _step(rng, shape)
    steps.append(step)
  steps.append([lambda w: w.reshape(4, 6), lambda w: w.reshape(6, 4).T][rng.integers(2)])
  return lambda w: functools.reduce(lambda w, step: step(w), steps, w)


def test_random_chains_of_rearrangements():
  """Sixty weights of one loss, each multiplied with data once or twice, compared one by one."""
  rng = np.random.default_rng(0)
  chains = {f"{i:02}": [_chain(rng) for _ in range(1 + i % 2)] for i in range(60)}

  def loss(params, unit, key):
    del key
    return sum(_total(unit @ f(params[name])) for name, some in chains.items() for f in some)

  params = {name: normal(4, 6, seed=i) for i, name in enumerate(chains)}
  expected, _ = float64_loop.loop_in_float64(loss, params, UNITS)
  grad = float64_loop.clipped_grad(loss, 1.0, engine="ghost")
  total, _ = jax.jit(grad).lower(params, UNITS).compile(float64_loop.QUICK)(params, UNITS)
  for name, reference in zip(params, expected, strict=True):
    np.testing.assert_allclose(total[name], reference, atol=1e-3 * np.linalg.norm(reference))


def _equations():
  """One equation of every primitive that has a rule and that the installed jax makes."""
  w, mesh = jnp.ones((2, 3)), jax.make_mesh((1,), ("a",), (jax.sharding.AxisType.Auto,))
  place = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("a"))
  makers = [
    lambda: jax.jit(jnp.sin)(w), lambda: jax.checkpoint(jnp.sin)(w), lambda: w @ w.T,
    lambda: lax.scan(lambda c, x: (c + x, None), w[0], w), lambda: w.T.reshape(6),
    lambda: lax.reshape(w, (6,), dimensions=(1, 0)), lambda: jnp.copy(w), lambda: lax.rev(w, (0,)),
    lambda: w.astype(jnp.bfloat16)[:, None].squeeze(1), lambda: lax.optimization_barrier(w),
    lambda: lax.conv(w[None, None], w[None, None], (1, 1), "SAME"), lambda: w[jnp.arange(2)],
    lambda: checkpoint_name(w, "a"),
    lambda: lax.with_sharding_constraint(w, place),
  ]  # fmt: skip
  for maker in makers:
    yield from jax.make_jaxpr(maker)().eqns


def test_the_installed_jax_has_no_parameter_that_a_rule_does_not_know():
  """Or it has become another primitive: then its rule is to be looked at again."""
  seen = set()
  for eqn in _equations():
    name = eqn.primitive.name
    if name in structure._PARAMETERS:
      seen.add(name)
      assert set(eqn.params) <= set(structure._PARAMETERS[name]), name
      assert structure.is_known(eqn)
  ruled = {"broadcast_in_dim", "conv_general_dilated", "convert_element_type", "copy",
           "dot_general", "gather", "name", "optimization_barrier", "reshape", "rev", "scan",
           "sharding_constraint", "squeeze", "transpose"}  # fmt: skip
  assert ruled <= seen
  assert seen & {"jit", "pjit"}
  assert seen & {"remat2", "checkpoint"}


def test_a_parameter_of_another_version_is_a_use_like_any_other():
  """None is what it says where it is not asked for."""
  (eqn,) = jax.make_jaxpr(lambda w: w.T)(jnp.ones((2, 3))).eqns
  for value, known in ((None, True), (False, False), (1, False)):
    other = types.SimpleNamespace(primitive=eqn.primitive, params={**eqn.params, "turns": value})
    assert structure.is_known(other) == known


def test_rules_that_do_not_know_a_parameter_give_way(monkeypatch):
  """All of them at once: gradients of the parameters themselves are right whatever they are."""
  monkeypatch.setattr(structure, "_PARAMETERS", {})
  for name in ("reshape F", "reversed scan", "convolution with a flipped kernel",
               "tied table in order F"):  # fmt: skip
    loss, params, units, _ = CASES[name]
    assert float64_loop.errors(loss, params, units, ("auto",))["auto"] < 1e-4
    assert plan_of(loss, params, units)["w"] == "instantiate"
