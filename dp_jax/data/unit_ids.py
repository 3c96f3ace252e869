"""Ids of units: which texts are one id, which only look like one, and what is no id.

Two spellings of one person are two units, so that leaving that person out would move the sum by
twice the clip norm; two people under one id are one unit, and leaving one of them out may do so
too. Neither side is the safe one, so spellings become one only where they cannot mean two.
"""

from __future__ import annotations

import hashlib
import numbers
import re
import unicodedata
from collections.abc import Hashable, Iterable, Sequence

import numpy as np

from dp_jax.data.sources.source import DataError
from dp_jax.errors import UserError

# One id a record, all strings or all numbers; an array, or a sequence of Python values.
Ids = Sequence[Hashable] | np.ndarray

RULE = (
  "ids are compared without spaces around them, in the composed form of Unicode (NFC), and a whole"
  " number as the same number with nothing but zeros behind its point; in nothing else: 'a' and"
  " 'A', '7' and '07' are two units"
)
_LONGEST = 256
_TOO_LARGE = "unit ids are numbers too large to tell apart; give them as strings"
_WHOLE = re.compile(r"([+-]?[0-9]+)\.0*")
# Spaces, and characters that nobody sees: of no width, or byte order marks.
_UNSEEN = "\u200b\u200c\u200d\u2060\ufeff"
_ZEROS = re.compile(r"(?<![\d.])0+(?=\d)")
_TOO_LARGE = "unit ids are numbers too large to tell apart; give them as strings"
_NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")


def canonical(ids: np.ndarray) -> np.ndarray:
  """Ids as texts of which two are equal if they are one id by RULE.

  Args:
    ids: [n] strings, bytes or numbers.

  Returns:
    [n] strings: "" for none, numbers as they are written without a point if they are whole. Of a
    text of more than 256 characters a hash, since an array is as wide as its longest text.
  """
  if not len(ids):
    return np.zeros(0, np.str_)
  distinct, inverse = np.unique(ids, return_inverse=True)
  if ids.dtype.kind == "f":
    texts = ["" if np.isnan(each) else repr(each) for each in distinct.tolist()]
  elif ids.dtype.kind == "S":
    texts = [each.decode(errors="backslashreplace") for each in distinct.tolist()]
  else:
    texts = [str(each) for each in distinct.tolist()]
  return np.array([_canonical(text) for text in texts])[inverse]


def _canonical(text: str) -> str:
  if not text.isascii():
    text = unicodedata.normalize("NFC", text)
  before = None
  while text != before:
    before, text = text, text.strip().strip(_UNSEEN)
  if len(text) > _LONGEST:
    return f"sha256 {hashlib.sha256(text.encode(errors='surrogatepass')).hexdigest()}"
  whole = _WHOLE.fullmatch(text)
  return whole.group(1) if whole else text


def look_alike(ids: np.ndarray) -> tuple[tuple[str, ...], ...]:
  """Ids that differ by RULE, and may be one all the same: "a" and "A", "7" and "07".

  Args:
    ids: [n] strings, as `canonical` gives them.

  Returns:
    Groups of ids that are the same but for case, spaces within, zeros before a number and how the
    same number is written.
  """
  groups: dict[str, list[str]] = {}
  for text in np.unique(ids).tolist():
    groups.setdefault(_likeness(text), []).append(text)
  return tuple(tuple(each) for each in groups.values() if len(each) > 1)


def _likeness(text: str) -> str:
  if _NUMBER.fullmatch(text):
    number = float(text)
    if abs(number) < 2**53:
      return str(int(number)) if number == int(number) else repr(number)
  if not text.isascii():
    text = unicodedata.normalize("NFKC", text)
    text = "".join(each for each in text if unicodedata.category(each) != "Cf")
  return _ZEROS.sub("", "".join(text.casefold().split()))


def as_array(ids: Ids, owner: str) -> tuple[np.ndarray, np.ndarray, int]:
  """Ids as an array of canonical texts, or of numbers.

  Returns:
    The array, which of them are empty or not finite, and how many are written in another way than
    they are compared.

  Raises:
    DataError: if they are of several types, or no single ids.
    ValueError: if they are numbers that their type does not tell apart from others.
  """
  array = ids if isinstance(ids, np.ndarray) and ids.dtype.kind != "O" else _typed(ids, owner)
  if array.ndim != 1 or array.dtype.kind not in "USbiuf":
    raise DataError(
      f"unit ids must be one number or string for each {owner}",
      f"one for each {owner}, not {array.dtype} of shape {array.shape}",
    )
  if array.dtype.kind == "f":
    _check_exact(array)
    return array, ~np.isfinite(array), 0
  if array.dtype.kind not in "US":
    return array, np.zeros(len(array), bool), 0
  texts = canonical(array)
  if array.dtype.kind == "S":
    return texts, texts == "", 0
  return texts, texts == "", int(np.sum(texts != array))


def _typed(ids: Iterable[object], owner: str) -> np.ndarray:
  """Python values as an array of the one type that they have; None becomes "" or NaN."""
  values = list(ids)
  kinds = {_kind(cls) for cls in set(map(type, values))}
  if "other" in kinds:
    bad = next(i for i, value in enumerate(values) if _kind(type(value)) == "other")
    raise DataError(
      f"{owner} {bad} has a unit id that is no one number or string; a record that belongs to"
      " several units has to be assigned to one or left out before",
      f"the id {values[bad]!r}",
    )
  nan = {i for i, v in enumerate(values) if v is None or v != v} if kinds - {"text"} else set()
  used = {_kind(type(v)) for i, v in enumerate(values) if i not in nan} if nan else kinds
  if len(used) > 1:
    raise DataError("unit ids mix types that have no order", f"{', '.join(sorted(used))}")
  if used == {"number"}:
    return _numbers(values, nan)
  blank = b"" if used == {"bytes"} else ""
  return _texts([blank if i in nan else v for i, v in enumerate(values)])


def _texts(values: list) -> np.ndarray:
  """Strings or bytes, no longer than they need be to be told apart."""
  longest = max(map(len, values), default=0)
  if longest > _LONGEST and values and isinstance(values[0], str):
    values = [_canonical(each) if len(each) > _LONGEST else each for each in values]
  return np.array(values)


def _numbers(values: list, nan: set[int]) -> np.ndarray:
  array = np.array([0 if i in nan else v for i, v in enumerate(values)])
  if array.dtype.kind not in "biuf":
    raise UserError(_TOO_LARGE)
  if nan:
    if max(abs(int(array.max())), abs(int(array.min()))) >= 2**53:
      raise UserError(_TOO_LARGE)
    array = array.astype(np.float64)
    array[list(nan)] = np.nan
  return array


def _check_exact(array: np.ndarray) -> None:
  """Refuses floats so large that the ids of two people may have become one of them."""
  digits = np.finfo(array.dtype).nmant + 1
  if (np.abs(array[np.isfinite(array)]) >= 2.0**digits).any():
    raise UserError(_TOO_LARGE)


def _kind(cls: type) -> str:
  if issubclass(cls, str):
    return "text"
  if issubclass(cls, bytes):
    return "bytes"
  if issubclass(cls, type(None)):
    return "none"
  return "number" if issubclass(cls, numbers.Real | np.bool_) else "other"
