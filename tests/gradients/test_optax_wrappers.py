"""Wrappers of optax around a transform that adds noise: each works, or is refused.

What is refused is shown first on a stand-in that nothing guards, which adds so much that whatever
comes out without it is seen.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import dp_jax

KEY = jax.random.key(21)
PARAMS = {"a": jnp.ones((3, 2)), "b": jnp.ones((3, 2))}
SUMS = {"a": jnp.full((3, 2), 2.0), "b": jnp.full((3, 2), -1.0)}
ROWS = jax.tree.map(lambda g: jnp.stack([g, 3 * g, -g]), SUMS)
ONLY_A = {"a": True, "b": False}
LABELS = {"a": "one", "b": "other"}
FAINT, LOUD = 1e-9, 1e9


def _sgd(stddev=FAINT, key=KEY, **kwargs):
  """Rate 1 and divisor 1: the update is minus the noised sum."""
  return dp_jax.dp_sgd(1.0, stddev, key, 1.0, **kwargs)


def _aggregate():
  return dp_jax.differentially_private_aggregate(1.0, LOUD, KEY, 1.0)


def _unguarded():
  """A transform that should see every sum: 1e9 stands for the noise."""
  return optax.stateless(lambda updates, params: jax.tree.map(lambda g: g + LOUD, updates))


def _first_update(transform, updates=SUMS, params=PARAMS):
  return transform.update(updates, transform.init(params), params)[0]


def _late(step):
  return step > 0


LEAKS = {
  "masked": lambda t: optax.masked(t, ONLY_A),
  "masked by a function": lambda t: optax.masked(t, lambda tree: ONLY_A),
  "partition": lambda t: optax.partition({"one": t, "other": optax.sgd(1.0)}, LABELS),
  "multi_transform": lambda t: optax.multi_transform({"one": t, "other": optax.sgd(1.0)}, LABELS),
  "conditionally_transform": lambda t: optax.conditionally_transform(t, _late),
  "sam": lambda t: optax.contrib.sam(t, optax.sgd(1.0), 2),
}


@pytest.mark.parametrize("name", LEAKS)
def test_what_lets_a_sum_out_without_noise_is_refused(name):
  leaked = _first_update(LEAKS[name](_unguarded()))
  assert min(float(jnp.abs(x).max()) for x in jax.tree.leaves(leaked)) < 10
  for transform in (_sgd(), dp_jax.gaussian_noise(1.0, KEY), _aggregate()):
    wrapped = LEAKS[name](transform)
    with pytest.raises(ValueError, match=r"optax\.chain\(dp_jax"):
      wrapped.init(PARAMS)
    # A state that was restored: `init` was not called.
    inner = transform.init(PARAMS)
    restored = jax.tree.map(
      lambda x: inner if isinstance(x, optax.EmptyState) else x,  # noqa: B023
      LEAKS[name](_unguarded()).init(PARAMS),
      is_leaf=lambda x: isinstance(x, optax.EmptyState),
    )
    with pytest.raises(ValueError, match=r"optax\.chain\(dp_jax"):
      wrapped.update(SUMS, restored, PARAMS)


DECIDES = {
  "apply_if_finite": lambda t: optax.apply_if_finite(t, 2),
  "conditionally_mask": lambda t: optax.conditionally_mask(t, _late),
  "selective_transform": lambda t: optax.selective_transform(t, freeze_mask=ONLY_A),
  "mechanize": optax.contrib.mechanize,
  "galore": lambda t: optax.contrib.galore(1, base_optimizer=t),
}
# Older versions of optax do not have all of them.
DECIDES = {n: w for n, w in DECIDES.items() if hasattr(optax, n) or hasattr(optax.contrib, n)}
PARTLY_ZERO = {"conditionally_mask": ("a", "b"), "selective_transform": ("a",)}


@pytest.mark.parametrize("name", DECIDES)
@pytest.mark.parametrize("compiled", [False, True])
def test_what_reads_a_sum_without_noise_is_refused(name, compiled):
  for transform in (_sgd(), _aggregate()):
    init = DECIDES[name](transform).init
    with pytest.raises(ValueError, match=r"optax\.chain\(dp_jax"):
      (jax.jit(init) if compiled else init)(PARAMS)


@pytest.mark.parametrize("name", [*LEAKS, "apply_if_finite", *PARTLY_ZERO])
def test_the_chain_that_the_refusal_names_works(name):
  """All leaves have noise before the wrapper sees them."""
  wrapper = {**LEAKS, **DECIDES}.get(name)
  if wrapper is None:
    pytest.skip(f"this version of optax has no {name}")
  chain = optax.chain(dp_jax.gaussian_noise(LOUD, KEY), optax.scale(1.0), wrapper(optax.sgd(1.0)))
  update = _first_update(chain)
  for leaf in ("a", "b"):
    size = float(jnp.abs(update[leaf]).min())
    assert size == 0 if leaf in PARTLY_ZERO.get(name, ()) else size > 1e5


def test_groups_that_are_clipped_apart_are_refused():
  """Blanking a unit moves the sum by C in each group: by sqrt(2) C in two."""
  theirs = {
    n: optax.contrib.differentially_private_aggregate(1.0, 0.0, KEY) for n in ("one", "other")
  }
  lone = jax.tree.map(lambda g: g * jnp.asarray([1.0, 0, 0])[:, None, None], ROWS)
  none = jax.tree.map(jnp.zeros_like, ROWS)
  sums = [_first_update(optax.multi_transform(theirs, LABELS), rows) for rows in (lone, none)]
  moved = optax.tree.norm(jax.tree.map(lambda x, y: 3 * (x - y), *sums))
  assert moved > 1.41
  ours = optax.multi_transform({"one": _aggregate(), "other": _aggregate()}, LABELS)
  with pytest.raises(ValueError, match="clipped apart"):
    ours.init(PARAMS)
  optimizers = {"one": optax.adam(0.1), "other": optax.sgd(0.1)}
  chain = optax.chain(
    dp_jax.differentially_private_aggregate(1.0, FAINT, KEY, 1.0),
    optax.multi_transform(optimizers, LABELS),
  )
  assert float(jnp.abs(_first_update(chain, lone)["b"]).max()) > 0


def test_noise_comes_first_in_a_chain():
  """What comes before it would scale what one unit adds, or keep it for later steps."""
  for before in (optax.scale(10.0), optax.trace(0.9), optax.masked(optax.set_to_zero(), ONLY_A)):
    for make in (optax.chain, lambda *parts: optax.named_chain(*zip("xy", parts, strict=True))):
      for transform in (_sgd(), _aggregate()):
        chain = make(before, transform)
        with pytest.raises(ValueError, match="first of its chain"):
          _first_update(chain)


def test_a_sum_of_microbatches_and_not_their_mean():
  """Of k microbatches, the mean has 1 / k of the signal under the same noise."""
  scale = optax.scale(-1.0)
  signal = {}
  for mean in (True, False):
    steps = optax.MultiSteps(scale, 4, use_grad_mean=mean)
    state = steps.init(PARAMS)
    for _ in range(4):
      update, state = steps.update(SUMS, state, PARAMS)
    signal[mean] = float(update["a"][0, 0])
  assert signal[False] == -8.0 and signal[True] == -2.0

  with pytest.raises(ValueError, match="use_grad_mean=False"):
    optax.MultiSteps(_sgd(), 4).init(PARAMS)
  with pytest.raises(ValueError, match="use_grad_mean=False"):
    optax.MultiSteps(_sgd(), 4).gradient_transformation().init(PARAMS)
  skipping = optax.MultiSteps(
    _sgd(), 4, use_grad_mean=False, should_skip_update_fn=optax.skip_not_finite
  )
  with pytest.raises(ValueError, match="should_skip_update_fn"):
    skipping.init(PARAMS)
  with pytest.raises(ValueError, match=r"optax\.chain\(dp_jax"):
    optax.MultiSteps(_aggregate(), 4, use_grad_mean=False).init(PARAMS)


@pytest.mark.parametrize("make", [_sgd, lambda **k: dp_jax.dp_adam(1.0, FAINT, KEY, 1.0)])
def test_sums_are_added_up_before_one_draw_of_noise(make):
  steps, direct = optax.MultiSteps(make(), 2, use_grad_mean=False), make()
  state, direct_state = steps.init(PARAMS), direct.init(PARAMS)
  update = jax.jit(steps.update)
  for total in (SUMS, jax.tree.map(jnp.square, SUMS)):
    both = jax.tree.map(lambda x: 2 * x, total)
    for expected in (jax.tree.map(jnp.zeros_like, SUMS), None):
      got, state = update(total, state, PARAMS)
      if expected is None:
        expected, direct_state = direct.update(both, direct_state, PARAMS)
      jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5), got, expected)


WORKS = {
  "flatten": optax.flatten,
  "schedule_free": lambda t: optax.contrib.schedule_free(t, 1.0),
  "named_chain": lambda t: optax.named_chain(("noise", t), ("rest", optax.identity())),
  "chain in a chain": lambda t: optax.chain(optax.chain(t, optax.identity()), optax.identity()),
}


@pytest.mark.parametrize("name", WORKS)
def test_what_hands_on_all_sums_works(name):
  """Like the wrapper around plain SGD, but for the noise; which is new in each step and leaf."""
  params, plain_params = PARAMS, PARAMS
  ours, plain, loud = WORKS[name](_sgd()), WORKS[name](optax.sgd(1.0)), WORKS[name](_sgd(LOUD))
  state, plain_state, loud_state = ours.init(params), plain.init(params), loud.init(params)
  noise = []
  for _ in range(2):
    update, state = jax.jit(ours.update)(SUMS, state, params)
    params = optax.apply_updates(params, update)
    update, plain_state = plain.update(SUMS, plain_state, plain_params)
    plain_params = optax.apply_updates(plain_params, update)
    update, loud_state = jax.jit(loud.update)(SUMS, loud_state, params)
    noise += [np.asarray(update["a"]).ravel(), np.asarray(update["b"]).ravel()]
  for leaf in params:
    np.testing.assert_allclose(params[leaf], plain_params[leaf], atol=1e-5)
  assert len(np.unique(np.concatenate(noise))) == 24


def test_lookahead_works_unless_it_would_repeat_the_noise():
  params = optax.LookaheadParams.init_synced(PARAMS)
  update = _first_update(optax.lookahead(_sgd(), 2, 0.5), params=params)
  np.testing.assert_allclose(update.fast["a"], -SUMS["a"], atol=1e-5)
  with pytest.raises(ValueError, match="reset_state"):
    _first_update(optax.lookahead(_sgd(), 2, 0.5, reset_state=True), params=params)


STATIC = ("stddev", "key", "expected_batch_size")


@pytest.mark.parametrize("name", ["dp_sgd", "dp_adam", "dp_lamb"])
def test_rates_may_be_injected_under_jit(name):
  make = optax.inject_hyperparams(getattr(dp_jax, name), static_args=STATIC)
  transform = make(1.0, FAINT, KEY, 1.0, weight_decay=0.0)
  state = transform.init(PARAMS)
  assert not set(STATIC) & set(state.hyperparams)
  update = jax.jit(transform.update)
  first, _ = update(SUMS, state, PARAMS)
  state.hyperparams["learning_rate"] = jnp.float32(0.25)
  second, after = update(SUMS, state, PARAMS)
  np.testing.assert_allclose(second["a"], 0.25 * first["a"], rtol=1e-6)
  plain = _first_update(getattr(dp_jax, name)(1.0, FAINT, KEY, 1.0))
  np.testing.assert_allclose(first["a"], plain["a"], rtol=1e-6)
  assert jax.tree.structure(after) == jax.tree.structure(state)


def test_a_schedule_may_be_injected():
  make = optax.inject_hyperparams(dp_jax.dp_sgd, static_args=STATIC)
  transform = make(optax.linear_schedule(1.0, 0.0, 4), FAINT, KEY, 1.0)
  state = transform.init(PARAMS)
  update = jax.jit(transform.update)
  got = []
  for _ in range(3):
    step, state = update(SUMS, state, PARAMS)
    got.append(float(step["a"][0, 0]))
  np.testing.assert_allclose(got, [-2.0, -1.5, -1.0], rtol=1e-6)


@pytest.mark.parametrize("missing", STATIC)
def test_what_must_not_change_is_not_injected(missing):
  """The state would hold the caller's own key, and noise that may change is not accounted."""
  static = tuple(name for name in STATIC if name != missing)
  make = optax.inject_hyperparams(dp_jax.dp_sgd, static_args=static)
  with pytest.raises(ValueError, match=f"{missing} must be fixed"):
    make(1.0, 1.0, KEY, 1.0).init(PARAMS)


def test_models_of_flax_take_the_chains():
  model = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
  optimizer = nnx.Optimizer(model, _sgd(LOUD), wrt=nnx.Param)
  total = jax.tree.map(jnp.ones_like, nnx.state(model, nnx.Param))

  @nnx.jit
  def step(model, optimizer):
    optimizer.update(model, total)

  step(model, optimizer)
  first = np.asarray(model.kernel[...])
  assert np.abs(first).min() > 1e5
  step(model, optimizer)
  assert not np.allclose(2 * first, model.kernel[...], rtol=1e-3)


def test_specs_of_a_state_may_be_made_by_its_parameters():
  transform = dp_jax.dp_adam(1.0, 1.0, KEY, 1.0)
  specs = optax.tree_map_params(
    transform, lambda _, spec: spec, transform.init(PARAMS), {"a": 1, "b": 2}
  )
  assert specs[1][0].mu == specs[1][0].nu == {"a": 1, "b": 2}
