"""report.html stands alone, escapes what it is given, and shows no private number."""

import html.parser
import json
import re
from pathlib import Path

import pytest
from made_up_runs import write_run

from dp_jax.report.html import render_report
from dp_jax.statement import privacy_json

HOSTILE = "<script>alert('x')</script>\"><img src=//evil.example/a onerror=alert(1)>$a_b$&amp;"
CANARY = "canary-4f1d"
CANARY_NUMBER = 0.7316552


class Collector(html.parser.HTMLParser):
  """Elements with their attributes, and the identifiers of the page."""

  def __init__(self) -> None:
    super().__init__()
    self.elements: list[tuple[str, dict[str, str | None]]] = []

  def handle_starttag(self, tag, attrs):
    self.elements.append((tag, dict(attrs)))


def parse(path: Path) -> list[tuple[str, dict[str, str | None]]]:
  collector = Collector()
  collector.feed(path.read_text(encoding="utf-8"))
  return collector.elements


def test_page_has_every_section_and_a_table_for_every_plot(tmp_path, record):
  runs = {"plain": write_run(tmp_path / "plain", None, accuracy=0.97)}
  page = render_report(write_run(tmp_path / "private", record), runs)
  assert page == tmp_path / "private" / "report.html"
  text = page.read_text(encoding="utf-8")
  sections = ["statement", "meaning", "accuracy", "cost", "epsilon", "classes", "confusion"]
  sections += ["calibration", "details", "evaluation", "setup", "verify", "cite"]
  for anchor in sections:
    assert f'<section id="{anchor}"' in text
  elements = parse(page)
  plots = [attributes for tag, attributes in elements if tag == "svg"]
  tables = [tag for tag, _ in elements if tag == "table"]
  assert len(plots) == 6
  assert len(tables) >= len(plots)
  assert all(plot["role"] == "img" and plot["aria-labelledby"] for plot in plots)
  assert "7.0 points" in text  # 97% without privacy against 90%


def test_figures_of_two_classes_stand_beside_the_accuracy(tmp_path, record):
  run = write_run(tmp_path / "private", record)
  assert "AUROC" not in render_report(run, {}).read_text(encoding="utf-8")
  line = {"step": 20, "split": "test", "final": True}
  metrics = {"accuracy": 0.9, "num_records": 300, "auroc": 0.8762, "loss": 0.4}
  (run / "metrics.jsonl").write_text(json.dumps({**line, "metrics": metrics}) + "\n")
  text = render_report(run, {}).read_text(encoding="utf-8")
  assert '<th scope="col">AUROC</th>' in text and "<td>0.876</td><td>0.400</td>" in text
  assert "average precision" not in text


def test_page_shows_every_evaluation_point(tmp_path, record):
  text = render_report(write_run(tmp_path / "private", record), {}).read_text(encoding="utf-8")
  shown = html.unescape(text[text.index('<section id="evaluation"') :])
  for sentence in record["nist_sp_800_226"].values():
    assert sentence in shown


def test_page_refers_to_nothing_outside_itself(tmp_path, record):
  page = render_report(write_run(tmp_path / "private", record), {})
  text = page.read_text(encoding="utf-8")
  assert not re.search(r"(https?:)?//[a-z]", text)
  assert "@import" not in text
  for tag, attributes in parse(page):
    assert tag not in {"script", "link", "iframe", "object", "img"}
    for name, value in attributes.items():
      if name in {"href", "xlink:href", "src"}:
        assert value is not None and value.startswith("#")
      assert "url(" not in (value or "") or "url(#" in (value or "")


def test_identifiers_are_unique_and_references_resolve(tmp_path, record):
  runs = {"plain": write_run(tmp_path / "plain", None)}
  elements = parse(render_report(write_run(tmp_path / "private", record), runs))
  identifiers = [attributes["id"] for _, attributes in elements if attributes.get("id")]
  assert len(identifiers) == len(set(identifiers))
  for _, attributes in elements:
    for name in ("href", "xlink:href"):
      if attributes.get(name):
        assert attributes[name].removeprefix("#") in identifiers


def test_page_is_the_same_for_the_same_run(tmp_path, record):
  run = write_run(tmp_path / "private", record)
  first = render_report(run, {}).read_bytes()
  assert render_report(run, {}).read_bytes() == first
  assert [path.name for path in run.iterdir() if "tmp" in path.name] == []


def test_names_are_escaped(tmp_path, facts):
  changes = {
    "public_facts": {"class_names": [HOSTILE, "one", "two"]},
    "warnings": (HOSTILE,),
    "pretrained_weights": HOSTILE,
    "hyperparameter_selection": HOSTILE,
  }
  record = privacy_json.privacy_record(facts(**changes))
  run = write_run(tmp_path / "private", record, source=HOSTILE)
  page = render_report(run, {HOSTILE: write_run(tmp_path / "plain", None, source=HOSTILE)})
  assert "alert(" in page.read_text(encoding="utf-8")
  for tag, attributes in parse(page):
    assert tag not in {"script", "img"}
    assert not any(name.startswith("on") for name in attributes)


