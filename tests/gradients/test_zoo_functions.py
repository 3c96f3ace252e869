"""Many functions of jax in which parameters meet data: every engine against a float64 loop."""

import functools
import logging

import float64_loop
import jax
import jax.numpy as jnp
import jax.scipy as jsp
import numpy as np
import pytest
from jax import lax

from dp_jax.gradients.clipping import clipped_grad
from dp_jax.gradients.engines import dispatch as engines
from dp_jax.gradients.ghost.traced import trace


def _normal(*shape, seed=0):
  return jnp.asarray(np.random.default_rng([seed, *shape]).standard_normal(shape), jnp.float32)


def _total(x):
  return jnp.sum(jnp.tanh(x) ** 2 * jnp.linspace(0.5, 1.5, x.size, dtype=x.dtype).reshape(x.shape))


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _custom(a, x, function):
  return function(a * x)


_custom.defvjp(
  lambda a, x, function: (function(a * x), (a, x)), lambda function, r, g: (g * r[1], g * r[0])
)


def _root(w, u):
  return lax.custom_root(
    lambda x: x**3 + x - w * u, jnp.zeros_like(u),
    lambda f, x: lax.fori_loop(0, 20, lambda _, x: x - f(x) / (3 * x * x + 1), x),
    lambda g, y: y / g(jnp.ones_like(y)),
  )  # fmt: skip


def _solved(w, u):
  diagonal = w**2 + u**2 + 1
  return lax.custom_linear_solve(
    lambda x: diagonal * x, u, lambda _, b: b / diagonal, symmetric=True
  )


def _noise(w, u):
  return u * w + 0.1 * jnp.sum(lax.rng_bit_generator(jnp.zeros(4, jnp.uint32), (6,))[1] % 3)


# Of a parameter float[6] and data float[6], both positive.
VECTORS = {
  "arctan2": lambda w, u: jnp.arctan2(w, u),
  "maximum": lambda w, u: jnp.maximum(w, u),
  "remainder": lambda w, u: jnp.fmod(u, w + 3),
  "power": lambda w, u: w**u + u**w,
  "gammaln": lambda w, u: lax.lgamma(w * u),
  "igamma": lambda w, u: lax.igamma(u, w),
  "erf_inv": lambda w, u: lax.erf_inv(jax.nn.sigmoid(w * u)),
  "clamp": lambda w, u: lax.clamp(0.5 * w, u, w),
  "cumsum": lambda w, u: lax.cumsum(u * w) + u * lax.cumsum(w),
  "cumprod": lambda w, u: lax.cumprod(u * w) + u * lax.cumprod(w),
  "cummax": lambda w, u: lax.cummax(u * w) + u * lax.cummax(w),
  "sort": lambda w, u: jnp.sort(u * w) + u * jnp.sort(w),
  "sort by data": lambda w, u: lax.sort((u, w), num_keys=1)[1],
  "top_k": lambda w, u: lax.top_k(u * w, 3)[0] + u[:3] * lax.top_k(w, 3)[0],
  "approx_max_k": lambda w, u: lax.approx_max_k(u * w, 3)[0],
  "argmax": lambda w, u: u[jnp.argmax(w * u)] * w,
  "fft": lambda w, u: jnp.real(jnp.fft.ifft(jnp.fft.fft(u) * jnp.fft.fft(w))),
  "abs of rfft": lambda w, u: u[:4] * jnp.abs(jnp.fft.rfft(w)),
  "complex": lambda w, u: jnp.abs(lax.complex(u * w, w)),
  "interp": lambda w, u: jnp.interp(u, jnp.linspace(0, 3, 6, dtype=u.dtype), w),
  "convolve": lambda w, u: jnp.convolve(u, w, mode="same"),
  "while": lambda w, u: w * lax.while_loop(
    lambda s: jnp.sum(s) < 9, lambda s: s + lax.stop_gradient(w), u),
  "switch": lambda w, u: lax.switch(
    (u[0] > 1).astype(int) + (u[1] > 1), [lambda: u * w, lambda: u - w, lambda: u**2 * w]),
  "cond on a parameter": lambda w, u: lax.cond(w[0] > u[0], lambda: w * u, lambda: w - u),
  "associative_scan": lambda w, u: lax.associative_scan(
    lambda a, b: (a[0] * b[0], a[1] * b[0] + b[1]), (jax.nn.sigmoid(w), u))[1],
  "scan that collects parameters": lambda w, u: lax.scan(
    lambda c, _: (c * u, c), w, None, length=3)[1],
  "custom_root": _root,
  "custom_linear_solve": _solved,
  "custom_vjp of a function": lambda w, u: _custom(w, u, jnp.sin),
  "linear_call": lambda w, u: jax.custom_derivatives.linear_call(
    lambda r, x: r * x, lambda r, g: r * g, u, w),
  "jvp": lambda w, u: jax.jvp(lambda x: jnp.tanh(x * w), (u,), (jnp.ones_like(u),))[1],
  "hessian": lambda w, u: jax.hessian(lambda x: jnp.sum(jnp.tanh(x * w)))(u),
  "grad of checkpoint": lambda w, u: jax.grad(
    lambda x: jnp.sum(jax.checkpoint(lambda y: jnp.tanh(y * w))(x) ** 2))(u),
  "scatter": lambda w, u: u.at[jnp.array([0, 2])].set(w[:2]) + w.at[jnp.array([1, 1])].add(u[:2]),
  "scatter_max": lambda w, u: u.at[jnp.array([0, 2])].max(w[:2]),
  "scatter to where data says": lambda w, u: w.at[(2 * u[:2]).astype(int)].add(u[:2]),
  "dynamic_update_slice": lambda w, u: lax.dynamic_update_slice(
    w, u[:2], ((u[0] > 1).astype(int),)),
  "dynamic_slice": lambda w, u: lax.dynamic_slice(w, ((u[0] > 1).astype(int) * 2,), (3,)),
  "segment_sum": lambda w, u: jax.ops.segment_sum(u * w, jnp.array([0, 0, 1, 1, 2, 2]), 3),
  "select_n": lambda w, u: lax.select_n((u > 1).astype(jnp.int32) + (u > 2), w, u, w * u),
  "rng_bit_generator": _noise,
  "optimization_barrier": lambda w, u: sum(lax.optimization_barrier((u * w, w))),
  "callback for debugging": lambda w, u: (jax.debug.callback(lambda: None), u * w)[1],
}  # fmt: skip

