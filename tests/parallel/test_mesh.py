"""The mesh of a configuration, and the rule that says which device holds what."""

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from support import small_config

from dp_jax.parallel.mesh import (
  Feed,
  build_mesh,
  cut_axis,
  describe,
  parse_mesh,
  place,
  shared_predict,
  spec_of,
)
from dp_jax.training.setup.prepare import prepare


@pytest.mark.parametrize(("text", "sizes"), [
  ("data:-1", (8, 1)), ("data:8", (8, 1)), ("data:4,fsdp:2", (4, 2)), ("fsdp:2,data:-1", (4, 2)),
  ("fsdp:-1", (1, 8)), ("data:2, fsdp:-1", (2, 4)), ("data:1", (1, 1)), ("data:3", (3, 1)),
])  # fmt: skip
def test_sizes_of_the_axes(text, sizes):
  assert tuple(parse_mesh(text, 8).values()) == sizes
  mesh = build_mesh(text)
  assert tuple(mesh.shape.items()) == (("data", sizes[0]), ("fsdp", sizes[1]))
  assert describe(mesh) == f"data:{sizes[0]},fsdp:{sizes[1]} on 1 host"


@pytest.mark.parametrize(("text", "named"), [
  ("", "''"), ("data", "data:SIZE"), ("data:x", "data:SIZE"), ("model:2", "'model'"),
  ("data:2,data:4", "once each"), ("data:0", "at least 1"), ("data:-2", "at least 1"),
  ("data:-1,fsdp:-1", "only one"), ("data:16", "8 devices"), ("data:-1,fsdp:3", "8 devices"),
  ("data:-1,fsdp:16", "8 devices"), ("data:1.5", "data:SIZE"),
])  # fmt: skip
def test_a_malformed_mesh_is_refused_before_anything_starts(text, named):
  with pytest.raises(ValueError, match="mesh=") as error:
    prepare(small_config(mesh=text))
  assert named in str(error.value) and repr(text) in str(error.value)


@pytest.mark.parametrize(("shape", "fsdp", "axis"), [
  ((64, 64), 1, None), ((64, 63), 2, None), ((128, 64), 2, 0), ((64, 128), 2, 1),
  ((64, 130), 4, 0),  # 130 does not divide by four
  ((64, 66), 2, 0),  # pairs of normals along the last dimension: 66 / 2 is not even
  ((3, 3, 64, 64), 4, 2), ((), 2, None), ((8192,), 2, 0), ((4095,), 5, None), ((1000, 10), 8, 0),
  ((4097,), 2, None),
])  # fmt: skip
def test_the_rule_cuts_the_largest_dimension_that_divides(shape, fsdp, axis):
  assert cut_axis(shape, fsdp) == axis


def test_state_is_cut_along_fsdp_and_repeated_along_data():
  mesh = build_mesh("data:4,fsdp:2")
  large, small = place((np.zeros((256, 64), np.float32), np.zeros(64, np.float32)), mesh)
  assert spec_of(large, mesh) == P("fsdp") and spec_of(small, mesh) == P()
  assert {shard.data.shape for shard in large.addressable_shards} == {(128, 64)}
  assert small.sharding.is_fully_replicated


@pytest.mark.parametrize(("size", "whole"), [(8, 8), (9, 16), (1, 8), (128, 128)])
def test_a_microbatch_is_rounded_up_to_equal_shares(size, whole):
  feed = Feed(build_mesh("data:4,fsdp:2"), size)
  assert feed.size == whole
  np.testing.assert_array_equal(feed.rows, np.arange(whole))
  units = np.arange(whole * 3).reshape(whole, 3)
  put = feed.put({"x": units})["x"]
  np.testing.assert_array_equal(put, units)
  assert {shard.data.shape for shard in put.addressable_shards} == {(whole // 8, 3)}


def test_predictions_of_shared_records_are_those_of_one_device():
  arrays = {"w": np.random.default_rng(0).standard_normal((5, 3)).astype(np.float32)}
  inputs = np.random.default_rng(1).standard_normal((13, 5)).astype(np.float32)

  def predict(arrays, inputs):
    return jax.nn.softmax(inputs @ arrays["w"])

  expected = predict(arrays, inputs)
  mesh = build_mesh("data:8")
  np.testing.assert_allclose(shared_predict(predict, arrays, mesh)(inputs), expected, rtol=1e-6)
