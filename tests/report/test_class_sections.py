"""Accuracy of classes and the confusion matrix: small classes of private data are suppressed."""

import dataclasses
import json
import re

import numpy as np
import pytest
from made_up_runs import CLASS_NAMES, write_run

from dp_jax.evaluation.disclosure import MIN_UNITS, hidden_classes, suppressed
from dp_jax.evaluation.predictions import PredictionTable
from dp_jax.evaluation.subgroups import incidence, partitions, unit_counts
from dp_jax.report.html import private_path, render_report
from dp_jax.report.private_page import measured_sections
from dp_jax.report.run_view import load

# People of each class, with two records each; of the second, every third record is taken for 0.
PEOPLE = (60, 9, 30)


def _table(people=PEOPLE, **groups):
  label = np.repeat(np.arange(len(people)), np.array(people) * 2).astype(np.int32)
  predicted = label.copy()
  predicted[(label == 1) & (np.arange(len(label)) % 3 == 0)] = 0
  return PredictionTable.of_labels(
    record=np.arange(len(label)), unit=np.arange(len(label)) // 2, label=label,
    predicted=predicted, label_probability=np.full(len(label), 0.5, np.float32),
    score=np.zeros(0, np.float32), groups=groups, about={"split": "test"},
  )  # fmt: skip


def _run(folder, declared, table, record=None, groups=()):
  run = write_run(folder, record, declared=declared)
  config = json.loads((run / "config.json").read_text())
  config["config"]["data"]["groups"] = list(groups)
  (run / "config.json").write_text(json.dumps(config))
  place = run if declared == "public" else run / "private"
  place.mkdir(exist_ok=True)
  confusion = np.zeros((3, 3), int)
  np.add.at(confusion, (table.label, table.predicted), 1)
  metrics = {
    "accuracy": float(np.mean(table.label == table.predicted)), "num_records": len(table.label),
    "confusion": confusion.tolist(),
  }  # fmt: skip
  line = {"step": 20, "split": "test", "final": True, "metrics": metrics}
  (run / "metrics.jsonl").unlink()
  (place / "metrics.jsonl").write_text(json.dumps(line) + "\n")
  (place / "predictions.npz").write_bytes(table.to_bytes())
  return run


def _section(text, anchor):
  return text.split(f'<section id="{anchor}"')[1].split("</section>")[0]


def test_small_classes_of_private_data_are_suppressed_with_what_gives_them_away(tmp_path):
  run = _run(tmp_path, "private", _table())
  render_report(run, {})
  text = private_path(run).read_text()
  classes, confusion = (_section(text, anchor) for anchor in ("classes", "confusion"))
  # 9 people are too few, and all people less the 60 would give the 30 and the 9 together, 39.
  assert (
    classes.count(">suppressed<") == 2
    and "fewer than 11 people" in classes
    and "100.0% (96.9% to 100.0%)" in classes
  )
  assert "66.7%" not in text and "18" not in confusion and "60" not in confusion
  assert confusion.count("(suppressed)") == 2 and ">120<" in confusion
  assert "Most frequent" not in confusion  # the only mistakes are of the class that is hidden


def _confused(folder, declared, mistakes):
  """The rows of the confusion matrix of 300 people, of whom so many of class 0 are taken for .."""
  table = _table((100, 100, 100))
  predicted = table.label.copy()
  start = 0
  for taken_for, people in mistakes.items():
    predicted[2 * start : 2 * (start + people)] = taken_for
    start += people
  run = _run(
    folder, declared, dataclasses.replace(table, columns={**table.columns, "predicted": predicted})
  )
  report = render_report(run, {})
  text = (report if declared == "public" else private_path(run)).read_text()
  rows = _section(text, "confusion").split("<tbody>")[1].split("</tbody>")[0].split("</tr>")
  return [re.findall(r">([0-9*\u00b7]+)<", row)[1:] for row in rows[:3]], text


