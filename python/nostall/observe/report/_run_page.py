"""The page of one run, or of two side by side: the answer, lanes of ranks and devices, tables."""

from __future__ import annotations

import html
import os
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from nostall.base._sizes import format_bytes
from nostall.base._words import counted
from nostall.errors import IoError, UsageError
from nostall.observe._stats import (
    DEVICE_CAUSES,
    HEADINGS,
    ORIGINS,
    Stats,
    device_lines,
    merge,
    replaced,
)
from nostall.observe.report._advice import advise, bandwidth, reason
from nostall.observe.report._digest import CAUSES, FETCHING, Digest, Spans
from nostall.observe.report._drawing import Line, Part, bar, legend, lines, spans, stacks
from nostall.observe.report._kept import RESUME, memory, resume
from nostall.observe.report._parts import document, folded, section, table
from nostall.observe.report._run import CAUSE_NAMES, Loader, Rank, Run, percent, words
from nostall.observe.timelines import Analysis

_TITLE = "nostall: where training waited"
_PHASES = "Phases that the program named, and checkpoint windows"
_THREADS = "What the loaders' threads did"
_STALLS = "Samples and origins over time"
# All waits of a rank: for data by cause, for the other ranks, and for checkpoints.
WAITS = {**{c: CAUSE_NAMES[c] for c in CAUSES}, "peers": "other ranks", "checkpoint": "checkpoints"}
_ORIGIN_NAMES = {"ram": "RAM tier", "file": "file tier", "peer": "other nodes", "source": "source"}
_ORIGIN_COLOURS = {"ram": "ram", "file": "file", "peer": "peer", "source": "source"}
_DEVICE_COLOURS = {"input": "data", "copy": "tier", "gradient": "peers", "checkpoint": "checkpoint"}
_SEEN = 0.002  # of a slot
_LITTLE = 0.02  # of the time: a run that waits less has nothing to gain
_HEADLINE_NAMES = {"source": "storage"}  # where they are other than those of WAITS
_ALMOST = 0.9  # of the waits: as good as all of them
_SLOTS = 100
_LANES = 32
_MARKS = 2000


def advice_lines(run: Run) -> list[str]:
    """What to change, one sentence each; none where that is not known."""
    found = advise(run)
    if not found and not (run.begun and (run.data < _LITTLE or run.modelled)):
        return []  # the headline or notes say what is missing
    if not found:
        line = "No change that the model knows would make this run noticeably shorter"
        why = "; ".join(reason(run)) if run.waited >= _LITTLE else ""
        return [f"{line}: {why}." if why else f"{line}."]
    each = "" if run.alone else " per rank"
    return [
        f"{a.change}: expected gain {a.gain:.1f} s{each}, {percent(a.share)} of the run, because "
        f"{a.why}."
        for a in found
    ]


def text(run: Run) -> str:
    """The summary for the terminal."""
    lines = [f"{headline(run)}.", words(run), *(f"  -> {line}" for line in advice_lines(run))]
    lines += [f"note: {n}" for n in run.notes]
    return "\n".join("".join(c if c.isprintable() else "\ufffd" for c in x) for x in lines)


def check_count(runs: int) -> None:
    """Refuses numbers of runs that no page shows."""
    if not 1 <= runs <= 2:
        raise UsageError(f"a report shows one run, or compares two, not {runs}")


