"""The site as `make docs` builds it: strictly, from nothing but its own files, and readable on desks and phones."""

import functools
import http.server
import json
import os
import pathlib
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from html.parser import HTMLParser

import pytest

from docs.generate import config_page, metrics_page
from scalerl_jax.contract import rollout_pb2 as pb
from tests.docs import pages
from tests.report.conftest import browser  # noqa: F401  a fixture
from tests.report.screens import DESK, SECONDS

pytestmark = pytest.mark.slow

REPO = "https://example.org/scalerl-jax"
PHONE = {"width": 390, "height": 844}
LOOKED_AT = (
    "", "start/laptop/", "tutorials/own_reward/", "how_to/data/", "how_to/develop/", "algorithms/losses/",
    "recipes/measured/", "reference/config/", "reference/commands/", "reference/metrics/", "reference/proto/",
    "reference/api/", "troubleshooting/",
)  # fmt: skip
# What sticks out on the right, but for what scrolls by itself.
TOO_WIDE = """() => [...document.querySelectorAll('.md-content *')]
    .filter((one) => !one.closest('.md-typeset__scrollwrap, pre, .formula'))
    .filter((one) => one.getBoundingClientRect().right > innerWidth + 1)
    .map((one) => one.outerHTML.slice(0, 100))"""


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("docs") / "site"
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "SITE_REPO_URL": REPO, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", f"--site-dir={folder}"]
    done = subprocess.run(
        command, cwd=pages.TREE, env=environment, capture_output=True, text=True, check=False, timeout=SECONDS * 5
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


class Loaded(HTMLParser):
    """What a page makes a browser fetch, where it leads, and its text outside of code."""

    def __init__(self, page: str):
        super().__init__()
        self.fetched: list[str] = []
        self.links: list[str] = []
        self.text: list[str] = []
        self._quiet: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        if tag in ("pre", "code", "script", "style"):
            self._quiet.append(tag)
        for name, value in attrs:
            if tag == "a" and name == "href":
                self.links.append(value)
            elif name in ("src", "href", "srcset", "data", "poster", "action") and value:
                self.fetched.append(value)

    def handle_endtag(self, tag):
        if self._quiet and self._quiet[-1] == tag:
            self._quiet.pop()

    def handle_data(self, data):
        if not self._quiet:
            self.text.append(data)


def built(site: pathlib.Path) -> Iterator[tuple[str, str]]:
    for path in sorted(site.rglob("*.html")):
        yield path.relative_to(site).as_posix(), path.read_text(encoding="utf-8")


def test_every_page_is_there(site) -> None:
    for page in pages.nav():
        at = "index.html" if page == "index.md" else page.removesuffix("index.md").removesuffix(".md") + "/index.html"
        assert (site / at).exists(), page
        assert (site / page).exists(), page  # as Markdown
    assert not (site / "generate").exists() and not (site / "theme").exists()
    assert not list(site.rglob("*.py")) and not list(site.rglob("generator.js"))


def test_no_page_fetches_anything_from_elsewhere(site) -> None:
    elsewhere = re.compile(r"(?:[a-z]+:)?//")
    assert sum(1 for _ in built(site)) > 40
    for name, page in built(site):
        fetched = [where for where in Loaded(page).fetched if elsewhere.match(where)]
        assert fetched == [], name
    for path in site.rglob("*.css"):
        style = path.read_text(encoding="utf-8")
        assert not re.search(r"url\(\s*['\"]?(?:https?:)?//|@import\s+['\"]?http", style), path


def test_links_to_sources_lead_to_the_repository(site) -> None:
    found = {link for _, page in built(site) for link in Loaded(page).links if link and link.startswith(f"{REPO}/")}
    assert len(found) > 40
    for link in found:
        kind, branch, path = link.removeprefix(f"{REPO}/").partition("#")[0].split("/", 2)
        there = pages.TREE / path
        assert branch == "main" and (there.is_dir() if kind == "tree" else there.is_file()), link
    assert (site / "assets" / "repository" / "configs" / "quickstart.png").exists()


def test_what_is_written_as_markdown_has_become_html(site) -> None:
    """No fence, list, table, link or formula is left over as text."""
    left = re.compile(r"```|^ *[*|] \S|\]\(|\$\$|\\\(|\{ *[.#]\w", re.MULTILINE)
    for name, page in built(site):
        text = "".join(Loaded(page).text)
        found = left.search(text)
        assert not found, (name, text[max(0, found.start() - 80) : found.end() + 80] if found else "")
        assert "arithmatex" not in page, name


def test_generated_pages_hold_it_all(site) -> None:
    config = (site / "reference" / "config" / "index.html").read_text(encoding="utf-8")
    assert all(f'id="{name}"' in config for name in config_page.anchors())
    metrics = (site / "reference" / "metrics" / "index.html").read_text(encoding="utf-8")
    assert all(name in metrics for name, *_ in metrics_page.trainer_families())
    proto = (site / "reference" / "proto" / "index.html").read_text(encoding="utf-8")
    assert all(
        f'id="rpc-{name.lower()}"' in proto for name in pb.DESCRIPTOR.services_by_name["Rollout"].methods_by_name
    )
    api = (site / "reference" / "api" / "index.html").read_text(encoding="utf-8")
    for name in ("scaling.fit_sigmoid", "model.load_hf", "objective.policy_loss", "environments.Score"):
        assert f"scalerl_jax.{name}" in api
    assert "used by filters, the curriculum and pass rates" in api  # a comment beside a field


def test_programs_find_their_way(site) -> None:
    index = (site / "llms.txt").read_text(encoding="utf-8")
    for page in pages.nav():
        (line,) = [line for line in index.splitlines() if f"]({page})" in line]
        assert re.fullmatch(r"- \[[^\]]+\]\([^)]+\): .{12,}", line), line
    whole = (site / "llms-full.txt").read_text(encoding="utf-8")
    assert "| `--config.objective.max_ratio` |" in whole and "def fit_sigmoid(" in whole and "\n::: " not in whole
    search = json.loads((site / "search" / "search_index.json").read_text(encoding="utf-8"))
    assert any("max_ratio" in entry["text"] for entry in search["docs"])


@pytest.fixture(scope="module")
def address(site) -> Iterator[str]:
    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, format, *arguments):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(site))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("screen", [DESK, PHONE], ids=["desk", "phone"])
