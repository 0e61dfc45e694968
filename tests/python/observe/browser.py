"""Opens a page in headless Chromium and says what a reader would see."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from playwright.sync_api import sync_playwright

LIMIT = 200_000.0  # milliseconds, for machines that do much else
WIDE, PHONE, PAPER = (1200, 900), (390, 844), (718, 1046)  # pixels; an A4 page within margins

_FIGURES = """[...document.querySelectorAll("svg")].map(s => {
  const box = s.getBoundingClientRect(); return [box.width, box.height] })"""
_OVERFLOW = "document.documentElement.scrollWidth - window.innerWidth"
_CUT = """[...document.querySelectorAll("figure, .wide")].filter(
  e => e.scrollWidth > e.clientWidth + 1).length"""
# The text that differs least from what lies behind it: WCAG's ratio, and the text.
_CONTRAST = """() => {
  const parse = c => c.match(/[\\d.]+/g).map(Number);
  const light = c => { const [r, g, b] = parse(c).map(v => v / 255).map(
    v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b };
  const seen = c => { const p = parse(c); return p.length < 4 || p[3] > 0 };
  const behind = e => { for (; e; e = e.parentElement) {
    const c = getComputedStyle(e).backgroundColor; if (seen(c)) return c } return "rgb(255,255,255)" };
  const words = e => [...e.childNodes].filter(n => n.nodeType == 3).map(n => n.data.trim()).join("");
  let least = [21, ""];
  for (const e of document.querySelectorAll("body *")) {
    const text = words(e), style = getComputedStyle(e);
    if (!text || !e.getClientRects().length || e.tagName == "title") continue;
    const drawn = e.tagName == "text", on = e.classList.contains("on");
    const front = light(drawn ? style.fill : style.color);
    const back = light(on ? getComputedStyle(e.previousElementSibling).fill : behind(e));
    const ratio = (Math.max(front, back) + 0.05) / (Math.min(front, back) + 0.05);
    if (ratio < least[0]) least = [ratio, text];
  }
  return least }"""


@dataclass
class Seen:
    """What one window shows.

    `messages` of the console, `requests` beyond the page itself, sizes of `figures` in pixels, pixels
    of `overflow` at the right; `contrast` is the least of any text, with it; `cut` counts what only
    scrolling would show.
    """

    messages: list[str]
    requests: list[str]
    figures: list[tuple[float, float]]
    overflow: int
    scripts: int
    text: str
    contrast: tuple[float, str]
    cut: int


def look(page: Path) -> dict[str, Seen]:
    """Opens the file without a network: as "wide", on a "phone", in the "dark", and on "paper"."""
    seen = {}
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox"], timeout=LIMIT
        )
        context = browser.new_context(offline=True)
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
        ways: dict[str, tuple[tuple[int, int], dict[str, Any]]] = {
            "wide": (WIDE, {"media": "screen", "color_scheme": "light"}),
            "phone": (PHONE, {"media": "screen", "color_scheme": "light"}),
            "dark": (WIDE, {"media": "screen", "color_scheme": "dark"}),
            # Of a reader who has dark pages: paper is white.
            "paper": (PAPER, {"media": "print", "color_scheme": "dark"}),
        }
        for name, ((width, height), media) in ways.items():
            view.set_viewport_size({"width": width, "height": height})
            view.emulate_media(**media)
            least, text = view.evaluate(_CONTRAST)
            seen[name] = Seen(
                messages,
                requests[1:],
                [(w, h) for w, h in view.evaluate(_FIGURES)],
                view.evaluate(_OVERFLOW),
                view.evaluate("document.scripts.length"),
                view.inner_text("body"),
                (least, text),
                view.evaluate(_CUT),
            )
        browser.close()
    return seen