def page(runs: Sequence[Run]) -> str:
    """The page; two runs stand side by side.

    Raises:
        UsageError: none, or more than two.
    """
    check_count(len(runs))
    if len(runs) == 1:
        return document(_TITLE, "\n".join(_whole(runs[0], "")))
    columns = "".join(
        "<div>" + "\n".join(_whole(r, name)) + "</div>" for r, name in zip(runs, "AB", strict=True)
    )
    compared = ""
    if all(r.begun for r in runs):
        compared = section("Side by side", _names(runs), _compared(runs[0], runs[1]))
    return document(_TITLE, f'{compared}<div class="pair">{columns}</div>')


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
        change = "" if x is None or y is None else f"{100 * (y - x):+.1f} points"
        return (name, percent(x), percent(y), change)

    ca, cb = a.causes(), b.causes()
    rows = [
        ("length of a rank", f"{a.seconds:.2f} s", f"{b.seconds:.2f} s",
         f"{100 * (b.seconds / a.seconds - 1):+.1f} %" if a.seconds else ""),
        row("waited", a.waited, b.waited),
        row("for data", a.data, b.data),
        *(
            row(f"... {CAUSE_NAMES[c]}", ca[c], cb[c])
            for c in CAUSES
            if not (c == "others" and a.alone and b.alone)
        ),
        row("for peers", a.peers, b.peers),
        row("for checkpoints", a.checkpoints, b.checkpoints),
    ]  # fmt: skip
    if a.stats and b.stats:
        x, y = (sum(s.source_bytes for s in run.stats) for run in (a, b))
        rows.append(
            ("read from the source", format_bytes(x), format_bytes(y),
             f"{100 * (y / x - 1):+.1f} %" if x else "")
        )  # fmt: skip
    return table(("", "A", "B", "change"), rows)


# ---------------------------------------------------------------------------- one run


def _whole(run: Run, name: str) -> list[str]:
    """The answer, then lanes, then numbers."""
    named = f"{name}: {Path(run.path).name}" if name else "nostall report"
    groups = run.loaders()
    out = [
        f'<header><p class="above">{html.escape(named)}</p>{_headline(run)}{_facts(run)}</header>',
        section("Where the time went", _shares(run), _cards(run, groups)) if run.begun else "",
        section("What to change", _changes(run)),
        section(
            "What it did" if run.alone else "What each rank did",
            _lanes(run),
            _ranks(run) if run.begun else "",
        ),
        section("What each device did", _devices(run)),
    ]
    digests = [r.digest for r in run.ranks if r.digest is not None]
    if digests:
        out += [section(_PHASES, _phases(digests)), section(_THREADS, _threads(run, digests))]
        out.append(section("Resume points", resume(digests, float(_slots(digests)[0][-1]))))
    if run.timeline is not None and run.timeline.ranks:
        out.append(section("How long each rank waited for the others", _imbalance(run.timeline)))
    out += [_of_loader(run, group, named=len(groups) > 1) for group in groups]
    out.append(section("Memory over time", memory(run)))
    out.append(section("Notes", _list(run.notes)))
    return out


def _list(lines: Sequence[str]) -> str:
    return "<ul>" + "".join(f"<li>{html.escape(x)}</li>" for x in lines) + "</ul>" if lines else ""


def headline(run: Run) -> str:
    """The answer: what the time waited for, and what would end it."""
    if not run.begun:
        return "No batch was taken before the record ends"
    if run.waited < _LITTLE:
        return f"Nothing to do: the training waited {percent(run.waited)} of its time"
    most, share = run.most()
    mostly = "" if share > _ALMOST * run.waited else ", most of it"
    name = _HEADLINE_NAMES.get(most, WAITS[most])
    line = f"{percent(run.waited)} of the time waited{mostly} for {name}"
    found = advise(run, 1)
    if not found:
        return "; ".join([line, *reason(run)[:1]])
    best = found[0]
    would, save = ("could", "save up to") if best.at_most else ("would", "save")
    gained = (
        "end it"
        if best.share > _ALMOST * run.waited
        else f"{save} {percent(best.share)} of the time"
    )
    return f"{line}; {best.remedy} {would} {gained}"


def _headline(run: Run) -> str:
    kind = "good" if run.begun and run.waited < _LITTLE else "bad"
    return (
        f'<h1 class="{kind}">{html.escape(headline(run))}</h1>'
        f'<p class="key">{html.escape(words(run))}</p>'
    )


