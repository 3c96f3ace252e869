"""Groups in the report, training diagnostics, released figures, and the page under private/."""

import json
import re

import numpy as np
import pytest
from made_up_runs import write_run
from made_up_work_directories import people_table

from dp_jax.evaluation.predictions import PredictionTable
from dp_jax.report import run_view
from dp_jax.report.html import private_path, render_report
from dp_jax.statement import privacy_json

LOSS = 0.73164237


def _run(folder, record, declared="public", *, accuracy=0.9, groups=("sex", "age")):
  """A completed run with predictions of 400 people and a training log."""
  run = write_run(folder, record, declared=declared, accuracy=accuracy)
  config = json.loads((run / "config.json").read_text())
  config["config"]["data"]["groups"] = list(groups)
  (run / "config.json").write_text(json.dumps(config))
  private = run / "private"
  private.mkdir()
  (private / "training.jsonl").write_text(json.dumps({"step": 1, "loss": LOSS}) + "\n")
  place = run if declared == "public" else private
  (place / "predictions.npz").write_bytes(people_table(accuracy).to_bytes())
  if declared != "public":
    (run / "metrics.jsonl").rename(private / "metrics.jsonl")
  return run


def _sections(text):
  return [part.split('"')[0] for part in text.split('<section id="')[1:]]


def test_groups_of_both_runs_stand_in_the_report(tmp_path, record):
  run = _run(tmp_path / "run", record, accuracy=0.8)
  text = render_report(run, {"plain": _run(tmp_path / "plain", None)}).read_text()
  assert "groups-accuracy" in _sections(text)
  assert "sex f" in text and "sex f, age below 40" in text
  assert "above the overall with private" in text or "below the overall with private" in text
  assert "points: paired 95% interval" in text
  alone = render_report(run, {}).read_text()
  assert "groups-accuracy" in _sections(alone) and "plot-groups-accuracy" in alone
  other = _run(tmp_path / "other", None)
  (other / "predictions.npz").write_bytes(people_table(0.9, data_digest="another").to_bytes())
  before = (run / "report.html").read_bytes()
  with pytest.raises(ValueError, match=r"'plain' .*their data differ"):
    render_report(run, {"plain": other})
  assert (run / "report.html").read_bytes() == before


def test_a_private_run_is_not_set_beside_a_public_one_of_other_data(tmp_path, record):
  """Which is shown beside it, under private/."""
  run = _run(tmp_path / "run", {**record, "declared": "private"}, "private", accuracy=0.8)
  other = _run(tmp_path / "other", None)
  render_report(run, {"plain": other})
  assert "unpaired" not in private_path(run).read_text()
  (other / "predictions.npz").write_bytes(people_table(0.9, data_digest="another").to_bytes())
  with pytest.raises(ValueError, match=r"'plain' .*their data differ"):
    render_report(run, {"plain": other})


def test_runs_that_kept_no_predictions_are_compared_by_what_they_say_of_their_data(
  tmp_path, record
):
  runs = [write_run(tmp_path / name, each) for name, each in (("run", record), ("plain", None))]
  assert "unpaired 95% interval" in render_report(runs[0], {"plain": runs[1]}).read_text()
  other = write_run(tmp_path / "other", None, source="rendered_digits")
  with pytest.raises(ValueError, match=r"data\.source is 'digits' here and 'rendered_digits'"):
    render_report(runs[0], {"plain": other})
  content = json.loads((runs[1] / "metrics.jsonl").read_text().splitlines()[-2])
  content["metrics"]["num_records"] = 299
  (runs[1] / "metrics.jsonl").write_text(json.dumps(content) + "\n")
  with pytest.raises(ValueError, match="numbers of held-out records differ"):
    render_report(runs[0], {"plain": runs[1]})


def test_two_private_runs_are_not_headed_as_the_cost_of_privacy(tmp_path, record):
  run, other = (_run(tmp_path / name, record, accuracy=a) for name, a in (("a", 0.8), ("b", 0.9)))
  text = render_report(run, {"other": other}).read_text()
  assert "beside" in _sections(text) and "cost" not in _sections(text)
  assert "The cost of privacy" not in text and "What they differ by is not the cost" in text
  plain = _run(tmp_path / "plain", None)
  both = _sections(render_report(run, {"other": other, "plain": plain}).read_text())
  assert both.index("cost") < both.index("beside")
  assert not {"cost", "beside"} & set(_sections(render_report(plain, {"run": run}).read_text()))


def test_no_small_count_of_people_stands_on_the_private_page(tmp_path, facts):
  """A class of 40 people of whom 4 are right: its diagonal would be shown beside what is hidden."""
  record = privacy_json.privacy_record(facts(declared="private"))
  run = _run(tmp_path / "run", record, "private", groups=())
  counts = np.array([[4, 20, 16], [12, 40, 12], [13, 14, 60]])
  label, predicted = (np.repeat(k.ravel(), counts.ravel()) for k in np.indices((3, 3)))
  table = PredictionTable.of_labels(
    record=np.arange(len(label)), unit=np.arange(len(label)), label=label.astype(np.int32),
    predicted=predicted.astype(np.int32), score=np.zeros(0, np.float32),
    label_probability=np.full(len(label), 0.5, np.float32), about={},
  )  # fmt: skip
  (run / "private" / "predictions.npz").write_bytes(table.to_bytes())
  log = run / "private" / "metrics.jsonl"
  last = json.loads(log.read_text().splitlines()[-2])
  last["metrics"] |= {"confusion": counts.tolist(), "num_records": int(counts.sum())}
  log.write_text(json.dumps(last) + "\n")
  render_report(run, {})
  text = private_path(run).read_text()
  matrix = text.split('<section id="confusion"')[1].split("</section>")[0]
  shown = [int(n) for n in re.findall(r">(\d+)</span>", matrix)]
  assert shown and min(shown) >= 11, shown
  # Nor does it follow from what is right in all: two classes are left out.
  assert matrix.count("suppressed)") == 2
  assert "10.0%" not in text.split('<section id="classes"')[1].split("</section>")[0]


