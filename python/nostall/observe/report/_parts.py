"""Parts of a self-contained HTML page: no scripts, no network; light, dark, on a phone, on paper."""

from __future__ import annotations

import html
import io
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Okabe and Ito's colours, which colour-blind readers can distinguish. Names are those of causes.
_COLOURS = {
    "source": "#d55e00", "peer": "#0072b2", "tier": "#56b4e9", "others": "#7b6bb7",
    "decode": "#e69f00", "other": "#8d99a6", "peers": "#cc79a7", "checkpoint": "#009e73",
    "data": "#d55e00", "ram": "#009e73", "file": "#e6c229", "background": "#56b4e9",
}  # fmt: skip
STYLE = """
:root { color-scheme: light dark; --ink: #1d2733; --soft: #52606d; --line: #dde3ea; --paper: #f4f6f8;
  --card: #fff; --compute: #c3cfdb; --good: #0b7a4b; --bad: #b3460a }
@media screen and (prefers-color-scheme: dark) { :root { --ink: #e4e9ef; --soft: #9fb0c0;
  --line: #2c3846; --paper: #10161d; --card: #18212b; --compute: #3d4e60; --good: #4cc38a;
  --bad: #f5985c } }
* { box-sizing: border-box }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 76em; margin: 0 auto; padding: 1.5em 1em 4em;
  color: var(--ink); background: var(--paper) }
h1 { font-size: 1.75em; line-height: 1.2; margin: .1em 0 .3em }
h2 { font-size: 1.15em; margin: 0 0 .6em }
h3 { font-size: 1em; margin: 1.2em 0 .4em }
.good { color: var(--good) } .bad { color: var(--bad) } .soft, .above { color: var(--soft) }
.above { font-size: .8em; letter-spacing: .08em; text-transform: uppercase; margin: 0 }
.key { font-size: 1.1em; max-width: 60em }
section { background: var(--card); border: 1px solid var(--line); border-radius: 10px;
  padding: 1.1em 1.3em; margin: 1em 0; break-inside: avoid }
dl.facts { display: flex; flex-wrap: wrap; gap: .2em 2em; margin: .6em 0 }
dl.facts div { min-width: 0 } dt { color: var(--soft); font-size: .8em }
dd { margin: 0; overflow-wrap: anywhere }
.cards { display: flex; flex-wrap: wrap; gap: 1em } .cards div { flex: 1 1 9em }
.cards b { display: block; font-size: 1.5em; font-weight: 600 } .cards span { color: var(--soft) }
table { border-collapse: collapse; font-variant-numeric: tabular-nums } td, th { padding: .25em .7em;
  text-align: right; border-bottom: 1px solid var(--line) } th { color: var(--soft); font-weight: 600;
  vertical-align: bottom } th:first-child, td:first-child { text-align: left }
td { white-space: nowrap }
.pair { display: flex; flex-wrap: wrap; gap: 1em } .pair > div { flex: 1 1 26em; min-width: 0 }
summary { cursor: pointer; color: var(--soft); margin: .4em 0 } li { margin: .35em 0 }
.gain { white-space: nowrap; font-weight: 600 }
.wide { overflow-x: auto; margin: .4em 0 }
svg { display: block; width: 100%; height: auto; min-width: 40em }
.bar { margin: .4em 0 } .bar svg { min-width: 0 }
svg text { font: 12px system-ui, sans-serif; fill: var(--soft) }
body:has(> .pair) { max-width: 130em } .pair .wide svg { min-width: 30em }
.pair .wide svg text:not([text-anchor="end"]) { font-size: 15px }
svg text.on { fill: #111; font-weight: 600 } svg text.on.compute { fill: var(--ink) }
.drawn svg { background: #fff; border-radius: 6px; width: auto; max-width: 100% }
.drawn svg text { fill: #000 }
.grid { stroke: var(--line) } .moment { stroke: var(--soft); stroke-dasharray: 2 3 }
.line { fill: none; stroke-width: 1.8 } .line.limit { stroke-dasharray: 7 4 }
.compute { fill: var(--compute); background: var(--compute) }
.legend { display: flex; flex-wrap: wrap; gap: .2em 1.2em; margin: .3em 0; font-size: .9em }
.legend i { display: inline-block; width: .85em; height: .85em; border-radius: 2px; margin-right: .4em }
a { color: inherit } :focus-visible { outline: 2px solid var(--soft); outline-offset: 2px }
@media print { :root { color-scheme: light } body { background: #fff; max-width: none }
  section { border-color: #bbb } .wide { overflow: visible } svg { min-width: 0 }
  table { font-size: .8em } td, th { padding: .2em .35em; white-space: normal; overflow-wrap: anywhere }
  * { print-color-adjust: exact; -webkit-print-color-adjust: exact } }
""" + "".join(
    f".{name} {{ fill: {c}; background: {c} }} .line.{name} {{ fill: none; stroke: {c} }}\n"
    for name, c in _COLOURS.items()
)


def document(title: str, body: str) -> str:
    """The whole page; `body` is HTML already. ASCII alone, so that every encoding can write it."""
    page = f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,"><style>{STYLE}</style></head><body>
{body}</body></html>
"""
    return page.encode("ascii", "xmlcharrefreplace").decode()


def section(title: str, *content: str) -> str:
    """A card of the page; `content` is HTML already. Nothing if there is none."""
    inside = "\n".join(c for c in content if c)
    return f"<section><h2>{html.escape(title)}</h2>\n{inside}</section>" if inside else ""


def table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table whose cells are escaped; wide ones scroll by themselves."""
    head = "".join(f"<th>{html.escape(h)}</th>" for h in headings)
    body = "".join(
        "<tr>" + "".join(f"<td>{html.escape(c)}</td>" for c in row) + "</tr>" for row in rows
    )
    return f'<div class="wide"><table><tr>{head}</tr>{body}</table></div>'


def folded(content: str, title: str = "as a table") -> str:
    """HTML that a reader opens, without a script."""
    return f"<details><summary>{html.escape(title)}</summary>{content}</details>"


def svg(drawn: Figure, label: str) -> str:
    """The figure as inline SVG with a name for screen readers; closes it."""
    from matplotlib import pyplot

    out = io.StringIO()
    drawn.savefig(out, format="svg")
    pyplot.close(drawn)
    picture = out.getvalue()
    picture = picture[picture.index("<svg") :]
    named = f'<svg role="img" aria-label="{html.escape(label, quote=True)}"'
    return f'<figure class="wide drawn">{picture.replace("<svg", named, 1)}</figure>'
