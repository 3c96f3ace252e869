"""GPT-2: published parameter count, causality, masks, tied embeddings and dropout."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tracing import QUICK, check_shapes, check_units, filled, forward, num_parameters, rngs

from dp_jax.models.language import gpt2

TINY = {"vocab": 11, "context": 8, "width": 8, "depth": 2, "heads": 2}


TOKENS = np.random.default_rng(3).integers(0, TINY["vocab"], (2, 8), np.int32)


def _build(**changes):
  return gpt2.build("10m", **{**TINY, **changes}, rngs=rngs())


@pytest.fixture(scope="module")
def model():
  """(tokens[, mask]) -> logits, at random parameters."""
  functional, arrays = filled(_build)
  compiled = forward(functional)
  return lambda *inputs: np.asarray(compiled(arrays, *inputs))


def test_parameter_counts():
  assert num_parameters(lambda: gpt2.build("124m", rngs=rngs())) == 124_439_808
  count = num_parameters(lambda: gpt2.build("10m", rngs=rngs()))
  assert count == pytest.approx(10e6, rel=0.02)


def test_shapes_and_compute_dtype():
  def build(dtype):
    return gpt2.build("124m", depth=2, dtype=dtype, rngs=rngs())

  check_shapes(build, (4, 128, 50257), ((4, 128), jnp.int32), ((4, 128), jnp.bool))


def test_examples_are_independent_and_everything_has_a_gradient():
  check_units(lambda: _build(depth=1), TOKENS, TOKENS[0, ::-1])


def test_a_later_token_does_not_change_earlier_logits(model):
  before = model(TOKENS)
  for position in range(8):
    tokens = TOKENS.copy()
    tokens[:, position] = (tokens[:, position] + 1) % TINY["vocab"]
    changed = model(tokens)
    np.testing.assert_array_equal(changed[:, :position], before[:, :position])
    differences = np.abs(changed - before)[:, position:].max((0, 2))
    assert (differences > 1e-4).all(), "each position sees itself and all before it"


def test_what_is_masked_has_no_influence_whatever_it_holds():
  functional, arrays = filled(_build)
  model = forward(functional)
  mask = np.array([[True] * 5 + [False] * 3, [False] * 2 + [True] * 6])
  before = np.asarray(model(arrays, TOKENS, mask))
  for padding in (0, -1, 10**6):
    after = np.asarray(model(arrays, np.where(mask, TOKENS, np.int32(padding)), mask))
    np.testing.assert_array_equal(after[mask], before[mask])
    assert np.isfinite(after).all()
  # Nor are the positions of padding in front seen.
  arrays["positions"][:2] *= -1
  after = np.asarray(model(arrays, TOKENS, mask))
  np.testing.assert_array_equal(after[1, 2:], before[1, 2:])
  assert (np.abs(after[0, :5] - before[0, :5]).max(-1) > 1e-3).all()
  unmasked = np.asarray(model(arrays, TOKENS, np.ones_like(mask)))
  np.testing.assert_allclose(after[0, :5], unmasked[0, :5], rtol=1e-5, atol=1e-6)
  assert np.abs(after[1, 2:] - unmasked[1, 2:]).max() > 1e-3


def test_a_shorter_sequence_gives_the_same_logits(model):
  np.testing.assert_allclose(model(TOKENS[:, :3]), model(TOKENS)[:, :3], rtol=1e-4, atol=1e-5)
  with pytest.raises(ValueError, match="9 tokens do not fit the context of 8"):
    model(np.zeros((1, 9), np.int32))


def test_one_embedding_is_read_twice():
  functional, arrays = filled(lambda: _build(depth=1))
  assert [name for name in arrays if 11 in arrays[name].shape] == ["tokens.embedding"]

  @functools.partial(jax.jit, compiler_options=QUICK)
  def gradient(embedding, tokens):
    def loss(x):
      return jnp.sin(functional.bind({**arrays, "tokens.embedding": x})(tokens)).sum()

    return jax.grad(loss)(embedding)

  rows = np.abs(gradient(arrays["tokens.embedding"], np.zeros((1, 4), np.int32))).max(1)
  assert (rows > 0).all(), "tokens that do not occur get theirs from the logits"


def test_dropout_follows_the_key_and_stops_in_evaluation():
  functional, arrays = filled(lambda: _build(depth=1, dropout=0.5))

  @functools.partial(jax.jit, compiler_options=QUICK)
  def logits(seed):
    module = functional.bind(arrays, jax.random.key(seed))
    dropped = module(TOKENS)
    module.eval()
    return dropped, module(TOKENS)

  (first, evaluated), (again, _), (other, also) = logits(0), logits(0), logits(1)
  np.testing.assert_array_equal(first, again)
  assert (first != other).any()
  np.testing.assert_array_equal(evaluated, also)
  plain, values = filled(lambda: _build(depth=1))
  assert not plain.random, "without dropout no key is needed"
  np.testing.assert_allclose(evaluated, forward(plain)(values, TOKENS), rtol=1e-5, atol=1e-6)


def test_sizes_that_do_not_fit_are_refused():
  for size, changes, named in [
    ("1b", {}, "1b.*10m, 124m"),
    ("10m", {"heads": 3}, "divisible by heads=3"),
    ("10m", {"dropout": 1.0}, "dropout=1.0"),
  ]:
    with pytest.raises(ValueError, match=named):
      gpt2.build(size, **{**TINY, **changes}, rngs=rngs())
