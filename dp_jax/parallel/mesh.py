"""Devices as a mesh, and the one rule that says which device holds what.

Units are spread over all devices; along `data` the parameters are repeated, along `fsdp` they are
cut. Neither changes which units a step uses, nor its noise.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from dp_jax.errors import UserError

PyTree = Any

DATA, FSDP = "data", "fsdp"
AXES = (DATA, FSDP)

# Arrays with fewer numbers are held by every device: cutting them costs more than it saves.
_SMALLEST_CUT = 4096


def parse_mesh(text: str, num_devices: int) -> dict[str, int]:
  """Reads "data:4,fsdp:2"; one size may be -1, which stands for all devices that are left.

  Args:
    text: axes and sizes; an axis that is not named has size 1.
    num_devices: how many devices there are.

  Returns:
    The size of each axis, in the order of AXES.

  Raises:
    ValueError: naming the text and what is wrong with it.
  """
  sizes = dict.fromkeys(AXES, 1)
  named = set()
  for part in text.split(","):
    axis, _, size = (piece.strip() for piece in part.partition(":"))
    if axis not in AXES or axis in named:
      raise UserError(f"mesh={text!r}: {axis!r} must be one of {', '.join(AXES)}, once each.")
    try:
      sizes[axis] = int(size)
    except ValueError:
      raise UserError(f"mesh={text!r}: write {axis}:SIZE, as in 'data:4,fsdp:2'.") from None
    if sizes[axis] < 1 and sizes[axis] != -1:
      raise UserError(f"mesh={text!r}: the size of {axis} must be at least 1, or -1 for the rest.")
    named.add(axis)
  open_axes = [axis for axis, size in sizes.items() if size == -1]
  if len(open_axes) > 1:
    raise UserError(f"mesh={text!r}: only one size may be -1.")
  fixed = math.prod(size for size in sizes.values() if size != -1)
  for axis in open_axes:
    sizes[axis] = max(num_devices // fixed, 1)
  wanted = math.prod(sizes.values())
  if wanted > num_devices or (open_axes and wanted != num_devices):
    raise UserError(f"mesh={text!r} does not fit the {num_devices} devices that there are.")
  return sizes


def build_mesh(text: str = "data:-1") -> Mesh:
  """The mesh that a configuration names, of the first devices of all hosts.

  Raises:
    ValueError: if the text is malformed or does not fit the devices, or would leave out devices
      where there is more than one host.
  """
  devices = jax.devices()
  sizes = parse_mesh(text, len(devices))
  count = math.prod(sizes.values())
  if jax.process_count() > 1 and count < len(devices):
    raise UserError(
      f"mesh={text!r} uses {count} of {len(devices)} devices; with several hosts it must use all."
    )
  return jax.make_mesh(
    tuple(sizes.values()), tuple(sizes), (AxisType.Auto,) * len(sizes), devices=devices[:count]
  )


def one_device() -> Mesh:
  """A mesh of this host's first device."""
  device = jax.local_devices()[0]
  return jax.make_mesh((1,) * len(AXES), AXES, (AxisType.Auto,) * len(AXES), devices=[device])


def cut_axis(shape: tuple[int, ...], fsdp: int) -> int | None:
  """Which dimension of an array is cut into `fsdp` pieces: the largest that divides, or none.

  The one rule for parameters, optimizer state, averages and noise; it sees the shape alone. The
  last dimension must divide by twice as much, since normals are drawn in pairs along it.
  """
  if fsdp == 1 or math.prod(shape) < _SMALLEST_CUT:
    return None
  last = len(shape) - 1
  fitting = [i for i, n in enumerate(shape) if n % (2 * fsdp if i == last else fsdp) == 0]
  return max(fitting, key=lambda i: shape[i], default=None)


def spec_of(leaf: Any, mesh: Mesh) -> P:
  """How one array of the state is spread: cut along fsdp, or on every device."""
  axis = cut_axis(np.shape(leaf), mesh.shape[FSDP])
  return P() if axis is None else P(*(None,) * axis, FSDP)


def specs_of(tree: PyTree, mesh: Mesh) -> PyTree:
  """`spec_of` each leaf."""
  return jax.tree.map(lambda leaf: spec_of(leaf, mesh), tree)


def shardings_of(tree: PyTree, mesh: Mesh) -> PyTree:
  """`spec_of` each leaf, on this mesh."""
  return jax.tree.map(lambda leaf: NamedSharding(mesh, spec_of(leaf, mesh)), tree)


def place(tree: PyTree, mesh: Mesh) -> PyTree:
  """Puts arrays that every host has whole onto the mesh, by the rule of `spec_of`."""
  return jax.tree.map(_put, tree, shardings_of(tree, mesh))


