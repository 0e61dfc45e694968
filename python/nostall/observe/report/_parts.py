"""Parts of a self-contained HTML page: no scripts, no network, readable on a phone."""

from __future__ import annotations

import html
import io
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 70em; margin: 2em auto; padding: 0 1em;
       color: #1d2733 }
h1 { font-size: 1.5em } h2 { font-size: 1.15em; margin-top: 2em }
table { border-collapse: collapse } td, th { padding: .25em .6em; text-align: right;
       border-bottom: 1px solid #dde3ea } th:first-child, td:first-child { text-align: left }
.pair { display: flex; flex-wrap: wrap; gap: 2em } .pair section { flex: 1 1 26em; min-width: 0 }
summary { cursor: pointer; color: #52606d } li { margin: .3em 0 }
.wide { overflow-x: auto } .key { font-size: 1.2em }
svg { max-width: 100%; height: auto; min-width: 34em }
td { white-space: nowrap } th { vertical-align: bottom }
"""


def document(title: str, body: str) -> str:
    """The whole page; `body` is HTML already."""
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,"><style>{STYLE}</style></head><body>
{body}</body></html>
"""


def table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table whose cells are escaped; wide ones scroll by themselves."""
    head = "".join(f"<th>{html.escape(h)}</th>" for h in headings)
    body = "".join(
        "<tr>" + "".join(f"<td>{html.escape(c)}</td>" for c in row) + "</tr>" for row in rows
    )
    return f'<div class="wide"><table><tr>{head}</tr>{body}</table></div>'


def svg(drawn: Figure, label: str) -> str:
    """The figure as inline SVG with a name for screen readers; closes it."""
    from matplotlib import pyplot

    out = io.StringIO()
    drawn.savefig(out, format="svg")
    pyplot.close(drawn)
    picture = out.getvalue()
    picture = picture[picture.index("<svg") :]
    named = f'<svg role="img" aria-label="{html.escape(label, quote=True)}"'
    return f'<figure class="wide" style="margin:0">{picture.replace("<svg", named, 1)}</figure>'
