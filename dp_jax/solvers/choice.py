"""Which solver to take, by public facts alone."""

from typing import Literal

Name = Literal["least_squares", "feature_covariance", "newton"]

# What `choose` may say.
CANDIDATES: tuple[Name, ...] = ("feature_covariance",)


def choose(epsilon: float, num_units: float, num_features: int, num_classes: int) -> Name:
  """The method that did best in the study of `experiments/heads` at such a target.

  Args:
    epsilon: the target.
    num_units: N, or what is declared for it.
    num_features: d.
    num_classes: C.
  """
  del epsilon, num_units, num_features, num_classes
  return "feature_covariance"
