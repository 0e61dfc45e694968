"""Removes old checkpoints from both tiers. One rank of a job does it."""

from __future__ import annotations

import logging
import os

from nostall.checkpoint.retention import decide
from nostall.checkpoint.saved import Settings
from nostall.checkpoint.store import Store
from nostall.errors import Error

_log = logging.getLogger("nostall")


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

    def kept(self, store: Store) -> dict[int, float | None]:
        """Step and metric of what is complete there."""
        return {
            e.step: e.manifest.metric
            for e in store.entries()
            if e.manifest is not None and e.manifest.id not in self.damaged
        }

    def retain(self, waiting: set[int]) -> None:
        """Removes what the rules no longer keep, but for steps that wait to be drained."""
        try:
            last = self.durable or self.fast
            assert last is not None
            if last is self.fast or self._owns_durable:
                kept = self.kept(last)
                stay = decide(kept.items(), self._settings.keep)
                for step in sorted(kept.keys() - stay.keys()):
                    last.remove(step)
            if self.fast is not None and self.durable is not None:
                self._trim_fast(self.fast, self.durable, waiting)
        except (Error, OSError) as error:
            _log.warning("old checkpoints stay: %s", error)

    def _trim_fast(self, fast: Store, durable: Store, waiting: set[int]) -> None:
        """Of the fast tier stay the newest, and what is not durable yet and still wanted."""
        kept = self.kept(fast)
        newest = sorted(kept)[-self._settings.keep_fast :]
        wanted = decide((kept | self.kept(durable)).items(), self._settings.keep)
        for step in sorted(kept.keys() - set(newest)):
            if self._is_on(durable, fast, step) or (step not in wanted and step not in waiting):
                fast.remove(step)

    @staticmethod
    def _is_on(durable: Store, fast: Store, step: int) -> bool:
        ours, theirs = fast.entry(step), durable.entry(step)
        return (
            ours is not None
            and theirs is not None
            and ours.manifest is not None
            and theirs.manifest is not None
            and ours.manifest.id == theirs.manifest.id
        )

    def make_room(self, fast: Store, size: int) -> None:
        """Lets old fast copies go if the new one does not fit: durable ones first, never the last."""

        def fits() -> bool:
            status = os.statvfs(fast.root)
            return status.f_bavail * status.f_frsize >= size + (1 << 20)

        if fits():
            return  # without a look at the durable storage, which may hang
        complete = sorted(self.kept(fast))
        durable = self.durable
        safe = [s for s in complete if durable is not None and self._is_on(durable, fast, s)]
        for step in [*safe, *(s for s in complete[:-1] if s not in safe)]:
            if fits():
                return
            if step not in safe:
                _log.warning(
                    "%s is full: the checkpoint of step %d goes, though it is not durable yet, to "
                    "make room for a newer one",
                    fast.root,
                    step,
                )
            fast.remove(step)