def _facts(run: Run) -> str:
    """What ran: where, when, on what."""
    all_settings = [x.settings for r in run.ranks for x in r.loaders]
    given = all_settings[0] if all_settings else {}
    hosts = sorted({str(s["host"]) for s in all_settings if s.get("host")})
    stats = run.stats
    world = max((s.world_size for s in stats), default=len(run.ranks))
    facts = [
        *_trained_on(run),
        ("ranks", str(world) if len(run.ranks) == world else f"{world}, {len(run.ranks)} recorded"),
        ("hosts", ", ".join(hosts[:4]) + (f" and {len(hosts) - 4} more" if len(hosts) > 4 else "")),
        ("command", given.get("command", "")),
        ("began", given.get("began", "")),
        ("versions", ", ".join(f"{k} {v}" for k, v in given.get("versions", {}).items() if v)),
    ]
    items = "".join(f"<div><dt>{k}</dt><dd>{html.escape(str(v))}</dd></div>" for k, v in facts if v)
    return f'<dl class="facts">{items}</dl>'


def _trained_on(run: Run) -> list[tuple[str, str]]:
    """The data sets, batches and epochs of the loaders, each in the loaders' order."""
    given = [(g[0].settings, g[0].stats) for g in run.loaders() if g and "samples" in g[0].settings]
    sets, batches, epochs = [], [], []
    for s, stats in given:
        size = format_bytes(float(s.get("dataset_bytes", 0)))
        sets.append(f"{s.get('dataset', '')}, {s['samples']:,} samples, {size}")
        each, world = s.get("batch_size", 0), stats.world_size
        whole = s.get("global_batch", each * world)
        most = "" if whole == each * world else "at most "
        batches.append(f"{most}{each} a rank, {whole} together" if world > 1 else f"{each}")
        done, planned = 1 + max((e.epoch for e in stats.epochs), default=-1), s.get("epochs")
        epochs.append(f"{done}" + (f" of {planned}" if planned not in (None, done) else ""))
    return [
        (name, "; ".join(dict.fromkeys(found)))
        for name, found in (("data set", sets), ("batch", batches), ("epochs", epochs))
    ]


def _shares(run: Run) -> str:
    """One bar: all the time of all ranks."""
    waits = [
        Part("data", "data", run.data),
        Part("peers", "other ranks", run.peers or 0.0),
        Part("checkpoint", "checkpoints", run.checkpoints or 0.0),
    ]
    parts = [Part("compute", "compute and all else", max(0.0, 1.0 - sum(p.amount for p in waits)))]
    parts += [p for p in waits if p.amount > 0]
    return bar(
        parts, "Where the time went" if run.alone else "Where the time of all ranks went"
    ) + legend([(p.colour, f"{p.name} {percent(p.amount)}") for p in parts])


def _cards(run: Run, groups: Sequence[Sequence[Loader]]) -> str:
    length, everywhere, each = (
        ("length of the run", "", "")
        if run.alone
        else ("length of a rank", ", all ranks", ", a rank")
    )
    cards = [(f"{run.seconds:,.1f} s", length)]
    for group in groups[:2]:
        whole = _whole_of(group)
        rate = whole.samples / whole.seconds if whole.seconds else 0.0
        name = f" of {whole.loader}" if len(groups) > 1 else ""
        cards.append((f"{rate:,.0f}", f"samples a second{name}{everywhere}"))
    read = sum(s.source_bytes for s in run.stats)
    cards += [
        (f"{run.waited * run.seconds:,.1f} s", f"waited{each}"),
        (format_bytes(read), "read from the source"),
    ]
    return '<div class="cards">' + "".join(
        f"<div><b>{html.escape(value)}</b><span>{html.escape(name)}</span></div>"
        for value, name in cards
    ) + "</div>"  # fmt: skip


def _changes(run: Run) -> str:
    found = advise(run)
    if not found:
        return "".join(f"<p>{html.escape(line)}</p>" for line in advice_lines(run))
    return "<ol>" + "".join(
        f'<li>{html.escape(a.change)} <span class="gain good">-{a.gain:.1f} s '
        f"({percent(a.share)})</span><br><span class=\"soft\">expected, because {html.escape(a.why)}"
        "</span></li>"
        for a in found
    ) + "</ol>"  # fmt: skip


def _share(rank: Rank) -> float:
    """Of a rank's time, what it waited for data."""
    return sum(rank.waits().values()) / rank.seconds if rank.seconds else 0.0


