"""Models as functions of named arrays, their partition, and their weights on disk."""

import hashlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import save_file
from support import classifier

from dp_jax.models.build import ModelSpec
from dp_jax.models.functional import partition, split
from dp_jax.models.pretrained import weights

SPEC = classifier(
  "convnet", {"widths": (4, 6), "strides": (1, 2), "groups": 2}, (5, 5, 1), 3, (0.0, 1.0)
)


@pytest.fixture(scope="module")
def model():
  return split(SPEC.build(0))


def test_binding_gives_the_same_outputs_and_gradients_as_the_module(model):
  functional, arrays = model
  x = jax.random.normal(jax.random.key(0), (2, 5, 5, 1))
  np.testing.assert_array_equal(functional.bind(arrays)(x), SPEC.build(0)(x))
  grads = jax.grad(lambda a: functional.bind(a)(x).sum())(arrays)
  assert list(arrays) == sorted(arrays) == list(grads)
  assert arrays["head.kernel"].shape == (6 * 3 * 3, 3)


def test_dropout_follows_the_key():
  class Net(nnx.Module):
    def __init__(self, rngs):
      self.dropout = nnx.Dropout(0.5, rngs=rngs)
      self.dense = nnx.Linear(16, 16, rngs=rngs)

    def __call__(self, x):
      return self.dropout(self.dense(x))

  functional, arrays = split(Net(nnx.Rngs(0)))
  x = jnp.ones((1, 16))

  def output(seed):
    return functional.bind(arrays, jax.random.key(seed))(x)

  np.testing.assert_array_equal(output(0), output(0))
  assert (output(0) != output(1)).any()
  assert sorted(arrays) == ["dense.bias", "dense.kernel"]
  with pytest.raises(ValueError, match=r"dropout\.rngs"):
    functional.bind(arrays)


def test_partition_by_name(model):
  functional, arrays = model
  trained, frozen = partition(functional, arrays, "^head")
  assert sorted(trained) == ["head.bias", "head.kernel"]
  assert sorted({**trained, **frozen}) == sorted(arrays)
  with pytest.raises(ValueError, match=r"matches none of .*head\.bias"):
    partition(functional, arrays, "^tail")
  with pytest.raises(ValueError, match="not a regular expression"):
    partition(functional, arrays, "(")


def test_statistics_are_never_trained():
  class Net(nnx.Module):
    def __init__(self, rngs):
      self.norm = nnx.BatchNorm(3, use_running_average=True, rngs=rngs)

    def __call__(self, x):
      return self.norm(x)

  functional, arrays = split(Net(nnx.Rngs(0)))
  trained, frozen = partition(functional, arrays, ".*")
  assert sorted(trained) == ["norm.bias", "norm.scale"]
  assert sorted(frozen) == ["norm.mean", "norm.var"]


def test_weights_round_trip(model, tmp_path):
  _, arrays = model
  path = tmp_path / "params.safetensors"
  path.write_bytes(weights.to_bytes(arrays, SPEC))
  spec, loaded = weights.load(path)
  assert spec.to_json() == SPEC.to_json()
  assert weights.to_bytes(arrays, SPEC) == path.read_bytes()
  _, fresh = split(spec.build(1))
  restored, digest = weights.initialise_from(fresh, path)
  assert digest == hashlib.sha256(path.read_bytes()).hexdigest()
  for name in arrays:
    np.testing.assert_array_equal(restored[name], arrays[name])
    np.testing.assert_array_equal(loaded[name], arrays[name])


def test_weights_that_do_not_fit_are_refused_by_name(model, tmp_path):
  _, arrays = model
  path = tmp_path / "params.safetensors"
  wrong = {**arrays, "head.kernel": jnp.zeros((2, 2)), "extra": jnp.zeros(1)}
  del wrong["head.bias"]
  path.write_bytes(weights.to_bytes(wrong, SPEC))
  with pytest.raises(ValueError) as error:
    weights.initialise_from(arrays, path)
  for part in ("head.bias is missing", "extra is not in the model", "head.kernel has shape (2, 2)"):
    assert part in str(error.value)
  path.write_bytes(b"not safetensors")
  with pytest.raises(ValueError, match="not a safetensors file"):
    weights.load(path)
  save_file({"x": np.zeros(1)}, path)
  with pytest.raises(ValueError, match="no model description"):
    weights.load(path)


def test_a_model_that_cannot_be_built_is_refused():
  for changes, named in [
    ({"name": "magic"}, "magic"),
    ({"kwargs": {"depth": 3}}, "depth"),
    ({"kwargs": {"widths": (4,), "strides": (1, 2), "groups": 2}}, "differ in length"),
    ({"kwargs": {"widths": (5,), "strides": (1,), "groups": 2}}, "divisible by groups=2"),
  ]:
    fields = {"name": "convnet", "kwargs": SPEC.kwargs, **changes}
    spec = classifier(**fields, input_shape=(5, 5, 1), num_classes=3, value_range=(0.0, 1.0))
    with pytest.raises(ValueError, match=named):
      spec.build(0)
  with pytest.raises(ValueError, match="not a model description"):
    ModelSpec.from_json("{}")
