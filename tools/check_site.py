"""Opens the built documentation in a headless browser, as a reader does: `make docs-check`.

    every page   at 400 pixels: nothing is wider than the screen; files load, no script fails
    every link   its page and its anchor exist (links to other hosts are not followed); pages of
                 this site are named by links
    the search   finds WORDS, on a page that has them

The browser is Chromium: `chromium` or Chrome of the system, or what
`.venv-docs/bin/playwright install chromium` has downloaded.
"""

from __future__ import annotations

import contextlib
import functools
import http.server
import pathlib
import shutil
import sys
import threading
import urllib.parse
from collections.abc import Iterator

from playwright.sync_api import Browser, Page, sync_playwright

SITE = pathlib.Path(__file__).resolve().parents[1] / "out" / "site"
WORDS = ("warm start", "TF_CONFIG")
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
WIDTH = 400
# Text, number of pixels beyond the screen, for what makes a page scroll sideways.
TOO_WIDE = """() => {
    const width = document.documentElement.clientWidth
    if (document.documentElement.scrollWidth <= width) return []
    const beyond = e => Math.round(e.getBoundingClientRect().right - width)
    return [...document.querySelectorAll('article *')].filter(e => beyond(e) > 0)
        .map(e => `${e.tagName} ${e.textContent.slice(0, 60)}: ${beyond(e)} pixels`).slice(0, 3)
        .concat('the page scrolls sideways')
}"""
# A page that the text names by its path in the repository, outside of blocks.
PLAIN_PATH = """() => {
    const article = document.querySelector('article').cloneNode(true)
    article.querySelectorAll('a, pre').forEach(e => e.remove())
    return (article.textContent.match(/docs\\/[\\w/]+\\.md/g) || []).map(t => `no link to ${t}`)
}"""


@contextlib.contextmanager
def served(folder: pathlib.Path) -> Iterator[str]:
    """The address of a server of the folder; the search needs one."""

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *args):
            pass

    handler = functools.partial(Quiet, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


def started(playwright) -> Browser:
    """A headless Chromium; exits if there is none."""
    path = next(filter(None, map(shutil.which, BROWSERS)), None)
    try:
        # Chromium's sandbox needs rights that containers lack. The pages are our own.
        return playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
    except Exception as error:
        sys.exit(
            "make docs-check needs Chromium: install the system's package (`chromium`), or run "
            f"`.venv-docs/bin/playwright install chromium`. Received: {error}"
        )


def problems_of_pages(page: Page, address: str) -> Iterator[str]:
    """What is wrong on a page, and links without a target."""
    failures: list[str] = []
    page.on("requestfailed", lambda request: failures.append(f"cannot load {request.url}"))
    page.on("pageerror", lambda error: failures.append(f"a script fails: {error}"))
    page.on("response", lambda r: r.status < 400 or failures.append(f"{r.status} for {r.url}"))
    anchors: dict[str, set[str]] = {}
    links: list[tuple[str, str]] = []
    names = sorted(path.relative_to(SITE).as_posix() for path in SITE.rglob("*.html"))
    for name in names:
        page.goto(address + name, wait_until="networkidle")  # leaving it earlier ends requests
        ids = page.eval_on_selector_all("[id]", "all => all.map(e => e.id)")
        anchors[address + name] = {*ids}
        hrefs = page.eval_on_selector_all("a[href]", "all => all.map(e => e.href)")
        links += [(name, href) for href in dict.fromkeys(hrefs) if href.startswith(address)]
        found = [*failures, *page.evaluate(TOO_WIDE), *page.evaluate(PLAIN_PATH)]
        yield from (f"{name}: {text}" for text in found)
        failures.clear()
    for name, href in links:
        target, _, anchor = href.partition("#")
        target += "index.html" if target.endswith("/") else ""
        file = SITE / urllib.parse.unquote(target.removeprefix(address))
        if not file.is_file():
            yield f"{name}: a dead link to {href.removeprefix(address)}"
        elif anchor and urllib.parse.unquote(anchor) not in anchors.get(target, {anchor}):
            yield f"{name}: a link to an anchor that is missing, {href.removeprefix(address)}"


def problems_of_search(page: Page, address: str, words: str) -> Iterator[str]:
    """Types words into the search of the first page, and opens the first result."""
    page.goto(address + "index.html", wait_until="load")
    page.click("label[for=__search]:visible")
    page.type("input.md-search__input", words)
    results = page.locator("a.md-search-result__link")
    try:
        results.first.wait_for(timeout=10_000)
        results.first.click()
        page.wait_for_url("**?h=**", timeout=10_000)
    except Exception as error:
        yield f"the search finds nothing for {words!r}: {error}"
        return
    if words.lower() not in page.inner_text("article").lower():
        yield f"the first result of a search for {words!r} does not have it: {page.url}"


def main() -> None:
    with served(SITE) as address, sync_playwright() as playwright:
        browser = started(playwright)
        page = browser.new_page(viewport={"width": WIDTH, "height": 800})
        problems = [*problems_of_pages(page, address)]
        for words in WORDS:
            page = browser.new_page(viewport={"width": WIDTH, "height": 800})
            problems += problems_of_search(page, address, words)
        browser.close()
    print("\n".join(problems) or "The site has no dead link, fits a phone, and can be searched")
    sys.exit(bool(problems))


if __name__ == "__main__":
    main()
