"""Formulas as MathML, which browsers draw by themselves: no script, no font, no network.

pymdownx.arithmatex finds $...$ and $$...$$ and leaves their TeX in the page; latex2mathml makes MathML of it.
"""

import html
import re

from latex2mathml.converter import convert

_INLINE = re.compile(r'<span class="arithmatex">\\\((.*?)\\\)</span>', re.DOTALL)
_BLOCK = re.compile(r'<div class="arithmatex">\\\[(.*?)\\\]</div>', re.DOTALL)


def drawn(page: str) -> str:
    """HTML with the formulas that arithmatex has left in it as MathML."""
    page = _BLOCK.sub(lambda found: f'<div class="formula">{_mathml(found[1], "block")}</div>', page)
    return _INLINE.sub(lambda found: _mathml(found[1], "inline"), page)


def _mathml(tex: str, display: str) -> str:
    return convert(html.unescape(tex).strip(), display=display)
