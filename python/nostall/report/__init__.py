"""One HTML page about what a training waited for, complete in itself."""

from __future__ import annotations

from nostall.report.page import Run, group, render

__all__ = ["Run", "group", "render"]
