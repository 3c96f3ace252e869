"""What a screen reader, a keyboard and a printer need of each page, and colours that can be read.

The full check, with a browser and axe-core, is experiments/report_check.
"""

import html.parser
import itertools
import re
from importlib import resources

import pytest
from made_up_runs import write_run

from dp_jax.evaluation.bootstrap import Interval
from dp_jax.report.html import private_path, render_report
from dp_jax.report.sweep_page import Row, SweepTable, sweep_page
from dp_jax.statement import privacy_json

VOID = {"meta", "link", "img", "br", "hr", "input"}


class Tree(html.parser.HTMLParser):
  """Elements in order, each with its attributes, depth and the sections and figures around it."""

  def __init__(self, text):
    super().__init__()
    self.open, self.found, self.text = [], [], {}
    self.feed(text)
    self.close()

  def handle_starttag(self, tag, attrs):
    self.found.append((tag, dict(attrs), tuple(i for _, i in self.open)))
    if tag not in VOID:
      self.open.append((tag, len(self.found) - 1))

  def handle_startendtag(self, tag, attrs):
    self.found.append((tag, dict(attrs), tuple(i for _, i in self.open)))

  def handle_endtag(self, tag):
    if tag not in VOID:
      assert self.open and self.open[-1][0] == tag, (tag, self.open[-3:])
      self.open.pop()

  def handle_data(self, data):
    for _, place in self.open:
      self.text[place] = self.text.get(place, "") + data

  def all(self, *tags):
    return [(i, tag, attrs, up) for i, (tag, attrs, up) in enumerate(self.found) if tag in tags]


def _public(folder, record):
  runs = {"plain": write_run(folder / "plain", None, accuracy=0.97)}
  run = write_run(folder / "run", record)
  _training(run)
  return render_report(run, runs, include_private=True).read_text()


def _private(folder, facts):
  record = privacy_json.privacy_record(facts(declared="private"))
  run, plain = (
    write_run(folder / name, given, declared="private")
    for name, given in (("run", record), ("plain", None))
  )
  for each in (run, plain):
    _training(each)
    (each / "metrics.jsonl").rename(each / "private" / "metrics.jsonl")
  page = render_report(run, {"plain": plain}, include_private=True)
  return page.read_text(), private_path(run).read_text()


def _training(run):
  (run / "private").mkdir()
  lines = (f'{{"step": {k}, "loss": {1 / k}, "norm_median": 0.5}}\n' for k in range(1, 31))
  (run / "private" / "training.jsonl").write_text("".join(lines))


def _sweep():
  def interval(x):
    return Interval(x, x - 0.1, x + 0.1)

  rows = [
    Row(e, (0.8, 0.9), interval(0.85), {"sex": interval(0.1)}, e and 2 * e)
    for e in (1.0, 4.0, None)
  ]
  return sweep_page(SweepTable("x", "test", True, "scan", 1e-5, 2, rows, ("sex",), 4, 9.0, "pld"))


@pytest.fixture(name="pages", scope="module")
def _pages(tmp_path_factory, shared_record):
  from made_up_runs import make_facts

  folder = tmp_path_factory.mktemp("pages")
  report, comparison = _private(folder / "private", make_facts)
  return {
    "public": _public(folder / "public", shared_record),
    "private": report, "comparison": comparison, "sweep": _sweep(),
  }  # fmt: skip


PAGES = ("public", "private", "comparison", "sweep")


@pytest.mark.parametrize("name", PAGES)
def test_nothing_comes_from_elsewhere_and_nothing_runs(pages, name):
  text, tree = pages[name], Tree(pages[name])
  assert not re.search(r"(https?:)?//[a-z]", text) and "@import" not in text
  assert not tree.all("script", "link", "iframe", "object", "img", "embed", "video", "form")
  for _, _, attrs, _ in tree.all(*{tag for tag, *_ in tree.found}):
    assert not any(key.startswith("on") for key in attrs)
    for key in ("src", "href", "xlink:href"):
      assert attrs.get(key, "#").startswith("#")
  assert "default-src 'none'" in text


@pytest.mark.parametrize("name", PAGES)
def test_language_title_and_headings_in_order(pages, name):
  tree = Tree(pages[name])
  assert tree.found[0][:2] == ("html", {"lang": "en"})
  (title,) = [i for i, *_ in tree.all("title") if i < 20]
  assert tree.text[title].strip()
  levels = [int(tag[1]) for _, tag, *_ in tree.all("h1", "h2", "h3", "h4")]
  assert levels.count(1) == 1 and levels[0] == 1
  assert all(after <= before + 1 for before, after in itertools.pairwise(levels))
  for tag in ("main", "header", "nav", "footer"):
    assert len(tree.all(tag)) == 1
  (skip,) = [attrs for _, _, attrs, _ in tree.all("a") if attrs.get("class") == "skip"]
  assert skip["href"] == "#main"


