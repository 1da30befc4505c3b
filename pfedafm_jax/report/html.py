"""HTML by construction: whatever is put into an element is escaped unless it is an element itself."""

from collections.abc import Iterable, Sequence
from html import escape

STYLE = """
:root { color-scheme: light dark; --ink: #1c2430; --soft: #5c6675; --line: #dde2e9; --card: #f6f8fa; --page: #fff;
        --accent: #2f6db5; --warn: #9a4a00; --warn-card: #fff4e5; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e4e8ee; --soft: #98a3b3; --line: #323b47; --card: #1b222c; --page: #12171e;
          --accent: #7db0ec; --warn: #ffb566; --warn-card: #33250f; }
  figure img { filter: invert(.91) hue-rotate(180deg); }
}
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.5rem 1rem 4rem; max-width: 68rem; background: var(--page); color: var(--ink);
       font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
h1 { font-size: 1.7rem; line-height: 1.2; margin: 0 0 .3rem; }
h2 { font-size: 1.35rem; margin: 3rem 0 .3rem; padding-top: 1.2rem; border-top: 2px solid var(--line); }
h3 { font-size: 1.05rem; margin: 1.8rem 0 .5rem; }
p { margin: .3rem 0 .8rem; max-width: 48rem; }
.soft, figcaption { color: var(--soft); font-size: .875rem; }
a { color: inherit; text-decoration-color: var(--accent); }
.note { background: var(--warn-card); color: var(--warn); border-left: 4px solid; padding: .5rem .8rem; margin: .8rem 0;
        overflow-wrap: anywhere; }
code, pre { font: .85em/1.45 ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; overflow-wrap: anywhere; }
pre { background: var(--card); padding: .7rem .9rem; border-radius: 6px; white-space: pre-wrap; margin: .5rem 0; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(9.5rem, 1fr)); gap: .7rem; margin: 1rem 0; }
.tile { background: var(--card); border-radius: 8px; padding: .7rem .9rem; }
.tile b { display: block; font-size: 1.5rem; line-height: 1.25; font-variant-numeric: tabular-nums; }
.tile span { display: block; font-size: .8rem; line-height: 1.35; color: var(--soft); overflow-wrap: anywhere; }
.wide { overflow-x: auto; margin: .5rem 0; }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; }
th, td { padding: .35rem .7rem; border-bottom: 1px solid var(--line); text-align: right; vertical-align: top; }
th:first-child, td:first-child, table.words th, table.words td { text-align: left; }
thead th { color: var(--soft); font-weight: 600; border-bottom-width: 2px; vertical-align: bottom; }
tbody th { font-weight: 500; min-width: 7.5rem; overflow-wrap: break-word; }
table.numbers td { white-space: nowrap; }
table.numbers th:first-child { position: sticky; left: 0; background: var(--page); }
table.words td { overflow-wrap: anywhere; min-width: 5rem; }
.best { font-weight: 700; color: var(--accent); }
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 25rem), 1fr)); gap: 1.2rem;
           margin: 1rem 0; align-items: start; }
figure { margin: 0; break-inside: avoid; }
figure img { display: block; width: 100%; height: auto; }
figcaption { padding-top: .2rem; }
details { margin: .6rem 0; }
summary { cursor: pointer; color: var(--accent); }
@media print {
  :root { color-scheme: light; --ink: #000; --soft: #444; --line: #bbb; --card: #f3f3f3; --page: #fff; --accent: #1f4f8a;
          --warn: #7a3b00; --warn-card: #fff4e5; }
  body { max-width: none; padding: 0; font-size: 11pt; }
  figure img { filter: none; }
  .wide { overflow: visible; }
  .figures { grid-template-columns: 1fr 1fr; }
  table { font-size: 8pt; }
  th, td { padding: .2rem .4rem; }
  tr, .tile { break-inside: avoid; }
  h2, h3 { break-after: avoid; }
  details::details-content { content-visibility: visible; block-size: auto; }
}
"""


class Html(str):
    """Text that is HTML already."""


def element(tag: str, /, *children: object, **attributes: str) -> Html:
    """`<tag attributes>children</tag>`; a trailing underscore of an attribute is dropped: `class_`.

    >>> element("p", "a < b ", element("b", "c"), class_='"x"')
    '<p class="&quot;x&quot;">a &lt; b <b>c</b></p>'
    """
    inside = "".join(child if isinstance(child, Html) else escape(str(child)) for child in children)
    said = "".join(f' {key.rstrip("_").replace("_", "-")}="{escape(value)}"' for key, value in attributes.items())
    return Html(f"<{tag}{said}>") if tag in ("img", "meta") else Html(f"<{tag}{said}>{inside}</{tag}>")


def together(parts: Iterable[object]) -> Html:
    """Elements and text one after the other."""
    return Html("\n".join(part if isinstance(part, Html) else escape(str(part)) for part in parts))


def table(head: Sequence[object], rows: Iterable[Sequence[object]], caption: str = "", words: bool = False) -> Html:
    """A table that scrolls by itself where it is too wide; the first cell of a row is its heading.

    `words`: all columns to the left, for text; otherwise all but the first to the right, for numbers.
    """
    top = element("tr", *(element("th", cell, scope="col") for cell in head))
    body = [
        element("tr", element("th", row[0], scope="row"), *(element("td", cell) for cell in row[1:])) for row in rows
    ]
    inside = element("thead", top), element("tbody", together(body))
    box = element("div", element("table", *inside, class_="words" if words else "numbers"), class_="wide")
    return together([box, element("p", caption, class_="soft")]) if caption else box


def page(title: str, parts: Iterable[object]) -> str:
    """A whole page that needs nothing else and, by its own policy, may load and run nothing else."""
    policy = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
    head = together(
        [
            element("meta", charset="utf-8"),
            element("meta", http_equiv="Content-Security-Policy", content=policy),
            element("meta", name="viewport", content="width=device-width, initial-scale=1"),
            element("title", title),
            element("style", Html(STYLE)),
        ]
    )
    return f"<!doctype html>\n{element('html', element('head', head), element('body', together(parts)), lang='en')}\n"
