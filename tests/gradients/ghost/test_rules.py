"""Each construct by the ghost engine against per-unit gradients, and the rule that it takes."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from comparison import compare, compiled, distance, normal, plan_of, values
from flax import nnx

from dp_jax.gradients.clipping import clipped_grad

IDS = jnp.asarray(np.random.default_rng(0).integers(0, 7, (4, 5)).astype(np.int32).tolist())
IDS = IDS.at[0].set(3)
WEIGHTS = jnp.arange(1.0, 6)[:, None]


def _total(x: Any) -> Any:
  return jnp.sum(jnp.tanh(x) ** 2 * jnp.linspace(0.5, 1.5, x.size).reshape(x.shape))


def _conv(params: Any, unit: Any, dims: tuple[str, str, str], **options: Any) -> Any:
  options = {"window_strides": (1,) * (len(dims[0]) - 2), "padding": "SAME", **options}
  x = unit[None]
  return _total(jax.lax.conv_general_dilated(x, params["k"], dimension_numbers=dims, **options))


def _two_dimensions(**options: Any) -> Callable[..., Any]:
  return lambda p, u, k: _conv(p, u, ("NHWC", "HWIO", "NHWC"), **options)


def _checkpointed(carry: Any, layer: Any) -> Any:
  return jax.checkpoint(lambda c: jnp.tanh(c @ layer["a"] + layer["b"]))(carry), None


def _standardised(w: Any) -> Any:
  return (w - w.mean(0)) / w.std(0)


@jax.custom_jvp
def _jvp_mixed(a: Any, x: Any) -> Any:
  return a * jnp.sin(x)


# Not the derivative of its body: what counts is the rule.
_jvp_mixed.defjvps(lambda t, out, a, x: 2 * t * x, lambda t, out, a, x: 3 * t * a)


@jax.custom_vjp
def _vjp_mixed(a: Any, x: Any) -> Any:
  return a * x


_vjp_mixed.defvjp(
  lambda a, x: (a * x, (a, x)), lambda kept, c: (jnp.clip(c * kept[1], -0.1, 0.1), c * kept[0])
)


def _attention(params: Any, unit: Any, key: Any) -> Any:
  del key
  x, valid = unit["x"], unit["valid"]
  q, k, v = (jnp.einsum("td,dhe->hte", x, params[name]) for name in "qkv")
  mask = valid[None, :] & jnp.tril(jnp.ones((4, 4), bool))
  weights = jax.nn.softmax(jnp.where(mask, jnp.einsum("hte,hse->hts", q, k), -1e30))
  out = jnp.einsum("hts,hse->the", weights, v)
  return jnp.sum(jnp.einsum("the,hed->td", out, params["o"]) ** 2 * valid[:, None])


ATTENTION = {"q": normal(6, 2, 3), "k": normal(6, 2, 3), "v": normal(6, 2, 3), "o": normal(2, 3, 6)}
VALID = jnp.asarray([[1, 1, 1, 1], [1, 1, 0, 0], [1, 0, 0, 0], [1, 1, 1, 0]], bool)


def _tied(params: Any, unit: Any, key: Any) -> Any:
  del key
  logits = jnp.tanh(params["e"][unit] @ params["w"]) @ params["e"].T
  return -jnp.sum(jax.nn.log_softmax(logits)[jnp.arange(5), jnp.roll(unit, -1)])


def _bf16(params: Any, unit: Any, key: Any) -> Any:
  del key
  half = jnp.bfloat16
  hidden = jnp.tanh(unit.astype(half) @ params["a"].astype(half) + params["b"].astype(half))
  return jnp.sum(hidden.astype(jnp.float32) ** 2)


def _embedding(mode: str | None) -> Callable[..., Any]:
  def loss(params: Any, unit: Any, key: Any) -> Any:
    del key
    rows = params["e"].at[unit].get(mode=mode, fill_value=0.0)
    return jnp.sum(jnp.tanh(rows + 0.5) ** 2 * WEIGHTS)

  return loss


def _record_loss(params: Any, unit: Any, key: Any) -> Any:
  """A unit of records with a mask."""
  del key
  losses = jax.vmap(lambda x: jnp.sum(jnp.tanh(jnp.tanh(x @ params["a"]) @ params["b"])))(unit["x"])
  return jnp.sum(jnp.where(unit["valid"], losses, 0.0))


# name: (loss, params, units, parameter -> rule)
CASES: dict[str, tuple[Callable[..., Any], Any, Any, dict[str, str]]] = {
  "dense": (
    lambda p, u, k: _total(jnp.tanh(u @ p["a"] + p["c"]) @ p["b"]),
    {"a": normal(5, 7), "b": normal(7, 3), "c": normal(7)}, normal(4, 5),
    {"a": "product", "b": "product", "c": "instantiate"},
  ),
  "gram of tokens": (
    lambda p, u, k: _total(u @ p["a"]), {"a": normal(9, 8)}, normal(4, 3, 9), {"a": "product"}
  ),
  "gradient of tokens": (
    lambda p, u, k: _total(u @ p["a"]), {"a": normal(3, 4)}, normal(4, 9, 3), {"a": "product"}
  ),
  "parameter on the left": (
    lambda p, u, k: _total(p["a"] @ u), {"a": normal(7, 5)}, normal(4, 5, 4), {"a": "product"}
  ),
  "batch dimensions": (
    lambda p, u, k: _total(jnp.einsum("htd,hde->hte", u, p["a"])),
    {"a": normal(2, 5, 3)}, normal(4, 2, 4, 5), {"a": "product"},
  ),
  "batch dimensions, parameter on the left": (
    lambda p, u, k: _total(jnp.einsum("dhe,thd->hte", p["a"], u)),
    {"a": normal(5, 2, 3)}, normal(4, 4, 2, 5), {"a": "product"},
  ),
  "several free and contracted dimensions": (
    lambda p, u, k: _total(jnp.einsum("stab,bxay->sxty", u, p["a"])),
    {"a": normal(3, 2, 4, 5)}, normal(4, 2, 3, 4, 3), {"a": "product"},
  ),
  "used twice alike": (
    lambda p, u, k: _total(jnp.tanh(u @ p["a"]) @ p["a"]),
    {"a": normal(5, 5)}, normal(4, 3, 5), {"a": "product"},
  ),
  "used twice, transposed": (
    lambda p, u, k: _total(jnp.tanh(u @ p["a"]) @ p["a"].T),
    {"a": normal(5, 7)}, normal(4, 3, 5), {"a": "instantiate"},
  ),
  "used twice, split in two ways": (
    lambda p, u, k: _total(u @ p["a"].reshape(4, 6)) + _total(u @ p["a"].reshape(6, 4).T),
    {"a": normal(24)}, normal(4, 3, 4), {"a": "instantiate"},
  ),
  "square, used twice, transposed": (
    lambda p, u, k: _total(jnp.tanh(u @ p["a"]) @ p["a"].T),
    {"a": normal(5, 5)}, normal(4, 3, 5), {"a": "instantiate"},
  ),
  "conv strided": (
    _two_dimensions(window_strides=(2, 1)), {"k": normal(3, 3, 4, 6)}, normal(4, 6, 5, 4),
    {"k": "convolution"},
  ),
  "conv dilated and grouped": (
    _two_dimensions(rhs_dilation=(2, 1), feature_group_count=2),
    {"k": normal(3, 2, 2, 6)}, normal(4, 6, 5, 4), {"k": "convolution"},
  ),
  "conv depthwise": (
    _two_dimensions(feature_group_count=4), {"k": normal(3, 3, 1, 8)}, normal(4, 5, 4, 4),
    {"k": "convolution"},
  ),
  "conv of a dilated input, uneven padding": (
    _two_dimensions(lhs_dilation=(2, 2), padding=((1, 2), (3, 0))),
    {"k": normal(3, 3, 4, 2)}, normal(4, 3, 3, 4), {"k": "convolution"},
  ),
  "conv with negative padding": (
    _two_dimensions(padding=((-1, 0), (0, -2)), window_strides=(1, 2)),
    {"k": normal(2, 2, 3, 2)}, normal(4, 6, 6, 3), {"k": "convolution"},
  ),
  "conv 1x1, gram": (
    _two_dimensions(), {"k": normal(1, 1, 20, 30)}, normal(4, 2, 2, 20), {"k": "convolution"}
  ),
  "conv 1-D, channels first": (
    lambda p, u, k: _conv(p, u, ("NCH", "OIH", "NCH"), padding="VALID"),
    {"k": normal(5, 3, 3)}, normal(4, 3, 8), {"k": "convolution"},
  ),
  "conv 3-D": (
    lambda p, u, k: _conv(p, u, ("NHWDC", "HWDIO", "NHWDC"), window_strides=(1, 2, 1)),
    {"k": normal(2, 3, 2, 2, 3)}, normal(4, 3, 4, 3, 2), {"k": "convolution"},
  ),
  "conv of the parameter, the unit being the kernel": (
    lambda p, u, k: _total(jax.lax.conv_general_dilated(
      p["x"], u, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))),
    {"x": normal(1, 4, 4, 2)}, normal(4, 2, 2, 2, 3), {"x": "instantiate"},
  ),
  "conv used twice": (
    lambda p, u, k: _two_dimensions()(p, u, k) + _two_dimensions(rhs_dilation=(2, 2))(p, u, k),
    {"k": normal(3, 3, 2, 2)}, normal(4, 4, 4, 2), {"k": "instantiate"},
  ),
  "scale and bias, broadcast": (
    lambda p, u, k: _total(u * p["s"][:, None] + p["b"] - p["c"] / (1 + u**2)),
    {"s": normal(3), "b": normal(5), "c": normal(3, 1)}, normal(4, 3, 5),
    {"s": "instantiate", "b": "instantiate", "c": "instantiate"},
  ),
  "embedding, repeated tokens": (_embedding(None), {"e": normal(7, 4)}, IDS, {"e": "lookup"}),
  "embedding, clipped": (
    _embedding("clip"), {"e": normal(7, 4)}, IDS.at[1].set(99).at[2].set(-99), {"e": "lookup"}
  ),
  "embedding, dropped": (
    _embedding("fill"), {"e": normal(7, 4)}, IDS.at[1].set(99).at[2, :2].set(-99), {"e": "lookup"}
  ),
  "embedding, promised": (
    _embedding("promise_in_bounds"), {"e": normal(7, 4)}, IDS, {"e": "lookup"}
  ),
  "embedding of one token": (
    lambda p, u, k: _total(p["e"][u]), {"e": normal(7, 4)}, IDS[:, 0], {"e": "instantiate"}
  ),
  "class token and position embeddings": (
    lambda p, u, k: _total((jnp.concatenate([p["c"], u]) + p["pos"]) @ p["w"]),
    {"c": normal(1, 5), "pos": normal(4, 5), "w": normal(5, 3)}, normal(4, 3, 5),
    {"c": "instantiate", "pos": "instantiate", "w": "product"},
  ),
  "one parameter twice in a concatenation": (
    lambda p, u, k: _total(jnp.concatenate([p["c"], u, 2 * p["c"]])),
    {"c": normal(2, 5)}, normal(4, 3, 5), {"c": "instantiate"},
  ),
  "overlapping slices": (
    lambda p, u, k: _total(u @ p["w"][:3]) + _total(u @ p["w"][1:4]),
    {"w": normal(4, 5)}, normal(4, 2, 3), {"w": "instantiate"},
  ),
  "LoRA, in two products": (
    lambda p, u, k: _total((u @ p["A"]) @ p["B"]),
    {"A": normal(6, 2), "B": normal(2, 6)}, normal(4, 3, 6), {"A": "product", "B": "product"},
  ),
  "LoRA, multiplied out": (
    lambda p, u, k: _total(u @ (p["A"] @ p["B"])),
    {"A": normal(6, 2), "B": normal(2, 6)}, normal(4, 3, 6),
    {"A": "instantiate", "B": "instantiate"},
  ),
  "tied embedding": (
    _tied, {"e": normal(7, 4), "w": normal(4, 4)}, IDS, {"e": "tied", "w": "product"}
  ),
  "tied with a square table, not transposed": (
    lambda p, u, k: _total(jnp.tanh(p["e"][u]) @ p["e"]), {"e": normal(5, 5)}, IDS % 5,
    {"e": "instantiate"},
  ),
  "weight standardisation": (
    lambda p, u, k: _total(u @ _standardised(p["w"])), {"w": normal(5, 4)}, normal(4, 3, 5),
    {"w": "instantiate"},
  ),
  "scan over checkpointed layers": (
    lambda p, u, k: _total(jax.lax.scan(_checkpointed, u, p)[0]),
    {"a": normal(3, 5, 5), "b": normal(3, 5)}, normal(4, 4, 5),
    {"a": "product", "b": "instantiate"},
  ),
  "scan backwards, its first layer used again": (
    lambda p, u, k: _total(jax.lax.scan(_checkpointed, u, p, reverse=True)[0] @ p["a"][0]),
    {"a": normal(3, 5, 5), "b": normal(3, 5)}, normal(4, 4, 5),
    {"a": "instantiate", "b": "instantiate"},
  ),
  "two scans over the same layers": (
    lambda p, u, k: _total(
      jax.lax.scan(_checkpointed, jax.lax.scan(_checkpointed, u, p)[0], p, reverse=True)[0]),
    {"a": normal(2, 5, 5), "b": normal(2, 5)}, normal(4, 4, 5),
    {"a": "product", "b": "instantiate"},
  ),
  "scan whose carry turns from parameters to data": (
    lambda p, u, k: _total(jax.lax.scan(
      lambda c, x: (jnp.where(x[0] > 1, c, c * p["s"]) + 0 * x, None), p["s"] * 2.0, u)[0]),
    {"s": normal(4)}, normal(4, 3, 4), {"s": "instantiate"},
  ),
  "scan over tokens with shared weights": (
    lambda p, u, k: _total(jax.lax.scan(
      lambda h, x: (jnp.tanh(h @ p["h"] + x @ p["x"]), h), jnp.zeros(4), u)[1]),
    {"h": normal(4, 4), "x": normal(3, 4)}, normal(4, 5, 3),
    # The first product, of zeros, derives from the parameter alone.
    {"h": "instantiate", "x": "product"},
  ),
  "scan too long to unroll": (
    lambda p, u, k: _total(jax.lax.scan(
      lambda h, _: (jnp.tanh(h * p["h"]), None), u, None, length=200)[0]),
    {"h": normal(3)}, normal(4, 3), {"h": "instantiate"},
  ),
  "scan inside a scan": (
    lambda p, u, k: _total(jax.lax.scan(
      lambda c, layer: jax.lax.scan(lambda d, w: (jnp.tanh(d @ w), None), c, layer), u, p["a"])[0]),
    {"a": normal(2, 2, 4, 4)}, normal(4, 3, 4), {"a": "instantiate"},
  ),
  "attention with masks": (
    _attention, ATTENTION, {"x": normal(4, 4, 6), "valid": VALID},
    {"q": "product", "k": "product", "v": "product", "o": "product"},
  ),
  "units of records with a mask": (
    _record_loss, {"a": normal(3, 4), "b": normal(4, 2)}, {"x": normal(4, 4, 3), "valid": VALID},
    {"a": "product", "b": "product"},
  ),
  "regulariser on the parameters": (
    lambda p, u, k: _total(u @ p["a"]) + 0.1 * jnp.sum(p["a"] ** 2),
    {"a": normal(5, 7)}, normal(4, 5), {"a": "instantiate"},
  ),
  "custom_jvp that mixes": (
    lambda p, u, k: _total(_jvp_mixed(p["a"], u)), {"a": normal(5)}, normal(4, 5),
    {"a": "instantiate"},
  ),
  "custom_vjp that mixes, and clips": (
    lambda p, u, k: _total(_vjp_mixed(p["a"], u @ p["w"])), {"a": normal(4), "w": normal(5, 4)},
    normal(4, 5), {"a": "instantiate", "w": "product"},
  ),
  "custom_jvp of parameters alone": (
    lambda p, u, k: _total(u * jax.nn.relu(p["a"]) + jax.nn.softplus(u * p["a"])),
    {"a": normal(5)}, normal(4, 5), {"a": "instantiate"},
  ),
  "stop_gradient on a parameter": (
    lambda p, u, k: _total(u @ (jax.lax.stop_gradient(p["a"]) + p["b"])),
    {"a": normal(5, 4), "b": normal(5, 4)}, normal(4, 5), {"b": "instantiate"},
  ),
  "one parameter in two others' functions": (
    lambda p, u, k: _total(u @ (p["s"] * p["a"])) + _total(u @ (p["s"] * p["b"])),
    {"a": normal(5, 4), "b": normal(5, 4), "s": normal(4)}, normal(4, 5),
    {"a": "instantiate", "b": "instantiate", "s": "instantiate"},
  ),
  "unused parameter": (
    lambda p, u, k: _total(u @ p["a"]), {"a": normal(5, 4), "unused": normal(3)}, normal(4, 5),
    {"a": "product"},
  ),
  "integers derived from parameters": (
    lambda p, u, k: _total(u[jnp.argsort(p["a"])] * p["a"]) + jnp.sum(u * (p["a"] > 0)),
    {"a": normal(5)}, normal(4, 5), {"a": "instantiate"},
  ),
  "parameters chosen by the unit": (
    lambda p, u, k: _total(jnp.where(u > 0, p["a"], p["b"])), {"a": normal(5), "b": normal(5)},
    normal(4, 5), {"a": "instantiate", "b": "instantiate"},
  ),
  "cond on the unit": (
    lambda p, u, k: _total(jax.lax.cond(
      u[0] > 0, lambda x: x @ p["a"], lambda x: jnp.tanh(x @ p["b"]), u)),
    {"a": normal(5, 4), "b": normal(5, 4)}, normal(4, 5),
    {"a": "instantiate", "b": "instantiate"},
  ),
  "cond on a parameter": (
    lambda p, u, k: _total(jax.lax.cond(p["s"] > 0, lambda x: x @ p["a"], lambda x: 2 * x, u)),
    {"a": normal(5, 5), "s": jnp.float32(0.5)}, normal(4, 5), {"a": "instantiate"},
  ),
  "while over parameters alone": (
    lambda p, u, k: _total(u @ p["a"] * jax.lax.stop_gradient(jax.lax.while_loop(
      lambda s: jnp.sum(s) < 9, lambda s: s + 1, jnp.abs(p["s"])))),
    {"a": normal(5, 3), "s": normal(3)}, normal(4, 5), {"a": "product"},
  ),
  "fori loop of fixed length": (
    lambda p, u, k: _total(jax.lax.fori_loop(0, 3, lambda i, x: jnp.tanh(x @ p["a"]), u)),
    {"a": normal(5, 5)}, normal(4, 5), {"a": "product"},
  ),
  "scatter into the unit": (
    lambda p, u, k: _total(u.at[jnp.array([1, 1, 2])].add(p["a"])), {"a": normal(3)},
    normal(4, 5), {"a": "instantiate"},
  ),
  "parameters by vmap in the loss": (
    lambda p, u, k: _total(jax.vmap(lambda w, x: x @ w, (0, None))(p["a"], u)),
    {"a": normal(2, 5, 4)}, normal(4, 3, 5), {"a": "product"},
  ),
  "gradient in the loss": (
    lambda p, u, k: _total(jax.grad(lambda x: jnp.sum(jnp.tanh(x @ p["a"]) ** 3))(u)),
    {"a": normal(5, 4)}, normal(4, 5), {"a": "instantiate"},
  ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_ghost_is_vmap(name):
  loss, params, units, rules = CASES[name]
  found = plan_of(loss, params, units)
  assert {k: found.get(k) for k in rules} == rules
  result = compare(loss, params, units)
  assert result.agrees(bound=1e-3), (result.norms / result.reference - 1, result.sum_error)


@pytest.mark.parametrize(
  "name",
  ["scale and bias, broadcast", "used twice, transposed", "weight standardisation",
   "class token and position embeddings", "scan over checkpointed layers", "LoRA, multiplied out"],
)  # fmt: skip
def test_without_memory_gradients_are_made_one_unit_at_a_time(name):
  loss, params, units, _ = CASES[name]
  assert compare(loss, params, units, memory_budget=0).agrees(bound=1e-3)


@pytest.mark.parametrize("name", [
  "dense", "gram of tokens", "batch dimensions", "used twice alike", "used twice, transposed",
  "conv strided", "conv depthwise", "conv used twice", "embedding, repeated tokens",
  "tied embedding", "scan over checkpointed layers", "weight standardisation",
])  # fmt: skip
@pytest.mark.parametrize("memory_budget", [0, 2**30])
def test_an_exact_sum_does_not_depend_on_where_units_stand(name, memory_budget):
  loss, params, units, _ = CASES[name]
  backwards = jax.tree.map(lambda x: x[::-1], units)

  def sums(engine, exact):
    grad = clipped_grad(
      loss, 1.0, engine=engine, compensated=True, exact=exact, memory_budget=memory_budget
    )
    run = compiled(grad, params, units)
    return [values(run(params, each)[0]) for each in (units, backwards)]

  here, there = sums("auto", True)
  expected, _ = sums("vmap", False)
  assert distance(here, there) < 1e-12
  assert distance(here, expected) < 1e-3 * distance(expected, [0.0] * len(expected))


def test_a_float32_sum_does():
  """The broken variant, as of most rules."""
  loss, params, units, _ = CASES["dense"]
  grad = clipped_grad(loss, 1.0, engine="ghost", compensated=True)
  here, there = (values(grad(params, each)[0]) for each in (units, units[::-1]))
  assert distance(here, there) > 1e-9


def test_bf16_compute_with_float32_parameters():
  """Both engines round per-unit gradients to bf16 somewhere: they agree within 2^-7."""
  params, units = {"a": normal(5, 7), "b": normal(7)}, normal(4, 3, 5)
  assert plan_of(_bf16, params, units) == {"a": "product", "b": "instantiate"}
  assert compare(_bf16, params, units).agrees(tolerance=2.0**-7, bound=2.0**-7)


def test_bf16_parameters():
  params = {"a": normal(5, 7).astype(jnp.bfloat16), "b": normal(7).astype(jnp.bfloat16)}
  assert compare(_bf16, params, normal(4, 3, 5)).agrees(tolerance=2.0**-7, bound=2.0**-7)


def test_dropout_keys_of_nnx():
  class Net(nnx.Module):
    def __init__(self, rngs):
      self.first, self.second = nnx.Linear(5, 8, rngs=rngs), nnx.Linear(8, 3, rngs=rngs)
      self.norm, self.dropout = nnx.LayerNorm(8, rngs=rngs), nnx.Dropout(0.5)

    def __call__(self, x, rngs):
      return self.second(self.dropout(self.norm(nnx.relu(self.first(x))), rngs=rngs))

  graph, params, rest = nnx.split(Net(nnx.Rngs(0)), nnx.Param, ...)

  def loss(params, unit, key):
    model = nnx.merge(graph, params, rest)
    return _total(model(unit, nnx.Rngs(dropout=key)))

  keys = jax.random.split(jax.random.key(1), 4)
  result = compare(loss, params, normal(4, 3, 5), keys)
  assert result.agrees(bound=1e-3)
  # Keys matter: others give other sums.
  other = compare(loss, params, normal(4, 3, 5), jax.random.split(jax.random.key(2), 4))
  assert not np.allclose(result.total[0], other.total[0])
  assert set(plan_of(loss, params, normal(4, 3, 5), keys).values()) == {"product", "instantiate"}


def _unknown(params, unit, key):
  del key
  return jnp.sum(jnp.arctan2(params["layer"]["angle"], unit) * 0.1 + unit @ params["w"])


UNKNOWN = {"layer": {"angle": normal(5)}, "w": normal(5, 5)}


def test_ghost_refuses_an_unknown_primitive_by_name_and_parameter():
  with pytest.raises(ValueError, match=r"'atan2', which uses the parameter layer\.angle"):
    clipped_grad(_unknown, 1.0, engine="ghost")(UNKNOWN, normal(4, 5))


def test_auto_clips_an_unknown_primitive_by_its_own_gradients():
  assert plan_of(_unknown, UNKNOWN, normal(4, 5)) == {
    "layer.angle": "instantiate", "w": "product"
  }  # fmt: skip
  assert compare(_unknown, UNKNOWN, normal(4, 5)).agrees()


def test_auto_falls_back_to_vmap_where_a_scan_mixes_what_it_collects(caplog):
  def loss(params, unit, key):
    del key

    def body(carry, _):
      return carry * unit, carry

    _, collected = jax.lax.scan(body, params["a"], None, length=3)
    return _total(collected)

  assert compare(loss, {"a": normal(5)}, normal(4, 5)).agrees()
  assert "clipping by vmap" in caplog.text
  with pytest.raises(ValueError, match="collects"):
    clipped_grad(loss, 1.0, engine="ghost")({"a": normal(5)}, normal(4, 5))