def _shown(ranks: Sequence[Rank]) -> list[Rank]:
    """All ranks, or of many those that waited longest."""
    if len(ranks) <= _LANES:
        return list(ranks)
    return sorted(sorted(ranks, key=_share)[-_LANES:], key=lambda r: r.rank)


def _slots(digests: Sequence[Digest]) -> tuple[Any, float]:
    """Edges of equal slots over all ranks, in seconds since the first rank's first event."""
    zero = min(d.origin for d in digests)
    end = max(d.origin - zero + d.seconds for d in digests)
    return np.linspace(0.0, max(end, 1e-6), _SLOTS + 1), zero


def _lanes(run: Run) -> str:
    """What each rank did in each slot of time."""
    shown = [r for r in _shown(run.ranks) if r.digest is not None]
    digests = [r.digest for r in shown if r.digest is not None]
    if not digests:
        return ""
    edges, zero = _slots(digests)
    lanes = []
    for d in digests:
        waits = [
            (Part("data", "data", 0.0), [d.waits()]),
            (Part("peers", "other ranks", 0.0), list(d.category("peers").values())),
            (Part("checkpoint", "checkpoints", 0.0), list(d.category("checkpoint").values())),
        ]
        begin = edges[:-1] + zero - d.origin
        within = np.minimum(begin + edges[1] - edges[0], d.seconds) - np.maximum(begin, 0.0)
        ran = np.clip(within / (edges[1] - edges[0]), 0.0, 1.0)
        lanes.append((f"rank {d.rank}", _columns(begin, edges, waits, ran)))
    note = f"<p>{len(shown)} of {len(run.ranks)} ranks, those that waited longest for data.</p>"
    names = [("compute", "compute and all else"), ("data", "waits for data")]
    if run.peers is not None:
        names.append(("peers", "waits for other ranks"))
    if run.checkpoints is not None:
        names.append(("checkpoint", "waits for checkpoints"))
    return (
        (note if len(run.ranks) > len(shown) else "")
        + legend(names)
        + stacks(
            "What it did over time" if run.alone else "What each rank did over time",
            lanes,
            float(edges[-1]),
        )
    )


def _columns(
    begin: Any, edges: Any, waits: Sequence[tuple[Part, Sequence[Spans]]], ran: Any
) -> list[list[Part]]:
    """Of each slot: the share of each wait, and the rest of the share that `ran`."""
    left = np.ones(_SLOTS)
    columns: list[list[Part]] = [[] for _ in range(_SLOTS)]
    end = begin + (edges[1] - edges[0])
    for part, found in waits:
        share = np.clip(sum(s.active(begin, end) for s in found) + np.zeros(_SLOTS), 0.0, left)
        left -= share
        for column, amount in zip(columns, share.tolist(), strict=True):
            if amount > _SEEN:
                column.append(part._replace(amount=amount))
    for column, amount in zip(columns, (left - (1.0 - ran)).tolist(), strict=True):
        if amount > _SEEN:
            column.append(Part("compute", "compute and all else", amount))
    return columns


def _devices(run: Run) -> str:
    """What each device did in each slot of time, on its own clock, and what its steps wait for."""
    digests = [r.digest for r in _shown(run.ranks) if r.digest is not None]
    there = [(d, name) for d in digests for name in d.devices()]
    if not there:
        return ""
    edges, zero = _slots(digests)
    lanes, rows = [], []
    for d, name in there:
        of = {cause: d.of(f"device {name}", cause) for cause in ("step", *DEVICE_CAUSES)}
        begin = edges[:-1] + zero - d.origin
        waits = [
            (Part(_DEVICE_COLOURS[cause], words, 0.0), [of[cause]])
            for cause, words in DEVICE_CAUSES.items()
        ]
        stepped = np.clip(of["step"].active(begin, begin + (edges[1] - edges[0])), 0.0, 1.0)
        lanes.append((f"rank {d.rank}, {name}", _columns(begin, edges, waits, stepped)))
        steps = max(1, len(of["step"].begin))
        whole = of["step"].seconds
        times = [whole, *(whole - of[cause].seconds for cause in DEVICE_CAUSES)]
        rows.append(
            (f"{d.rank}, {name}", str(len(of["step"].begin)),
             *(f"{1e3 * seconds / steps:.3f} ms" for seconds in times))
        )  # fmt: skip
    names = [(_DEVICE_COLOURS[c], f"waits for {words}") for c, words in DEVICE_CAUSES.items()]
    headings = (
        "rank, device", "steps", "a step", *(f"without {w}" for w in DEVICE_CAUSES.values())
    )  # fmt: skip
    return (
        "".join(f"<p>{_capital(html.escape(line))}.</p>" for line in device_lines(run.device))
        + legend([("compute", "compute and all else"), *names])
        + stacks("What each device did over time", lanes, float(edges[-1]))
        + folded(table(headings, rows))
    )


