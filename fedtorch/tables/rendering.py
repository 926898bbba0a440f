"""Tables of text as Markdown, HTML and LaTeX, with escaped names."""

from __future__ import annotations

import html as escaping
import re
from collections.abc import Mapping, Sequence

Rows = Sequence[Sequence[str]]

_LATEX = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    "∞": r"$\infty$",
    "–": "--",
    **{each: f"\\{each}" for each in "&%$#_{}"},
}
_NEGATIVE = re.compile(r"(?<![\w.)\]}])-(?=[\d∞])")


def markdown(header: Sequence[str], rows: Rows, names: int = 1, caption: str | None = None) -> str:
    """Return a pipe table, whose first `names` columns are names.

    >>> print(markdown(["", "n"], [["a|b", "3"]]))
    |  | n |
    | :-- | --: |
    | a\\|b | 3 |
    """
    cells = [[_markdown(cell) for cell in row] for row in (header, *rows)]
    ruler = [":--"] * names + ["--:"] * (len(header) - names)
    lines = ["| " + " | ".join(row) + " |" for row in (cells[0], ruler, *cells[1:])]
    return "\n".join([*([_markdown(caption), ""] if caption else []), *lines])


def html(header: Sequence[str], rows: Rows, names: int = 1, caption: str | None = None) -> str:
    """Return a `<table>` with a head, a body and scopes of the names.

    >>> print(html(["", "n"], [["a<b", "3"]]))
    <table>
    <thead><tr><th></th><th>n</th></tr></thead>
    <tbody>
    <tr><th scope="row">a&lt;b</th><td>3</td></tr>
    </tbody>
    </table>
    """
    text = lambda cell: escaping.escape(" ".join(cell.split()))
    lines = ["<table>", *([f"<caption>{text(caption)}</caption>"] if caption else [])]
    lines += ["<thead><tr>" + "".join(f"<th>{text(cell)}</th>" for cell in header) + "</tr></thead>", "<tbody>"]
    for row in rows:
        labels = "".join(f'<th scope="row">{text(cell)}</th>' for cell in row[:names])
        lines.append("<tr>" + labels + "".join(f"<td>{text(cell)}</td>" for cell in row[names:]) + "</tr>")
    return "\n".join([*lines, "</tbody>", "</table>"])


def facts(kind: str, values: Mapping[str, str]) -> str:
    """Return what a notebook shows of an object: a `<table>` with what it is above names and numbers.

    >>> print(facts("Score", {"all rows": "0.9"}))
    <table>
    <thead><tr><th>Score</th><th></th></tr></thead>
    <tbody>
    <tr><th scope="row">all rows</th><td>0.9</td></tr>
    </tbody>
    </table>
    """
    return html([kind, ""], [list(each) for each in values.items()])


def latex(header: Sequence[str], rows: Rows, names: int = 1, caption: str | None = None) -> str:
    r"""Return a `tabular`, in a `table` where it has a caption.

    >>> print(latex(["", "n"], [["a_b & c", "-3"]]))
    \begin{tabular}{lr}
    \toprule
     & n \\
    \midrule
    a\_b \& c & $-$3 \\
    \bottomrule
    \end{tabular}
    """
    line = lambda row: " & ".join(_latex(cell) for cell in row) + r" \\"  # before "[" it would take an argument
    columns = "l" * names + "r" * (len(header) - names)
    inner = [rf"\begin{{tabular}}{{{columns}}}", r"\toprule", line(header), r"\midrule"]
    inner += [*map(line, rows), r"\bottomrule", r"\end{tabular}"]
    if caption:
        around = [r"\begin{table}", r"\centering", rf"\caption{{{_latex(caption)}}}"]
        inner = [*around, *inner, r"\end{table}"]
    return "\n".join(inner)


def _markdown(cell: str) -> str:
    return re.sub(r"([\\`*_\[\]<>|~$])", r"\\\1", " ".join(cell.split()))


def _latex(cell: str) -> str:
    escaped = "".join(_LATEX.get(each, each) for each in " ".join(cell.split()))
    return _NEGATIVE.sub("$-$", f"{{}}{escaped}" if escaped[:1] in ("[", "*") else escaped)
