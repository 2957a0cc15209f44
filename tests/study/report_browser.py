"""Open a report in headless Chromium; as a program, take its picture:

python tests/study/report_browser.py REPORT.html docs/report.png --width 1280 --height 1600 --theme light
"""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
REMEDY = "chromium is not installed: apt-get install chromium"


@dataclass
class Seen:
    """What a page did beside being shown."""

    requests: list[str] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)


@contextmanager
def chromium() -> Iterator:
    """A headless browser; None where there is none installed."""
    program = shutil.which("chromium")
    if program is None:
        yield None
        return
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=program, args=list(FLAGS))
        try:
            yield browser
        finally:
            browser.close()


def opened(browser, path: Path, width: int = 1280, height: int = 900, theme: str = "light"):
    """A page with the report loaded from disk, and what it asked for and complained about on the way."""
    seen = Seen()
    page = browser.new_page(viewport={"width": width, "height": height}, color_scheme=theme)
    page.on("request", lambda request: seen.requests.append(request.url))
    page.on("pageerror", lambda error: seen.complaints.append(str(error)))
    page.on("console", lambda message: seen.complaints.append(message.text) if message.type in BAD else None)
    page.goto(path.resolve().as_uri(), wait_until="load")
    page.wait_for_function(READY)
    return page, seen


def overflowing(page) -> list:
    """What sticks out of the window, apart from what a box of its own lets scroll."""
    return page.evaluate(
        """() => [...document.querySelectorAll("body *")].filter((node) =>
          !node.closest(".scroll, svg, noscript, script, style, .skip, .chart") && node.getClientRects().length
          && node.getBoundingClientRect().right > innerWidth + 0.5).map((node) => [node.tagName, node.className])"""
    )


BAD = ("error", "warning")
READY = "document.documentElement.dataset.ready"

TEXT_CONTRAST = """() => {
  const light = (colour) => {
    const part = colour.match(/[\\d.]+/g).slice(0, 3).map((v) => v / 255);
    const [r, g, b] = part.map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const ground = (node) => {
    for (; node; node = node.parentElement) {
      const colour = getComputedStyle(node).backgroundColor;
      if (!/, 0\\)$/.test(colour)) return colour;
    }
    return "rgb(255, 255, 255)";
  };
  const poor = [];
  for (const node of document.querySelectorAll("body *:not(script):not(style):not(svg *):not(noscript *)")) {
    const own = [...node.childNodes].some((one) => one.nodeType === 3 && one.textContent.trim());
    if (!own || !node.getClientRects().length) continue;
    const [low, high] = [light(getComputedStyle(node).color), light(ground(node))].sort((a, b) => a - b);
    const ratio = (high + 0.05) / (low + 0.05);
    if (ratio < 4.5) poor.push([node.tagName, node.className, node.textContent.slice(0, 30), ratio]);
  }
  return poor;
}"""


def main() -> None:
    parser = argparse.ArgumentParser(description="Take a picture of a report.")
    parser.add_argument("report", type=Path)
    parser.add_argument("picture", type=Path)
    parser.add_argument("--width", type=int, default=1280)
    parser.add_argument("--height", type=int, default=900)
    parser.add_argument("--theme", choices=("light", "dark"), default="light")
    parser.add_argument("--whole", action="store_true", help="the whole page, not only the first screen")
    chosen = parser.parse_args()
    with chromium() as browser:
        if browser is None:
            parser.exit(2, REMEDY + "\n")
        page, _ = opened(browser, chosen.report, chosen.width, chosen.height, chosen.theme)
        page.screenshot(path=chosen.picture, full_page=chosen.whole)


if __name__ == "__main__":
    main()
