"""Two sections of a run's page: from where the run could have gone on, and what memory it held."""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import Any

import numpy as np

from nostall.base._sizes import format_bytes
from nostall.base._words import counted
from nostall.observe._held import Held
from nostall.observe.report._digest import Digest
from nostall.observe.report._drawing import Line, legend, lines, spans
from nostall.observe.report._run import Run

# Of each save, from its call until a job could go on from it.
RESUME = {f"resume point, {level}": f"on {level} storage" for level in ("fast", "durable")}
_MOMENTS = 101


def resume(digests: Sequence[Digest], seconds: float) -> str:
    """From when on a job could go on from which moment; `seconds` is the length of the run."""
    zero = min(d.origin for d in digests)
    lanes, said = [], []
    for name, where in RESUME.items():
        # All ranks wait for the whole checkpoint, so one of them says it for all.
        having = next((d for d in digests if ("background", name) in d.spans), None)
        if having is None:
            continue
        found, shift = having.spans["background", name], having.origin - zero
        begin, end = found.begin + shift, found.end + shift
        lanes.append((where, "checkpoint", list(zip(begin.tolist(), end.tolist(), strict=True))))
        lost = at_risk(begin, end, seconds)
        said.append(
            f"{counted(len(begin), 'checkpoint')} {where}, at most {lost:.1f} s of work at risk"
        )
    if not lanes:
        return ""
    return (
        f"<p>{'; '.join(said)}. At risk is what would have to be trained again if the run had ended at "
        "the worst moment. A mark begins at the save, and ends when a job can go on from it.</p>"
        + spans("Checkpoints, from the save until they are safe", lanes, seconds)
    )


def at_risk(begin: Any, end: Any, seconds: float) -> float:
    """The longest time from the newest state that is safe to the moment at which a newer one is."""
    order = np.argsort(end, kind="stable")
    newest = np.maximum.accumulate(np.append(0.0, begin[order]))
    return float(np.max(np.append(end[order], seconds) - newest))


def memory(run: Run) -> str:
    """What the ranks of a host and its /dev/shm held: of the host that held most."""
    hosts: dict[str, dict[int, list[Held]]] = {}
    sizes: dict[str, int] = {}
    for rank in run.ranks:
        for settings in (x.settings for x in rank.loaders):
            held = settings.get("held")
            if held and held.time:
                host = str(settings.get("host", ""))
                hosts.setdefault(host, {}).setdefault(rank.rank, []).append(held)
                sizes[host] = settings.get("memory_bytes", 0)
    if not hosts:
        return ""
    drawn = {host: _of_host(list(ranks.values())) for host, ranks in hosts.items()}
    host = max(drawn, key=lambda h: float((drawn[h][1] + drawn[h][2]).max()))
    moments, own, shared = drawn[host]
    begun = [r.digest.origin for r in run.ranks if r.digest is not None]
    # Moments are rounded, and may lie before the first event.
    times = np.maximum(0.0, moments - min(begun, default=moments[0])).tolist()
    unit, scale = ("GB", 1e9) if max(own.max(), shared.max()) >= 1e9 else ("MB", 1e6)
    whose = "of the process alone" if run.alone else "of each rank alone, together"
    curves = [
        Line(colour, name, list(zip(times, (column / scale).tolist(), strict=True)))
        for colour, name, column in (
            ("peer", f"memory {whose}", own),
            ("ram", "/dev/shm, of all programs", shared),
        )
    ]
    of = f" of {format_bytes(float(sizes[host]))}" if sizes[host] else ""
    most = "the host that held most, " if len(hosts) > 1 else ""
    return (
        f"<p>At the most {format_bytes(float((own + shared).max()))}{of} on {most}"
        f"{html.escape(host)}.</p>"
        + legend([(c.colour, c.name) for c in curves])
        + lines("Memory over time", curves, times[-1], unit)
    )


def _of_host(ranks: Sequence[Sequence[Held]]) -> tuple[Any, Any, Any]:
    """Moments; the sum of what the ranks of a host hold at each, and what its /dev/shm does."""
    columns = []
    for of_rank in ranks:  # one for each of its loaders
        time, own, shared = (
            np.concatenate([np.asarray(getattr(h, n), np.float64) for h in of_rank])
            for n in ("time", "own", "shared")
        )
        order = np.argsort(time, kind="stable")
        columns.append((time[order], own[order], shared[order]))
    first, last = min(c[0][0] for c in columns), max(c[0][-1] for c in columns)
    moments = np.linspace(float(first), float(last), _MOMENTS)
    owned = np.sum([np.interp(moments, c[0], c[1]) for c in columns], axis=0)
    return moments, owned, np.max([np.interp(moments, c[0], c[2]) for c in columns], axis=0)
