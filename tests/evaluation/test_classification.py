"""Metrics equal scikit-learn's on random predictions, whatever the batches and the padding."""

import numpy as np
import pytest
from sklearn.metrics import accuracy_score, confusion_matrix, log_loss

from dp_jax.data.records import RecordSpec
from dp_jax.data.sources.source import ArraySource, SourceInfo
from dp_jax.data.units import UnitLoader
from dp_jax.evaluation.classification import ClassificationSums, evaluate

CLASSES = 4


@pytest.fixture(scope="module")
def predictions():
  rng = np.random.default_rng(0)
  logits = rng.standard_normal((101, CLASSES)) * 2
  probabilities = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
  return probabilities.astype(np.float32), rng.integers(0, CLASSES, 101)


@pytest.mark.parametrize("size", [1, 7, 101, 200])
def test_equal_to_scikit_learn_for_any_batch_size(predictions, size):
  probabilities, labels = predictions
  # The "image" is the index of the record, so that predictions can be looked up.
  images = np.arange(101, dtype=np.float32).reshape(-1, 1, 1, 1)
  info = SourceInfo("indices", 101, (1, 1, 1), CLASSES, (0, 101), input_dtype="float32")
  loader = UnitLoader(
    ArraySource(info, images, labels), RecordSpec((1, 1, 1), CLASSES, (0.0, 101.0))
  )
  sums = evaluate(
    lambda x: probabilities[x.reshape(-1).astype(int)], loader, CLASSES, size
  ).details()
  predicted = probabilities.argmax(axis=1)
  assert sums["num_records"] == 101
  assert sums["accuracy"] == accuracy_score(labels, predicted)
  np.testing.assert_allclose(sums["loss"], log_loss(labels, probabilities), rtol=1e-6)
  expected = confusion_matrix(labels, predicted, labels=range(CLASSES))
  np.testing.assert_array_equal(sums["confusion"], expected)
  np.testing.assert_allclose(sums["per_class_accuracy"], np.diag(expected) / expected.sum(axis=1))


def test_calibration_error_by_hand():
  sums = ClassificationSums.zeros(2)
  probabilities = np.array([[0.9, 0.1], [0.9, 0.1], [0.4, 0.6]])
  sums.add(probabilities, np.array([0, 1, 1]), np.ones(3, bool))
  # The bin of 0.9 holds two records, one right; the bin of 0.6 one, right.
  np.testing.assert_allclose(
    sums.scalars()["calibration_error"], (2 * abs(0.5 - 0.9) + abs(1 - 0.6)) / 3
  )
  assert sums.details()["calibration"]["count"] == [1, 2]


def test_masked_records_count_for_nothing_whatever_they_hold(predictions):
  probabilities, labels = predictions
  clean, padded = ClassificationSums.zeros(CLASSES), ClassificationSums.zeros(CLASSES)
  clean.add(probabilities, labels, np.ones(101, bool))
  filler = np.full((9, CLASSES), np.nan, np.float32)
  padded.add(
    np.concatenate([probabilities, filler]), np.concatenate([labels, np.full(9, -5)]),
    np.arange(110) < 101,
  )  # fmt: skip
  assert padded.details() == clean.details()


def test_an_absent_class_and_an_empty_split_have_no_accuracy():
  sums = ClassificationSums.zeros(3)
  assert set(sums.scalars().values()) == {None}
  assert sums.details()["num_records"] == 0
  sums.add(np.eye(3)[[0, 1]], np.array([0, 1]), np.ones(2, bool))
  assert sums.details()["per_class_accuracy"] == [1.0, 1.0, None]


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_prediction_that_is_not_a_number_is_wrong(value):
  sums = ClassificationSums.zeros(3)
  probabilities = np.eye(3)[[0, 1]]
  probabilities[1] = value
  with np.errstate(all="raise"):
    sums.add(probabilities, np.array([0, 1]), np.ones(2, bool))
    found = sums.details()
  assert found["accuracy"] == 0.5 and found["num_records"] == 2 and np.isfinite(found["loss"])
