"""The report of one run, or of two side by side, as one self-contained HTML page."""

from __future__ import annotations

import html
import os
from collections.abc import Sequence
from pathlib import Path

from nostall.errors import IoError, UsageError
from nostall.observe._stats import HEADINGS, merge
from nostall.observe.report._advice import Advice, advise
from nostall.observe.report._digest import CAUSES
from nostall.observe.report._parts import document, svg, table
from nostall.observe.report._plots import plots
from nostall.observe.report._run import CAUSE_NAMES, Loader, Run, percent, words


def advice_lines(run: Run) -> list[str]:
    """What to change, one sentence each."""
    found = advise(run)
    if not found:
        return ["No change that the model knows would make this run noticeably shorter."]
    return [_sentence(a) for a in found]


def _sentence(a: Advice) -> str:
    return (
        f"{a.change}: expected gain {a.gain:.1f} s per rank, {percent(a.share)} of the run, because "
        f"{a.why}."
    )


def text(run: Run) -> str:
    """The summary for the terminal."""
    lines = [words(run), *(f"  -> {line}" for line in advice_lines(run))]
    lines += [f"note: {n}" for n in run.notes]
    return "\n".join("".join(c if c.isprintable() else "\ufffd" for c in x) for x in lines)


def page(runs: Sequence[Run]) -> str:
    """The page; two runs stand side by side.

    Raises:
        UsageError: none, or more than two.
    """
    if not 1 <= len(runs) <= 2:
        raise UsageError(f"a report shows one run, or compares two, not {len(runs)}")
    body = ["<h1>nostall: where training waited</h1>"]
    if len(runs) == 2:
        body += [_names(runs), "<h2>Side by side</h2>", _compared(runs[0], runs[1])]
    columns = [_column(r, named=len(runs) == 2) for r in runs]
    if len(runs) == 1:
        body += columns
    else:
        body.append(
            '<div class="pair">' + "".join(f"<section>{c}</section>" for c in columns) + "</div>"
        )
    return document("nostall: where training waited", "\n".join(body))


def _names(runs: Sequence[Run]) -> str:
    gain = runs[0].seconds - runs[1].seconds
    faster = "shorter" if gain >= 0 else "longer"
    share = abs(gain) / runs[0].seconds if runs[0].seconds else 0.0
    return (
        f'<p class="key">B is {abs(gain):.1f} s ({percent(share)}) {faster} than A. '
        f"A: {html.escape(runs[0].path)}, B: {html.escape(runs[1].path)}</p>"
    )


def _compared(a: Run, b: Run) -> str:
    def row(name: str, x: float | None, y: float | None) -> tuple[str, ...]:
        change = "" if x is None or y is None else f"{100 * (y - x):+.1f}"
        return (name, percent(x), percent(y), change)

    ca, cb = a.causes(), b.causes()
    rows = [
        ("length of a rank", f"{a.seconds:.2f} s", f"{b.seconds:.2f} s",
         f"{100 * (b.seconds / a.seconds - 1):+.1f} %" if a.seconds else ""),
        row("waited", a.waited, b.waited),
        row("for data", a.data, b.data),
        *(row(f"... {CAUSE_NAMES[c]}", ca[c], cb[c]) for c in CAUSES),
        row("for peers", a.peers, b.peers),
        row("for checkpoints", a.checkpoints, b.checkpoints),
    ]  # fmt: skip
    if a.stats and b.stats:
        x, y = (sum(s.source_bytes for s in run.stats) for run in (a, b))
        rows.append(
            ("read from the source", f"{x / 1e6:.1f} MB", f"{y / 1e6:.1f} MB",
             f"{100 * (y / x - 1):+.1f} %" if x else "")
        )  # fmt: skip
    return table(("", "A", "B", "change (points)"), rows)


def _column(run: Run, named: bool) -> str:
    body = [f"<h2>{html.escape(Path(run.path).name)}</h2>"] if named else []
    body.append(f'<p class="key">{html.escape(words(run))}</p>')
    body.append("<h2>What to change</h2><ol>")
    body += [f"<li>{html.escape(line)}</li>" for line in advice_lines(run)]
    body.append("</ol>")
    for plot in plots(run):
        body.append(f"<h2>{html.escape(plot.title)}</h2>")
        body.append(svg(plot.figure, plot.title))
        body.append(_folded(table(plot.headings, plot.rows)))
    groups = run.loaders()
    for group in groups:
        body += _of_loader(group, named=len(groups) > 1)
    if run.notes:
        notes = "".join(f"<li>{html.escape(n)}</li>" for n in run.notes)
        body.append(f"<h2>Notes</h2><ul>{notes}</ul>")
    return "\n".join(body)


def _of_loader(group: Sequence[Loader], named: bool) -> list[str]:
    from nostall.observe.report import figure, read_line

    stats = [x.stats for x in group]
    whole = merge(stats)
    title = "Stalls and origins over time"
    if named:
        data = group[0].settings.get("storage") or group[0].settings.get("dataset") or ""
        title += f": {whole.loader}" + (f", {data}" if data else "")
    return [
        f"<h2>{html.escape(title)}</h2>",
        svg(figure(stats), "The wait for each batch, and the origins of samples"),
        _folded(table(HEADINGS, whole.rows())),
        f"<p>{read_line(whole, len(stats)).capitalize()}</p>",
    ]


def _folded(content: str) -> str:
    return f"<details open><summary>as a table</summary>{content}</details>"


def save(runs: Sequence[Run], path: str | os.PathLike[str]) -> None:
    """Writes the page.

    Raises:
        IoError: the file cannot be written.
    """
    try:
        Path(path).write_text(page(runs))
    except OSError as error:
        raise IoError(
            f"cannot write the report to {path}: {error.strerror}; pass another file with -o"
        ) from error