def _ranks(run: Run) -> str:
    """Waits by cause, and the time between batches without them: the slowest rank is a straggler."""
    shown = {r.rank for r in _shown(run.ranks)}
    lasted: dict[tuple[str, int], float] = defaultdict(float)
    for s in run.stats:
        lasted[s.loader, s.world_size] += _lasted(s)
    most = max(lasted, key=lambda loader: lasted[loader], default=None)
    loaders = {
        r.rank: x
        for r in run.ranks
        for x in r.loaders
        if (x.stats.loader, x.stats.world_size) == most
    }
    rows, lengths, own = [], [], {}
    hidden = {"others"} if run.alone else set()
    hidden |= {"peers"} if run.alone and run.peers is None else set()
    names = {c: name for c, name in WAITS.items() if c not in hidden}
    for r in run.ranks:
        steps, works, alone = _steps(r, loaders.get(r.rank))
        # The step of a rank that waits for a slow one is as long as that one's.
        if len(alone):
            own[r.rank] = float(alone.mean())
        if r.rank not in shown:
            continue
        waits: dict[str, float | None] = {
            **r.waits(),
            "checkpoint": run.phase(r, "checkpoint"),
            "peers": run.peer_seconds(r),
        }
        known = {c: w / r.seconds if r.seconds else 0.0 for c, w in waits.items() if w is not None}
        name = str(r.rank) if r.rank >= 0 else "all"  # of statistics that are merged
        rows.append((name, *(percent(known.get(c)) for c in names), percent(sum(known.values()))))
        if len(steps):
            times = [*np.percentile(steps, (50, 95, 100)).tolist(), float(np.median(works))]
            lengths.append((name, *(f"{1e3 * t:.1f} ms" for t in times)))
    # Of two ranks the faster: between them lies none.
    usual = statistics.median_low(own.values()) if own else 0.0
    late = ""
    if len(own) > 1 and usual > 0:
        slowest = max(own, key=lambda r: own[r])
        if own[slowest] > 1.1 * usual:
            late = (
                f"<p>Rank {slowest} is a straggler: without waits its step takes "
                f"{own[slowest] / usual:.2f} times as long as the median rank's.</p>"
            )
    steps_of = (
        "rank", "median step", "95 % are below", "longest", "median without waits for data"
    )  # fmt: skip
    return (
        late
        + folded(table(("rank", *names.values(), "together"), rows), "waits by cause, as a table")
        + (folded(table(steps_of, lengths), "lengths of steps, as a table") if lengths else "")
    )


def _lasted(stats: Stats) -> float:
    """Seconds of all steps, by the usual one: an iterator that stays open counts what others do too."""
    time, epoch = (np.asarray(c, np.float64) for c in (stats.batches.time, stats.batches.epoch))
    steps = np.diff(time)[epoch[1:] == epoch[:-1]]
    return float(np.median(steps)) * sum(e.batches for e in stats.epochs) if len(steps) else 0.0


