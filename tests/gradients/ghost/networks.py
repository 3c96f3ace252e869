"""Random small networks: layers of one width, so that operations are compiled once for all of them.

A network maps tokens [T, D] to tokens [T, D], layer by layer; its loss is that of a classifier
over the rows of a table, or a weighted sum. A unit is one example, or two records with a mask.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

TOKENS, WIDTH, ROWS, UNITS, RECORDS = 3, 4, 5, 4, 2

Choose = Callable[[Sequence[Any]], Any]
Params = dict[str, jax.Array]

D, T = WIDTH, TOKENS
# Layer -> shapes of its own parameters. "shared" and "table" are one for the whole network.
SHAPES: dict[str, dict[str, tuple[int, ...]]] = {
  "dense": {"w": (D, D), "b": (D,)},
  "dense, checkpointed": {"w": (D, D), "b": (D,)},
  "dense, frozen": {"frozen": (D, D)},
  "dense, standardised": {"w": (D, D)},
  "dense, no gradient": {"w": (D, D)},
  "shared": {"shared": (D, D)},
  "shared, transposed": {"shared": (D, D)},
  "tokens mixed": {"w": (T, T)},
  "heads": {"w": (2, D // 2, D // 2)},
  "scale and bias": {"s": (D,), "b": (D,)},
  "scale of tokens": {"s": (T, 1)},
  "norm": {"s": (D,), "b": (D,)},
  "positions": {"p": (T, D)},
  "class token": {"c": (1, D)},
  "conv": {"k": (2, D, D)},
  "conv, dilated": {"k": (2, D, D)},
  "conv, depthwise": {"k": (3, 1, D)},
  "conv, grouped": {"k": (2, D // 2, D)},
  "attention": {"q": (D, D), "k": (D, D), "v": (D, D)},
  "lora": {"frozen": (D, D), "A": (D, 2), "B": (2, D)},
  "lora, multiplied out": {"A": (D, 2), "B": (2, D)},
  "table added": {"table": (ROWS, D)},
  "scan": {"w": (2, D, D), "b": (2, D)},
  "gate": {"a": (D,)},
  "dropout": {},
  "relu": {},
  "unused": {"w": (D,)},
}
LAYERS = tuple(SHAPES)


@dataclasses.dataclass(frozen=True)
class Network:
  """A loss, and what it is called with."""

  loss: Callable[..., Any]
  params: Params
  units: dict[str, jax.Array]
  keys: jax.Array
  mask: np.ndarray
  clip_norm: float
  memory_budget: int
  is_half: bool


def draw(choose: Choose) -> Network:
  """Draws a network; every choice is made by `choose`, from a sequence."""
  layers = [choose(LAYERS) for _ in range(choose((1, 2, 3, 4, 5)))]
  embedded, tied, records = (choose((True, False)) for _ in range(3))
  half = choose((False, False, True))
  regulariser = choose((0.0, 0.0, 0.0, 0.1))
  seed = choose(range(2**16))
  shapes = {
    _name(i, part): shape for i, layer in enumerate(layers) for part, shape in SHAPES[layer].items()
  }
  if embedded or tied:
    shapes["table"] = (ROWS, D)
  rng = np.random.default_rng(seed)
  drawn = {name: jnp.asarray(0.7 * rng.standard_normal(s), jnp.float32)
           for name, s in shapes.items()}  # fmt: skip
  frozen = {name: x for name, x in drawn.items() if name.endswith("frozen")}
  params = {name: x for name, x in drawn.items() if name not in frozen}
  params = params or {"unused": jnp.ones(D)}
  dtype = jnp.bfloat16 if half else jnp.float32

  def record_loss(params: Params, record: dict[str, Any], key: Any) -> Any:
    every = {name: x.astype(dtype) for name, x in {**params, **frozen}.items()}
    x = every["table"][record["ids"]] if embedded else record["x"].astype(dtype)
    for i, layer in enumerate(layers):
      own = {part: every[_name(i, part)] for part in SHAPES[layer]}
      x = _apply(layer, own, x, record["valid"], jax.random.fold_in(key, i))
    if tied:
      logits = (x @ every["table"].T).astype(jnp.float32)
      return -jnp.sum(jax.nn.log_softmax(logits)[jnp.arange(T), record["ids"]])
    return jnp.sum(jnp.tanh(x.astype(jnp.float32)) * record["x"])

  def loss(params: Params, unit: dict[str, Any], key: Any) -> Any:
    if records:
      losses = jax.vmap(record_loss, (None, 0, None))(params, unit, key)
      total = jnp.sum(jnp.where(unit["present"], losses, 0.0))
    else:
      total = record_loss(params, unit, key)
    if regulariser:
      total += regulariser * sum(jnp.sum(x**2) for x in params.values())
    return total

  units = _units(rng, records)
  mask = np.asarray([choose((True, True, True, False)) for _ in range(UNITS)])
  budget = choose((2**30,) * 15 + (0,))
  keys = jax.random.split(jax.random.key(seed), UNITS)
  return Network(loss, params, units, keys, mask, choose((0.1, 1.0, 10.0)), budget, half)


def _units(rng: np.random.Generator, records: bool) -> dict[str, jax.Array]:
  some = (UNITS, RECORDS) if records else (UNITS,)
  ids = rng.integers(0, ROWS, (*some, T))
  ids[0] = ids[0, ..., :1]  # one token, repeated
  units = {
    "x": jnp.asarray(rng.standard_normal((*some, T, D)), jnp.float32),
    "ids": jnp.asarray(ids, jnp.int32),
    "valid": jnp.asarray(rng.random((*some, T)) < 0.7).at[..., 0].set(True),
  }
  if records:
    units["present"] = jnp.asarray(rng.random(some) < 0.7)
  return units


def _name(index: int, part: str) -> str:
  return part if part in ("shared", "table") else f"{index}.{part}"


def _apply(layer: str, p: Params, x: jax.Array, valid: jax.Array, key: jax.Array) -> jax.Array:
  """One layer: [T, D] -> [T, D]."""
  kind, _, variant = layer.partition(", ")
  if kind == "dense":
    return _dense(variant, p, x)
  if kind == "conv":
    return _conv(variant, p["k"], x)
  if kind == "lora":
    if variant:
      return jnp.tanh(x @ (p["A"] @ p["B"]))
    return jnp.tanh(x @ p["frozen"] + (x @ p["A"]) @ p["B"])
  if kind == "attention":
    scores = jnp.where(valid[None, :], (x @ p["q"]) @ (x @ p["k"]).T, -1e9)
    return x + jax.nn.softmax(scores) @ (x @ p["v"])
  if kind == "norm":
    centred = x - x.mean(-1, keepdims=True)
    scale = jax.lax.rsqrt(jnp.mean(centred**2, -1, keepdims=True) + 0.1)
    return centred * scale * p["s"] + p["b"]
  if kind == "scan":

    def body(carry: jax.Array, layer: Params) -> tuple[jax.Array, None]:
      return jnp.tanh(carry @ layer["w"] + layer["b"]), None

    return jax.lax.scan(body, x, p)[0]
  return _SIMPLE[layer](p, x, key)


_SIMPLE: dict[str, Callable[[Params, jax.Array, jax.Array], jax.Array]] = {
  "shared": lambda p, x, k: jnp.tanh(x @ p["shared"]),
  "shared, transposed": lambda p, x, k: jnp.tanh(x @ p["shared"].T),
  "tokens mixed": lambda p, x, k: jnp.tanh(p["w"] @ x),
  "heads": lambda p, x, k: jnp.einsum(
    "thd,hde->the", x.reshape(T, 2, D // 2), p["w"]).reshape(T, D),
  "scale and bias": lambda p, x, k: jnp.tanh(x * p["s"] + p["b"]),
  "scale of tokens": lambda p, x, k: x * p["s"],
  "positions": lambda p, x, k: jnp.tanh(x + p["p"]),
  "class token": lambda p, x, k: jnp.tanh(jnp.concatenate([p["c"], x])[:T]),
  "table added": lambda p, x, k: x + p["table"][:T],
  "gate": lambda p, x, k: x * jax.nn.sigmoid(p["a"]) + jax.nn.relu(x * p["a"]),
  "dropout": lambda p, x, k: jnp.where(jax.random.bernoulli(k, 0.5, x.shape), 2 * x, 0),
  "relu": lambda p, x, k: jax.nn.relu(x),
  "unused": lambda p, x, k: x,
}  # fmt: skip


def _dense(variant: str, p: Params, x: jax.Array) -> jax.Array:
  if variant == "frozen":
    return jnp.tanh(x @ p["frozen"])
  if variant == "no gradient":
    return jnp.tanh(x @ jax.lax.stop_gradient(p["w"]))
  if variant == "standardised":
    centred = p["w"] - p["w"].mean(0)
    return jnp.tanh(x @ (centred * jax.lax.rsqrt(jnp.mean(centred**2, 0) + 0.1)))
  if variant == "checkpointed":
    return jax.checkpoint(lambda y: jnp.tanh(y @ p["w"] + p["b"]))(x)
  return jnp.tanh(x @ p["w"] + p["b"])


def _conv(variant: str, kernel: jax.Array, x: jax.Array) -> jax.Array:
  groups = {"depthwise": D, "grouped": 2}.get(variant, 1)
  dilation = 2 if variant == "dilated" else 1
  out = jax.lax.conv_general_dilated(
    x[None], kernel, (1,), "SAME", rhs_dilation=(dilation,), feature_group_count=groups,
    dimension_numbers=("NHC", "HIO", "NHC"),
  )  # fmt: skip
  return jnp.tanh(out[0])
