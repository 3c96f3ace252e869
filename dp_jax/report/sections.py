"""The report's sections on privacy: the statement, what it means, how to check and cite it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from dp_jax.report import page, plots, run_view
from dp_jax.report.page import Markup, Section
from dp_jax.report.run_view import RunView
from dp_jax.statement import attacker, evaluation_points, formatting, sentences, statement_items

CITATIONS = """\
@inproceedings{abadi2016deep,
  title     = {Deep Learning with Differential Privacy},
  author    = {Abadi, Martin and Chu, Andy and Goodfellow, Ian and McMahan, H. Brendan and
               Mironov, Ilya and Talwar, Kunal and Zhang, Li},
  booktitle = {ACM Conference on Computer and Communications Security},
  year      = {2016},
  note      = {arXiv:1607.00133}
}
@article{ponomareva2023dpfy,
  title     = {How to {DP}-fy {ML}: A Practical Guide to Machine Learning with Differential
               Privacy},
  author    = {Ponomareva, Natalia and Hazimeh, Hussein and Kurakin, Alex and Xu, Zheng and
               Denison, Carson and McMahan, H. Brendan and Vassilvitskii, Sergei and
               Chien, Steve and Thakurta, Abhradeep},
  journal   = {Journal of Artificial Intelligence Research},
  volume    = {77},
  year      = {2023},
  note      = {arXiv:2303.00654}
}"""


def statement_section(run: RunView) -> Section:
  """The statement and its points; for a run without privacy, that it claims nothing."""
  record = run.record
  if record is None:
    return Section("statement", "The statement", page.paragraph(sentences.PLAIN_STATEMENT, "lead"))
  return Section("statement", "The statement", page.paragraph(sentences.statement(record), "lead"))


def details_section(record: Mapping[str, Any]) -> Section:
  """The statement point by point, with unrounded numbers."""
  body = page.paragraph(
    "The list that Ponomareva et al. (2023, arXiv:2303.00654, Section 5.3.3) ask every report of "
    "a privacy guarantee to give, with unrounded numbers."
  )
  body += page.definitions(statement_items.statement_items(record))
  return Section("details", "The statement, point by point", body)


def evaluation_section(record: Mapping[str, Any]) -> Section:
  """The points by which NIST SP 800-226 evaluates a guarantee, and what this run has to say."""
  body = page.paragraph(
    "NIST SP 800-226 (Guidelines for Evaluating Differential Privacy Guarantees, 2025) ranks what "
    "a guarantee rests on as a pyramid: parameters and unit on top, then the algorithm with its "
    "utility and bias, and beneath them all that surrounds it. What this record cannot vouch for "
    "is said where it belongs. Nobody but the writers of this software made the mapping."
  )
  body += page.definitions(evaluation_points.titled(record["nist_sp_800_226"]))
  return Section("evaluation", "Against NIST SP 800-226", body)


def attacker_section(record: Mapping[str, Any]) -> Section:
  """What the guarantee means for someone who asks whether a unit was in the data."""
  found = record["attacker"]
  unit = formatting.one_line(record["unit"], 60)
  advantage = found["mechanism_advantage_bound"]
  right = formatting.percent_up((1 + advantage) / 2)
  alone = formatting.round_up(found["membership_advantage_bound"], 3)
  intro = ""
  if record["randomness"]["test_key"]:
    text = (
      "Nothing below holds for this run, whose key is known; it describes one with a secret key."
    )
    intro = page.paragraph(text, "note")
  intro += page.paragraph(
    "Suppose that someone has the released parameters and knows everything about the training "
    f"except its random bits and {_question(record['adjacency'], unit)}, each as likely as the "
    "other. Blind guessing is right half of the time. No test whatever, by any method short of "
    f"predicting those bits, is right more than {right} of the time: its advantage (true minus "
    f"false positive rate) is at most {formatting.round_up(advantage, 3)}. Epsilon and delta "
    f"alone, without the mechanism behind them, bound it by {alone}."
  )
  rows = [
    [
      formatting.percent(point["false_positive_rate"]),
      formatting.percent_up(point["true_positive_rate_bound"], 2),
    ]
    for point in found["trade_off"]
  ]
  numbers = page.table(
    "Limit on membership tests", ["false positive rate", "true positive rate, at most"], rows
  )
  svg = plots.attacker_plot(attacker.curve(record))
  caption = "The most that any membership test can reach against this mechanism."
  text = page.paragraph(
    "The table gives the same limit where it matters most to people: how many members can be "
    "named while only few others are named wrongly."
  )
  figure = page.plot(svg, caption)
  return Section("meaning", "What it means", intro + page.columns(figure, text + numbers))


def epsilon_section(record: Mapping[str, Any]) -> Section:
  """Epsilon against the step."""
  points = attacker.epsilon_curve(record)
  rows = [[formatting.count(step), formatting.round_up(epsilon)] for step, epsilon in points]
  numbers = page.table("Epsilon spent, by step", ["step", "epsilon"], rows)
  intro = page.paragraph(
    f"Every step spends some of the budget. The stated epsilon is that of all "
    f"{formatting.count(record['steps'])} planned steps, also if training had stopped earlier. "
    f"Delta is {formatting.plain(record['delta'])} throughout. Between two points the plot stands "
    "at the later one, so that it never shows less than is spent."
  )
  target = record["target"]["epsilon"]
  svg = plots.epsilon_plot(points, target)
  body = intro + page.plot(svg, "Epsilon spent after each step, and the target.", numbers)
  return Section("epsilon", "Epsilon against step", body)


def warnings_block(record: Mapping[str, Any] | None) -> str:
  """What must be read first: no privacy at all, a fixed seed, or a warning of the record."""
  if record is None:
    return page.callout("No privacy.", "These parameters come from a run without protection.")
  parts = []
  if record["randomness"]["test_key"]:
    text = "The noise came from a test key; the numbers below are not a guarantee."
    parts.append(page.callout(f"{sentences.NOT_PRIVATE.capitalize()}.", text))
  parts += [page.callout("Warning.", f"{warning}.") for warning in record["warnings"]]
  return "".join(parts)


def released_sections(run: RunView) -> list[Section]:
  """Figures on held-out data that were released with noise, each with what it spent."""
  rows: list[list[page.Cell]] = []
  texts = []
  for line in run.released:
    values = [run_view.number(line.get(k)) for k in ("accuracy", "stddev", "epsilon", "delta")]
    accuracy, stddev, epsilon, delta = values
    if accuracy is None or stddev is None or epsilon is None or delta is None:
      continue
    rows.append([
      formatting.one_line(line.get("split", ""), 60), formatting.percent(accuracy),
      f"{100 * stddev:.2g} points", formatting.round_up(epsilon), formatting.plain(delta),
    ])  # fmt: skip
    texts.append(page.paragraph(str(line.get("statement", ""))))
  if not rows:
    return []
  header = ["split", "accuracy", "standard deviation of the noise", "epsilon", "delta"]
  body = page.table("Released with noise", header, rows) + "".join(texts)
  return [Section("released", "Accuracy that was released", body)]


def setup_section(run: RunView) -> Section:
  """The settings a reader asks for first; all of them were fixed before training."""
  wanted = {
    "data": ("source", "declared", "max_records_per_unit"),
    "model": ("name", "weights", "trainable"),
    "privacy": ("enabled", "unit", "adjacency", "sampling", "clipping", "clip_norm"),
    "train": ("steps", "epochs", "optimizer", "learning_rate", "schedule", "ema"),
  }
  rows = [
    [f"{section}.{key}", _setting(run.config[section][key])]
    for section, keys in wanted.items()
    for key in keys
    if section in run.config and run.config[section].get(key) is not None
  ]
  body = page.paragraph("Excerpt of config.json; every setting was fixed before training.")
  return Section(
    "setup", "How it was trained", body + page.table("Settings", ["key", "value"], rows, "text")
  )


def verify_section(record: Mapping[str, Any] | None) -> Section:
  """How someone else can check the statement."""
  if record is None:
    text = "There is nothing to verify: this run makes no claim."
    return Section("verify", "How to verify", page.paragraph(text))
  body = page.paragraph(
    "Whoever holds the release can derive every number of the statement anew, without the data. "
    "The command recomputes epsilon with the same accountant, brackets it by two others, "
    "recomputes every derived number and checks each file against its hash. It exits with 1 and "
    "the reason if anything differs."
  )
  body += page.code("python -m dp_jax verify release/", "Command to verify the release")
  ledger = record["ledger"]
  software = ", ".join(f"{name} {version}" for name, version in record["software"].items())
  body += page.definitions(
    [
      ("Digest of privacy.json", record["digest"]),
      (
        "Head of the ledger",
        f"{ledger['head']} ({ledger['count']} {'entry' if ledger['count'] == 1 else 'entries'})",
      ),
      ("Software", software),
    ]
  )
  body += page.paragraph(
    "What it cannot show: that the run was carried out by this code on the data it names. The "
    "ledger makes a later change evident; it does not prevent one.",
    "note",
  )
  return Section("verify", "How to verify", body)


def cite_section(record: Mapping[str, Any] | None) -> Section:
  """A sentence for a paper, and the entries behind it."""
  parts = []
  if record is not None and not record["randomness"]["test_key"]:
    parts.append(page.paragraph("A sentence for a paper or a data sheet:"))
    parts.append(f"<blockquote>{page.paragraph(_sentence(record))}</blockquote>")
  version = "" if record is None else f" {record['software'].get('dp_jax', '')}".rstrip()
  software = (
    f"@software{{dp_jax,\n  title = {{dp_jax{version}: differentially private training "
    f"in JAX}}\n}}\n"
  )
  parts.append(page.code(software + CITATIONS, "BibTeX entries"))
  return Section("cite", "How to cite", "".join(parts))


def hero(run: RunView) -> str:
  """The head of the page: what was trained on what, and the guarantee in large type."""
  record = run.record
  kind = "trained with differential privacy" if record else "trained without differential privacy"
  if record is not None and record["randomness"]["test_key"]:
    kind = "trained with a fixed seed: not private"
  title = f'<p class="kind">Privacy report</p><h1>{page.escape(run.source(), 80)}, {kind}</h1>'
  return f"{title}{warnings_block(record)}"


def guarantee_tiles(record: Mapping[str, Any]) -> list[tuple[str, str, str]]:
  """The tiles that state the guarantee."""
  known = record["randomness"]["test_key"]
  head = "if the key were secret" if known else "at the noise used"
  unit = formatting.one_line(record["unit"], 40)
  advantage = record["attacker"]["mechanism_advantage_bound"]
  return [
    ("Epsilon", formatting.round_up(record["epsilon"]), f"{head}; smaller is stronger"),
    ("Delta", formatting.plain(record["delta"]), "the probability set aside"),
    ("Protects", f"one {unit}", f"{record['adjacency'].replace('_', '-')} neighbours"),
    (
      "Membership test",
      f"≤ {formatting.percent_up((1 + advantage) / 2)}",
      "right at best; a coin is right 50%" if not known else "right at best, if it were",
    ),
  ]


def page_title(run: RunView) -> str:
  """The document's title."""
  return f"Privacy report: {run.source()}"


