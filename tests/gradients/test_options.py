"""What `clipped_grad` takes and refuses, however it is made, in every engine and configuration."""

import contextlib
import dataclasses
import functools

import float64_loop
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dp_jax
from dp_jax.gradients.clipping import ClippedGrad, clipped_grad
from dp_jax.gradients.engines.styles import make_rule
from dp_jax.gradients.parameters import check_params

ENGINES = float64_loop.ENGINES
UNITS = jnp.asarray(np.random.default_rng(0).standard_normal((3, 4)), jnp.float32)


def _loss(params, unit, key):
  del key
  return jnp.sum(jnp.tanh(unit * params["a"]) + params["b"] * unit)


PARAMS = {"a": jnp.ones(4), "b": jnp.zeros(4)}

REFUSED = [
  ({"clip_norm": 0.0}, "clip_norm must be a number from"),
  ({"clip_norm": float("nan")}, "clip_norm must be a number from"),
  ({"clip_norm": True}, "clip_norm must be a number from"),
  ({"clip_norm": "1"}, "clip_norm must be a number from"),
  ({"engine": "fast"}, "engine 'fast' is not one of"),
  ({"clipping": {"a": 3.0}}, r"the share of clipping group 'a' must be in \(0, 1\]"),
  ({"clipping": {"a": True}}, "the share of clipping group 'a'"),
  ({"clipping": {"a": 0.6, "b": 0.6}}, "must sum to 1"),
  ({"clipping": (("a", 0.5), ("a", 0.5), ("b", 0.5))}, "given twice"),
  ({"clipping": (("a", 3.0),)}, "the share of clipping group 'a'"),
  ({"clipping": "steep"}, "clipping 'steep' is not one of"),
  ({"microbatch_size": 0}, "microbatch_size must be at least 1"),
  ({"microbatch_size": True}, "microbatch_size must be at least 1"),
  ({"microbatch_size": 2.0}, "microbatch_size must be at least 1"),
  ({"memory_budget": -1}, "memory_budget must be a number of bytes"),
  ({"memory_budget": float("nan")}, "memory_budget must be a number of bytes"),
  ({"compensated": "yes"}, "compensated must be True or False"),
  ({"exact": 1}, "exact must be True or False"),
  ({"loss_fn": None}, "loss_fn must be a function"),
]


def _made(make, options):
  return make(**{"loss_fn": _loss, "clip_norm": 1.0, **options})


def _replaced(**options):
  return dataclasses.replace(ClippedGrad(_loss, 1.0), **options)


@pytest.mark.parametrize(("options", "message"), REFUSED)
@pytest.mark.parametrize("make", [clipped_grad, ClippedGrad, _replaced])
def test_what_is_refused_is_refused_however_it_is_made(make, options, message):
  with pytest.raises(ValueError, match=message):
    _made(make, options)


@pytest.mark.parametrize("make", [clipped_grad, ClippedGrad, _replaced])
def test_the_class_is_what_the_function_makes(make):
  """Hashable, with plain numbers; `exact` implies `compensated`."""
  found = _made(make, {
    "clip_norm": np.float32(0.5), "clipping": {"b": np.float32(0.25), "a": 0.75},
    "microbatch_size": np.int64(2), "memory_budget": 2.0**20, "exact": np.bool_(True),
  })  # fmt: skip
  assert found == clipped_grad(
    _loss, 0.5, clipping={"a": 0.75, "b": 0.25}, microbatch_size=2, memory_budget=2**20, exact=True
  )
  assert isinstance(hash(found), int)
  assert found.compensated
  assert dataclasses.replace(found, engine="loop").clipping == (("a", 0.75), ("b", 0.25))
  assert _made(make, {"memory_budget": float("inf")}).memory_budget > 2**60


def test_shares_that_were_not_checked_would_exceed_the_sensitivity():
  """The broken variant: a rule of a share of 3, which the class took."""
  rule = make_rule(((".", 3.0),), 1.0, PARAMS)
  scale = rule.scales(jnp.asarray([[1000.0]]), jnp.ones(1, bool))
  assert 1000 * float(scale[0, 0]) > 1.7 * clipped_grad(_loss, 1.0).sensitivity("zero_out")


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
  ("leaf", "message"),
  [(jnp.ones(4, jnp.complex64), "leaf 'a' is complex64. Give its real and imaginary parts"),
   (np.ones(4, np.complex128), "leaf 'a' is complex128. Give its real and imaginary parts"),
   (1j, "leaf 'a' is complex64. Give its real and imaginary parts"),
   (jnp.ones(4, jnp.int32), "leaf 'a' is int32. Keep other leaves outside"),
   (2, "leaf 'a' is int32. Keep other leaves outside"),
   (np.ones(4, bool), "leaf 'a' is bool. Keep other leaves outside"),
   (jax.random.key(0), "leaf 'a' is key<"), ("name", "leaf 'a' is a str")],
)  # fmt: skip
def test_parameters_that_are_not_real_are_refused(engine, leaf, message):
  grad = clipped_grad(lambda p, u, k: jnp.sum(u * jnp.real(p["a"])), 1.0, engine=engine)
  with pytest.raises(ValueError, match=message):
    grad({"a": leaf}, UNITS)
  with pytest.raises(ValueError, match=message):
    dp_jax.explain(grad, {"a": leaf}, UNITS)


