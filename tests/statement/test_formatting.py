"""Numbers never flatter, names never escape."""

import math

import pytest

from dp_jax.statement import formatting


@pytest.mark.parametrize(
  ("value", "text"),
  [
    (0.49999821, "0.5"),
    (0.49991, "0.5"),
    (0.123412, "0.1235"),
    (0.1, "0.1"),
    (2.0000001, "2.001"),
    (12.0, "12"),
    (123456.0, "123500"),
    (0.0, "0"),
    (math.inf, "infinity"),
  ],
)
def test_round_up(value, text):
  assert formatting.round_up(value) == text
  if math.isfinite(value):
    assert float(text) >= value


@pytest.mark.parametrize(
  ("value", "text"),
  [(1e-05, "1e-5"), (0.0001, "0.0001"), (1.0, "1"), (3, "3"), (2.5e-19, "2.5e-19")],
)
def test_plain_reads_back(value, text):
  assert formatting.plain(value) == text
  assert float(text) == value


def test_percent_of_a_bound_is_rounded_up():
  assert formatting.percent_up(0.53341) == "53.4%"
  assert formatting.percent_up(0.07) == "7.0%"
  assert formatting.percent_up(0.00174, 2) == "0.18%"


def test_names_become_one_printable_line():
  assert formatting.one_line("a\n\tb\x00c\u202ed") == "a b c d"
  assert len(formatting.one_line("x" * 500)) == 200


def test_markdown_keeps_no_markup():
  text = formatting.markdown("[a](b) <img> `c` *d*\n# e & f")
  assert "\n" not in text
  assert "<" not in text
  assert "\\[a\\]" in text and "\\*d\\*" in text and "&amp;" in text
