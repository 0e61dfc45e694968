"""Opens a page in headless Chromium and says what a reader would see."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from playwright.sync_api import sync_playwright

LIMIT = 200_000.0  # milliseconds, for machines that do much else


@dataclass
class Seen:
    """`messages` of the console, `requests` beyond the page itself, sizes of figures in pixels."""

    messages: list[str]
    requests: list[str]
    figures: list[tuple[float, float]]
    overflow: int
    scripts: int
    text: str


def look(page: Path, width: int = 1200, height: int = 900, picture: Path | None = None) -> Seen:
    """Opens the file in a window of that size, without a network."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox"], timeout=LIMIT
        )
        context = browser.new_context(viewport={"width": width, "height": height}, offline=True)
        context.set_default_timeout(LIMIT)
        view = context.new_page()
        messages: list[str] = []
        requests: list[str] = []
        view.on("console", lambda m: messages.append(m.text))
        view.on("pageerror", lambda e: messages.append(str(e)))
        view.on("dialog", lambda d: (messages.append(f"dialog {d.message}"), d.dismiss()))
        view.on("request", lambda r: requests.append(r.url))
        view.goto(page.as_uri())
        view.eval_on_selector_all("details", "all => all.forEach(d => d.open = true)")
        figures = view.eval_on_selector_all(
            "svg", "all => all.map(s => [s.getBoundingClientRect().width,"
            " s.getBoundingClientRect().height])",
        )  # fmt: skip
        seen = Seen(
            messages,
            requests[1:],
            [(w, h) for w, h in figures],
            view.evaluate("document.documentElement.scrollWidth - window.innerWidth"),
            view.evaluate("document.scripts.length"),
            view.inner_text("body"),
        )
        if picture is not None:
            view.screenshot(path=str(picture), full_page=True)
        browser.close()
    return seen
