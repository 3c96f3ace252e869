"""`auto` takes what the recorded study says."""

import re

import numpy as np
import pytest

from dp_jax.solvers.choice import CANDIDATES, choose
from experiments.heads import results

# Two seeds and 5,000 rows tell no smaller differences apart where noise is large.
TOLERANCE = 0.01

# What the study calls the ways of a solver: with a moment, without one, and DP-FC.
WAYS = {
  "feature_covariance": ("feature_covariance", "descent", "DP-FC"),
  "least_squares": ("least_squares",),
  "newton": ("newton",),
}


def _cells():
  """(facts for `choose`, accuracy of each method) of every size that was run to its end."""
  for group, rows in results.read()["sizes"].items():
    features, classes = map(int, re.search(r"(\d+) \w+, (\d+) classes", group).groups())
    for cell, methods in rows.items():
      count, epsilon = re.fullmatch(r"(\d+) records, epsilon ([\d.]+)", cell).groups()
      found = {name: np.mean(each["accuracy"]) for name, each in methods.items()}
      if {"feature_covariance", "descent", "DP-FC", "least_squares"} <= set(found):
        yield (float(epsilon), int(count), features, classes), found


CELLS = list(_cells())


def _behind(choice):
  """By how much the best way of the choice is behind the best of all, at each size."""
  return [
    max(found.values()) - max(found.get(way, 0.0) for way in WAYS[choice(*facts)])
    for facts, found in CELLS
  ]


def test_the_choice_is_about_the_best_at_every_size_of_the_study():
  assert len(CELLS) >= 15
  assert len({facts[2:] for facts, _ in CELLS}) >= 4, "several numbers of features and classes"
  behind = _behind(choose)
  assert max(behind) <= TOLERANCE and np.mean(behind) <= 0.002


@pytest.mark.parametrize("other", ["least_squares", "newton"])
def test_another_method_would_not_be(other):
  assert max(_behind(lambda *facts: other)) > 0.03


def test_gradients_alone_are_about_the_best_at_every_size():
  """What the README says of moment_share=0, with the learning rate as the noise asks."""
  behind = [max(found.values()) - found["descent"] for _, found in CELLS]
  assert max(behind) <= TOLERANCE


def test_the_choice_is_one_of_its_candidates():
  assert {choose(*facts) for facts, _ in CELLS} <= set(CANDIDATES)