def _steps(rank: Rank, loader: Loader | None) -> tuple[Any, Any, Any]:
    """Seconds between batches of an epoch, of one of the rank's loaders: with waits, without those for
    data, and, of steps that the trace has, without those for other ranks and checkpoints either."""
    nothing = np.zeros(0)
    if loader is None:
        return nothing, nothing, nothing
    stats, digest = loader.stats, rank.digest
    b = stats.batches
    time, wait, epoch = (np.asarray(c, np.float64) for c in (b.time, b.wait, b.epoch))
    within = epoch[1:] == epoch[:-1]
    steps = np.diff(time)[within]
    works = np.maximum(0.0, steps - wait[1:][within])
    if digest is None or stats.made is None or not digest.category("peers"):
        return steps, works, nothing
    begin = time[:-1][within] + (stats.made - digest.origin)
    seen = (begin >= 0) & (begin + steps <= digest.seconds)
    begin, alone = begin[seen], works[seen]
    waited = digest.merged("peers", "checkpoint").active(begin, begin + alone)
    return steps, works, alone * (1 - waited)


def _threads(run: Run, digests: Sequence[Digest]) -> str:
    """How many threads, of all ranks, were busy, by kind of work."""
    edges, zero = _slots(digests)
    middle = ((edges[1:] + edges[:-1]) / 2).tolist()
    curves, rows = [], []
    for name, cause in (*FETCHING.items(), ("decode", "decode")):
        kinds = [d.of("data", name) for d in digests]
        sums = np.zeros(_SLOTS)
        for d, kind in zip(digests, kinds, strict=True):
            sums += kind.active(edges[:-1] + zero - d.origin, edges[1:] + zero - d.origin)
        if sums.max(initial=0) <= 0.001:
            continue
        shown = "wait for another thread's read" if run.alone and cause == "others" else name
        curves.append(Line(cause, shown, list(zip(middle, sums.tolist(), strict=True))))
        rows.append(
            (shown, f"{float(sums.mean()):.2f}", f"{float(sums.max()):.2f}",
             f"{sum(k.seconds for k in kinds):.2f} s",
             format_bytes(sum(float(k.bytes.sum()) for k in kinds)))
        )  # fmt: skip
    if not curves:
        return ""
    headings = ("work", "threads, average", "threads, most", "thread seconds", "bytes")
    return (
        legend([(c.colour, c.name) for c in curves])
        + lines(
            "Busy threads over time" + ("" if run.alone else ", of all ranks"),
            curves,
            float(edges[-1]),
            "",
        )
        + folded(table(headings, rows))
    )


def _phases(digests: Sequence[Digest]) -> str:
    """Spans that the program named: compute, peers, checkpoint windows."""
    kinds: dict[tuple[str, str], float] = {}
    for d in digests:
        for (category, name), found in d.spans.items():
            hidden = category == "data" or name in RESUME
            if not hidden and not category.startswith("device "):
                kinds[category, name] = kinds.get((category, name), 0.0) + found.seconds
    if not kinds:
        return ""
    order = sorted(kinds, key=lambda k: -kinds[k])[:12]
    edges, zero = _slots(digests)
    lanes, rows = [], []
    for category, name in order:
        having = [d for d in digests if (category, name) in d.spans]
        times = [(d.spans[category, name], d.origin - zero) for d in having]
        intervals = _together(
            np.concatenate([s.begin + shift for s, shift in times]),
            np.concatenate([s.end + shift for s, shift in times]),
            float(edges[-1]),
        )
        colour = (
            category if category in ("compute", "peers", "checkpoint", "background") else "other"
        )
        lanes.append((name, colour, intervals))
        count = sum(len(d.spans[category, name].begin) for d in having)
        total = kinds[category, name]
        rows.append(
            (category, name, str(count), f"{total:.2f} s", f"{1e3 * total / max(1, count):.2f} ms")
        )
    headings = ("category", "phase", "times", "together", "each")
    return spans(_PHASES, lanes, float(edges[-1])) + folded(table(headings, rows))


def _together(begin: Any, end: Any, seconds: float) -> list[tuple[float, float]]:
    """Intervals with no gaps that are too short to be seen: about _MARKS at most."""
    order = np.argsort(begin, kind="stable")
    begin, end = begin[order], np.maximum.accumulate(end[order])
    first = np.flatnonzero(np.append(True, begin[1:] - end[:-1] > seconds / _MARKS))
    return list(
        zip(begin[first].tolist(), end[np.append(first[1:], len(end)) - 1].tolist(), strict=True)
    )


