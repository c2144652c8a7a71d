"""What mkdocs calls while it builds (mkdocs.yml, `hooks`): the generated pages come in here, and links and formulas are
finished. Nothing of the site is loaded from elsewhere."""

import html
import json
import os
import pathlib
import subprocess
import sys
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.nav import Navigation, Section
from mkdocs.structure.pages import Page

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from docs.generate import formulas, labels, llms, repository  # noqa: E402

SOURCES = ("scalerl_jax", "launch", "rollout_server", "docs/generate", "setup.py", "Makefile")  # of generated pages

_made: dict[str, str] = {}  # path -> Markdown
_made_from: object = None
_plain: dict[str, str] = {}  # path -> Markdown for programs that read, where that is another
_texts: dict[str, str] = {}  # path -> Markdown as it is rendered, links finished
_sections: dict[str, list[tuple[str, str]]] = {}


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    if config.site_url:  # it fetches sitemap.xml, which has no addresses without one
        config.theme["features"].append("navigation.instant")
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for path, text in _generated().items():
        files.append(File.generated(config, path, content=text))
    for path in repository.pictures():
        copy = f"{repository.COPIES}/{path}"
        files.append(File.generated(config, copy, abs_src_path=str(ROOT / path)))
    return files


def on_nav(nav: Navigation, config: MkDocsConfig, files: Files) -> Navigation:
    _sections.clear()
    for item in nav.items:
        pages = _pages(item)
        name = item.title if isinstance(item, Section) else config.site_name
        _sections.setdefault(name or "", []).extend(pages)
    return nav


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    path = page.file.src_uri
    if path in _made:
        page.meta["search"] = {"boost": 2}  # who searches for a name wants its definition
    assert config.repo_url, "mkdocs.yml has one"
    _texts[path] = repository.rewritten(
        markdown, path, pages={file.src_uri for file in files if file.inclusion.is_included()}, repo_url=config.repo_url
    )
    return _texts[path]


def on_page_content(content: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    content = labels.unbroken(formulas.drawn(content))
    if page.file.src_uri in _made:
        content = f'<div class="reference">{labels.labelled(content)}</div>'
    return content


def on_post_build(config: MkDocsConfig) -> None:
    site = pathlib.Path(config.site_dir)
    _texts.update(_plain)
    for path, text in _texts.items():
        (site / path).parent.mkdir(parents=True, exist_ok=True)
        (site / path).write_text(llms.plain(text), encoding="utf-8")
    titled = {name: [(html.unescape(title), path) for title, path in pages] for name, pages in _sections.items()}
    (site / "llms.txt").write_text(
        llms.index(config.site_name, config.site_description or "", titled, _texts), encoding="utf-8"
    )
    (site / "llms-full.txt").write_text(llms.full(titled, _texts), encoding="utf-8")


def _pages(item: Any) -> list[tuple[str, str]]:
    """(title in the navigation, path) of all pages in it."""
    if isinstance(item, Section):
        return [page for child in item.children for page in _pages(child)]
    return [(item.title or _title(item.file), item.file.src_uri)] if isinstance(item, Page) else []


def _title(file: File) -> str:
    heading = next((line for line in file.content_string.splitlines() if line.startswith("# ")), file.name)
    return heading.lstrip("# ")


def _generated() -> dict[str, str]:
    """By a process of its own, when a source has changed: this one may have imported what it was before."""
    global _made_from
    newest = [(path, os.stat(path).st_mtime_ns) for source in SOURCES for path in _files(ROOT / source)]
    if newest != _made_from:
        command = [sys.executable, "-m", "docs.generate.pages"]
        environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise PluginError(f"the generated pages: {done.stderr}")
        found = json.loads(done.stdout)
        _made.clear()
        _made.update(found["pages"])
        _plain.clear()
        _plain.update(found["plain"])
        _made_from = newest
    return _made


def _files(source: pathlib.Path) -> list[str]:
    return sorted(map(str, source.rglob("*.py"))) if source.is_dir() else [str(source)]