def test_private_data_show_only_what_the_guarantee_covers(tmp_path, facts):
  record = privacy_json.privacy_record(facts(declared="private"))
  run = write_run(tmp_path / "private", record, declared="private", accuracy=CANARY_NUMBER)
  _plant(run)
  plain = write_run(tmp_path / "plain", None, declared="private", accuracy=CANARY_NUMBER)
  _plant(plain)
  text = render_report(run, {CANARY: plain}).read_text(encoding="utf-8")
  _assert_no_canary(text)
  assert "declared private" in text
  assert "point" not in re.findall(r'<section id="([a-z]+)"', text)
  for anchor in ("accuracy", "cost", "classes", "confusion", "calibration"):
    assert f'<section id="{anchor}"' not in text
  assert '<section id="statement"' in text
  _assert_no_canary(render_report(plain, {}).read_text(encoding="utf-8"))


@pytest.mark.parametrize(("in_config", "in_record"), [("public", "private"), ("private", "public")])
def test_the_stricter_declaration_counts(tmp_path, facts, in_config, in_record):
  record = privacy_json.privacy_record(facts(declared=in_record))
  run = write_run(tmp_path / "run", record, declared=in_config, accuracy=CANARY_NUMBER)
  _plant(run)
  _assert_no_canary(render_report(run, {}).read_text(encoding="utf-8"))


def test_comparison_with_a_private_run_is_left_out(tmp_path, record):
  plain = write_run(tmp_path / "plain", None, declared="private", accuracy=CANARY_NUMBER)
  text = render_report(write_run(tmp_path / "run", record), {"plain": plain}).read_text("utf-8")
  _assert_no_canary(text)
  assert '<section id="cost"' not in text


@pytest.mark.parametrize(("source", "path", "declared", "title"), [
  ("csv", "/data/cohort.csv", "public", "cohort.csv"),
  ("csv", "/data/Jane Doe.csv", "private", "Private table"),
  ("npy", "/data/features/", "public", "features"),
  ("npz", None, "public", "Public arrays"),
  ("tfds:mnist", "/data", "private", "tfds:mnist"),
])  # fmt: skip
def test_the_title_names_the_data_where_that_is_public(tmp_path, source, path, declared, title):
  run = write_run(tmp_path / "run", None, declared=declared, source=source)
  config = json.loads((run / "config.json").read_text())
  config["config"]["data"]["path"] = path
  (run / "config.json").write_text(json.dumps(config))
  text = render_report(run, {}).read_text(encoding="utf-8")
  assert f"<title>Privacy report: {title}</title>" in text
  assert f"<h1>{title}, trained without differential privacy</h1>" in text


def test_plain_run_claims_nothing(tmp_path):
  text = render_report(write_run(tmp_path / "plain", None), {}).read_text(encoding="utf-8")
  assert "trained without differential privacy" in text
  assert "No privacy." in text


def test_test_key_is_said_first(tmp_path, facts):
  record = privacy_json.privacy_record(facts(test_key=True))
  text = render_report(write_run(tmp_path / "run", record), {}).read_text(encoding="utf-8")
  assert "Not private: fixed seed" in text[text.index("<header>") : text.index("</header>")]


def test_a_folder_that_is_no_run_is_refused(tmp_path, record):
  with pytest.raises(ValueError, match=r"config\.json"):
    render_report(tmp_path, {})
  run = write_run(tmp_path / "run", record)
  broken = {name: value for name, value in record.items() if name != "epsilon"}
  (run / "release" / "privacy.json").write_text(json.dumps(broken), encoding="utf-8")
  with pytest.raises(ValueError, match="lacks epsilon"):
    render_report(run, {})


def test_canaries_are_seen_where_the_declaration_is_ignored(tmp_path, record):
  """The broken variant, data that pass as public, does show what the tests above look for."""
  run = write_run(tmp_path / "run", record, accuracy=CANARY_NUMBER)
  with pytest.raises(AssertionError):
    _assert_no_canary(render_report(run, {}).read_text(encoding="utf-8"))


def _plant(run: Path) -> None:
  """Canaries where only the holder of the data may look."""
  for folder in ("private", "unprotected", "checkpoints"):
    (run / folder).mkdir()
    for name in ("metrics.jsonl", "training.jsonl", "comparison.html", "config.json"):
      text = json.dumps({"step": 1, "loss": CANARY_NUMBER, "note": CANARY, "split": "test"})
      (run / folder / name).write_text(text, encoding="utf-8")


def _assert_no_canary(text: str) -> None:
  assert CANARY not in text
  assert f"{100 * CANARY_NUMBER:.1f}%" not in text
  assert str(CANARY_NUMBER)[:5] not in text
