"""Every metric equals scikit-learn's on random predictions, padded and sharded over devices."""

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from sklearn import metrics

from dp_jax.data.sources.source import SourceInfo
from dp_jax.data.units import UnitLoader
from dp_jax.evaluation.class_metrics import class_details, class_rows, class_scalars
from dp_jax.evaluation.fairness import measure
from dp_jax.evaluation.label_metrics import ranks_of_labels
from dp_jax.evaluation.language import TokenSums
from dp_jax.evaluation.predictions import PredictionTable
from dp_jax.evaluation.scores import ranking_metrics
from dp_jax.tasks.classification import Classification
from dp_jax.tasks.evaluate import evaluate
from dp_jax.tasks.multilabel import MultiLabel

COUNT, CLASSES = 203, 7


def _softmax(logits):
  return (np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)).astype(np.float32)


@pytest.fixture(scope="module")
def predictions():
  rng = np.random.default_rng(3)
  # Rounded, so that classes tie for a place among the five.
  return _softmax(rng.standard_normal((COUNT, CLASSES)).round(1)), rng.integers(0, CLASSES, COUNT)


def _batches(probabilities, labels, size, devices):
  """Padded batches; each comes back from arrays that are spread over devices."""
  mesh = jax.make_mesh((devices,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
  spread = NamedSharding(mesh, PartitionSpec("data"))
  for start in range(0, len(labels), size):
    rows = np.full((size, CLASSES), np.nan, np.float32)
    own = np.full(size, -3)
    part = slice(start, start + size)
    count = len(labels[part])
    rows[:count], own[:count] = probabilities[part], labels[part]
    yield np.asarray(jax.device_put(rows, spread)), own, np.arange(size) < count


def _table(batches):
  """The table of batches of (probabilities, labels, mask)."""
  rows = [class_rows(p[mask], labels[mask]) for p, labels, mask in batches]
  columns = {name: np.concatenate([each[name] for each in rows]) for name in rows[0]}
  record = np.arange(len(columns["label"]))
  return PredictionTable(record, record, columns)


@pytest.mark.parametrize(("size", "devices"), [(8, 1), (16, 8), (64, 4), (256, 8)])
def test_classification(predictions, size, devices):
  probabilities, labels = predictions
  table = _table(_batches(probabilities, labels, size, devices))
  found, predicted = class_details(table, CLASSES), probabilities.argmax(axis=1)
  assert found["accuracy"] == metrics.accuracy_score(labels, predicted)
  right = table.columns["in_top_k"].mean()
  assert right == metrics.top_k_accuracy_score(labels, probabilities, k=5)
  assert "top_5_accuracy" not in found  # five of eight are most of what there is to guess
  np.testing.assert_allclose(found["loss"], metrics.log_loss(labels, probabilities), rtol=1e-6)
  np.testing.assert_allclose(
    found["per_class_f1"], metrics.f1_score(labels, predicted, average=None)
  )
  np.testing.assert_allclose(
    found["macro_f1"], metrics.f1_score(labels, predicted, average="macro")
  )
  recall = metrics.recall_score(labels, predicted, average=None)
  np.testing.assert_allclose(found["per_class_accuracy"], recall)


def test_the_sums_are_the_same_to_the_last_bit_for_any_batches_and_order(predictions):
  probabilities, labels = predictions
  every = []
  for size, devices in [(8, 8), (7, 1), (256, 2)]:
    batches = reversed(list(_batches(probabilities, labels, size, devices)))
    every.append(class_details(_table(batches), CLASSES))
  assert every[0] == every[1] == every[2]


def test_a_class_without_records_or_predictions_has_no_f1():
  table = _table([(np.eye(3)[[0, 1]], np.array([0, 0]), np.ones(2, bool))])
  assert class_details(table, 3)["per_class_f1"] == [pytest.approx(2 / 3), 0.0, None]
  assert class_details(table, 3)["macro_f1"] == pytest.approx(1 / 3)
  assert "top_5_accuracy" not in class_scalars(table, 3)


def test_two_classes():
  rng = np.random.default_rng(0)
  probabilities = _softmax(rng.standard_normal((COUNT, 2)).round(1))  # with ties
  labels = rng.integers(0, 2, COUNT)
  batches = []
  for start in range(0, COUNT, 50):
    rows = np.full((50, 2), np.nan, np.float32)
    own = np.zeros(50, int)
    count = len(labels[start : start + 50])
    rows[:count], own[:count] = probabilities[start : start + 50], labels[start : start + 50]
    batches.append((rows, own, np.arange(50) < count))
  found = _table(batches).rankings()
  assert found["auroc"] == metrics.roc_auc_score(labels, probabilities[:, 1])
  expected = metrics.average_precision_score(labels, probabilities[:, 1])
  assert found["average_precision"] == expected


def test_several_labels():
  rng = np.random.default_rng(1)
  scores = rng.random((COUNT, 5)).astype(np.float32).round(2)
  targets = (rng.random((COUNT, 5)) < [0.5, 0.1, 0.3, 0.05, 0.9]).astype(int)
  found = ranks_of_labels(scores, targets)
  for name, metric in [
    ("auroc", metrics.roc_auc_score), ("average_precision", metrics.average_precision_score),
  ]:  # fmt: skip
    np.testing.assert_allclose(found[name], metric(targets, scores, average="macro"), rtol=1e-12)
    np.testing.assert_allclose(found[f"{name}_micro"], metric(targets, scores, average="micro"))
    np.testing.assert_allclose(found[f"{name}_per_label"], metric(targets, scores, average=None))


def test_labels_that_are_not_known_and_labels_of_one_kind_are_left_out():
  scores = np.array([[0.1, 0.2], [0.9, 0.3], [0.8, 0.4]], np.float32)
  targets = np.array([[0, 1], [1, 1], [-1, 1]])
  found = ranks_of_labels(scores, targets)
  assert found["auroc_per_label"] == [1.0, None] and found["auroc"] == 1.0
  assert found["auroc_micro"] == metrics.roc_auc_score([0, 1, 1, 1, 1], [0.1, 0.9, 0.2, 0.3, 0.4])


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_score_that_is_not_a_number_ranks_as_wrong_as_it_can(bad):
  scores, targets = np.array([0.1, 0.9, bad], np.float32), np.array([0, 1, 1])
  assert ranking_metrics(scores, targets)["auroc"] == 0.5
  assert ranking_metrics(scores, np.array([0, 1, 0]))["auroc"] == 0.5


def test_perplexity():
  rng = np.random.default_rng(2)
  logits = rng.standard_normal((4, 30, 11))
  probabilities = _softmax(logits.reshape(-1, 11))
  tokens = rng.integers(0, 11, 120)
  mask = rng.random(120) < 0.7
  losses = -np.log(probabilities[np.arange(120), tokens].astype(float))
  expected = metrics.log_loss(tokens[mask], probabilities[mask], labels=range(11))
  losses[~mask] = np.nan
  sums, pieces = TokenSums(), TokenSums()
  sums.add(losses, mask)
  for i in range(0, 120, 7):
    pieces.add(losses[i : i + 7], mask[i : i + 7])
  np.testing.assert_allclose(sums.scalars()["loss"], expected, rtol=1e-6)
  np.testing.assert_allclose(sums.scalars()["perplexity"], np.exp(expected), rtol=1e-6)
  assert sums == pieces and sums.tokens == mask.sum()
  assert set(TokenSums().scalars().values()) == {None}


def test_a_loss_that_is_not_a_number_counts_as_a_large_one():
  sums = TokenSums()
  sums.add(np.array([np.nan, np.inf]), np.ones(2, bool))
  assert 80 < sums.scalars()["loss"] < 90


class _Labelled:
  """A source of several labels: the input of a record is its index."""

  def __init__(self, labels):
    self._labels = labels
    count, names = labels.shape
    self.info = SourceInfo(
      "made up", count, (1,), names, (0, count), input_dtype="float32", label_shape=(names,)
    )

  def __len__(self):
    return len(self._labels)

  def gather(self, indices):
    return {"inputs": indices.astype(np.float32)[:, None], "label": self._labels[indices]}


def test_several_labels_on_a_split_with_unknown_ones_and_malformed_records():
  rng = np.random.default_rng(4)
  scores = rng.random((60, 3)).astype(np.float32)
  labels = rng.integers(-1, 2, (60, 3)).astype(np.float32)
  labels[7] = 5  # no label
  task = MultiLabel((1,), 3, (0.0, 60.0))
  found = None
  for size in (7, 64):
    loader = UnitLoader(_Labelled(labels), task.record)
    held_out = evaluate(lambda x: scores[x[:, 0].astype(int)], loader, task, size)
    assert found is None or held_out.details() == found
    found = held_out.details()
  kept = np.arange(60) != 7
  known = kept[:, None] & (labels >= 0)
  assert found["num_records"] == 59 and found["known_per_label"] == known.sum(axis=0).tolist()
  expected = metrics.accuracy_score(labels[known], scores[known] > 0.5)
  assert found["accuracy"] == expected
  np.testing.assert_allclose(found["loss"], metrics.log_loss(labels[known], scores[known]))
  areas = [metrics.roc_auc_score(labels[known[:, i], i], scores[known[:, i], i]) for i in range(3)]
  assert found["auroc_per_label"] == areas
  np.testing.assert_allclose(found["auroc"], np.mean(areas))
  (measured,) = measure([held_out.table], [], "auroc", private=False, resamples=5)
  np.testing.assert_allclose(measured.values, [np.mean(areas)])
  (measured,) = measure([held_out.table], [], "accuracy", private=False, resamples=5)
  np.testing.assert_allclose(measured.values, [expected])


@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("low", [1.0, 18.0, 60.0])
def test_sure_predictions_are_ranked_by_logits(several, low):
  """Margins of which float32 probabilities are equal: 1 from 17 nats on, 0 from 104."""
  rng = np.random.default_rng(0)
  labels = (np.arange(200) % 2).astype(np.int32)
  margin = (low + 5 * labels + rng.normal(size=200)).astype(np.float32)  # all of them a sure yes
  logits = np.stack([np.zeros_like(margin), margin], axis=1)
  if several:
    task, targets = MultiLabel((1,), 2, (-1.0, 1.0)), np.stack([labels, 1 - labels], axis=1)
    logits = np.stack([margin, -margin], axis=1)
  else:
    task, targets = Classification((1,), 2, (-1.0, 1.0)), labels
  outputs = np.concatenate([task.probabilities(logits), task.scores(logits)], axis=1)
  record = np.arange(200)
  table = PredictionTable(record, record, task.rows(outputs, {"label": targets}))
  area = metrics.roc_auc_score(labels, margin)
  if several:
    found = ranks_of_labels(table.score, table.label)
    assert found["auroc_per_label"] == [area, area]
    wrong = labels == 0  # the loss of a yes that is none is log(1 + e^margin)
    expected = np.minimum(np.logaddexp(0, margin[wrong].astype(float)), 87.3)
    np.testing.assert_allclose(table.losses()[wrong, 0], expected, rtol=1e-2)
  else:
    found = table.rankings()
    assert found["auroc"] == area
    assert found["average_precision"] == metrics.average_precision_score(labels, margin)
  if low > 17:  # the broken variant: ranked by probabilities
    score = task.rows(outputs[:, :2], {"label": targets})["score"]
    assert metrics.roc_auc_score(labels, score[:, 0] if several else score) < 0.6 < 0.9 < area
