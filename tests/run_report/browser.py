"""A page in a headless Chromium: what it shows, what the console says, what it asks the network for."""

from __future__ import annotations

import json
import shutil
import subprocess
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path

import pytest

NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
LIMIT_S = 120


@dataclass
class Opened(HTMLParser):
    """console: what was said there. requests: addresses asked for. figures: of each named one a value for each run;
    None where words say that it is not known. drawings: charts that were laid out."""

    console: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)
    figures: dict[str, list[float | None]] = field(default_factory=dict)
    drawings: int = 0
    text: str = ""

    def __post_init__(self) -> None:
        super().__init__()
        self._name = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if given.get("data-figure"):
            self._name = str(given["data-figure"])
            self.figures.setdefault(self._name, []).append(None)
        elif tag == "data":
            self.figures[self._name][-1] = float(str(given["value"]))
        self.drawings += tag == "svg"

    def handle_data(self, data: str) -> None:
        self.text += data


def open_page(page: Path, folder: Path) -> Opened:
    """Skips the test where there is no Chromium. folder: for its files."""
    found = next((path for path in map(shutil.which, NAMES) if path), None)
    if found is None:
        pytest.skip("no Chromium: apt-get install chromium-headless-shell")
    log = folder / "net.json"
    command = [found, "--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"]
    command += [
        "--enable-logging=stderr",
        f"--user-data-dir={folder / 'profile'}",
        f"--log-net-log={log}",
        "--dump-dom",
        page.resolve().as_uri(),
    ]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
    assert ended.returncode == 0, ended.stderr[-2000:]
    opened = Opened()
    opened.feed(ended.stdout)
    opened.console = [line for line in ended.stderr.splitlines() if ":CONSOLE" in line]
    events = json.loads(log.read_text())["events"]
    parameters = [event.get("params") for event in events]
    opened.requests = [one["url"] for one in parameters if isinstance(one, dict) and "url" in one]
    return opened
