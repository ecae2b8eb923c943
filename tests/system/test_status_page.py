"""The status page in a real browser, of a real daemon: what it shows is true, fits, can be read, and asks nobody else."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.system.browser import CHROMIUM, Browser
from tests.system.conftest import ROOT, Daemon, MakeDaemon, eventually
from tests.system.pages import chain, open_space, put, read
from tests.system.test_metrics import get, port

PAGE = ROOT / "daemon" / "kvtier_daemon" / "status.html"
in_browser = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here (Debian: apt-get install chromium)")

CONTRAST = """
(() => {
  const light = text => {
    const [r, g, b] = text.match(/[\\d.]+/g).map(part => part / 255)
      .map(part => part <= 0.03928 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = node => {
    for (; node; node = node.parentElement) {
      const colour = getComputedStyle(node).backgroundColor;
      if (!/, 0\\)$/.test(colour)) return colour;
    }
  };
  return [...document.querySelectorAll("h1, h2, td, th, b, .soft, #state, .plot text")].map(node => {
    const style = getComputedStyle(node);
    const pair = [light(node.ownerSVGElement ? style.fill : style.color), light(behind(node.parentElement))];
    return [(Math.max(...pair) + 0.05) / (Math.min(...pair) + 0.05), node.textContent];
  }).sort((one, other) => one[0] - other[0])[0];
})()
"""


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Browser]:
    with Browser(tmp_path / "profile") as running:
        yield running


@pytest.fixture
def busy(make: MakeDaemon) -> Daemon:
    """Two workers and two namespaces, one of a name that would be markup if it were not kept from being it."""
    daemon = make(host="2MiB", ssd="16MiB", http_port=0).start(period=0.2)
    for name, model in (("first worker", "llama"), ("<b>second</b>", "<script>alert(1)</script>")):
        space = open_space(daemon.client(name=name), model)
        for seed in range(6):
            put(space, chain(space, seed, 30))
        assert read(space, chain(space, 0, 30)) > 0
    number = port(daemon)
    eventually(lambda: get(number, "/status.json")[2].count('"ready"') > 4, "there is something to plot")
    return daemon


def shown(browser: Browser, daemon: Daemon) -> Any:
    """The page, once it shows the plots; its text."""
    browser.open(f"http://127.0.0.1:{port(daemon)}/")
    browser.until("document.querySelectorAll('.plot path').length >= 4 && document.querySelectorAll('td').length > 20")
    return browser.run("document.body.innerText")


@in_browser
def test_what_it_shows_is_so(browser: Browser, busy: Daemon) -> None:
    browser.look(width=1400)
    text = shown(browser, busy)
    for expected in ("serving", "first worker", "<b>second</b>", "llama", "<script>alert(1)</script>", "host → ssd"):
        assert expected in text
    stats = busy.client().stats()
    assert f"{stats['daemon']['pages']}\npages held" in text
    bars = browser.run("[...document.querySelectorAll('.bar')].map(bar => bar.getAttribute('aria-label'))")
    assert len(bars) == 2 and all("held" in bar for bar in bars)
    width = browser.run("document.querySelectorAll('.bar span')[1].getBoundingClientRect().width")
    assert width > 500, "host memory is full, and its bar shows that"
    assert browser.complaints == []


@in_browser
@pytest.mark.parametrize("dark", [False, True])
def test_it_fits_and_can_be_read(browser: Browser, busy: Daemon, dark: bool) -> None:
    shown(browser, busy)
    for width in (360, 400, 800, 1400, 2560):
        browser.look(width=width, dark=dark)
        browser.until(f"innerWidth === {width} && document.querySelector('.plot svg').clientWidth < {width}")
        assert browser.run("document.documentElement.scrollWidth") <= width, f"at {width} it scrolls sideways"
        lightness = browser.run("Number(getComputedStyle(document.body).backgroundColor.match(/\\d+/)[0])")
        assert (lightness < 64) == dark
        contrast, where = browser.run(CONTRAST)
        assert contrast >= 4.5, f"{where!r} has a contrast of {contrast:.2f}"
        assert len(browser.picture()) > 10_000


@in_browser
def test_a_daemon_that_ends_is_told_of(browser: Browser, busy: Daemon) -> None:
    browser.look(width=800)
    shown(browser, busy)
    busy.stop()
    browser.until("document.getElementById('state').textContent.includes('does not answer')")


@in_browser
def test_a_daemon_with_nothing_in_it(browser: Browser, make: MakeDaemon) -> None:
    daemon = make(http_port=0).start()
    browser.look(width=800)
    number = port(daemon)
    daemon.clients.pop().close()
    browser.open(f"http://127.0.0.1:{number}/")
    browser.until("document.body && document.body.dataset.shown")
    text = browser.run("document.body.innerText")
    assert "No namespace is open." in text and "collecting" in text
    assert not re.search(r"\b(NaN|undefined|null|Infinity)\b", text)


@in_browser
def test_it_asks_nobody_but_the_daemon(browser: Browser, busy: Daemon) -> None:
    browser.look(width=800)
    shown(browser, busy)
    own = f"http://127.0.0.1:{port(busy)}/"
    assert set(browser.requests) <= {own, f"{own}status.json", "about:blank"} | {
        one for one in browser.requests if one.startswith("data:")
    }


def test_it_is_one_file_that_names_no_other() -> None:
    text = PAGE.read_text()
    assert not re.search(r"<(script|img|iframe)[^>]+src=|<link[^>]+href=\"(?!data:)|@import|url\(", text)
    assert set(re.findall(r"https?://[^\s'\"]+", text)) <= {"http://www.w3.org/2000/svg"}
    assert "innerHTML" not in text, "names of workers and models are not markup"
