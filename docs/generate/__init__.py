"""What of the documentation is made from the source when the site is built (mkdocs.yml, hooks.py).

config_page, commands_page, metrics_page, proto_page, api_page    the pages under reference/
pages.py         all of them, by a process of its own, so that `make docs-serve` sees a source that has changed
api_text.py      the Python API as plain Markdown, beside what mkdocstrings makes of it
repository.py    links that leave docs/ become links to the repository
formulas.py      $...$ becomes MathML, which browsers draw without a script
labels.py        cells of generated tables say their column where a phone shows each row as a paragraph
llms.py          llms.txt, llms-full.txt and each page as Markdown
markdown.py      comments of the source as Markdown
"""

import pathlib

ROOT = pathlib.Path(__file__).resolve().parents[2]