# Of float[4, 4] and float[4, 4].
MATRICES = {
  "solve": lambda w, u: jnp.linalg.solve(w + 6 * jnp.eye(4), u),
  "solve, data first": lambda w, u: jnp.linalg.solve(u + 6 * jnp.eye(4), w),
  "det": lambda w, u: 0.01 * jnp.linalg.det(w * u + 3 * jnp.eye(4)),
  "cholesky": lambda w, u: jnp.linalg.cholesky(u @ u.T + w @ w.T + jnp.eye(4)),
  "eigvalsh": lambda w, u: 0.1 * jnp.linalg.eigvalsh(u @ u.T + w @ w.T),
  "svd": lambda w, u: jnp.linalg.svd(u @ w + 3 * jnp.eye(4), compute_uv=False),
  "qr": lambda w, u: jnp.linalg.qr(u * w + 3 * jnp.eye(4))[1],
  "triangular_solve": lambda w, u: jsp.linalg.solve_triangular(
    jnp.tril(w) + 4 * jnp.eye(4), u, lower=True),
  "max pooling": lambda w, u: lax.reduce_window(
    u @ w, -jnp.inf, lax.max, (2, 2), (1, 1), "SAME"),
  "its derivative": lambda w, u: jax.jvp(
    lambda x: lax.reduce_window(x @ w, -jnp.inf, lax.max, (2, 2), (2, 2), "VALID"),
    (u,), (jnp.ones_like(u),))[1],
  "map_coordinates": lambda w, u: jsp.ndimage.map_coordinates(
    w, [u[0] / 2 + 1.5, u[1] / 2 + 1.5], order=1),
  "take_along_axis": lambda w, u: jnp.take_along_axis(w, (u > 0).astype(int), 1),
  "patches": lambda w, u: lax.conv_general_dilated_patches(
    (u @ w)[None, None], (2, 2), (1, 1), "SAME"),
  "attention": lambda w, u: jax.nn.dot_product_attention(
    (u @ w)[:, None], (u @ w)[:, None], u[:, None]),
  "pad": lambda w, u: u * lax.pad(w, jnp.zeros((), u.dtype), ((1, -1, 0), (0, 0, 0))),
  "matrix_power": lambda w, u: jnp.linalg.matrix_power(0.3 * w, 3) @ u,
  "ragged_dot": lambda w, u: lax.ragged_dot(
    u, jnp.stack([w, 2 * w]), jnp.array([1, 3], jnp.int32)),
  "ragged_dot, data in groups": lambda w, u: lax.ragged_dot(
    w, jnp.stack([u, 2 * u]), jnp.array([1, 3], jnp.int32)),
}  # fmt: skip

