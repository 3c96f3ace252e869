"""Subgroups by declared cut points."""

import numpy as np
import pytest

from dp_jax.data.group_columns import bands


def test_values_as_they_are():
  np.testing.assert_array_equal(bands(np.array(["f", "", "m"]), ()), ["f", "missing", "m"])
  np.testing.assert_array_equal(bands(np.array([1, 2]), ()), ["1", "2"])
  np.testing.assert_array_equal(bands(np.array([1.5, np.nan]), ()), ["1.5", "missing"])


@pytest.mark.parametrize("kind", [float, str])
def test_bands_between_cut_points(kind):
  values = np.array([39.9, 40, 59, 60, 100, np.nan]).astype(kind)
  expected = ["below 40", "40 to 60", "40 to 60", "60 and above", "60 and above", "missing"]
  np.testing.assert_array_equal(bands(values, (40, 60)), expected)


def test_one_value_that_is_no_number_is_missing_and_a_column_of_them_is_refused():
  np.testing.assert_array_equal(bands(np.array(["x", "7"]), (5,)), ["missing", "5 and above"])
  with pytest.raises(ValueError, match="column 'sex' has cut points but holds no numbers"):
    bands(np.array(["f", "m"]), (40,), "sex")
  with pytest.raises(ValueError, match="must ascend"):
    bands(np.array([1.0]), (60, 40))