def test_pages_in_a_browser(browser, address, screen, scheme) -> None:  # noqa: F811
    """No console says anything, nothing comes from elsewhere, and nothing but tables and code scrolls sideways."""
    context = browser.new_context(viewport=screen, color_scheme=scheme)
    context.set_default_timeout(1000 * SECONDS)
    page, said = context.new_page(), list[str]()
    page.on("console", lambda message: said.append(f"{page.url}: {message.type}: {message.text}"))
    page.on("pageerror", lambda error: said.append(f"{page.url}: {error}"))
    # What the next page breaks off is no failure; a file that is not there is said by the console.
    page.on(
        "requestfailed", lambda one: None if "ABORTED" in (one.failure or "") else said.append(f"failed: {one.url}")
    )
    page.on("request", lambda one: None if one.url.startswith((address, "data:", "blob:")) else said.append(one.url))
    backgrounds = set()
    for path in LOOKED_AT:
        page.goto(address + path, wait_until="load")
        assert page.evaluate("document.documentElement.scrollWidth") <= screen["width"], path
        assert page.evaluate(TOO_WIDE) == [], path
        backgrounds.add(page.evaluate("getComputedStyle(document.body).backgroundColor"))
        text = page.inner_text(".md-content h1")
        assert text, path
    assert said == []
    (background,) = backgrounds
    brightness = sum(map(int, re.findall(r"\d+", background)[:3]))
    assert brightness > 600 if scheme == "light" else brightness < 200
    context.close()


def test_the_search_finds_a_field(browser, address) -> None:  # noqa: F811
    page = browser.new_page()
    page.set_default_timeout(1000 * SECONDS)
    page.goto(address)
    page.focus("input[name=query]")
    page.keyboard.type("max_ratio")
    page.wait_for_selector(".md-search-result__item a[href*='reference/config']")
    page.close()
