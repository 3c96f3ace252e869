"""The keys of the noise: one for each leaf by its path, in the state alone, and for one sum."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dp_jax
from dp_jax.gradients.compensated import Compensated
from dp_jax.gradients.noise.leaf_keys import leaf_keys, path_words

KEY = jax.random.wrap_key_data(np.array([0xDEADBEEF, 0x0BADF00D], np.uint32))
WORDS = (str(0xDEADBEEF), str(0x0BADF00D))
PARAMS = {"w": jnp.ones((3, 2)), "b": jnp.ones(2)}
TOTAL = {"w": jnp.full((3, 2), 2.0), "b": jnp.ones(2)}
STACKED = jax.tree.map(lambda x: jnp.stack([x, x]), TOTAL)
TRANSFORMS = {
  "gaussian_noise": lambda key=KEY: dp_jax.gaussian_noise(1.0, key),
  "dp_sgd": lambda key=KEY: dp_jax.dp_sgd(1.0, 1.0, key, 1.0),
  "dp_adam": lambda key=KEY: dp_jax.dp_adam(1.0, 1.0, key, 1.0),
  "aggregate": lambda key=KEY: dp_jax.differentially_private_aggregate(1.0, 1.0, key, 1.0),
}


def test_two_parts_of_a_tree_with_one_key_have_independent_noise():
  """Counted from zero in each part, both leaves would get the same noise.

  2^16 coordinates; six standard errors, so false alarms are below 1e-8, and the key is fixed.
  """
  size = 2**16
  parts = [dp_jax.add_noise({name: jnp.zeros(size)}, 1.0, KEY)[name] for name in ("a", "b")]
  assert abs(np.corrcoef(*parts)[0, 1]) < 6 / np.sqrt(size)
  whole = dp_jax.add_noise({"a": jnp.zeros(size), "b": jnp.zeros(size)}, 1.0, KEY)
  assert all((whole[name] == part).all() for name, part in zip("ab", parts, strict=True))
  by_place = [dp_jax.add_noise([jnp.zeros(4)], 1.0, KEY)[0] for _ in range(2)]  # the broken variant
  assert (by_place[0] == by_place[1]).all()


def test_parts_that_equinox_would_make_have_independent_noise():
  """A tree with holes: what is not there has no leaf, and moves no other."""
  tree = [jnp.zeros(8), jnp.zeros(8)]
  first = dp_jax.add_noise([tree[0], None], 1.0, KEY)[0]
  second = dp_jax.add_noise([None, tree[1]], 1.0, KEY)[1]
  assert not (first == second).any()


@jax.tree_util.register_pytree_with_keys_class
class Twins:
  """A container that gives both of its children one name."""

  def __init__(self, *children):
    self.children = children

  def tree_flatten_with_keys(self):
    return [(jax.tree_util.GetAttrKey("x"), child) for child in self.children], None

  @classmethod
  def tree_unflatten(cls, _, children):
    return cls(*children)


class Name:
  """A key of a dict whose `repr` is its address."""

  def __init__(self, order):
    self.order = order

  def __lt__(self, other):
    return self.order < other.order


TREES = [
  {"a.b": 0, "a": {"b": 0}},
  {"a": {"b']['c": 0, "b": {"c": 0}}},
  {"a": [0, 0], "b": (0, {"0": 0})},
  {0: {1: 0}, 1: {0: 0}},
  Twins(0, 0, Twins(0, 0)),
  {Name(1): 0, Name(2): 0},
  [{"0": 0}, {0: 0}],
]


@pytest.mark.parametrize("tree", TREES)
def test_no_two_leaves_share_a_path(tree):
  words = path_words(tree)
  assert len(set(words)) == len(words) == len(jax.tree.leaves(tree)) > 1


def test_no_two_of_many_leaves_share_a_path():
  assert len(set(path_words([{"w": 0, "b": 0}] * 5000))) == 10_000


def test_words_are_the_same_in_every_process():
  """BLAKE2b of the path, never `hash`; these values are part of what a resumed run must repeat."""
  assert path_words({"head": {"kernel": 0}, "body": [0]}) == [
    (472260014, 63875403),
    (870839926, 3835355429),
  ]
  renamed = [path_words({Name(order): 0}) for order in (1, 2)]
  assert renamed[0] == renamed[1]


@pytest.mark.parametrize("generator", ["threefry2x32", "rbg", "unsafe_rbg"])
def test_keys_of_leaves_are_the_two_words_folded_in(generator):
  key = jax.random.key(3, impl=generator)
  got = leaf_keys(PARAMS, key)
  for own, words in zip(got, path_words(PARAMS), strict=True):
    expected = jax.random.fold_in(jax.random.fold_in(key, words[0]), words[1])
    assert (jax.random.key_data(own) == jax.random.key_data(expected)).all()
  noised = [dp_jax.add_noise({n: jnp.zeros(64)}, 1.0, key)[n] for n in ("a", "b")]
  assert not (noised[0] == noised[1]).any()


def test_a_pair_has_the_noise_of_its_sum():
  pair = Compensated(TOTAL, jax.tree.map(jnp.zeros_like, TOTAL))
  for name, x in dp_jax.add_noise(pair, 1.0, KEY).items():
    np.testing.assert_array_equal(x, dp_jax.add_noise(TOTAL, 1.0, KEY)[name])


@pytest.mark.parametrize("name", TRANSFORMS)
def test_a_donated_state_does_not_take_the_callers_key(name):
  key = jax.random.wrap_key_data(np.array([3, 4], np.uint32))
  transform = TRANSFORMS[name](key)
  updates = jax.tree.map(lambda x: x[None], TOTAL) if name == "aggregate" else TOTAL
  step = jax.jit(lambda u, s: transform.update(u, s, PARAMS), donate_argnums=1)
  for _ in range(2):
    state = transform.init(PARAMS)
    step(updates, state)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state))
    assert (jax.random.key_data(key) == np.array([3, 4])).all()


@pytest.mark.parametrize("name", TRANSFORMS)
def test_shapes_of_a_state_may_be_asked_for(name):
  transform = TRANSFORMS[name]()
  shapes = jax.eval_shape(transform.init, PARAMS)
  state = transform.init(PARAMS)
  got = jax.tree.map(lambda x: (x.shape, x.dtype), shapes)
  assert got == jax.tree.map(lambda x: (x.shape, x.dtype), state)
  assert jax.tree.structure(shapes) == jax.tree.structure(state)
  inner = jax.eval_shape(lambda p: jax.eval_shape(jax.jit(transform.init), p), PARAMS)
  assert jax.tree.structure(inner) == jax.tree.structure(state)
  if name != "aggregate":
    assert jax.eval_shape(transform.update, TOTAL, shapes, PARAMS)[1] == shapes


@pytest.mark.parametrize("name", TRANSFORMS)
def test_init_cannot_be_compiled_and_nothing_of_the_key_is_in_what_is_traced(name):
  transform = TRANSFORMS[name]()
  closed = jax.make_jaxpr(transform.init)(PARAMS)
  assert not any(isinstance(c, jax.Array) and c.dtype == KEY.dtype for c in closed.consts)
  assert not any(word in str(closed) for word in WORDS)

  def and_update(params):
    return transform.update(params, transform.init(params), params)

  compiled = [
    lambda: jax.jit(transform.init)(PARAMS),
    lambda: jax.jit(transform.init).lower(PARAMS),
    lambda: jax.jit(jax.vmap(transform.init))(STACKED),
    lambda: jax.lax.map(lambda _: transform.init(PARAMS), jnp.arange(2)),
    lambda: jax.lax.cond(True, lambda: transform.init(PARAMS), lambda: transform.init(PARAMS)),
    lambda: jax.export.export(jax.jit(transform.init))(PARAMS),
    lambda: jax.jit(lambda: transform.init(None))(),
  ]
  if name != "aggregate":
    compiled.append(lambda: jax.jit(and_update)(PARAMS))
  for run in compiled:
    with pytest.raises(ValueError, match="inside a traced function"):
      run()
  broken = jax.jit(lambda: dp_jax.add_noise(TOTAL, 1.0, KEY)).lower().as_text("hlo")
  assert all(word in broken for word in WORDS)
  with pytest.raises(ValueError, match="inside a traced function"):
    jax.core.eval_jaxpr(closed.jaxpr, closed.consts, *jax.tree.leaves(PARAMS))


def test_a_checkpoint_is_restored_by_shapes(tmp_path):
  checkpoint = pytest.importorskip("orbax.checkpoint")
  transform = TRANSFORMS["dp_adam"]()
  _, state = transform.update(TOTAL, transform.init(PARAMS), PARAMS)
  again = TRANSFORMS["dp_adam"]()
  with checkpoint.StandardCheckpointer() as checkpointer:
    checkpointer.save(tmp_path / "state", state)
    checkpointer.wait_until_finished()
    restored = checkpointer.restore(tmp_path / "state", jax.eval_shape(again.init, PARAMS))
  expected, _ = transform.update(TOTAL, state, PARAMS)
  got, _ = jax.jit(again.update)(TOTAL, restored, PARAMS)
  jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6), got, expected)


@pytest.mark.parametrize("outer", [lambda f: f, jax.jit], ids=["eager", "jit"])
@pytest.mark.parametrize("name", ["gaussian_noise", "dp_adam"])
def test_a_key_for_two_sums_is_refused(outer, name):
  """The same noise on both; their difference would have none."""
  both = jax.vmap(lambda total: dp_jax.add_noise(total, 1.0, KEY))(STACKED)  # the broken variant
  assert (both["w"][0] == both["w"][1]).all()
  transform = TRANSFORMS[name]()
  state = transform.init(PARAMS)
  with pytest.raises(ValueError, match="vmap"):
    jax.vmap(transform.init)(STACKED)
  for axes in ((0, None, None), (0, None, 0)):
    params = STACKED if axes[2] == 0 else PARAMS
    with pytest.raises(ValueError, match="vmap"):
      outer(jax.vmap(transform.update, axes))(STACKED, state, params)

  def steps(total, state, params):
    def step(state, _):
      noised, state = transform.update(total, state, params)
      return state, noised

    return jax.lax.scan(step, state, None, length=2)

  with pytest.raises(ValueError, match="vmap"):
    outer(jax.vmap(steps, (0, None, None)))(STACKED, state, PARAMS)


def test_a_key_for_each_sum_works_under_vmap():
  """An ensemble: states made one by one, with keys of their own, and stacked."""
  states = [dp_jax.gaussian_noise(1.0, k).init(PARAMS) for k in jax.random.split(KEY, 2)]
  transform = TRANSFORMS["gaussian_noise"]()
  transform.init(PARAMS)
  stacked = jax.tree.map(lambda *x: jnp.stack(x), *states)
  got, after = jax.jit(jax.vmap(transform.update))(STACKED, stacked)
  for index, state in enumerate(states):
    alone, _ = transform.update(TOTAL, state)
    np.testing.assert_allclose(got["w"][index], alone["w"])
  assert not (got["w"][0] == got["w"][1]).any() and after.count.tolist() == [1, 1]


def test_init_may_run_while_something_else_is_differentiated():
  def loss(params):
    state = TRANSFORMS["dp_sgd"]().init(params)
    return jnp.sum(params["w"]) + 0.0 * state[0].count

  np.testing.assert_array_equal(jax.grad(loss)(PARAMS)["w"], 1.0)


ROWS = jax.tree.map(lambda x: jnp.stack([x] * 5), TOTAL)


@pytest.mark.parametrize("outer", [lambda f: f, jax.jit], ids=["eager", "jit"])
@pytest.mark.parametrize("name", ["gaussian_noise", "dp_sgd", "dp_adam"])
def test_rows_of_units_are_refused_with_and_without_parameters(outer, name):
  """Each noised row would be a release of one unit's gradient."""
  transform = TRANSFORMS[name]()
  state = transform.init(PARAMS)
  pair = Compensated(ROWS, ROWS)
  lone = jax.tree.map(lambda x: x[:1], ROWS)
  for rows in (ROWS, lone, pair):
    for params in ((), (PARAMS,)):
      with pytest.raises(ValueError, match="takes the sum over units"):
        outer(transform.update)(rows, state, *params)
  assert outer(transform.update)(TOTAL, state)[0]["w"].shape == (3, 2)
  # Restored into a transform that has never seen the parameters.
  with pytest.raises(ValueError, match=r"update\(total, state, params\)"):
    outer(TRANSFORMS[name]().update)(ROWS, state)
  with pytest.raises(ValueError, match="takes the sum over units"):
    outer(TRANSFORMS[name]().update)(ROWS, state, PARAMS)


