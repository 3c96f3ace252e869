"""CSV files as columns of text: one row a record, whatever a cell or a row holds.

A malformed row or cell belongs to one record, so it may neither stop the reading nor shift or drop
rows: it is noted beside the row's index.
"""

from __future__ import annotations

import csv
import hashlib
import io
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import csv as arrow_csv

from dp_jax.data.group_columns import to_numbers
from dp_jax.data.sources.absent import ABSENT
from dp_jax.data.sources.source import LONGEST, DataError, shortened
from dp_jax.errors import UserError


@dataclass(frozen=True)
class Table:
  """A CSV file in memory.

  Attributes:
    path: of the file.
    columns: the columns as bytes, by name.
    num_rows: without the header; rows of the wrong length are counted, and hold no values.
    malformed: rows of the wrong length, by index, and what is wrong.
    digest: SHA-256 of the file.
    missing: the cells that are declared to hold no value, in place of
      `dp_jax.data.sources.absent.ABSENT`; None takes those, which are no rule for `text`.
  """

  path: Path
  columns: dict[str, pa.ChunkedArray]
  num_rows: int
  malformed: dict[int, str] = field(default_factory=dict)
  digest: str = ""
  missing: tuple[str, ...] | None = None

  def text(self, name: str) -> pa.ChunkedArray:
    """A column as strings as they are, but for spaces around them; "" for what is declared missing.

    Raises:
      DataError: if there is no such column; its detail names those that there are.
    """
    if name not in self.columns:
      raise DataError(
        f"{self.path} has no column {name!r}", f"its columns: {', '.join(self.columns)}"
      )
    column = self.columns[name]
    try:
      text = column.cast(pa.string())
    except pa.ArrowException:  # a cell that is no UTF-8; two such ones stay apart
      cells = [cell.decode(errors="backslashreplace") for cell in column.to_pylist()]
      text = pa.chunked_array([pa.array(cells, pa.string())])
    text = pc.utf8_trim_whitespace(text)
    if self.missing is None:
      return text
    return pc.if_else(pc.is_in(text, value_set=pa.array(self.missing, pa.string())), "", text)

  def strings(self, name: str) -> np.ndarray:
    """`text` as a NumPy array of strings, [num_rows]; of what is too long, a hash."""
    text = self.text(name)
    cells = text.to_pylist()
    if (pc.max(pc.utf8_length(text)).as_py() or 0) > LONGEST:
      cells = list(map(shortened, cells))
    return np.array(cells, np.str_)

  def absent(self, name: str) -> np.ndarray:
    """bool[num_rows], which cells of a column hold no value: a rule for numbers and labels."""
    text = self.text(name)
    if self.missing is None:
      none = pc.is_in(pc.utf8_lower(text), value_set=pa.array(ABSENT))
    else:
      none = pc.equal(text, "")
    return np.asarray(none.to_numpy(zero_copy_only=False), bool)

  def numbers(self, name: str) -> tuple[np.ndarray, np.ndarray]:
    """A column as float64[num_rows], NaN for no value; and bool[num_rows], what is no number."""
    text, empty = self.text(name), self.absent(name)
    try:
      values = pc.if_else(pa.array(empty), None, text).cast(pa.float64())
      values = values.to_numpy(zero_copy_only=False).astype(np.float64)
    except pa.ArrowException:
      values = _numbers_by_value(text)
    if self.missing:  # "-9" is "-9.0" too
      empty = empty | np.isin(values, to_numbers(np.array(self.missing)))
    values = np.where(np.isfinite(values) & ~empty, values, np.nan)
    return values, np.isnan(values) & ~empty

  def rows(self, keep: np.ndarray) -> Table:
    """The rows where `keep` (bool[num_rows]) is true, in their order."""
    kept = np.flatnonzero(keep)
    columns = {name: column.take(pa.array(kept)) for name, column in self.columns.items()}
    malformed = {
      int(at): self.malformed[int(row)] for at, row in enumerate(kept) if int(row) in self.malformed
    } if self.malformed else {}  # fmt: skip
    return Table(self.path, columns, len(kept), malformed, self.digest, self.missing)