@pytest.mark.parametrize(("mistakes", "shown"), [
  ({1: 20, 2: 30}, ["100", "40", "60"]),
  ({1: 9, 2: 10}, ["162", "*", "*"]),
  ({1: 9, 2: 30}, ["122", "*", "*"]),  # else 78 mistakes less the 60 are the 18 records
  ({1: 9}, ["182", "*", "*"]),
  ({}, ["200", "·", "·"]),
])  # fmt: skip
def test_confusions_of_few_people_of_private_data_are_suppressed(tmp_path, mistakes, shown):
  rows, text = _confused(tmp_path / "private", "private", mistakes)
  assert rows[0] == shown and rows[1] == ["·", "200", "·"]
  assert ("A * stands for fewer than 11" in text) == ("*" in shown)
  assert ("Most frequent confusion" in text) == (20 in mistakes.values())
  rows, text = _confused(tmp_path / "public", "public", mistakes)
  assert "*" not in rows[0] and "A * stands" not in text


def test_public_data_show_every_class(tmp_path):
  text = render_report(_run(tmp_path, "public", _table()), {}).read_text()
  assert "suppressed" not in text and "66.7%" in _section(text, "classes")
  assert "Most frequent confusion: 1 taken for 0, 6 times." in _section(text, "confusion")


def test_without_countable_people_no_class_of_private_data_is_shown(tmp_path):
  run = _run(tmp_path, "private", _table())
  (run / "private" / "predictions.npz").write_bytes(b"torn")
  render_report(run, {})
  text = private_path(run).read_text()
  assert '<section id="classes"' not in text and "120" not in _section(text, "confusion")


def test_too_few_people_of_private_data_show_nothing(tmp_path):
  run = _run(tmp_path / "few", "private", _table((4, 3, 3)))
  assert measured_sections(load(run, "few", inside=True), []) == []
  run = _run(tmp_path / "public", "public", _table((4, 3, 3)))
  assert measured_sections(load(run, "few"), [])


