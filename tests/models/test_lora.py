"""LoRA: starts as the base model, trains only its factors, and keeps the names of the base."""

import re

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tracing import check_shapes, check_units, filled, forward, num_parameters, rngs

from dp_jax.models.functional import partition
from dp_jax.models.language import gpt2
from dp_jax.models.layers.lora import LORA_PARAMETERS, LoRALinear, add_lora
from dp_jax.models.vision import vit

TINY = {"vocab": 11, "context": 8, "width": 8, "depth": 1, "heads": 2}
TOKENS = np.random.default_rng(3).integers(0, 11, (2, 8), np.int32)
PROJECTIONS = re.compile(r"attention\.(qkv|out)$").search


def _adapted(chosen=PROJECTIONS, rank=2):
  model = gpt2.build("10m", **TINY, rngs=rngs())
  assert add_lora(model, chosen, rank=rank, alpha=16.0, rngs=rngs()) == LORA_PARAMETERS
  return model


def test_at_b_zero_it_is_the_base_model_under_the_same_names():
  base, base_arrays = filled(lambda: gpt2.build("10m", **TINY, rngs=rngs()))
  adapted, arrays = filled(_adapted)
  trained, frozen = partition(adapted, arrays, LORA_PARAMETERS)
  assert sorted(trained) == [
    f"blocks.0.attention.{layer}.lora_{factor}" for layer in ("out", "qkv") for factor in "ab"
  ]  # fmt: skip
  assert frozen.keys() == base_arrays.keys()
  logits, before = forward(adapted), forward(base)(base_arrays, TOKENS)
  zeros = {name: np.zeros_like(x) for name, x in trained.items() if name.endswith("_b")}
  np.testing.assert_array_equal(logits({**base_arrays, **trained, **zeros}, TOKENS), before)
  assert np.abs(logits({**base_arrays, **trained}, TOKENS) - before).max() > 1e-2


def test_examples_are_independent_and_the_factors_have_gradients():
  check_units(_adapted, TOKENS, TOKENS[0, ::-1], LORA_PARAMETERS)


@pytest.mark.parametrize("use_bias", [True, False])
def test_a_layer_starts_as_its_base_and_its_product_is_scaled_by_alpha_over_rank(use_bias):
  base = nnx.Linear(6, 4, use_bias=use_bias, rngs=rngs())
  layer = LoRALinear(base, rank=3, alpha=12.0, rngs=rngs())
  assert layer.kernel is base.kernel
  assert (np.asarray(layer.lora_b[...]) == 0).all()
  assert (np.asarray(layer.lora_a[...]) != 0).all()
  functional, arrays = filled(lambda: layer)
  x = np.random.default_rng(3).standard_normal((2, 5, 6)).astype(np.float32)
  merged = arrays["kernel"] + 4 * arrays["lora_a"] @ arrays["lora_b"]
  expected = x @ merged + (arrays["bias"] if use_bias else 0)
  np.testing.assert_allclose(forward(functional)(arrays, x), expected, rtol=1e-4, atol=1e-5)


def test_count_and_compute_dtype():
  def build(size, **sizes):
    model = gpt2.build(size, **sizes, rngs=rngs())
    add_lora(model, PROJECTIONS, rank=8, alpha=16.0, rngs=rngs())
    return model

  factors = 12 * 8 * ((768 + 3 * 768) + (768 + 768))
  assert num_parameters(lambda: build("124m")) == 124_439_808 + factors
  check_shapes(
    lambda dtype: build("10m", depth=2, dtype=dtype), (1, 16, 8192), ((1, 16), jnp.int32)
  )


def test_layers_in_lists_and_of_other_models_are_wrapped():
  class Net(nnx.Module):
    def __init__(self):
      self.layers = nnx.List([nnx.Linear(3, 3, rngs=rngs()) for _ in range(2)])
      self.last = nnx.Linear(3, 2, rngs=rngs())

    def __call__(self, x):
      for layer in self.layers:
        x = layer(x)
      return self.last(x)

  def build():
    net = Net()
    add_lora(net, lambda name: name in ("layers.1", "last"), rank=1, alpha=1, rngs=rngs())
    return net

  net = nnx.eval_shape(build)
  assert [isinstance(m, LoRALinear) for m in (*net.layers, net.last)] == [False, True, True]
  functional, arrays = filled(build)
  trained, _ = partition(functional, arrays, f"{LORA_PARAMETERS}|^last")
  assert sorted(trained) == [
    "last.bias", "last.kernel", "last.lora_a", "last.lora_b", "layers.1.lora_a", "layers.1.lora_b",
  ]  # fmt: skip
  assert forward(functional)(arrays, np.ones((1, 3), np.float32)).shape == (1, 2)


def test_a_vision_transformer_is_wrapped():
  def build():
    sizes = {"input_shape": (16, 16, 1), "num_classes": 2, "depth": 2, "width": 8, "heads": 2}
    model = vit.build("ti16", **sizes, rngs=rngs())
    add_lora(model, re.compile("mlp").search, rank=1, alpha=1, rngs=rngs())
    return model

  model = nnx.eval_shape(build)
  wrapped = [path for path, m in nnx.iter_modules(model) if isinstance(m, LoRALinear)]
  assert sorted(wrapped) == [
    ("blocks", block, "mlp", layer) for block in range(2) for layer in ("down", "up")
  ]


def test_what_cannot_be_adapted_is_refused():
  with pytest.raises(ValueError, match=r"no linear layer .*blocks\.0\.attention\.out"):
    nnx.eval_shape(lambda: _adapted(chosen=re.compile("nothing").search))
  with pytest.raises(ValueError, match="rank=0"):
    nnx.eval_shape(lambda: _adapted(rank=0))

  def twice():
    return add_lora(_adapted(), PROJECTIONS, rank=2, alpha=1.0, rngs=rngs())

  with pytest.raises(ValueError, match="no linear layer"):
    nnx.eval_shape(twice)
