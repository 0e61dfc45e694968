"""Tables of a notebook (``_repr_html_``)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape


def table(
    caption: str, rows: Iterable[Sequence[str]], heads: Sequence[str] = (), below: str = ""
) -> str:
    """A table of texts; without `heads` the first cell of a row is its head."""
    kinds = ["td"] * len(heads) if heads else ["th", "td"]
    # Notebooks put cells to the right, where numbers belong.
    style = "" if heads else ' style="text-align: left"'
    body = "".join(
        "<tr>"
        + "".join(
            f"<{kind}{style}>{_lines(text)}</{kind}>" for text, kind in zip(row, kinds, strict=True)
        )
        + "</tr>"
        for row in rows
    )
    head = "".join(f"<th>{_lines(text)}</th>" for text in heads)
    return (
        f"<table><caption>{escape(caption)}</caption>"
        + (f"<thead><tr>{head}</tr></thead>" if heads else "")
        + f"<tbody>{body}</tbody></table>"
        + (f"<p>{_lines(below)}</p>" if below else "")
    )


def _lines(text: str) -> str:
    return "<br>".join(map(escape, text.splitlines()))
