"""Removes old checkpoints from both tiers. One rank of a job does it."""

from __future__ import annotations

import logging
import os

from nostall.checkpoint._format import Manifest
from nostall.checkpoint._lineage import Record, branches, is_past, newest
from nostall.checkpoint._retention import decide
from nostall.checkpoint._saved import Settings
from nostall.checkpoint._store import Store
from nostall.errors import Error, IoError, PeerError

_log = logging.getLogger("nostall")


def begin_of_branch(*stores: Store | None) -> Record | None:
    """The newest note in these directories that a branch began."""
    return newest(store.branch() for store in stores if store is not None)


class Cleaner:
    """What may go, by the rules of retention; `damaged` ids never count as kept."""

    def __init__(
        self,
        fast: Store | None,
        durable: Store | None,
        settings: Settings,
        owns_durable: bool = True,
    ) -> None:
        self.fast, self.durable, self._settings = fast, durable, settings
        self._owns_durable = owns_durable
        self.damaged: set[str] = set()
        # The durable storage as it was last read: it may hang when a snapshot needs room.
        self._durable: dict[str, Manifest] = {}
        self._safe: set[str] = set()  # those of them that have all parts
        self._begin: Record | None = None

    def begin(self) -> None:
        """Reads what an earlier job has left, for `make_room`."""
        try:
            if self.fast is not None and self.durable is not None:
                self._look(self.fast, self.durable)
        except (Error, OSError) as error:
            _log.warning("%s", error)

    @staticmethod
    def complete(store: Store) -> dict[str, Manifest]:
        """What is complete there, by id."""
        return {m.id: m for m in store.manifests()}

    def staying(self, manifests: dict[str, Manifest]) -> dict[str, str]:
        """The ids of the checkpoints that the rules keep, each with the reason."""
        return self._staying(manifests, begin_of_branch(self.fast, self.durable))

    def _staying(self, manifests: dict[str, Manifest], begin: Record | None) -> dict[str, str]:
        return decide(manifests.values(), self._settings.keep, begin, self.damaged)

    def _look(self, fast: Store, durable: Store) -> dict[str, Manifest]:
        """Reads what is complete on the fast tier, and which of it is durable with all its parts."""
        there, kept = self.complete(fast), self.complete(durable)
        both = [m for m in kept.values() if m.id in there]
        safe = {m.id for m in both if durable.has_all(m) and durable.is_durable(m)}
        self._begin = durable.branch()
        try:
            durable.check_owned()
        except PeerError:  # which may remove any of it
            kept, safe = {}, set()
        except IoError:
            self._safe = set()
            raise
        self._durable, self._safe = kept, safe
        return there

    def retain(self, waiting: set[str]) -> None:
        """Removes what the rules no longer keep, except for ids that wait to be drained."""
        try:
            last = self.durable or self.fast
            assert last is not None
            if last is self.fast or self._owns_durable:
                found = [(e.manifest, e.damage) for e in last.entries() if e.manifest is not None]
                there = {m.id: m for m, damage in found if not damage}
                # They say what they do not continue, and do not count as kept.
                lost = {m.id: m for m, damage in found if damage}
                damaged, begin = (
                    self.damaged | lost.keys(),
                    begin_of_branch(self.fast, self.durable),
                )
                stay = decide((there | lost).values(), self._settings.keep, begin, damaged)
                kept = stay.keys() | damaged
                self._remove(last, [m for m in there.values() if m.id not in kept])
            if self.fast is not None and self.durable is not None:
                self._trim_fast(self.fast, self.durable, waiting)
        except (Error, OSError) as error:
            _log.warning("old checkpoints stay: %s", error)

    def _trim_fast(self, fast: Store, durable: Store, waiting: set[str]) -> None:
        """Keeps on the fast tier the newest, and those that are wanted and not durable yet."""
        there = self._look(fast, durable)
        wanted = self.staying(there | self._durable)
        good = self._in_order(there)
        self._remove(
            fast,
            [
                m
                for m in good[: -self._settings.keep_fast]
                if m.id in self._safe or (m.id not in wanted and m.id not in waiting)
            ],
        )

    def _in_order(self, manifests: dict[str, Manifest]) -> list[Manifest]:
        """The checkpoints that are not damaged, oldest first."""
        good = [m for m in manifests.values() if m.id not in self.damaged]
        return sorted(good, key=lambda m: m.order)

    @staticmethod
    def _remove(store: Store, manifests: list[Manifest]) -> None:
        for manifest in sorted(manifests, key=lambda m: m.order):
            try:
                store.remove(manifest.step, manifest.id)
            except (Error, OSError) as error:  # others may still be removed
                _log.warning("an old checkpoint stays: %s", error)

    def make_room(self, fast: Store, size: int, coming: Manifest) -> None:
        """Removes old fast copies if the new one does not fit: durable ones, and those that the rules
        retire once the new one is complete, superseded ones first; never the newest of the branch that
        the new one continues, nor of the branch that a restart would."""

        def fits() -> bool:
            status = os.statvfs(fast.root)
            return status.f_bavail * status.f_frsize >= size + (1 << 20)

        if fits():
            return
        there, safe = self.complete(fast), self._safe
        known = self._durable | there | {coming.id: coming}
        begin = newest([fast.branch(), self._begin])
        good = self._in_order(there)
        line = {m.id for m in good if is_past(m.sequence, coming.sequence, coming.abandoned)}
        tips = [m.id for m in branches(good, begin)[0][:1]] if good else []
        tips += [m.id for m in good if m.id in line][-1:]
        stay = {*self._staying(known, begin), *tips}
        first = [m for m in good if m.id in safe]
        rest = [m for m in good if m.id not in safe and m.id not in stay]
        for manifest in [*first, *sorted(rest, key=lambda m: m.id in line)]:
            if fits():
                return
            if manifest.id not in safe:
                _log.warning(
                    "%s is full: the checkpoint of step %d is removed before the one that replaces it "
                    "is complete",
                    fast.root,
                    manifest.step,
                )
            self._remove(fast, [manifest])