@pytest.mark.parametrize("wrapper", [lambda t: optax.chain(t, optax.sgd(1.0)), optax.flatten])
def test_rows_of_units_are_refused_within_chains(wrapper):
  transform = wrapper(TRANSFORMS["gaussian_noise"]())
  with pytest.raises(ValueError, match="takes the sum over units"):
    transform.update(ROWS, transform.init(PARAMS))


def test_a_sum_is_refused_where_rows_are_taken():
  """Its rows would pass for units: one unit would move each of them by twice the clip norm."""
  square = {"w": jnp.ones((3, 2)), "v": jnp.ones((3, 2))}
  transform = TRANSFORMS["aggregate"]()
  state = transform.init(square)
  for params in ((), (square,)):
    with pytest.raises(ValueError, match="per-example gradients"):
      transform.update(square, state, *params)
  with pytest.raises(ValueError, match="per-example gradients"):
    TRANSFORMS["aggregate"]().update(square, state, square)


def test_sums_of_any_floating_point_are_noised_as_float32():
  noise = dp_jax.add_noise({"x": jnp.zeros(4)}, 1.0, KEY)["x"]
  for dtype in (jnp.float16, jnp.bfloat16, jnp.float32):
    got = dp_jax.add_noise({"x": jnp.full(4, 0.5, dtype)}, 1.0, KEY)["x"]
    assert got.dtype == jnp.float32
    np.testing.assert_array_equal(got, noise + 0.5)
  lone = dp_jax.add_noise({"x": jnp.float32(0)}, 1.0, KEY)["x"]
  assert dp_jax.add_noise({"x": 0.0}, 1.0, KEY)["x"] == lone and lone.shape == ()
  assert dp_jax.add_noise({}, 1.0, KEY) == {} and dp_jax.add_noise([{}, None], 1.0, KEY) == [
    {},
    None,
  ]
  with jax.enable_x64(True):
    # As float32, the sum would be 2^24 and lose the half.
    far = dp_jax.add_noise({"x": jnp.full(4, 2.0**24 + 0.5, jnp.float64)}, 2.0**-20, KEY)["x"]
    exact = Compensated(
      {"x": jnp.full(4, 2.0**24, jnp.float32)}, {"x": jnp.full(4, 0.5, jnp.float32)}
    )
    assert far.dtype == jnp.float32
    np.testing.assert_array_equal(far, dp_jax.add_noise(exact, 2.0**-20, KEY)["x"])


@pytest.mark.parametrize("dtype", [jnp.complex64, jnp.int32, jnp.bool_])
def test_what_is_not_a_real_floating_point_number_is_refused(dtype):
  """Noise on the real part alone would release the imaginary one."""
  with pytest.raises(ValueError, match="real floating point"):
    dp_jax.add_noise({"x": jnp.ones(3, dtype)}, 1.0, KEY)


def test_a_sum_that_is_not_finite_is_not_made_to_look_like_one():
  got = dp_jax.add_noise({"x": jnp.asarray([jnp.nan, jnp.inf, 1.0])}, 1.0, KEY)["x"]
  assert np.isnan(got[:2]).all() and np.isfinite(got[2])