@pytest.mark.parametrize("declared", ["public", "private"])
def test_predictions_are_read_once_for_all_sections(tmp_path, facts, declared, monkeypatch):
  record = privacy_json.privacy_record(facts(declared=declared))
  runs = [_run(tmp_path / name, record, declared) for name in ("run", "other")]
  read = []
  load = run_view.load_predictions
  monkeypatch.setattr(run_view, "load_predictions", lambda path: read.append(path) or load(path))
  render_report(runs[0], {"other": runs[1]})
  assert len(read) == len(set(read)) == 2, read


def test_groups_that_cannot_be_shown_are_no_error(tmp_path, record):
  text = render_report(_run(tmp_path / "run", record, groups=("colour",)), {}).read_text()
  assert "Not shown: there is no group column" in text
  (tmp_path / "run" / "predictions.npz").write_bytes(b"torn")
  assert "holds no predictions" in render_report(tmp_path / "run", {}).read_text()


def test_private_data_go_to_the_page_under_private(tmp_path, facts):
  record = privacy_json.privacy_record(facts(declared="private"))
  run = _run(tmp_path / "run", record, "private", accuracy=LOSS)
  plain = _run(tmp_path / "plain", None, "private", accuracy=0.8)
  text = render_report(run, {"plain": plain}, include_private=True).read_text()
  for word in ("73.2%", str(LOSS)[:6], "sex f", "plot-loss"):
    assert word not in text
  assert not {"accuracy", "diagnostics", "groups-accuracy"} & set(_sections(text))
  inside = private_path(run)
  assert inside.stat().st_mode & 0o077 == 0
  found = _sections(inside.read_text())
  for anchor in ("accuracy", "cost", "groups-accuracy", "classes", "confusion", "calibration"):
    assert anchor in found
  assert "diagnostics" in found and 'class="callout alarm"' in inside.read_text()
  assert not (plain / "report.html").exists()


def test_diagnostics_only_if_asked_for_under_a_red_banner(tmp_path, record):
  run = _run(tmp_path / "run", record)
  for asked in (False, True):
    text = render_report(run, {}, include_private=asked).read_text()
    assert ("diagnostics" in _sections(text)) == asked
    assert ('class="callout alarm"' in text) == asked
    assert (f"{LOSS:.4g}" in text) == asked


def test_figures_that_were_released_with_noise_are_shown_of_private_data(tmp_path, facts):
  record = privacy_json.privacy_record(facts(declared="private"))
  run = _run(tmp_path / "run", record, "private")
  line = {"split": "test", "accuracy": 0.875, "stddev": 0.011, "epsilon": 0.1, "delta": 1e-6,
          "statement": "The accuracy was released <with> noise."}  # fmt: skip
  (run / "released_metrics.jsonl").write_text(json.dumps(line) + '\n{"accuracy": "x"}\n{"acc')
  text = render_report(run, {}).read_text()
  assert "87.5%" in text and "1.1 points" in text and "released &lt;with&gt; noise" in text


@pytest.mark.parametrize("lines", ["", "x\n", '{"loss": 1}\n[]\n'])
def test_a_log_that_says_nothing_shows_nothing(tmp_path, record, lines):
  run = _run(tmp_path / "run", record)
  (run / "private" / "training.jsonl").write_text(lines)
  assert "diagnostics" not in _sections(render_report(run, {}, include_private=True).read_text())


@pytest.mark.parametrize(
  ("counts", "shown"),
  [((40, 60, 200), (40, 60, 200)), ((4, 60, 200), (200,)), ((4, 8, 200), (200,)), ((3, 2, 5), ())],
)
def test_small_calibration_bins_of_private_data_are_left_out(tmp_path, facts, counts, shown):
  """With the next larger ones, which the overall accuracy would otherwise give away."""
  record = privacy_json.privacy_record(facts(declared="private"))
  run = _run(tmp_path / "run", record, "private")
  log = run / "private" / "metrics.jsonl"
  confidences = (0.0171, 0.0283, 0.0391)  # no other figure here is so small
  last = json.loads(log.read_text().splitlines()[-2])  # the log ends in a torn line
  calibration = {"confidence": confidences, "accuracy": [0.5] * 3, "count": counts}
  last["metrics"]["calibration"] = calibration
  log.write_text(json.dumps(last) + "\n")
  render_report(run, {})
  text = private_path(run).read_text()
  assert ("calibration" in _sections(text)) == bool(shown)
  for count, confidence in zip(counts, confidences, strict=True):
    assert (f">{100 * confidence:.1f}%<" in text) == (count in shown)
