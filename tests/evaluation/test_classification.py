"""Metrics equal scikit-learn's on random predictions, whatever the batches and the padding."""

import numpy as np
import pytest
from sklearn.metrics import accuracy_score, confusion_matrix, log_loss

from dp_jax.data.sources.source import ArraySource, SourceInfo
from dp_jax.data.units import UnitLoader
from dp_jax.evaluation.class_metrics import class_details, class_rows, class_scalars
from dp_jax.evaluation.predictions import PredictionTable
from dp_jax.tasks.classification import Classification
from dp_jax.tasks.evaluate import evaluate

CLASSES = 4


def table_of(probabilities, labels, mask=None):
  """The table of what was predicted of records, masked ones left out."""
  mask = np.ones(len(labels), bool) if mask is None else mask
  columns = class_rows(np.asarray(probabilities)[mask], np.asarray(labels)[mask])
  record = np.arange(mask.sum())
  return PredictionTable(record, record, columns)


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
  task = Classification((1, 1, 1), CLASSES, (0.0, 101.0))
  loader = UnitLoader(ArraySource(info, images, labels), task.record)
  sums = evaluate(lambda x: probabilities[x.reshape(-1).astype(int)], loader, task, size).details()
  predicted = probabilities.argmax(axis=1)
  assert sums["num_records"] == 101
  assert sums["accuracy"] == accuracy_score(labels, predicted)
  np.testing.assert_allclose(sums["loss"], log_loss(labels, probabilities), rtol=1e-6)
  expected = confusion_matrix(labels, predicted, labels=range(CLASSES))
  np.testing.assert_array_equal(sums["confusion"], expected)
  np.testing.assert_allclose(sums["per_class_accuracy"], np.diag(expected) / expected.sum(axis=1))


def test_calibration_error_by_hand():
  table = table_of(np.array([[0.9, 0.1], [0.9, 0.1], [0.4, 0.6]]), np.array([0, 1, 1]))
  # The bin of 0.9 holds two records, one right; the bin of 0.6 one, right.
  np.testing.assert_allclose(
    class_scalars(table, 2)["calibration_error"],
    (2 * abs(0.5 - 0.9) + abs(1 - 0.6)) / 3,
    rtol=1e-6,
  )
  assert class_details(table, 2)["calibration"]["count"] == [1, 2]


def test_masked_records_count_for_nothing_whatever_they_hold(predictions):
  probabilities, labels = predictions
  clean = table_of(probabilities, labels)
  filler = np.full((9, CLASSES), np.nan, np.float32)
  padded = table_of(
    np.concatenate([probabilities, filler]), np.concatenate([labels, np.full(9, -5)]),
    np.arange(110) < 101,
  )  # fmt: skip
  assert class_details(padded, CLASSES) == class_details(clean, CLASSES)


def test_an_absent_class_and_an_empty_split_have_no_accuracy():
  none = table_of(np.zeros((0, 3)), np.zeros(0, int))
  assert set(class_scalars(none, 3).values()) == {None}
  assert class_details(none, 3)["num_records"] == 0
  two = table_of(np.eye(3)[[0, 1]], np.array([0, 1]))
  assert class_details(two, 3)["per_class_accuracy"] == [1.0, 1.0, None]


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_prediction_that_is_not_a_number_is_wrong(value):
  probabilities = np.eye(3)[[0, 1]]
  probabilities[1] = value
  with np.errstate(all="raise"):
    found = class_details(table_of(probabilities, np.array([0, 1])), 3)
  assert found["accuracy"] == 0.5 and found["num_records"] == 2 and np.isfinite(found["loss"])
