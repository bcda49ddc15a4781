"""How a report looks: one HTML page without anything from elsewhere, and the same as Markdown.

A page reads on a phone (tables and pictures scroll inside their frames), in the dark and on paper.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Sequence
from dataclasses import dataclass

from sparkling.show import View, esc

STYLE = """
:root { color-scheme: light dark; --ink: #1c2430; --dim: #5b6675; --line: #dfe4eb; --soft: #f4f6f9;
  --paper: #fff; --good: #14713d; --bad: #b3261e; --note: #fff8e1; --edge: #d9a400; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e3e8ef; --dim: #98a3b3; --line: #2c3440; --soft: #1e242d; --paper: #14181f;
    --good: #5fd38d; --bad: #ff8a80; --note: #2a2410; --edge: #d9a400; } }
* { box-sizing: border-box; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 70rem; margin: 2rem auto; padding: 0 1rem;
  color: var(--ink); background: var(--paper); overflow-wrap: anywhere; }
h1 { margin-bottom: 0; } h2 { margin-top: 2.5rem; border-bottom: 1px solid var(--line); }
h3 { margin: 1.6rem 0 .3rem; }
.wide { overflow-x: auto; margin: .5rem 0; }
table { border-collapse: collapse; font-size: .92rem; overflow-wrap: normal; width: max-content; max-width: none; }
th, td { text-align: left; vertical-align: top; padding: .3rem .7rem .3rem 0; border-bottom: 1px solid var(--line); }
td { min-width: 3.5rem; max-width: 28rem; overflow-wrap: break-word; }
pre { background: var(--soft); padding: .7rem; overflow-x: auto; font-size: .85rem; overflow-wrap: normal; }
img { width: 100%; max-width: 50rem; background: #fff; border-radius: 4px; }
.good { color: var(--good); } .bad { color: var(--bad); } .dim { color: var(--dim); }
ul.verdicts { padding-left: 1.2rem; } ul.verdicts li { margin: .35rem 0; }
summary { cursor: pointer; padding: .15rem 0; }
blockquote { border-left: 4px solid var(--edge); margin: .5rem 0; padding: .3rem .8rem; background: var(--note); }
nav { font-size: .92rem; margin-top: 1rem; } nav a { margin-right: .9rem; display: inline-block; }
a { color: inherit; }
@media (max-width: 40rem) {
  body { margin: 1rem auto; font-size: 15px; }
  .wide img { width: 40rem; max-width: none; }
  table { font-size: .85rem; } td { max-width: 15rem; } }
@media print {
  :root { --ink: #000; --dim: #444; --line: #bbb; --soft: #fff; --paper: #fff; --good: #14713d;
    --bad: #b3261e; --note: #fff; }
  body { max-width: none; margin: 0; font-size: 10pt; }
  nav { display: none; } .wide { overflow: visible; } pre { white-space: pre-wrap; border: 1px solid #bbb; }
  tr, img, blockquote { break-inside: avoid; } h2, h3 { break-after: avoid; }
  table { font-size: 8.5pt; width: auto; max-width: 100%; } td { max-width: none; } }
"""


@dataclass(frozen=True)
class Section:
    """A heading and what stands under it."""

    title: str
    view: View

    @property
    def anchor(self) -> str:
        return re.sub(r"[^a-z0-9]+", "-", self.title.lower()).strip("-")


def heading(text: str) -> View:
    """A heading inside a section."""
    return View(f"<h3>{esc(text)}</h3>", f"### {text}")


def bad(text: str, *, strong: bool = False) -> View:
    """A sentence that must not be overlooked."""
    body = f"<b>{esc(text)}</b>" if strong else esc(text)
    return View(f"<p class='bad'>{body}</p>", text)


def dim(text: str) -> View:
    """A sentence that says there is nothing."""
    return View(f"<p class='dim'>{esc(text)}</p>", text)


def picture(png: bytes, alt: str) -> View:
    """A picture inside the page; Markdown has its text instead."""
    data = base64.b64encode(png).decode()
    return View(
        f'<div class="wide"><img alt="{esc(alt)}" src="data:image/png;base64,{data}"></div>', ""
    )


def folded(title: str, view: View) -> View:
    """Something to open by hand."""
    return View(f"<details><summary>{title}</summary>{view.html}</details>", view.text)


def page(title: str, head: View, sections: Sequence[Section]) -> str:
    """The whole HTML file."""
    links = "".join(f'<a href="#{s.anchor}">{esc(s.title)}</a>' for s in sections)
    body = "".join(f'<h2 id="{s.anchor}">{esc(s.title)}</h2>{s.view.html}' for s in sections)
    # `show.table` writes for notebooks; here every table scrolls in a frame of its own.
    body = body.replace("<table>", '<div class="wide"><table>').replace(
        "</table>", "</table></div>"
    )
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{esc(title)}</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{STYLE}</style></head><body>{head.html}<nav>{links}</nav>{body}</body></html>\n"
    )


def markdown(title: str, head: View, sections: Sequence[Section]) -> str:
    """The same as Markdown: sentences as they are, tables and commands as fixed-width text."""
    parts = [f"# {_escape(title)}", _prose(head.text)]
    for section in sections:
        parts += [f"## {_escape(section.title)}", _prose(section.view.text)]
    return "\n\n".join(p for p in parts if p).rstrip() + "\n"


_RULED = re.compile(r"^-{2,}( {2}-+)*$", re.MULTILINE)


def _prose(text: str) -> str:
    """Paragraphs as Markdown: those that hold a table, or lines that belong under one another, are
    fenced; nothing in the rest is taken for markup."""
    out = []
    for block in re.split(r"\n{2,}", text.strip("\n")):
        if not block.strip():
            continue
        if block.startswith("### ") and "\n" not in block:
            out.append(f"### {_escape(block[4:])}")
        elif all(line.startswith("- ") for line in block.split("\n")):
            out.append("\n".join(f"- {_escape(line[2:])}" for line in block.split("\n")))
        elif "\n" in block or _RULED.search(block):
            longest = max((len(m) for m in re.findall(r"`+", block)), default=0)
            fence = "`" * max(3, longest + 1)
            out.append(f"{fence}text\n{block}\n{fence}")
        else:
            out.append(_escape(block))
    return "\n\n".join(out)


def _escape(text: str) -> str:
    return re.sub(r"([\\`*_<>\[\]#|])", r"\\\1", text)
