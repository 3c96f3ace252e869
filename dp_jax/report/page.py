"""Small pieces of HTML. Every text that comes in is escaped here and nowhere else."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib import resources

from dp_jax.statement import formatting


@dataclass(frozen=True)
class Section:
  """A section of the page: anchor, title (plain text) and body (HTML)."""

  anchor: str
  title: str
  body: str


@dataclass(frozen=True)
class Markup:
  """HTML that is ready to be placed; a plain string is not, and gets escaped."""

  html: str


Cell = str | Markup


def escape(text: object, limit: int = 2000) -> str:
  """One line of untrusted text, safe as content and as a quoted attribute."""
  return html.escape(formatting.one_line(text, limit), quote=True)


def paragraph(text: Cell, css_class: str = "") -> str:
  """A paragraph of plain text (escaped) or of markup."""
  attribute = f' class="{css_class}"' if css_class else ""
  return f"<p{attribute}>{_cell(text)}</p>"


def table(
  caption: str,
  header: Sequence[str],
  rows: Iterable[Sequence[Cell]],
  css_class: str = "",
) -> str:
  """A table whose first column heads its rows; it scrolls by itself where the page is narrow."""
  head = "".join(f'<th scope="col">{escape(name)}</th>' for name in header)
  body = "".join(
    f'<tr><th scope="row">{_cell(row[0])}</th>'
    + "".join(f"<td>{_cell(cell)}</td>" for cell in row[1:])
    + "</tr>"
    for row in rows
  )
  return (
    f'<div class="scroll" role="region" tabindex="0" aria-label="{escape(caption)}">'
    f'<table class="{css_class}"><caption>{escape(caption)}</caption>'
    f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
  )


def plot(svg: str, caption: str, numbers: str = "") -> str:
  """A plot with its caption, and its table folded beneath unless it stands on the page itself."""
  folded = "<details><summary>The numbers behind this plot</summary>{}</details>"
  table_of = folded.format(numbers) if numbers else ""
  return f'<figure class="plot">{svg}<figcaption>{escape(caption)}</figcaption>{table_of}</figure>'


def columns(*parts: str) -> str:
  """Blocks side by side where there is room."""
  return f'<div class="columns">{"".join(f"<div>{part}</div>" for part in parts)}</div>'


def callout(title: str, text: str) -> str:
  """A warning that cannot be overlooked."""
  return f'<div class="callout" role="note"><strong>{escape(title)}</strong> {escape(text)}</div>'


def alarm(title: str, text: str) -> str:
  """A red banner: the page holds what no guarantee covers."""
  banner = callout(title, text)
  return banner.replace('class="callout"', 'class="callout alarm"', 1)


def tiles(items: Sequence[tuple[str, str, str]]) -> str:
  """Key figures: (name, value, what it means)."""
  body = "".join(
    f"<div><dt>{escape(name)}</dt><dd><span>{escape(value)}</span> "
    f"<small>{escape(meaning)}</small></dd></div>"
    for name, value, meaning in items
  )
  return f'<dl class="tiles">{body}</dl>'


def figures(items: Iterable[tuple[str, str]]) -> str:
  """Large figures, each with the sentence that it stands in, all plain text."""
  body = "".join(
    f"<div><dt>{escape(figure)}</dt><dd>{escape(text)}</dd></div>" for figure, text in items
  )
  return f'<dl class="figures">{body}</dl>'


def definitions(items: Iterable[tuple[str, str]]) -> str:
  """A list of terms and their texts, all plain text."""
  body = "".join(
    f"<div><dt>{escape(term)}</dt><dd>{escape(text, 8000)}</dd></div>" for term, text in items
  )
  return f'<dl class="definitions">{body}</dl>'


def code(text: str, label: str) -> str:
  """A block of code; keeps its lines, scrolls by itself."""
  lines = "\n".join(html.escape(line) for line in text.split("\n"))
  return f'<pre role="region" tabindex="0" aria-label="{escape(label)}"><code>{lines}</code></pre>'


def document(title: str, header: str, sections: Sequence[Section], footer: str) -> str:
  """The whole page: style inlined, no script, and a policy that forbids both it and the network."""
  style = resources.files("dp_jax.report").joinpath("report.css").read_text(encoding="utf-8")
  links = "".join(
    f'<li><a href="#{section.anchor}">{escape(section.title)}</a></li>' for section in sections
  )
  body = "".join(
    f'<section id="{section.anchor}" aria-labelledby="{section.anchor}-title">'
    f'<h2 id="{section.anchor}-title">{escape(section.title)}</h2>{section.body}</section>'
    for section in sections
  )
  return (
    '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
    '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; '
    "style-src 'unsafe-inline'\">\n"
    '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
    '<meta name="color-scheme" content="light dark">\n'
    f"<title>{escape(title)}</title>\n<style>\n{style}</style>\n</head>\n<body>\n"
    '<a class="skip" href="#main">Skip to the report</a>\n'
    f"<header><div>{header}</div></header>\n"
    f'<div class="frame"><nav aria-label="Contents"><ol>{links}</ol></nav>\n'
    f'<main id="main" tabindex="-1">{body}</main></div>\n'
    f"<footer>{footer}</footer>\n</body>\n</html>\n"
  )


def _cell(value: Cell) -> str:
  return value.html if isinstance(value, Markup) else escape(value)