def put_key(key: jax.Array, mesh: Mesh) -> jax.Array:
  """Puts a key that every host has onto every device."""
  if mesh.size == 1 and key.devices() == set(mesh.devices.flat):
    return key
  data = _put(jax.random.key_data(key), NamedSharding(mesh, P()))
  return jax.random.wrap_key_data(data, impl=jax.random.key_impl(key))


def _put(x: Any, sharding: NamedSharding) -> jax.Array:
  if sharding.is_fully_addressable:
    return jax.device_put(x, sharding)
  # Not device_put: of several hosts, it would ask all others each time whether they have the same.
  whole = jax.device_get(x)
  return _assemble(whole.shape, sharding, lambda index: whole[index])


def _assemble(
  shape: tuple[int, ...], sharding: NamedSharding, part: Callable[[Any], np.ndarray]
) -> jax.Array:
  """An array over all hosts of this host's parts, by transfers that are asked for by name."""
  placed = [
    jax.device_put(part(index), device)
    for device, index in sharding.addressable_devices_indices_map(shape).items()
  ]
  return jax.make_array_from_single_device_arrays(shape, sharding, placed)


def describe(mesh: Mesh) -> str:
  """The mesh as text, "data:4,fsdp:2 on 2 hosts": rounding depends on it."""
  hosts = len({device.process_index for device in mesh.devices.flat})
  sizes = ",".join(f"{axis}:{size}" for axis, size in mesh.shape.items())
  return f"{sizes} on {hosts} host{'' if hosts == 1 else 's'}"


def to_host(tree: PyTree) -> PyTree:
  """The whole arrays as numpy, on every host; a call of all hosts together."""

  def leaf(x: Any) -> np.ndarray:
    if not isinstance(x, jax.Array) or x.is_fully_addressable or x.is_fully_replicated:
      return jax.device_get(x)
    return multihost_utils.process_allgather(x, tiled=True)

  return jax.tree.map(leaf, tree)


def own_rows(tree: PyTree) -> PyTree:
  """Of arrays as `Feed.put` makes them, the rows of this host, as numpy; waits for them."""

  def leaf(x: Any) -> np.ndarray:
    if not isinstance(x, jax.Array) or x.is_fully_addressable:
      return x
    shards = sorted(x.addressable_shards, key=lambda shard: shard.index[0].start or 0)
    return np.concatenate(jax.device_get([shard.data for shard in shards]))

  return jax.device_get(jax.tree.map(leaf, tree))


def shared_predict(
  predict: Callable[[Any, jax.Array], jax.Array], arrays: PyTree, mesh: Mesh
) -> Callable[[np.ndarray], np.ndarray]:
  """`predict` of records that are spread over all devices; every host has all of its results.

  Args:
    predict: (arrays, inputs [n, ...]) -> [n, ...], each row a function of that record alone.
    arrays: on the mesh.
    mesh: the devices.

  Returns:
    inputs [n, ...], the same on every host, to results [n, ...].
  """
  compiled = jax.jit(predict, out_shardings=NamedSharding(mesh, P()))
  feeds: dict[int, Feed] = {}

  def call(inputs: np.ndarray) -> np.ndarray:
    count = len(inputs)
    feed = feeds.setdefault(count, Feed(mesh, count))
    filled = np.concatenate(
      [inputs, np.zeros((feed.size - count, *inputs.shape[1:]), inputs.dtype)]
    )
    return np.asarray(compiled(arrays, feed.put(filled[feed.rows])))[:count]

  return call


class Feed:
  """Where the units of a microbatch go: equal shares to all devices, each from its own host.

  Args:
    mesh: the devices.
    microbatch_size: units of a microbatch over all devices; rounded up to a multiple of their
      number, which adds padding and changes no result.
  """

  def __init__(self, mesh: Mesh, microbatch_size: int):
    self.size = -(-microbatch_size // mesh.size) * mesh.size
    self._sharding = NamedSharding(mesh, P(AXES))
    slices = self._sharding.addressable_devices_indices_map((self.size,)).values()
    self.rows = np.unique(np.concatenate([np.arange(self.size)[part] for part in slices]))
    """int64[local size]: the rows of a microbatch that this host loads, in order."""

  def put(self, tree: PyTree) -> PyTree:
    """Makes arrays [size, ...] over all hosts of this host's rows [len(rows), ...]."""
    if self._sharding.is_fully_addressable:
      return jax.device_put(tree, self._sharding)  # one call: each costs the host

    def leaf(x: np.ndarray) -> jax.Array:
      def part(index: Any) -> np.ndarray:
        first, last, _ = index[0].indices(self.size)
        start = int(np.searchsorted(self.rows, first))
        return x[start : start + last - first]

      return _assemble((self.size, *x.shape[1:]), self._sharding, part)

    return jax.tree.map(leaf, tree)