def _question(adjacency: str, unit: str) -> str:
  if adjacency == "replace_one":
    return f"which of two candidates was the one {unit} that took part in it"
  return f"whether one {unit} took part in it or not"


def _sentence(record: Mapping[str, Any]) -> str:
  if sentences.is_solver(record):
    how = "was fitted to noised statistics by the Gaussian mechanism"
    details = f"{sentences.own_releases(record)} releases over all units"
  else:
    how = "was trained with DP-SGD (Abadi et al., 2016)"
    details = (
      f"{sentences.sampling_words(record)}, {sentences.steps_phrase(record['steps'])}, "
      f"noise multiplier {formatting.short(record['noise_multiplier'])}, clip norm "
      f"{formatting.plain(record['clip_norm'])}"
    )
  return (
    f"The model {how} using dp_jax and satisfies "
    f"({formatting.round_up(record['epsilon'])}, {formatting.plain(record['delta'])})-differential "
    f"privacy for each {formatting.one_line(record['unit'], 60)} under "
    f"{record['adjacency'].replace('_', '-')} adjacency ({details}; "
    f"{record['accountant']} accounting, "
    f"{record['accountant_version']})."
  )


def _setting(value: Any) -> str | Markup:
  # Of a path only the last part says anything to a reader elsewhere.
  return value.rsplit("/", 1)[-1] if isinstance(value, str) else json.dumps(value)
