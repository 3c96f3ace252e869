"""A zoo of losses under every engine: each is clipped right, or refused by name.

Right is what a loop in this file says, which takes the gradient of one unit after the other,
without vmap, and clips and adds in float64. To add a loss, add a line to LOSSES.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.custom_batching import custom_vmap, sequential_vmap
from jax.experimental import io_callback
from jax.experimental import pallas as pl
from jax.sharding import PartitionSpec as P

import dp_jax

ENGINES = ("vmap", "ghost", "loop", "auto")
C = 0.5
NUM_UNITS, WIDTH = 4, 3
# They run once: compiling takes longer than computing.
QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}

Loss = Callable[[Any, Any, Any], Any]


@dataclasses.dataclass(frozen=True)
class Case:
  """A loss, and what is to come of it.

  Attributes:
    loss: (params, unit, key) -> scalar.
    refused: engine, or "all" -> what the refusal says; the engines left out serve it.
    params, units: what it is called with, units with a leading axis.
    generator: of the keys of the units.
    tolerance: of the sum, in clip norms, where arithmetic is less than float32.
  """

  loss: Loss
  refused: dict[str, str] = dataclasses.field(default_factory=dict)
  params: Any = dataclasses.field(default_factory=lambda: PARAMS)
  units: Any = dataclasses.field(default_factory=lambda: UNITS)
  generator: str = "threefry2x32"
  tolerance: float = 1e-5


def _normal(*shape: int, seed: int = 0) -> jax.Array:
  rng = np.random.default_rng([seed, *shape])
  return jnp.asarray(rng.standard_normal(shape), jnp.float32)


PARAMS = {"w": _normal(WIDTH, WIDTH), "b": _normal(WIDTH)}
UNITS = _normal(NUM_UNITS, WIDTH, seed=1)


def dense(params: Any, x: Any) -> Any:
  return jnp.sum(jnp.tanh(x @ params["w"] + params["b"]) ** 2)


def after(change: Callable[[Any], Any]) -> Loss:
  """A dense layer on a changed unit."""
  return lambda params, unit, key: dense(params, change(unit))


def in_backward(change: Callable[[Any], Any]) -> Loss:
  """Changes the cotangent of the layer, in the backward rule of a custom derivative."""

  @jax.custom_vjp
  def same(x: Any) -> Any:
    return x

  same.defvjp(lambda x: (x, None), lambda _, c: (change(c),))
  return lambda params, unit, key: jnp.sum(jnp.tanh(same(unit @ params["w"])) * params["b"])


def nested(change: Callable[[Any], Any]) -> Loss:
  """Deep inside: a jitted, checkpointed conditional in a scan."""

  def body(x: Any, _: Any) -> Any:
    return jax.lax.cond(x[0] > -99.0, lambda: jnp.tanh(change(x)), lambda: x), None

  @jax.jit
  @jax.checkpoint
  def deep(x: Any) -> Any:
    return jax.lax.scan(body, x, None, length=2)[0]

  return after(deep)


@custom_vmap
def centred(x):
  """The identity, whose batching rule is a batch normalisation."""
  return 1.0 * x


@centred.def_vmap
def _(size, batched, x):
  del size
  return (x - x.mean(0) if batched[0] else x), True


def outside(vmap_method: str | None) -> Callable[[Any], Any]:
  """A callback that divides by the largest entry of what it is given, a batch as a whole."""

  def change(x: Any) -> Any:
    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    scaled = lambda x: np.asarray(x / np.max(np.abs(x)), np.float32)  # noqa: E731
    return jax.pure_callback(scaled, shape, x, vmap_method=vmap_method)

  return change


def counted(x: Any) -> Any:
  """Adds how often it was called: what one unit leaves, the next one finds."""
  calls = []

  def call(x: Any) -> Any:
    calls.append(x)
    return np.asarray(x + len(calls), np.float32)

  return io_callback(call, jax.ShapeDtypeStruct(x.shape, x.dtype), x)


def told(ordered: bool) -> Callable[[Any], Any]:
  def change(x: Any) -> Any:
    jax.debug.callback(lambda x: None, x, ordered=ordered)
    return x

  return change


def kernel(x: Any) -> Any:
  def double(source: Any, target: Any) -> None:
    target[...] = 2.0 * source[...]

  return pl.pallas_call(double, jax.ShapeDtypeStruct(x.shape, x.dtype), interpret=True)(x)


def within_devices(x: Any) -> Any:
  """A layer over a mesh of its own: its collective stays within the unit."""
  mesh = jax.make_mesh((3,), ("inner",), axis_types=(jax.sharding.AxisType.Auto,))

  def part(x: Any) -> Any:
    return x / jax.lax.psum(jnp.sum(x**2), "inner")

  return jax.shard_map(part, mesh=mesh, in_specs=P("inner"), out_specs=P("inner"))(x)


def within_records(x: Any) -> Any:
  """An axis that the loss binds itself."""
  return jax.vmap(lambda r: r - jax.lax.pmean(r, "records"), axis_name="records")(x)


def bits_of_hardware(x: Any) -> Any:
  seed = jax.lax.bitcast_convert_type(jnp.pad(x, (0, 1)), jnp.uint32)
  return x * (jax.lax.rng_bit_generator(seed, (WIDTH,))[1] % 2).astype(jnp.float32)


def own_key(generator: str) -> Callable[[Any], Any]:
  def change(x: Any) -> Any:
    key = jax.random.key(jnp.int32(1000 * x[0]), impl=generator)
    return x * jax.random.bernoulli(key, 0.5, x.shape)

  return change


def dropout(params: Any, unit: Any, key: Any) -> Any:
  return dense(params, unit * jax.random.bernoulli(key, 0.5, unit.shape))


def own_reference(x: Any) -> Any:
  ref = jax.new_ref(x)
  ref[...] = ref[...] ** 2
  return ref[...]


OUTER = jax.new_ref(jnp.zeros(WIDTH))


def outer_reference(x: Any) -> Any:
  before = OUTER[...]
  OUTER[...] = x
  return x + before


def by_vmap(what: str) -> dict[str, str]:
  """Refused by the engines that rely on vmap."""
  return {"vmap": what, "ghost": what}


CUSTOM, METHOD, GENERATOR = "batching rule of its own", "vmap_method=", "the generator"


def rearranged(params: Any, unit: Any, key: Any) -> Any:
  """Weights in an order that their shape does not tell."""
  del key
  flipped = jax.lax.reshape(params["w"], (WIDTH, WIDTH), dimensions=(1, 0))
  columns = jnp.reshape(params["w"], (WIDTH, WIDTH), order="F") + jnp.ravel(params["b"], order="F")
  return jnp.sum(jnp.tanh(unit @ flipped) ** 2) + jnp.sum(jnp.tanh(unit @ columns))


def one_row(params: Any, unit: Any, key: Any) -> Any:
  """Every token looks up the same row."""
  del key
  rows = params["w"][jnp.int32(unit * 0) + 1]
  return jnp.sum(jnp.tanh(rows * unit[:, None]) ** 2)


def ragged(params: Any, unit: Any, key: Any) -> Any:
  del key
  stacked = jnp.stack([params["w"], 2 * params["w"]])
  tokens = jnp.stack([unit, unit**2, -unit])
  return jnp.sum(jnp.tanh(jax.lax.ragged_dot(tokens, stacked, jnp.array([1, 2], jnp.int32))))


def half(dtype: Any) -> Loss:
  """Computed in half precision, of float32 parameters."""

  def loss(params: Any, unit: Any, key: Any) -> Any:
    del key
    low = jax.tree.map(lambda p: p.astype(dtype), params)
    return dense(low, unit.astype(dtype)).astype(jnp.float32)

  return loss


LOSSES: dict[str, Case] = {
  "a dense layer": Case(after(lambda x: x)),
  "deep inside, harmless": Case(nested(lambda x: 2.0 * x)),
  "weights rearranged": Case(rearranged),
  "tokens on one row": Case(one_row),
  "a ragged product": Case(
    ragged, {"vmap": "cannot map", "ghost": "no rule for the primitive 'ragged_dot_general'"}
  ),
  "bfloat16": Case(half(jnp.bfloat16), tolerance=0.02),
  "float16": Case(half(jnp.float16), tolerance=0.005),
  "an axis of its own": Case(after(within_records)),
  "a mesh of its own": Case(after(within_devices), by_vmap(CUSTOM)),
  "custom_vmap": Case(after(centred), by_vmap(CUSTOM)),
  "custom_vmap, deep inside": Case(nested(centred), by_vmap(CUSTOM)),
  "custom_vmap, backward": Case(in_backward(centred), by_vmap(CUSTOM)),
  "sequential_vmap": Case(after(sequential_vmap(jnp.tanh)), by_vmap(CUSTOM)),
  "a kernel": Case(after(kernel), by_vmap(CUSTOM)),
  "a callback, sequential": Case(after(outside("sequential"))),
  "a callback, unrolled": Case(after(outside("sequential_unrolled"))),
  "a callback, broadcast": Case(after(outside("broadcast_all")), by_vmap(METHOD)),
  "a callback, expanded": Case(after(outside("expand_dims")), by_vmap(METHOD)),
  "a callback, unsaid": Case(after(outside(None)), by_vmap(METHOD)),
  "a callback, deep inside": Case(
    after(lambda x: jax.jit(jax.checkpoint(outside("expand_dims")))(jax.lax.stop_gradient(x))),
    by_vmap(METHOD),
  ),
  "a callback, backward": Case(in_backward(outside("broadcast_all")), by_vmap(METHOD)),
  "a callback with effects": Case(after(counted), {"all": "'io_callback'"}),
  "a callback with effects, backward": Case(in_backward(counted), {"all": "'io_callback'"}),
  "a callback for debugging": Case(after(told(False))),
  "a callback for debugging, ordered": Case(after(told(True)), by_vmap("ordered")),
  "state of the hardware": Case(
    after(lambda x: x * jax.lax.rng_uniform(0.0, 1.0, (WIDTH,))), {"all": "'rng_uniform'"}
  ),
  "bits of the hardware": Case(after(bits_of_hardware), by_vmap("'rng_bit_generator'")),
  "a reference of its own": Case(after(own_reference), {"ghost": "reference"}),
  "a reference from outside": Case(after(outer_reference), {"all": "mutable reference"}),
  "dropout": Case(dropout),
  "dropout, rbg": Case(dropout, by_vmap(GENERATOR), generator="rbg"),
  "dropout, unsafe_rbg": Case(dropout, by_vmap(GENERATOR), generator="unsafe_rbg"),
  "a key of its own": Case(after(own_key("threefry2x32"))),
  "a key of its own, rbg": Case(after(own_key("rbg")), by_vmap(GENERATOR)),
  "a key of its own, unsafe_rbg": Case(after(own_key("unsafe_rbg")), by_vmap(GENERATOR)),
}  # fmt: skip
LOSSES["an axis of its own"] = dataclasses.replace(
  LOSSES["an axis of its own"], units=_normal(NUM_UNITS, 2, WIDTH)
)


def keys_of(case: Case) -> jax.Array:
  one = jax.random.key(7, impl=case.generator)
  return jnp.stack([jax.random.fold_in(one, i) for i in range(NUM_UNITS)])


def expected(case: Case, mask: np.ndarray) -> list[np.ndarray]:
  """The clipped sum, one unit after the other: no vmap, and float64 after the gradient."""
  keys = keys_of(case)
  gradient = jax.jit(jax.grad(case.loss))
  total = [np.zeros(x.shape) for x in jax.tree.leaves(case.params)]
  for i in np.flatnonzero(mask):
    found = gradient(case.params, jax.tree.map(lambda x, i=i: x[i], case.units), keys[i])
    leaves = [np.asarray(x, np.float64) for x in jax.tree.leaves(found)]
    norm = np.sqrt(sum(np.sum(x**2) for x in leaves))
    scale = min(1.0, C * (1 - 2.0**-10) / max(norm, 1e-300))
    total = [t + scale * x for t, x in zip(total, leaves, strict=True)]
  return total


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", LOSSES)
def test_every_loss_is_clipped_right_or_refused(name, engine):
  case = LOSSES[name]
  mask = np.arange(NUM_UNITS) != 1
  args = (case.params, case.units, jnp.asarray(mask), keys_of(case))
  grad_fn = jax.jit(dp_jax.clipped_grad(case.loss, C, engine=engine))
  said = case.refused.get("all", case.refused.get(engine))
  if said is not None:
    with pytest.raises(ValueError, match=said):
      grad_fn.lower(*args)
    return
  total, _ = grad_fn.lower(*args).compile(QUICK)(*args)
  for found, wanted in zip(jax.tree.leaves(total), expected(case, mask), strict=True):
    np.testing.assert_allclose(found, wanted, atol=case.tolerance * C)


# What uses an axis of an outer transformation. The last two do so in the gradient alone.
CROSS = {
  "pmean": after(lambda x: x - jax.lax.pmean(x, "data")),
  "psum": after(lambda x: x / jax.lax.psum(jnp.sum(x**2), "data")),
  "pmax": after(
    lambda x: x - jax.lax.stop_gradient(jax.lax.pmax(jax.lax.stop_gradient(x), "data"))
  ),
  "all_gather": after(lambda x: x - jax.lax.all_gather(x, "data").mean(0)),
  "ppermute": after(lambda x: x + jax.lax.ppermute(x, "data", [(0, 1), (1, 0)])),
  "axis_index": after(lambda x: x * (1 + jax.lax.axis_index("data"))),
  "psum, deep inside": nested(lambda x: x - jax.lax.pmean(x, "data")),
  "psum, backward": in_backward(lambda c: jax.lax.psum(c, "data")),
}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", CROSS)
@pytest.mark.parametrize("outer", ["vmap", "shard_map", "pmap", "nothing"])
def test_an_axis_of_an_outer_transformation_is_refused(outer, name, engine):
  grad_fn = dp_jax.clipped_grad(CROSS[name], C, engine=engine)
  units = UNITS.reshape(2, 2, WIDTH)
  if outer == "vmap":
    run = jax.vmap(grad_fn, (None, 0), axis_name="data")
  elif outer == "pmap":
    run = jax.pmap(grad_fn, "data", in_axes=(None, 0))
  elif outer == "shard_map":
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    local = lambda params, units: grad_fn(params, units[0])[0]  # noqa: E731
    run = jax.shard_map(local, mesh=mesh, in_specs=(P(), P("data")), out_specs=P(), check_vma=False)
  else:
    run, units = grad_fn, UNITS
  with pytest.raises(ValueError, match=r"collective across units.*data"):
    run(PARAMS, units)


@pytest.mark.parametrize("name", ["custom_vmap", "a callback, broadcast", "dropout, rbg"])
@pytest.mark.parametrize("jitted", [False, True])
def test_an_outer_vmap_over_groups_does_not_mix_them(name, jitted):
  """The loop calls no batching rule; an outer vmap of it would."""
  case = LOSSES[name]
  grad_fn = dp_jax.clipped_grad(case.loss, C)
  run = jax.vmap(jax.jit(grad_fn) if jitted else grad_fn, (None, 0, 0, 0))
  mask = np.ones(NUM_UNITS, bool)
  halves = jax.tree.map(
    lambda x: x.reshape(2, 2, *x.shape[1:]), (case.units, jnp.asarray(mask), keys_of(case))
  )
  total, _ = run(case.params, *halves)
  for found, wanted in zip(jax.tree.leaves(total), expected(case, mask), strict=True):
    np.testing.assert_allclose(found.sum(0), wanted, atol=2e-5 * C)