def read_table(path: Path, missing: tuple[str, ...] | None = None) -> Table:
  """Reads a CSV file: UTF-8, commas, quotes as in RFC 4180, names in the first line.

  Args:
    path: of the file.
    missing: the cells that hold no value, without spaces around them, in place of the usual ones.

  Raises:
    ValueError: if there is no such file, or no names, or one is there twice, or a quote is not
      closed: it would take in other records. Without names the first line is a record, so that none
      of its cells is told but as the detail of a DataError.
  """
  try:
    content = path.read_bytes()
  except OSError as error:
    raise UserError(f"cannot read {str(path)!r}: {error.strerror}") from None
  malformed: dict[int, str] = {}

  def note(row: arrow_csv.InvalidRow) -> str:
    # Rows are numbered from 1, the header among them.
    malformed[row.number - 2] = f"has {row.actual_columns} cells, not {row.expected_columns}"
    return "skip"

  names = _names(path, content)
  _check_quotes(path, content)
  try:
    table = arrow_csv.read_csv(
      pa.BufferReader(content),
      read_options=arrow_csv.ReadOptions(use_threads=False),  # which alone numbers the rows
      parse_options=arrow_csv.ParseOptions(newlines_in_values=True, invalid_row_handler=note),
      convert_options=arrow_csv.ConvertOptions(column_types={name: pa.binary() for name in names}),
    )
  except pa.ArrowException as error:
    raise DataError(
      f"{path} is no CSV file with commas and closed quotes", " ".join(str(error).split())
    ) from None  # whose message quotes the file
  digest = hashlib.sha256(content).hexdigest()
  columns = {name: _with_blanks(table[name], sorted(malformed)) for name in names}
  return Table(path, columns, table.num_rows + len(malformed), malformed, digest, missing)


def _names(path: Path, content: bytes) -> list[str]:
  csv.field_size_limit(max(csv.field_size_limit(), len(content)))  # else a long cell is an error
  try:
    names = next(csv.reader(_text(content)), [])
  except csv.Error:
    names = []
  if not names or "\ufffd" in "".join(names):
    raise UserError(f"{path}: its first line must name the columns, in UTF-8")
  twice = {name for name in names if names.count(name) > 1}
  if twice:
    raise DataError(
      f"{path} has a column more than once, or no names in its first line",
      f"it has the columns {', '.join(sorted(twice))} more than once",
    )
  return names


def _check_quotes(path: Path, content: bytes) -> None:
  """Refuses a quote that nothing closes. Not by its line, which may be a private record's."""
  if b'"' not in content:
    return
  try:
    for _ in csv.reader(_text(content), strict=True):
      pass
  except csv.Error:
    raise UserError(
      f"{path} has a quote that nothing closes, or text after a closing one: the lines that follow"
      ' would be one cell. Close it; a quote within a quoted cell is written twice ("").'
    ) from None


def _text(content: bytes) -> io.TextIOWrapper:
  # A cell further down that is no UTF-8 may not matter here.
  return io.TextIOWrapper(io.BytesIO(content), "utf-8-sig", errors="replace", newline="")


def _with_blanks(column: pa.ChunkedArray, blank_rows: list[int]) -> pa.ChunkedArray:
  """The column with empty cells put in, so that they stand at `blank_rows`."""
  if not blank_rows:
    return column
  parts, start = [], 0
  for put, row in enumerate(blank_rows):
    parts += [column.slice(start, row - put - start), pa.chunked_array([[b""]], pa.binary())]
    start = row - put
  parts.append(column.slice(start))
  return pa.chunked_array([chunk for part in parts for chunk in part.chunks], pa.binary())


def _numbers_by_value(text: pa.ChunkedArray) -> np.ndarray:
  """float64[n], NaN for what is no number; each distinct value is read once."""
  encoded = text.combine_chunks().dictionary_encode()
  numbers = np.full(len(encoded.dictionary), np.nan)
  for i, value in enumerate(encoded.dictionary.to_pylist()):
    try:
      numbers[i] = float(value)
    except ValueError:
      continue
  return numbers[encoded.indices.to_numpy()]