@pytest.mark.parametrize("engine", ENGINES)
def test_complex_numbers_of_two_real_leaves(engine):
  """The way that the refusal names: both parts have their gradient."""

  def loss(params, unit, key):
    del key
    return jnp.sum(jnp.abs(jax.lax.complex(params["re"], params["im"]) * unit) ** 2)

  params = {"im": jnp.arange(1.0, 5), "re": jnp.ones(4)}
  grad = clipped_grad(loss, 1.0, engine="auto" if engine == "ghost" else engine)
  total, _ = grad(params, UNITS)
  expected, _ = float64_loop.loop_in_float64(loss, params, UNITS, jit=False)
  np.testing.assert_allclose(jnp.stack(jax.tree.leaves(total)), np.stack(expected), atol=1e-5)
  assert np.all(total["im"] != 0)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("empty", [{}, (), None, {"a": {}, "b": []}])
def test_empty_trees_are_refused(engine, empty):
  with pytest.raises(ValueError, match="has no leaves"):
    clipped_grad(lambda p, u, k: jnp.sum(u), 1.0, engine=engine)(empty, UNITS)
  with pytest.raises(ValueError, match="has no leaves"):
    clipped_grad(lambda p, u, k: jnp.sum(u), 1.0, engine=engine)(empty, UNITS[:0])


@pytest.mark.parametrize("engine", ENGINES)
def test_numbers_are_scalars(engine):
  def loss(params, unit, key):
    del key
    return jnp.sum(jnp.tanh(unit * params["number"]) * params["numpy"] + params["array"] * unit)

  plain = {"number": 0.5, "numpy": np.float32(2.0), "array": np.ones(4), "none": np.zeros((0, 3))}
  arrays = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), plain)
  grad = clipped_grad(loss, 1.0, engine=engine)
  for found, expected in zip(grad(plain, UNITS), grad(arrays, UNITS), strict=True):
    jax.tree.map(np.testing.assert_array_equal, found, expected)
  assert grad(plain, UNITS)[0]["number"].shape == ()
  assert grad(plain, UNITS[:0])[0]["number"] == 0
  assert check_params({"a": 0.5})["a"].dtype == jnp.float32


def _layers(params, unit, key):
  """A table, a convolution, a scan, a tied table, a scale: every rule, without rank promotion."""
  del key
  numbers = ("NHC", "HIO", "NHC")
  x = params["e"][unit["ids"]] + unit["x"]
  x = jax.lax.conv_general_dilated(x[None], params["k"], (1,), "SAME", dimension_numbers=numbers)[0]
  x, _ = jax.lax.scan(lambda c, w: (jnp.tanh(c @ w), None), x, params["layers"])
  tied = params["t"][unit["ids"]] @ params["t"].T
  x = jnp.sin(x @ params["w"]) + jnp.broadcast_to(params["b"][None], (5, 5))
  return jnp.sum(jnp.square(x * params["s"])) + jnp.sum(jnp.sin(tied))


@functools.cache
def _layer_arguments():
  rng = np.random.default_rng(0)
  shapes = {"e": (7, 4), "w": (4, 5), "k": (3, 4, 4), "b": (5,), "t": (7, 4), "layers": (2, 4, 4),
            "s": ()}  # fmt: skip
  params = {name: np.float32(rng.standard_normal(shape)) for name, shape in shapes.items()}
  ids = rng.integers(0, 7, (4, 5)).astype(np.int32)
  units = {"ids": ids, "x": np.float32(rng.standard_normal((4, 5, 4)))}
  return params, units, np.array([True, True, True, False])


CONFIGURATIONS = {
  "rank promotion": lambda: jax.numpy_rank_promotion("raise"),
  "dtype promotion": lambda: jax.numpy_dtype_promotion("strict"),
  "both, 64 bits": lambda: _all(
    jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"), jax.enable_x64(True)
  ),
  "leaks, NaN": lambda: _all(jax.checking_leaks(), jax.debug_nans(True)),
  "products in bfloat16": lambda: jax.default_matmul_precision("bfloat16"),
}


@contextlib.contextmanager
def _all(*contexts):
  with contextlib.ExitStack() as stack:
    for context in contexts:
      stack.enter_context(context)
    yield


@functools.cache
def _usual(engine, clipping, exact):
  return _clipped(engine, clipping, exact)


def _clipped(engine, clipping, exact):
  grad = clipped_grad(_layers, 1.0, engine=engine, clipping=dict(clipping) if clipping else "flat",
                      exact=exact, memory_budget=2**30 if exact else 200)  # fmt: skip
  args = _layer_arguments()
  total, aux = jax.jit(grad).lower(*args).compile(float64_loop.QUICK)(*args)
  return jax.tree.map(np.asarray, (total.sum if exact else total, aux.norms))


@pytest.mark.parametrize("configuration", CONFIGURATIONS)
@pytest.mark.parametrize("engine", ["vmap", "loop", "ghost"])
def test_strict_configurations_of_jax(engine, configuration):
  """Groups, gradients one unit at a time; and exact sums."""
  for clipping, exact in ((((".*[ewk]", 0.5), ("^[bts]$", 0.5)), False), (None, True)):
    with CONFIGURATIONS[configuration]():
      found = _clipped(engine, clipping, exact)
    expected = _usual(engine, clipping, exact)
    jax.tree.map(
      functools.partial(np.testing.assert_allclose, rtol=1e-3, atol=1e-4), found, expected
    )


@pytest.mark.parametrize("engine", ["vmap", "loop", "ghost"])
def test_operation_by_operation(engine):
  """With jit disabled; automatic clipping."""
  grad = clipped_grad(_loss, 1.0, engine=engine, clipping="automatic")
  with jax.disable_jit(), jax.numpy_rank_promotion("raise"):
    found = grad(PARAMS, UNITS)
  expected = jax.jit(grad)(PARAMS, UNITS)
  jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5), found, expected)
