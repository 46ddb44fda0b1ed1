"""Opens a page in headless Chromium and says what went wrong in it, and what is in it then."""

import base64
import json
import os
import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
from skips import NO_BROWSER

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--virtual-time-budget=5000",
    "--host-resolver-rules=MAP * ~NOTFOUND",
    "--enable-logging=stderr",
)
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
  seen.document = document.documentElement.outerHTML;
  parent.postMessage(JSON.stringify(seen), "*");
}, 1000));
</script>"""

FRAME = """<!doctype html><meta name="color-scheme" content="light dark"><body style="margin: 0">
<script>addEventListener("message", (event) => console.info("SEEN" + btoa(encodeURIComponent(event.data)) + "END"));</script>
<iframe src="{page}" style="width: {width}px; height: 1200px; border: 0; color-scheme: light dark"></iframe>"""  # noqa: E501


@dataclass(frozen=True)
class Seen:
    """A page that was opened.

    Attributes:
        errors: messages of the console and of scripts. asked: what the page wanted to load.
        width: of the frame. wide: of the content; more than the frame can be scrolled sideways.
        document: the page after its scripts have run. picture: of it, as PNG.
    """

    errors: list[str]
    asked: list[str]
    width: int
    wide: int
    dark: bool
    ground: str
    document: str
    picture: bytes


def chromium() -> str:
    """The browser; the test is skipped where there is none."""
    found = os.environ.get("LIGHTNING_3D_CHROMIUM") or next(
        filter(None, map(shutil.which, NAMES)), None
    )
    if found is None:
        pytest.skip(
            f"{NO_BROWSER}; `make browser` installs it, or set LIGHTNING_3D_CHROMIUM to its path"
        )
    return found


def look(page: Path, *, width: int, dark: bool) -> Seen:
    """Open a copy of the page, which watches itself, in a frame of this width."""
    browser = chromium()
    with tempfile.TemporaryDirectory() as folder:
        picture = Path(folder) / "picture.png"
        copy = Path(folder) / page.name
        copy.write_text(
            page.read_text("utf-8").replace("<head>", f"<head>{PROBE}", 1), encoding="utf-8"
        )
        scheme = f"--blink-settings=preferredColorScheme={0 if dark else 1}"
        frame = Path(folder) / "frame.html"  # a window has a width of 500 at the least
        frame.write_text(FRAME.format(page=copy.as_uri(), width=width), encoding="utf-8")
        where = (
            f"--window-size={max(width, 500)},1200",
            f"--user-data-dir={folder}/user",
            f"--screenshot={picture}",
        )
        done = subprocess.run(
            [browser, *FLAGS, scheme, *where, frame.as_uri()],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        said = re.search(r"SEEN([A-Za-z0-9+/=]*)END", done.stderr)
        assert said and picture.is_file(), f"the page did not load:\n{done.stderr[-2000:]}"
        pixels = picture.read_bytes()
    seen: dict[str, Any] = json.loads(unquote(base64.b64decode(said[1]).decode()))
    console = [
        line for line in done.stderr.splitlines() if ":CONSOLE" in line and "SEEN" not in line
    ]
    return Seen(picture=pixels, **{**seen, "errors": [*seen["errors"], *console]})
