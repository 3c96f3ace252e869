"""Which solver to take, by public facts alone."""

from typing import Literal

Name = Literal["least_squares", "feature_covariance", "newton"]

# What `choose` may say.
CANDIDATES: tuple[Name, ...] = ("feature_covariance",)


def choose(epsilon: float, num_units: float, num_features: int, num_classes: int) -> Name:
  """The method that did best in the study of `experiments/heads` at such a target.

  That is `feature_covariance` wherever it looked: 2,000 to 50,000 records, 60 to 1280 features, 2
  and 10 classes, epsilon 0.5 to 8. Settings matter more than methods: its learning rate must fall
  in proportion to the noise per record. Its README has the tables, the command, machine and date.

  Args:
    epsilon: the target.
    num_units: N, or what is declared for it.
    num_features: d.
    num_classes: C.
  """
  del epsilon, num_units, num_features, num_classes  # no method was ahead at some of them
  return "feature_covariance"