# What jax has no batching rule for: the loop alone has no need of it.
UNMAPPED = ("ragged_dot", "ragged_dot, data in groups")
# What has a batching rule of its own, or one that is not known to be the map.
UNCERTAIN = ("approx_max_k", "linear_call", "rng_bit_generator")
# What the ghost engine does not follow: vmap does.
UNFOLLOWED = ("complex", "fft", "scan that collects parameters", "while")


def _loss(functions, params, unit, key):
  """Of every function, each with a parameter of its own."""
  del key
  return sum(_total(function(params[name], unit)) for name, function in functions.items())


def _batches(functions, size):
  """A few functions of one loss: one compilation an engine, and each parameter is its own."""
  mapped = [name for name in functions if name not in (*UNMAPPED, *UNCERTAIN)]
  # One that is not followed takes all others of its loss with it.
  followed = [name for name in mapped if name not in UNFOLLOWED]
  parts = [followed[i : i + size] for i in range(0, len(followed), size)]
  parts.append([name for name in mapped if name in UNFOLLOWED])
  return [
    pytest.param({name: functions[name] for name in part}, id=part[0]) for part in parts if part
  ]


def _compare(functions, params, units, engines):
  loss = functools.partial(_loss, functions)
  if not {*functions} & {*UNFOLLOWED, *UNMAPPED, *UNCERTAIN}:
    jax.eval_shape(lambda p, u: trace(loss, p, u[0], None) and None, params, units)
  expected, norms = float64_loop.loop_in_float64(loss, params, units)
  fns = [clipped_grad(loss, 1.0, engine=engine) for engine in engines]
  run = jax.jit(lambda *args: [fn(*args) for fn in fns])
  found = run.lower(params, units).compile(float64_loop.QUICK)(params, units)
  for engine, (total, aux) in zip(engines, found, strict=True):
    np.testing.assert_allclose(aux.norms, norms, rtol=1e-3)
    # Leaves of a dictionary are sorted.
    for name, reference in zip(sorted(params), expected, strict=True):
      difference = np.linalg.norm(np.asarray(total[name], np.float64) - reference)
      assert difference <= 1e-3 * np.linalg.norm(reference) + 1e-6, (engine, name)


@pytest.mark.parametrize(
  "functions",
  _batches(VECTORS, 12),
)
def test_functions_of_vectors(functions):
  params = {name: 0.4 + jnp.abs(_normal(6, seed=i)) for i, name in enumerate(functions)}
  units = 0.3 + jnp.abs(_normal(3, 6))
  _compare(functions, params, units, ("vmap", "loop", "auto"))


@pytest.mark.parametrize(
  "functions",
  _batches(MATRICES, 8),
)
def test_functions_of_matrices(functions):
  params = {name: _normal(4, 4, seed=i) for i, name in enumerate(functions)}
  _compare(functions, params, _normal(3, 4, 4, seed=9), ("vmap", "loop", "auto"))


@pytest.mark.parametrize("name", [*UNMAPPED, *UNCERTAIN])
def test_what_jax_cannot_map_is_looped(name, caplog):
  functions = {name: (VECTORS | MATRICES)[name]}
  shape = (6,) if name in VECTORS else (4, 4)
  params, units = {name: _normal(*shape)}, _normal(3, *shape, seed=1)
  with caplog.at_level(logging.WARNING):
    _compare(functions, params, units, ("loop", "auto"))
  loss = functools.partial(_loss, functions)
  cannot = "maps .* may mix them" if name in UNCERTAIN else "cannot map"
  with pytest.raises(ValueError, match=rf"engine 'vmap' {cannot} .*se engine 'auto' or 'loop'"):
    jax.eval_shape(clipped_grad(loss, 1.0, engine="vmap"), params, units)
  with pytest.raises(ValueError, match="engine 'auto'"):
    jax.eval_shape(clipped_grad(loss, 1.0, engine="ghost"), params, units)


def test_why_it_is_looped_is_said_once(caplog):
  def loss(params, unit, key):
    del key
    return jnp.sum(lax.ragged_dot(unit, params, jnp.array([1, 3], jnp.int32)))

  engines._told.clear()
  with caplog.at_level(logging.WARNING):
    for _ in range(2):
      jax.eval_shape(clipped_grad(loss, 1.0), _normal(2, 4, 3), _normal(3, 4, 4))
  assert caplog.text.count("clipping in a loop, since jax cannot map this loss over units") == 1
