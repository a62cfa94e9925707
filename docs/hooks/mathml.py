"""Turns formulas into MathML when the pages are built: nothing to load in the reader's browser."""

import html
import re

from latex2mathml.converter import convert


_FORMULA = re.compile(
    r'<(span|div) class="arithmatex">(?:\\\(|\\\[)(.*?)(?:\\\)|\\\])</\1>', re.DOTALL
)


def on_page_content(content: str, **_) -> str:
    def to_mathml(match: re.Match) -> str:
        tag, latex = match.groups()
        display = "block" if tag == "div" else "inline"
        latex, number = re.subn(r"\\tag\{(\d+)\}", "", html.unescape(latex))
        mathml = convert(latex, display=display)
        if not number:
            return mathml
        label = re.search(r"\\tag\{(\d+)\}", match[2])[1]
        return f'<div class="equation" id="eq-{label}">{mathml}<span>({label})</span></div>'

    return _FORMULA.sub(to_mathml, content)
