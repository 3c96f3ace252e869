"""Views: K' of them are one unit, clipped once, wherever it lands."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import one_label

from dp_jax.data.views import PAD, Views, pad_mirror_crop, random_resized_crop
from dp_jax.gradients.clipping import clipped_grad

RNG = np.random.default_rng(0)
SHAPE = (8, 6, 2)
UNITS = {
  "inputs": RNG.normal(size=(5, 2, *SHAPE)).astype(np.float32),
  "label": RNG.integers(0, 3, (5, 2), np.int32),
  "record_mask": np.array([[1, 1], [1, 0], [0, 1], [0, 0], [1, 1]], bool),
}
PARAMS = {
  "kernel": RNG.normal(size=(np.prod(SHAPE), 3)).astype(np.float32) / 10,
  "bias": np.zeros(3, np.float32),
}
KEYS = jax.random.split(jax.random.key(1), 5)
KINDS = ("pad_mirror_crop_flip", "random_resized_crop")


def _plain_loss(params, unit, key):
  """The mean cross-entropy over real records, as a task has it."""
  inputs = unit["inputs"].astype(jnp.float32).reshape(len(unit["label"]), -1)
  logits = jnp.tanh(inputs @ params["kernel"] + params["bias"])
  losses = -jnp.take_along_axis(jax.nn.log_softmax(logits), unit["label"][:, None], 1)[:, 0]
  mask = unit["record_mask"]
  return jnp.sum(jnp.where(mask, losses, 0.0)) / jnp.maximum(mask.sum(), 1)


def _loss(views):
  return lambda params, unit, key: _plain_loss(params, views.expand(unit, key), key)


@functools.cache
def _grad_fn(views, clip_norm, engine):
  return jax.jit(clipped_grad(_loss(views), clip_norm, engine=engine))


@functools.cache
def _expand(views):
  return jax.jit(jax.vmap(views.expand))


def _sum(views, clip_norm=0.1, engine="vmap", units=UNITS, keys=KEYS, mask=None):
  mask = np.ones(len(units["label"]), bool) if mask is None else mask
  total, aux = _grad_fn(views, clip_norm, engine)(PARAMS, units, mask, keys)
  return np.concatenate([np.ravel(x) for x in jax.tree.leaves(total)]), np.asarray(aux.norms)


@pytest.mark.parametrize("kind", KINDS)
def test_one_unit_with_views_moves_the_sum_by_at_most_c(kind):
  clip_norm, views = 0.1, Views(kind, 2)
  whole, norms = _sum(views)
  assert (norms[:3] > clip_norm).all() and norms[3] == 0  # so that clipping is what bounds it
  for removed in range(5):
    rest, _ = _sum(views, mask=np.arange(5) != removed)
    assert np.linalg.norm(whole - rest) <= clip_norm * (1 + 1e-6)


def test_clipping_each_view_is_caught():
  """The broken variant: the views of one unit as so many units move the sum by more than C."""
  clip_norm, views = 0.1, Views("pad_mirror_crop_flip", 3)
  # Variants of what is nearly one colour are alike, and so are their gradients.
  alike = {**UNITS, "inputs": UNITS["inputs"] / 100 + 0.1}
  expanded = jax.tree.map(lambda x: np.asarray(x)[0, :, None], _expand(views)(alike, KEYS))
  moved, norms = _sum(Views(), clip_norm, units=expanded, keys=None)
  assert (norms > clip_norm).all()
  assert np.linalg.norm(moved) > 2 * clip_norm


def test_the_gradient_is_the_mean_over_records_and_views():
  views = Views("pad_mirror_crop_flip", 3)
  expanded = _expand(views)(UNITS, KEYS)
  assert expanded["inputs"].shape == (5, 6, *SHAPE)
  whole = jax.jit(jax.vmap(jax.grad(_loss(views)), (None, 0, 0)))(PARAMS, UNITS, KEYS)
  one = jax.vmap(jax.grad(lambda params, record: _plain_loss(params, record, None)), (None, 0))
  single = jax.tree.map(lambda x: x[:, :, None], expanded)
  parts = jax.jit(jax.vmap(one, (None, 0)))(PARAMS, single)  # zero where the record is masked
  count = np.maximum(3 * UNITS["record_mask"].sum(1), 1)
  for name in PARAMS:
    mean = np.sum(parts[name], axis=1) / count.reshape(-1, *(1,) * PARAMS[name].ndim)
    np.testing.assert_allclose(whole[name], mean, atol=1e-6)
    assert np.abs(whole[name][0]).max() > 0.001


@pytest.mark.parametrize("kind", KINDS)
def test_ghost_clipping_agrees_with_vmap(kind):
  views = Views(kind, 2)
  expected, norms = _sum(views)
  total, ghost_norms = _sum(views, engine="ghost")
  np.testing.assert_allclose(ghost_norms, norms, rtol=1e-5, atol=1e-6)
  np.testing.assert_allclose(total, expected, atol=1e-6)


def test_views_do_not_depend_on_the_company_of_the_unit():
  views = Views("pad_mirror_crop_flip", 3)
  expand = _expand(views)
  whole = expand(UNITS, KEYS)["inputs"]
  order = np.array([3, 0, 4])
  part = expand(jax.tree.map(lambda x: x[order], UNITS), KEYS[order])["inputs"]
  np.testing.assert_array_equal(part, whole[order])
  # More views, or another key, leave or change them; records of a unit differ from each other.
  more = _expand(Views("pad_mirror_crop_flip", 5))(UNITS, KEYS)["inputs"]
  np.testing.assert_array_equal(more.reshape(5, 2, 5, *SHAPE)[:, :, :3].reshape(whole.shape), whole)
  assert not np.array_equal(expand(UNITS, KEYS[::-1])["inputs"], whole)
  same = {**UNITS, "inputs": np.broadcast_to(UNITS["inputs"][:1, :1], UNITS["inputs"].shape)}
  variants = np.asarray(expand(same, KEYS)["inputs"]).reshape(30, -1)
  assert len(np.unique(variants, axis=0)) > 20


def test_pad_mirror_crop_takes_every_place_of_the_mirrored_image():
  image = RNG.integers(0, 256, SHAPE, np.uint8)
  padded = np.pad(image, ((PAD, PAD), (PAD, PAD), (0, 0)), mode="reflect")
  places = {
    padded[y : y + 8, x : x + 6].tobytes(): (y, x)
    for y in range(2 * PAD + 1)
    for x in range(2 * PAD + 1)
  }
  draws = RNG.random((2000, 2), np.float32)
  draws[0] = np.nextafter(np.float32(1), np.float32(0))
  crops = np.asarray(jax.jit(jax.vmap(pad_mirror_crop, (None, 0)))(image, draws))
  assert crops.dtype == np.uint8
  counts = np.zeros((9, 9), int)
  for crop in crops:
    counts[places[crop.tobytes()]] += 1
  # 81 places at 24.7 each: below 1e-6 that one stays empty or reaches 62.
  assert counts.min() > 0 and counts.max() < 62


def test_random_resized_crop_scales_what_it_cuts():
  """Of a ramp in both directions, a crop is a ramp again: its ends say what was cut out."""
  height, width = 64, 48
  image = np.stack(np.meshgrid(np.arange(height), np.arange(width), indexing="ij"), -1)
  draws = RNG.random((500, 4), np.float32)
  crop = jax.jit(jax.vmap(lambda draw: random_resized_crop(image.astype(np.uint8), draw, 0.08)))
  crops = np.asarray(crop(draws))
  assert crops.shape == (500, height, width, 2) and crops.dtype == np.float32
  # The slope in the middle is the share of the side that was kept.
  rows = (crops[:, 48, 24, 0] - crops[:, 16, 24, 0]) / 32
  columns = (crops[:, 32, 36, 1] - crops[:, 32, 12, 1]) / 24
  assert rows.min() > 0.2 and rows.max() <= 1.001 and columns.max() <= 1.001
  areas, aspects = rows * columns, columns * width / (rows * height)
  assert 0.07 < areas.min() < 0.15 and areas.max() > 0.85
  uncut = (rows < 0.99) & (columns < 0.99)
  assert aspects[uncut].min() > 0.74 and aspects[uncut].max() < 1.35
  assert crops.min() >= 0 and crops[..., 0].max() <= 63.01 and crops[..., 1].max() <= 47.01
  # Above half the area there is one crop that is all of it: the square root of 3/4 is 0.87.
  assert (crops[np.minimum(rows, columns) > 0.999] == image).all()


def test_masked_records_and_settings():
  expanded = _expand(Views("pad_mirror_crop_flip", 3))(UNITS, KEYS)
  assert expanded["record_mask"][1].tolist() == [True] * 3 + [False] * 3
  assert expanded["label"][1].tolist() == np.repeat(UNITS["label"][1], 3).tolist()
  assert Views().expand(UNITS, None) is UNITS
  cases = [
    (Views("none", 2), SHAPE, "data.views=2 would all be the same"),
    (Views("none", 0), SHAPE, "data.views=0 must be at least 1"),
    (Views("random_resized_crop"), (7,), "is for images"),
    (Views("pad_mirror_crop_flip"), (4, 9, 1), "larger than"),
    (Views("random_resized_crop", 1, 0.0), SHAPE, "data.min_crop_area=0"),
  ]
  for views, shape, message in cases:
    with pytest.raises(ValueError, match=message):
      views.check(one_label(shape, 2, (0.0, 1.0)))