@pytest.mark.parametrize("name", PAGES)
def test_every_plot_has_a_name_a_description_and_a_table(pages, name):
  tree = Tree(pages[name])
  plots = tree.all("svg")
  assert len(plots) >= (2 if name in ("private", "sweep") else 5)
  ids = {attrs["id"]: i for i, (_, attrs, _) in enumerate(tree.found) if "id" in attrs}
  for _, _, attrs, above in plots:
    assert attrs["role"] == "img"
    for reference in attrs["aria-labelledby"].split():
      assert tree.text[ids[reference]].strip()
    (section,) = [i for i in above if tree.found[i][0] == "section"]
    tables = [up for _, _, _, up in tree.all("table") if section in up]
    assert tables, attrs
    figure = [i for i in above if tree.found[i][0] == "figure"]
    assert figure and any(up[-1] == figure[-1] for _, _, _, up in tree.all("figcaption"))


@pytest.mark.parametrize("name", PAGES)
def test_tables_have_captions_and_heads_and_scroll_by_keyboard(pages, name):
  tree = Tree(pages[name])
  for i, _, _, above in tree.all("table"):
    captions = [j for j, _, _, up in tree.all("caption") if i in up]
    assert len(captions) == 1 and tree.text[captions[0]].strip()
    heads = [attrs for _, _, attrs, up in tree.all("th") if i in up]
    assert heads and all(attrs.get("scope") in ("row", "col") for attrs in heads)
    around = tree.found[above[-1]][1]
    assert around["tabindex"] == "0" and around["role"] == "region" and around["aria-label"]


@pytest.mark.parametrize("name", PAGES)
def test_sections_are_named_and_links_lead_somewhere(pages, name):
  tree = Tree(pages[name])
  ids = [attrs["id"] for _, attrs, _ in tree.found if "id" in attrs]
  assert len(ids) == len(set(ids))
  for _, _, attrs, _ in tree.all("section"):
    assert attrs["aria-labelledby"] in ids
  for _, _, attrs, _ in tree.all("a"):
    assert attrs["href"].removeprefix("#") in ids


def _luminance(colour):
  digits = colour if len(colour) == 7 else "#" + "".join(2 * c for c in colour[1:])
  channels = [int(digits[i : i + 2], 16) / 255 for i in (1, 3, 5)]
  linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
  return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one, other):
  """WCAG 2.2, success criterion 1.4.3."""
  high, low = sorted((_luminance(one), _luminance(other)), reverse=True)
  return (high + 0.05) / (low + 0.05)


def _schemes():
  style = resources.files("dp_jax.report").joinpath("report.css").read_text()
  blocks = re.findall(r":root \{(.*?)\}", style, flags=re.DOTALL)
  variables = [dict(re.findall(r"--([\w-]+):\s*(#[0-9a-fA-F]{3,6})", block)) for block in blocks]
  light, dark, printed = variables
  return {"light": light, "dark": light | dark, "print": light | printed}


@pytest.mark.parametrize("scheme", ["light", "dark", "print"])
def test_colours_can_be_read(scheme):
  colours = _schemes()[scheme]
  texts = [(ink, ground) for ink in ("ink", "muted", "accent") for ground in ("paper", "wash")]
  texts += [("warn-ink", "warn-wash"), ("alarm-ink", "alarm-wash")]
  for ink, ground in texts:
    assert contrast(colours[ink], colours[ground]) >= 4.5, (ink, ground)
  for series in range(6):  # lines and dots, success criterion 1.4.11
    assert contrast(colours[f"series-{series}"], colours["paper"]) >= 3.0, series
  assert contrast(colours["alarm-line"], colours["paper"]) >= 3.0


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_on_the_deepest_cell_can_be_read(scheme):
  """A cell of the confusion matrix is shaded at most `--deepest`, mixed into the wash."""
  style = resources.files("dp_jax.report").joinpath("report.css").read_text()
  deepest = [int(n) / 100 for n in re.findall(r"--deepest: (\d+)%", style)]
  share, colours = dict(zip(("light", "dark"), deepest, strict=True))[scheme], _schemes()[scheme]
  # A hit reaches 45% of its tint at a share of 1, a miss up to the deepest.
  for tint, most in (("series-0", min(share, 0.45)), ("series-2", share)):
    ends = [[int(colours[k][i : i + 2], 16) for i in (1, 3, 5)] for k in (tint, "wash")]
    mixed = [round(most * a + (1 - most) * b) for a, b in zip(*ends, strict=True)]
    cell = "#" + "".join(f"{c:02x}" for c in mixed)
    assert contrast(colours["ink"], cell) >= 4.5, (tint, cell)


def test_contrast_of_known_colours():
  assert contrast("#000", "#ffffff") == pytest.approx(21)
  assert contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.01)
