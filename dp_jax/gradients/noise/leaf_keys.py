"""The key of each leaf's noise, from its path: its place in a list of leaves would not do.

Two calls with one key may see different parts of one tree. Counted from zero in each, two leaves
of one shape would get the same noise, and the difference of their sums would be released without.
"""

import collections
import hashlib
from typing import Any

import jax
import numpy as np

PyTree = Any

# 64 bits, as many as a threefry key has.
_WORDS = 2


def leaf_keys(tree: PyTree, key: jax.Array) -> list[jax.Array]:
  """One key for each leaf: the key with the hash of the leaf's path folded in.

  Args:
    tree: any; only its structure matters, so that the keys are the same on every host and under
      any sharding.
    key: one typed key.

  Returns:
    Typed keys in the order of the leaves. No two leaves of a tree share a path, and so a key.
  """
  words = path_words(tree)
  if not words:
    return []
  if jax.random.key_impl(key) == "threefry2x32":
    # All leaves at once, which compiles in a fraction of the time.
    keys = jax.vmap(_fold_in, (None, 0))(key, np.asarray(words, np.uint32))
    return [keys[index] for index in range(len(words))]
  # Of other generators, vmap is not the map.
  return [_fold_in(key, own) for own in words]


def _fold_in(key: jax.Array, words: Any) -> jax.Array:
  for index in range(_WORDS):
    key = jax.random.fold_in(key, words[index])
  return key


def path_words(tree: PyTree) -> list[tuple[np.uint32, ...]]:
  """The first 64 bits of the BLAKE2b hash of each leaf's path, as two words."""
  counts: collections.Counter[str] = collections.Counter()
  words = []
  for path, _ in jax.tree_util.tree_flatten_with_path(tree)[0]:
    text = path_text(path)
    # A container may give two of its children one name; then their order tells them apart.
    digest = hashlib.blake2b(repr((text, counts[text])).encode(), digest_size=4 * _WORDS).digest()
    counts[text] += 1
    words.append(tuple(np.frombuffer(digest, "<u4")))
  return words


def path_text(path: tuple[Any, ...]) -> str:
  """A text that different paths of one tree do not share: {"a.b": x} is not {"a": {"b": x}}."""
  return repr([_entry_text(entry) for entry in path])


def _entry_text(entry: Any) -> tuple[str, str]:
  for name in ("key", "idx", "name"):
    if hasattr(entry, name):
      return type(entry).__name__, _stable_text(getattr(entry, name))
  return type(entry).__name__, _stable_text(entry)


def _stable_text(value: Any) -> str:
  """What is the same in every process: the default `repr` of an object is its address."""
  if type(value).__repr__ is object.__repr__:
    return type(value).__qualname__
  return repr(value)