def _imbalance(found: Analysis) -> str:
    """Negotiation delays: how long ranks waited for the last to arrive."""
    rounds = found.rounds[:: max(1, len(found.rounds) // 1000)]
    curves = [
        Line(colour, name, [(float(r.round), 1e3 * (getattr(r, field) or 0.0)) for r in rounds])
        for field, colour, name in (
            ("negotiation_max", "source", "longest of a rank"),
            ("negotiation_average", "peer", "average over ranks"),
        )
    ]
    rows = [
        (str(r.rank), f"{1e3 * r.average:.3f} ms", f"{1e3 * r.max:.3f} ms", str(r.rounds))
        for r in found.ranks[:_LANES]
    ]
    last = max((x for c in curves for x, _ in c.points), default=0.0)
    return (
        legend([(c.colour, c.name) for c in curves])
        + lines("Waits for other ranks by round", curves, last, "ms", axis="")
        + folded(table(("rank", "average a round", "longest", "rounds"), rows))
    )


# ---------------------------------------------------------------------------- one loader


def _whole_of(group: Sequence[Loader]) -> Stats:
    """The statistics of all processes; several may have one rank, as where each validates alone."""
    return merge([replace(x.stats, rank=i) for i, x in enumerate(group)])


def _of_loader(run: Run, group: Sequence[Loader], named: bool) -> str:
    stats = [x.stats for x in group]
    whole = _whole_of(group)
    given = group[0].settings
    data = given.get("storage") or given.get("dataset") or ""
    title = _STALLS + (f": {whole.loader}" + (f", {data}" if data else "") if named else "")
    facts = []
    if "samples" in given and "dataset_bytes" in given:
        facts.append(f"{given.get('dataset')}, {given['samples']:,} samples of "
                     f"{format_bytes(float(given['dataset_bytes']))}"
                     + (f" at {given['storage']}" if given.get("storage") else ""))  # fmt: skip
        each = " a rank" if whole.world_size > 1 else ""
        facts.append(f"batches of {given.get('batch_size')}{each}")
        tiers = ", ".join(f"{t[0]} {format_bytes(float(t[1]))}" for t in given.get("tiers", []))
        facts.append(f"tiers: {tiers or 'none'}")
    memory = ", ".join(
        f"{name.replace('_', ' ')} {format_bytes(float(size))}"
        for name, size in whole.memory.items() if size
    )  # fmt: skip
    bad = replaced(whole.epochs)
    return section(
        title,
        f"<p>{html.escape('; '.join(facts))}</p>" if facts else "",
        _flow(run, group),
        _origins(stats),
        folded(table(HEADINGS, whole.rows()), "by epoch, as a table"),
        f"<p>{_capital(_read_line(whole, group))}"
        + (f" Memory, most seen: {html.escape(memory)}." if memory else "")
        + "</p>",
        f"<p>Samples that could not be used: {', '.join(map(str, bad))}</p>" if bad else "",
    )


def _capital(line: str) -> str:
    return line[:1].upper() + line[1:]


def _read_line(whole: Stats, group: Sequence[Loader]) -> str:
    """What was read from the source, with the bound where the records are of all that the job read."""
    line = f"read {whole.source_bytes / 1e6:.1f} MB from the source"
    ranks, world = len(group), whole.world_size
    if ranks == world and whole.lower_bound_bytes and all(x.ended for x in group):
        line += f", lower bound {whole.lower_bound_bytes / 1e6:.1f} MB"
    if world == 1:
        return f"{line}."
    several = "" if ranks <= world else f" in {ranks} processes"
    return f"{line}; {min(ranks, world)} of {world} ranks{several}."


def _over_time(stats: Sequence[Stats]) -> tuple[Any, float, dict[str, Any]]:
    """Edges of slots that all hold batches, from the first moment on whose batches all ranks have
    kept, which is the second result, and per slot the samples by origin and the waits."""
    names = ("time", "wait", *ORIGINS)
    columns = {n: np.concatenate([np.asarray(getattr(s.batches, n), np.float64) for s in stats])
               for n in names}  # fmt: skip
    known = [(s.batches.time, sum(e.batches for e in s.epochs)) for s in stats]
    begin = max((times[0] for times, taken in known if 0 < len(times) < taken), default=0.0)
    moments = columns["time"] - begin
    kept = int(np.count_nonzero(moments >= 0))
    count = max(1, min(_SLOTS, kept // (3 * len(stats))))
    edges = np.linspace(0.0, max(moments.max(initial=0.0), 1e-9), count + 1)
    sums = {n: np.histogram(moments, edges, weights=columns[n])[0] for n in names[1:]}
    return edges, begin, sums


def _since(begin: float) -> str:
    """What the charts of single batches lack of a long run."""
    return f", from {begin:,.0f} s on: of earlier batches there are sums" if begin else ""


def _limits(run: Run, group: Sequence[Loader]) -> list[tuple[str, str, float]]:
    """Samples a second that the source and the threads alone would give, by what was measured."""
    whole = _whole_of(group)
    out = []
    rate, size = bandwidth(run), sum(e.bytes for e in whole.epochs)
    if rate and size and whole.source_bytes:
        out.append(("source", "as fast as the source gave", rate * whole.samples / size))
    decode = sum(e.decode_seconds for e in whole.epochs)
    if decode and whole.threads:
        words_ = f"as fast as {counted(whole.threads, 'thread')} decoded"
        out.append(("decode", words_, whole.threads * whole.samples / decode))
    return out


def _flow(run: Run, group: Sequence[Loader]) -> str:
    """Samples a second of all ranks, and what bounds them."""
    stats = [x.stats for x in group]
    edges, begin, sums = _over_time(stats)
    if not any(s.batches.time for s in stats):
        return ""
    width, end = float(edges[1] - edges[0]), float(edges[-1])
    middle = ((edges[1:] + edges[:-1]) / 2).tolist()
    rate = (sum(sums[o] for o in ORIGINS) / width).tolist()
    curve = Line("ram", "samples a second", list(zip(middle, rate, strict=True)))
    first: dict[int, float] = {}
    for s in stats:
        for epoch, moment in zip(s.batches.epoch, s.batches.time, strict=True):
            first[int(epoch)] = min(moment, first.get(int(epoch), moment))
    # The first batches of an epoch that began before are not there.
    marks = [
        (moment - begin, f"epoch {epoch}")
        for epoch, moment in sorted(first.items())
        if moment > begin or not begin
    ]
    everywhere = ", all ranks" if len(stats) > 1 else ""
    label = "Samples a second over time" + (_since(begin) or ", since the loader was made")
    names, curves = [(curve.colour, curve.name)], [curve]
    # A bound far above the curve would press it flat.
    for colour, name, value in _limits(run, group):
        far = value > 2 * max(rate)
        names.append((colour, f"{name}: {value:,.0f}" + (", above what is drawn" if far else "")))
        if not far:
            curves.append(Line(f"{colour} limit", name, [(0.0, value), (end, value)]))
    return (
        f"<h3>Samples a second{everywhere}{_since(begin)}</h3>"
        + legend(names)
        + lines(label, curves, end, "", marks)
    )


def _origins(stats: Sequence[Stats]) -> str:
    """Where samples came from over time."""
    edges, begin, sums = _over_time(stats)
    totals = sum(sums[o] for o in ORIGINS)
    there = [o for o in ORIGINS if np.any(sums[o])]
    if not there:
        return ""
    columns = [
        [Part(_ORIGIN_COLOURS[o], _ORIGIN_NAMES[o], float(sums[o][i] / totals[i])) for o in there]
        if totals[i] else []
        for i in range(len(totals))
    ]  # fmt: skip
    return (
        f"<h3>Where its samples came from{_since(begin)}</h3>"
        + legend([(_ORIGIN_COLOURS[o], _ORIGIN_NAMES[o]) for o in there])
        + stacks("Where samples came from over time", [("share", columns)], float(edges[-1]), 64.0)
    )


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
