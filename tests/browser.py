"""Opens a page in headless Chromium and says what went wrong in it, and what is in it then."""

import html
import json
import os
import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--hide-scrollbars", "--virtual-time-budget=5000",
    "--host-resolver-rules=MAP * ~NOTFOUND", "--enable-logging=stderr",
)  # fmt: skip
PROBE = """<script>
const seen = { errors: [], asked: [] };
addEventListener("error", (event) => seen.errors.push(String(event.message || event.target)), true);
addEventListener("unhandledrejection", (event) => seen.errors.push(String(event.reason)));
addEventListener("securitypolicyviolation", (event) => seen.asked.push(event.blockedURI));
addEventListener("load", () => setTimeout(() => {
  for (const entry of performance.getEntriesByType("resource")) seen.asked.push(entry.name);
  seen.width = innerWidth;
  seen.wide = document.documentElement.scrollWidth;
  seen.dark = matchMedia("(prefers-color-scheme: dark)").matches;
  seen.ground = getComputedStyle(document.body).backgroundColor;
  document.documentElement.dataset.seen = JSON.stringify(seen);
}, 1000));
</script>"""


@dataclass(frozen=True)
class Seen:
    """A page that was opened.

    Attributes:
        errors: messages of the console and of scripts. asked: what the page wanted to load.
        width: of the window. wide: of the content; more than the window can be scrolled sideways.
        document: the page after its scripts have run.
    """

    errors: list[str]
    asked: list[str]
    width: int
    wide: int
    dark: bool
    ground: str
    document: str


def chromium() -> str:
    """The browser; the test is skipped where there is none."""
    found = os.environ.get("LIGHTNING_3D_CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        pytest.skip("there is no Chromium: install it (Debian: apt-get install chromium), or set LIGHTNING_3D_CHROMIUM to its path")
    return found


def look(page: Path, *, width: int, dark: bool) -> Seen:
    """Open a copy of the page, which watches itself, in a window of this width."""
    browser = chromium()
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / page.name
        copy.write_text(page.read_text("utf-8").replace("<head>", f"<head>{PROBE}", 1), encoding="utf-8")
        scheme = f"--blink-settings=preferredColorScheme={0 if dark else 1}"
        command = [browser, *FLAGS, scheme, f"--window-size={width},1200", f"--user-data-dir={folder}/user", "--dump-dom", copy.as_uri()]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    said = re.search(r'data-seen="([^"]*)"', done.stdout)
    assert said, f"the page did not load:\n{done.stderr[-2000:]}"
    seen: dict[str, Any] = json.loads(html.unescape(said[1]))
    console = [line for line in done.stderr.splitlines() if ":CONSOLE" in line]
    return Seen(document=done.stdout, **{**seen, "errors": [*seen["errors"], *console]})
