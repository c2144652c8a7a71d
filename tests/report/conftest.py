"""Pages of reports in headless Chromium, for the tests that open them; skipped where it is not installed."""

import os
import pathlib
import shutil
from collections.abc import Iterator

import pytest

from scalerl_jax.report.page import write_report
from tests.report import run_folders
from tests.report.screens import DESK, SECONDS

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


@pytest.fixture(scope="session")
def pages(tmp_path_factory) -> dict[str, str]:
    """URLs of a page of one run, which has hostile completions, of one of two runs, and of one with a mixture."""
    folder = tmp_path_factory.mktemp("report")
    hostile = {
        "prompt": run_folders.HOSTILE,
        "answer": run_folders.HOSTILE,
        "task": run_folders.HOSTILE,
        "verdict": True,
        "forced": [],
    }
    samples = [
        run_folders.sample(5, 50, run_folders.HOSTILE, **hostile),
        run_folders.sample(5, 51, run_folders.HOSTILE + "<b>1", **hostile, pieces=[]),
    ]
    one = run_folders.write_run(folder / "a <i>run", samples=samples)
    other = run_folders.write_run(folder / "another", final=0.7, updates=20)
    mixture = run_folders.write_run(folder / "mixture", parts=("math", "code"))
    return {
        "mixture": pathlib.Path(write_report([mixture, other], str(folder / "mixture.html"))).as_uri(),
        "one": pathlib.Path(write_report([one])).as_uri(),
        "two": pathlib.Path(write_report([one, other], str(folder / "two.html"))).as_uri(),
    }


@pytest.fixture(scope="module")
def browser() -> Iterator:
    playwright = pytest.importorskip(
        "playwright.sync_api", reason="playwright is not installed: make setup-test brings it"
    )
    chromium = next((path for name in BROWSERS if (path := shutil.which(name))), None)
    if chromium is None:
        pytest.skip(f"no Chromium on PATH (looked for {', '.join(BROWSERS)})")
    with playwright.sync_playwright() as driver:
        # Chromium's sandbox does not start as root.
        arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
        with driver.chromium.launch(executable_path=chromium, args=arguments, timeout=1000 * SECONDS) as browser:
            yield browser


@pytest.fixture
def open_page(browser, pages):
    """Opens a page of `pages`; in the end nothing may have gone wrong in it, or out of it."""
    opened = []

    def opening(name: str, **settings):
        context = browser.new_context(**{"viewport": DESK, **settings})
        context.set_default_timeout(1000 * SECONDS)
        page = context.new_page()
        said: list[str] = []
        page.on("console", lambda message: said.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: said.append(f"error: {error}"))
        page.on("dialog", lambda dialog: said.append(f"dialog: {dialog.message}"))
        page.on("request", lambda request: said.append(request.url) if request.url != pages[name] else None)
        page.goto(pages[name])
        page.wait_for_selector("html[data-ready=yes]")
        opened.append((context, page, said))
        return page

    yield opening
    for context, page, said in opened:
        assert page.evaluate("window.hacked") is None
        assert said == []
        context.close()
