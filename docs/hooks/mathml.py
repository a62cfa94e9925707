"""Turns formulas into MathML when the pages are built: nothing to load in the reader's browser."""

import html
import re

from latex2mathml.converter import convert


_FORMULA = re.compile(
    r'<(span|div) class="arithmatex">(?:\\\(|\\\[)(.*?)(?:\\\)|\\\])</\1>', re.DOTALL
)


def on_page_content(content: str, **_) -> str:
    def to_mathml(match: re.Match) -> str:
        tag, latex = match[1], html.unescape(match[2])
        number = re.search(r"\\tag\{(\d+)\}", latex)
        if tag == "span":
            return convert(latex)
        if number is None:
            return f'<div class="equation">{convert(latex, display="block")}</div>'
        mathml = convert(latex.replace(number[0], ""), display="block")
        return f'<div class="equation" id="eq-{number[1]}">{mathml}<span>({number[1]})</span></div>'

    return _FORMULA.sub(to_mathml, content)
