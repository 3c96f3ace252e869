"""Numbers and names as text: never rounded in the direction that flatters."""

from __future__ import annotations

import math
import re
from decimal import ROUND_CEILING, Decimal


def round_up(value: float, digits: int = 4) -> str:
  """Writes a privacy loss with `digits` significant digits, rounded up.

  An epsilon that is rounded to the nearest may claim more than was proved.

  Args:
    value: a number >= 0, or infinity.
    digits: significant digits, >= 1.

  Returns:
    The text, without an exponent for values that people read (1e-4 to 1e6).
  """
  if math.isinf(value):
    return "infinity"
  if value == 0:
    return "0"
  exact = Decimal(value)
  quantum = Decimal(1).scaleb(exact.adjusted() - digits + 1)
  rounded = exact.quantize(quantum, rounding=ROUND_CEILING)
  # A double such as 0.1 lies a hair above the decimal it stands for; that hair is no reason to
  # write 0.1001.
  shortest = Decimal(repr(float(value)))
  if shortest == shortest.quantize(quantum):
    rounded = shortest
  return plain(float(rounded))


def plain(value: float) -> str:
  """The shortest decimal that reads back as the same double, without a trailing `.0`."""
  if isinstance(value, int) or (float(value).is_integer() and abs(value) < 1e15):
    return str(int(value))
  text = repr(float(value))
  match = re.fullmatch(r"(-?[\d.]+)e([+-])0*(\d+)", text)
  if match:
    mantissa, sign, exponent = match.groups()
    return f"{mantissa}e{'-' if sign == '-' else ''}{exponent}"
  return text


def short(value: float, digits: int = 4) -> str:
  """A number that no guarantee depends on, to `digits` significant digits."""
  return plain(float(f"{value:.{digits}g}"))


def count(value: float) -> str:
  """A count with thousands separators, such as 1,437."""
  if float(value).is_integer():
    return f"{int(value):,}"
  return f"{value:,.2f}".rstrip("0").rstrip(".")


def percent(fraction: float, decimals: int = 1) -> str:
  """A fraction as a percentage, such as 91.3%."""
  return f"{100 * fraction:.{decimals}f}%"


def percent_up(fraction: float, decimals: int = 1) -> str:
  """A fraction as a percentage, rounded up: for bounds."""
  scale = 10**decimals
  # The tiny slack keeps 0.07 (a hair above 7/100 in binary) from becoming 7.1%.
  value = math.ceil(100 * fraction * scale - 1e-9) / scale
  return f"{value:.{decimals}f}%"


def one_line(text: object, limit: int = 200) -> str:
  """An untrusted name as one printable line of at most `limit` characters."""
  cleaned = "".join(c if c.isprintable() else " " for c in str(text))
  cleaned = " ".join(cleaned.split())
  return cleaned if len(cleaned) <= limit else cleaned[: limit - 1] + "…"


def markdown(text: object, limit: int = 200) -> str:
  """An untrusted name for a line of Markdown: no markup, no raw HTML, no line break."""
  escaped = re.sub(r"([\\`*_{}\[\]#!|~>])", r"\\\1", one_line(text, limit))
  return escaped.replace("&", "&amp;").replace("<", "&lt;")