def test_records_are_not_people():
  """24 records of 8 people are too few; counted as records they would be shown."""
  table = _table((60, 12, 30))
  hidden = hidden_classes(table, len(CLASS_NAMES))
  assert hidden.tolist() == [False] * 3
  people = np.where(table.label == 1, 500 + np.arange(len(table.label)) // 3 % 8, table.unit)
  few = table.of_people(people, {}, {})
  assert hidden_classes(few, len(CLASS_NAMES)).tolist() == [False, True, True]


def test_classes_that_nobody_is_of_are_not_told_from_small_ones():
  assert hidden_classes(_table(), 5).tolist() == [False, True, True, True, True]


def test_what_is_hidden_beside_other_columns_is_hidden_among_the_classes():
  """Class 2, all in clinic a, would give away 5 people of class 1 there, and is hidden too."""
  table = _table((60, 40, 30))
  elsewhere = ((table.label == 1) & (table.unit >= 65)) | ((table.label == 0) & (table.unit < 20))
  clinic = np.where(elsewhere, "b", "a")
  alone = hidden_classes(table, 3)
  beside = hidden_classes(_table((60, 40, 30), clinic=clinic), 3, ["class", "clinic"])
  assert alone.tolist() == [False] * 3 and beside.tolist() == [False, True, True]
  with pytest.raises(ValueError, match="no group column 'colour'"):
    hidden_classes(table, 3, ["class", "colour"])


def _diagnoses():
  """Classes 0, 1, 2 by diagnosis a, b, c, which is a column too; one record a person.

  Women and men: 60 and 0 of a, 8 and 8 of b, 0 and 8 of c. The 68 women less the 60 records of
  class 0 are the 8 women of b.
  """
  cells = (60, 8, 8, 8)
  label = np.repeat([0, 1, 1, 2], cells).astype(np.int32)
  groups = {"dx": np.array(["a", "b", "c"])[label], "sex": np.repeat(["F", "F", "M", "M"], cells)}
  return PredictionTable.of_labels(
    record=np.arange(84), unit=np.arange(84), label=label, predicted=label,
    label_probability=np.full(84, 0.5, np.float32), score=np.zeros(0, np.float32), groups=groups,
    about={"split": "test"},
  )  # fmt: skip


@pytest.mark.parametrize("compared", [None, ("dx", "sex")])
def test_the_classes_do_not_give_away_a_group_of_the_same_page(tmp_path, compared):
  run = _run(tmp_path / "with", "private", _diagnoses(), groups=("dx", "sex"))
  sections = measured_sections(load(run, "run", inside=True), [], compared=compared)
  found = {section.anchor: section.body for section in sections}
  assert compared is not None or ">68<" in found["groups-accuracy"]
  assert "classes" not in found and ">60<" not in found["confusion"]
  assert "from the groups on this page" in found["confusion"]
  run = _run(tmp_path / "without", "private", _diagnoses())
  (confusion,) = (
    section.body
    for section in measured_sections(load(run, "run", inside=True), [])
    if section.anchor == "confusion"
  )
  assert ">60<" in confusion  # no groups, nothing to give away


def test_classes_and_groups_together_give_no_small_group_away():
  """Columns that are the class, or coarser, or finer: nothing small is a sum of what is shown."""
  rng, kept = np.random.default_rng(0), 0
  for _ in range(40):
    fine, sex = rng.choice(5, 150, p=(0.5, 0.25, 0.15, 0.06, 0.04)), rng.integers(0, 2, 150)
    label = [fine, fine // 2, fine // 3][rng.integers(3)]
    kind = [fine, fine // 2, fine // 3][rng.integers(3)]
    sex = np.where(rng.random(150) < 0.5, kind % 2, sex)
    table = PredictionTable.of_labels(
      record=np.arange(150), unit=np.arange(150), label=label.astype(np.int32), predicted=label,
      label_probability=np.full(150, 0.5, np.float32), score=np.zeros(0, np.float32),
      groups={"kind": kind.astype(str), "sex": sex.astype(str)},
    )  # fmt: skip
    hidden = hidden_classes(table, 5, ("kind", "sex"))
    if hidden.all():  # the groups stand alone
      continue
    kept += 1
    own = partitions(table, ("kind", "sex"))
    groups = [(part.columns, group) for part in own for group in part.groups]
    out = dict(zip(groups, suppressed(own, unit_counts(own, table.unit)), strict=True))
    out |= {(("class",), (str(k),)): h for k, h in enumerate(hidden)} | {((), ()): False}
    parts = partitions(table, ("kind", "sex", "class"))
    every = [(part.columns, group) for part in parts for group in part.groups]
    shown = np.array([not out.get(group, True) for group in every])
    matrix, small = incidence(parts), unit_counts(parts, table.unit) < MIN_UNITS
    rest = matrix[small] - matrix[small] @ np.linalg.pinv(matrix[shown]) @ matrix[shown]
    assert not small.any() or np.abs(rest).max(axis=1).min() > 1e-6
  assert kept > 5


def test_a_public_run_does_not_show_what_a_private_one_beside_it_hides(tmp_path):
  runs = [
    load(_run(tmp_path / declared, declared, _table()), declared, inside=True)
    for declared in ("private", "public")
  ]
  for main, other in (runs, runs[::-1]):
    found = {section.anchor: section.body for section in measured_sections(main, [other])}
    assert "66.7%" not in found["classes"] and found["classes"].count(">suppressed<") == 4
    assert found["confusion"].count("(suppressed)") == 2 and ">12<" not in found["confusion"]
  few = [
    load(_run(tmp_path / f"few {d}", d, _table((4, 3, 3))), d, inside=True)
    for d in ("public", "private")
  ]
  assert measured_sections(few[0], few[1:]) == []


def test_classes_of_one_name_are_counted_apart():
  table = dataclasses.replace(_table(), about={"class_names": ["mole", "mole", "mark"]})
  assert hidden_classes(table, 3).tolist() == [False, True, True]
  assert hidden_classes(table, 3, ["class"]).all()
