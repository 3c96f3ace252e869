"""Random small networks by both engines, and units made to exceed the clip norm.

Networks are evaluated operation by operation: of many, most operations are compiled already, and
the compilation of each network as a whole would take a multiple of its time. Thousands of further
ones are compared by experiments/ghost_property.py.
"""

import functools

import hypothesis
import jax
import jax.numpy as jnp
import networks
import numpy as np
import pytest
from comparison import Result, compare, compiled, distance, moved_by_units, normal, values
from hypothesis import strategies

from dp_jax.gradients.clipping import clipped_grad

SETTINGS = hypothesis.settings(
  deadline=None, derandomize=True, database=None,
  suppress_health_check=list(hypothesis.HealthCheck),
  phases=(hypothesis.Phase.generate, hypothesis.Phase.shrink),
)  # fmt: skip


def compare_network(network: networks.Network, engine: str = "auto") -> Result:
  """An engine and the reference, operation by operation."""
  return compare(
    network.loss, network.params, network.units, network.keys, clip_norm=network.clip_norm,
    mask=network.mask, memory_budget=network.memory_budget, jit=False, engine=engine,
  )  # fmt: skip


def problem_of(network: networks.Network, result: Result) -> str | None:
  """What is wrong with the ghost engine's result for a network, or None."""
  # In bf16 the reference rounds each unit's gradient to bf16, and the ghost engine mostly does not.
  tolerance = 2.0**-6 if network.is_half else 1e-5
  smallest = 1e-3 if network.is_half else 1e-6
  if result.agrees(tolerance=tolerance, bound=max(tolerance, 2e-3), smallest=smallest):
    return None
  return f"norms {result.norms} for {result.reference}, sums differ by {result.sum_error}"


@hypothesis.given(strategies.data())
@hypothesis.settings(SETTINGS, max_examples=120)
def test_random_networks(data):
  network = networks.draw(lambda options: data.draw(strategies.sampled_from(list(options))))
  assert problem_of(network, compare_network(network)) is None


@hypothesis.given(strategies.data())
@hypothesis.settings(SETTINGS, max_examples=30)
def test_random_networks_in_a_loop(data):
  network = networks.draw(lambda options: data.draw(strategies.sampled_from(list(options))))
  assert problem_of(network, compare_network(network, "loop")) is None


def _linear(params, unit, key):
  """Products, by Gram and by gradients, a scale and a bias: nothing bounds the activations."""
  del key
  hidden = unit @ params["wide"] + unit * params["s"] @ params["wide"] + params["b"]
  return 1e-2 * jnp.sum(hidden @ params["narrow"] * jnp.linspace(1.0, 2.0, 3))


def _convolved(params, unit, key):
  del key
  out = jax.lax.conv_general_dilated(
    (unit + params["p"])[None], params["k"], (1,), "SAME", dimension_numbers=("NHC", "HIO", "NHC")
  )
  return 1e-2 * jnp.sum(out * jnp.linspace(1.0, 2.0, 8))


def _tied(params, unit, key):
  """The table's gradient of the lookup against that of the product."""
  del key
  ids = jnp.abs(jnp.nan_to_num(unit[:, 0])).astype(jnp.int32) % 5
  logits = (params["e"][ids] * unit) @ params["e"].T
  return jnp.sum(logits * jnp.linspace(1.0, 2.0, 5))


def _scanned(params, unit, key):
  del key
  return 1e-2 * jnp.sum(jax.lax.scan(lambda c, w: (c @ w, None), unit, params["w"])[0])


LOSSES = {
  "linear": (_linear, {"wide": normal(6, 12), "narrow": normal(12, 3), "s": normal(6),
                       "b": normal(12)}),
  "convolved": (_convolved, {"p": normal(8, 6), "k": normal(3, 6, 8)}),
  "tied": (_tied, {"e": normal(5, 6)}),
  "scanned": (_scanned, {"w": normal(2, 6, 6)}),
}  # fmt: skip
KINDS = ("plain", "cancels", "nearly cancels", "cancels far apart", "tiny", "huge", "mixed", "nan",
         "inf", "largest", "zero", "one token")  # fmt: skip
UNITS, TOKENS, WIDTH = 4, 8, 6


@functools.cache
def _compiled(name: str, engine: str, memory_budget: int):
  loss, params = LOSSES[name]
  grad = clipped_grad(loss, 1.0, engine=engine, compensated=True, memory_budget=memory_budget)
  args = (params, jnp.zeros((UNITS, TOKENS, WIDTH)), jnp.ones(UNITS, bool), None)
  return compiled(grad, *args)


def _unit(kind: str, scale: float, rng: np.random.Generator) -> np.ndarray:
  x = rng.standard_normal((TOKENS, WIDTH)) * scale
  half = TOKENS // 2
  if kind == "cancels":
    x[1::2] = -x[::2]
  elif kind == "cancels far apart":
    x[half:] = -x[:half]
  elif kind == "nearly cancels":
    x[half:] = -x[:half] * (1 + 2.0**-20 * rng.standard_normal((half, 1)))
  elif kind == "tiny":
    x *= 1e-30
  elif kind == "huge":
    x *= 1e30
  elif kind == "mixed":
    x *= 10.0 ** rng.integers(-30, 30, (TOKENS, 1))
  elif kind in ("nan", "inf", "largest"):
    x[rng.integers(TOKENS), rng.integers(WIDTH)] = {"nan": np.nan, "inf": np.inf}.get(kind, 3.4e38)
  elif kind == "zero":
    x[:] = 0
  elif kind == "one token":
    x[1:] = x[0]
  with np.errstate(over="ignore"):
    return x.astype(np.float32)


@pytest.mark.parametrize(
  ("engine", "memory_budget"), [("ghost", 0), ("ghost", 2**30), ("loop", 2**30)]
)
@pytest.mark.parametrize("name", LOSSES)
@hypothesis.given(
  kinds=strategies.lists(strategies.sampled_from(KINDS), min_size=UNITS, max_size=UNITS),
  scale=strategies.sampled_from([1.0, 200.0, 1e4, 1e-3]),
  seed=strategies.integers(0, 2**16),
)
@hypothesis.settings(SETTINGS, max_examples=60)
def test_no_unit_moves_the_sum_by_more_than_the_clip_norm(
  name, engine, memory_budget, kinds, scale, seed
):
  rng = np.random.default_rng(seed)
  units = jnp.asarray(np.stack([_unit(kind, scale, rng) for kind in kinds]))
  run, params = _compiled(name, engine, memory_budget), LOSSES[name][1]
  moved = moved_by_units(run, params, units, None)
  assert np.max(moved) <= 1.0, moved
  # Padding adds zero, whatever it holds.
  mask = jnp.asarray([True, False, True, False])
  padded = values(run(params, units, mask, None)[0])
  clean = values(run(params, jnp.where(mask[:, None, None], units, 0.0), mask, None)[0])
  assert distance(padded, clean) == 0
