"""Things to look at: each shows itself as HTML in Jupyter and on GitHub, as text in a terminal.

HTML keeps to what GitHub leaves in (tables, lists, `details`, `pre`); no script, no style sheet.
"""

from __future__ import annotations

import html as _html
import json
import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from sparkling import limits, metrics
from sparkling import recipe as _recipe
from sparkling import recordings as _recordings
from sparkling.ladder import GAIN_DEFINITION, RATE_DEFINITION, unsteady
from sparkling.live import Live
from sparkling.metrics import shown

MARK = {True: "✓", False: "✗", None: "?"}
STATE_MARK = {"live": "✓", "off": "✓", "not live": "✗", "not off": "✗", "cannot tell": "?"}


class View:
    """Something shown: `html` for Jupyter and GitHub, `text` for a terminal, perhaps a PNG."""

    def __init__(self, html: str, text: str, png: bytes | None = None) -> None:
        self.html, self.text, self.png = html, text, png

    def __str__(self) -> str:
        return self.text

    __repr__ = __str__

    def _repr_html_(self) -> str | None:
        # IPython asks for what a bundle lacks, too, and JupyterLab and GitHub prefer HTML to a picture.
        return in_jupyter(self.html) if self.png is None else None

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        if self.png is not None:
            return {"text/plain": self.text, "image/png": self.png}
        return {"text/plain": self.text, "text/html": in_jupyter(self.html)}

    def __add__(self, other: View) -> View:
        return View(self.html + other.html, f"{self.text}\n\n{other.text}")


def esc(value: Any) -> str:
    """HTML-escaped text; None is an empty cell."""
    return "" if value is None else _html.escape(str(value))


def prose(value: Any) -> str:
    """HTML-escaped text in which `this` is code, and a line's end one."""
    return re.sub(r"`([^`\n]+)`", r"<code>\1</code>", esc(value)).replace("\n", "<br>")


def in_jupyter(html: str) -> str:
    """The HTML as a notebook hands it on. Jupyter's style sheet sets every cell of a table flush right
    and gives `pre` the font of the prose, and only a style on the element is stronger; GitHub, which
    drops it, needs none."""
    html = re.sub(r"<(t[dh])(?=[ >])", r'<\1 style="text-align:left"', html)
    return html.replace("<pre>", f'<pre style="{_CODE}">')


_CODE = "font-family:var(--jp-code-font-family,monospace);word-break:normal;overflow-wrap:anywhere"


def note(text: str, *, strong: bool = False) -> View:
    """One line of plain language."""
    body = f"<b>{prose(text)}</b>" if strong else prose(text)
    return View(f"<p>{body}</p>", text)


def table(
    rows: Iterable[Mapping[str, Any] | Sequence[Any]],
    columns: Sequence[str] | None = None,
    *,
    title: str = "",
    caption: str = "",
    width: int = 100,
) -> View:
    """A table of dicts or of sequences; `columns` picks and orders. None shows as "n/a"."""
    items = list(rows)
    if columns is None:
        seen: dict[str, None] = {}
        for row in items:
            if isinstance(row, Mapping):
                seen.update(dict.fromkeys(row))
        columns = list(seen)
    cells = [
        [_cell(row.get(c) if isinstance(row, Mapping) else v) for c, v in _pairs(row, columns)]
        for row in items
    ]
    head = "".join(f"<th>{esc(c)}</th>" for c in columns)
    body = "".join("<tr>" + "".join(f"<td>{prose(c)}</td>" for c in row) + "</tr>" for row in cells)
    html = (
        (f"<p><b>{esc(title)}</b></p>" if title else "")
        + f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
        + (f"<p><i>{prose(caption)}</i></p>" if caption else "")
    )
    parts = [title, _text_table(list(columns), cells, width)]
    if caption:
        parts.append("\n".join(textwrap.wrap(caption, width)))
    return View(html, "\n".join(p for p in parts if p))


def _pairs(row: Any, columns: Sequence[str]) -> list[tuple[str, Any]]:
    if isinstance(row, Mapping):
        return [(c, None) for c in columns]
    values = list(row)
    return [(c, values[i] if i < len(values) else "") for i, c in enumerate(columns)]


def _cell(value: Any) -> str:
    if value is None:
        return "n/a"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 1 else f"{value:,.2f}"
    return str(value)


def _text_table(columns: list[str], cells: list[list[str]], width: int) -> str:
    natural = [
        max([len(c), *(len(line) for row in cells for line in row[i].split("\n"))], default=1)
        for i, c in enumerate(columns)
    ]
    sizes = _fit(natural, width - 2 * (len(columns) - 1))
    lines = ["  ".join(c.ljust(s) for c, s in zip(columns, sizes, strict=True)).rstrip()]
    lines.append("  ".join("-" * s for s in sizes))
    for row in cells:
        wrapped = [
            [piece for line in c.split("\n") for piece in textwrap.wrap(line, s) or [""]]
            for c, s in zip(row, sizes, strict=True)
        ]
        for i in range(max(map(len, wrapped), default=0)):
            lines.append(
                "  ".join(
                    (w[i] if i < len(w) else "").ljust(s)
                    for w, s in zip(wrapped, sizes, strict=True)
                ).rstrip()
            )
    return "\n".join(lines)


def _fit(natural: list[int], room: int) -> list[int]:
    """Column widths: the widest columns give way first, none below 8 characters."""
    sizes = list(natural)
    while sum(sizes) > room and max(sizes, default=0) > 8:
        widest = max(range(len(sizes)), key=sizes.__getitem__)
        sizes[widest] -= 1
    return sizes


def command(launch: Any) -> View:
    """The whole command of a stage, ready to copy."""
    shell = launch.shell()
    title = f"Stage {launch.stage}" + (f" ({launch.variant})" if launch.variant else "")
    return View(f"<p><b>{esc(title)}</b></p><pre>{esc(shell)}</pre>", f"{title}\n{shell}")


def diff(a: Any, b: Any) -> View:
    """What changes between two launches, and nothing else."""
    changes = _recipe.diff(a, b)
    before, after = (f"{x.stage}-{x.variant}" if x.variant else x.stage for x in (a, b))
    title = f"{before} → {after}"
    if not changes:
        return note(f"{title}: no difference.")
    before, after = (before, after) if before != after else ("before", "after")
    rows = [
        {"": c.kind, "name": c.name, before: _side(c.before), after: _side(c.after)}
        for c in changes
    ]
    return table(rows, ["", "name", before, after], title=title)


def _side(value: Any) -> str:
    if value is None:
        return "—"
    if value is True or value == "":
        return "set"
    return " ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def proof(p: Any) -> View:
    """Every switch with its verdict, and under it the evidence wanted and found."""
    if p.only_wanted:
        rows = [
            {
                "switch": v.switch,
                "declared": _on(v.expected_on),
                "from": e.source,
                "wanted": e.wanted,
            }
            for v in p.verdicts
            for e in v.evidence
        ]
        return table(rows, title=f"Evidence that stage {p.stage} is asked for")
    summary = table(
        [
            {
                "switch": v.switch,
                "declared": _on(v.expected_on),
                "verdict": f"{STATE_MARK[v.state]} {v.state}",
                "why": " ".join(
                    x
                    for x in (v.cause and v.cause + ".", v.remedy and f"What to do: {v.remedy}.")
                    if x
                ),
            }
            for v in p.verdicts
        ],
        ["switch", "declared", "verdict", "why"]
        if any(v.cause for v in p.verdicts)
        else ["switch", "declared", "verdict"],
        title="" if p.label else f"Stage {p.stage}: " + ("proved" if p.ok else "not proved"),
    )
    seen = [e for v in p.verdicts for e in v.evidence]
    detail = table(
        [
            {
                "switch": v.switch,
                "from": e.source,
                "wanted": e.wanted,
                "found": e.found,
                "": MARK[e.ok],
            }
            for v in p.verdicts
            for e in v.evidence
        ],
        ["switch", "from", "wanted", "found", ""],
        caption="?: this place cannot tell." if any(e.ok is None for e in seen) else "",
    )
    view = summary + View(
        f"<details open><summary>Evidence</summary>{detail.html}</details>", detail.text
    )
    if p.limits and any(x.wanted or x.applied for x in p.limits):
        view += _limit_table(p.limits)
    if p.unlimited:
        view += note(f"✗ {limits.SWITCH}=1 is not at work: {p.unlimited}.")
    readings = [r for v in p.verdicts for r in v.readings]
    if readings:
        view += table(
            [
                {
                    "number": r.name,
                    "value": r.text,
                    "from": r.source,
                    "over": r.window,
                    "definition": r.definition + (f" ({r.remark})" if r.remark else ""),
                }
                for r in readings
            ],
            title="Accept length and rate, as each source reports them",
        )
    return banner(p.label) + view if p.label else view


def _limit_table(found: Sequence[limits.Limit]) -> View:
    """The SwiGLU limit of every expert layer, neighbours of one kind in one row."""
    rows = [
        {
            "layers": layers,
            "experts": one.experts,
            "the checkpoint wants": limits.text(one.wanted),
            "computed with": limits.text(one.applied),
            "by": " ".join(x for x in (one.by, one.runner and f"({one.runner})") if x),
            "": MARK[one.ok],
        }
        for layers, one in limits.spans(found)
    ]
    return table(rows, title="SwiGLU limit of the experts, layer by layer")


def _on(value: bool) -> str:
    return "on" if value else "off"


def banner(label: Mapping[str, str]) -> View:
    """The line that no recording is shown without."""
    where, when = label.get("where", "?"), label.get("when", "?")
    head = f"RECORDING — not this machine. Made on {where}, {when}."
    rest = [label.get("what", ""), label.get("versions", ""), label.get("caveat", "")]
    body = ". ".join(r.rstrip(".") for r in rest if r) + "."
    return View(
        f"<blockquote><b>{esc(head)}</b><br>{esc(body)}</blockquote>",
        "\n".join(["| " + line for t in (head, body) for line in textwrap.wrap(t, 96)]),
    )


def recording(name: str, *, lines: int = 12) -> View:
    """One recording: its label, its telling log lines and its timings."""
    data = _recordings.load(name)
    view = banner(data["label"])
    keep = _telling(data.get("log") or [], lines)
    if keep:
        view += View(f"<pre>{esc(chr(10).join(keep))}</pre>", "\n".join(keep))
    timing = data.get("timing")
    if timing:
        values = timing["runs_ms"]
        view += table(
            [{f"ms per {timing['unit']}": ", ".join(f"{v:.2f}" for v in values), "n": len(values)}],
            caption=timing["definition"]
            + ". Recorded, and not comparable with numbers measured here.",
        )
    return view


def _telling(log: list[str], limit: int) -> list[str]:
    """At most `limit` lines; a run of lines that differ in a number only becomes one."""
    out: list[str] = []
    last, count = "", 0
    for line in log:
        kind = "".join(c for c in line.split("] ", 1)[-1] if not c.isdigit() and c != ".")
        if kind == last:
            count += 1
            continue
        if count:
            out[-1] += f"   (and {count} more like it)"
        out.append(line)
        last, count = kind, 0
    if count:
        out[-1] += f"   (and {count} more like it)"
    if len(out) <= limit:
        return out
    head = limit // 2
    return [*out[:head], f"… {len(out) - limit} lines left out …", *out[-(limit - head) :]]


def reply(r: Any) -> View:
    """One answer: its text, its reasoning folded away, its times with their definitions."""
    parts = []
    if r.reasoning:
        parts.append(
            View(
                f"<details><summary>Reasoning ({len(r.reasoning)} characters)</summary>"
                f"<pre>{esc(r.reasoning)}</pre></details>",
                "Reasoning:\n" + textwrap.indent(r.reasoning.strip(), "  "),
            )
        )
    calls = [f"tool call: {c.name}({json.dumps(c.arguments)})" for c in r.tool_calls]
    calls += [f"broken tool call, not to be run: {c.name}" for c in r.broken_calls]
    for text in [r.text or ("" if calls else "(no text)"), *calls]:
        if text:
            parts.append(View(f"<pre>{esc(text)}</pre>", text))
    if r.problem:
        parts.append(note(f"Not complete: {r.problem}.", strong=True))
    parts += [note(f"Note: {w}") for w in r.warnings]
    if metrics.burst(r):
        parts.append(note(f"Note: {metrics.BURST}."))
    cached = "" if r.cached_tokens is None else f" ({r.cached_tokens} from the cache)"
    rows = [
        ["first token", shown(metrics.ttft_s(r), 3, "s"), "from sending the request"],
        [
            "decode rate",
            shown(metrics.decode_rate(r), 1, "tokens/s"),
            "tokens after the first chunk ÷ (last − first chunk), as the server counts them",
        ],
        ["tokens", f"{r.prompt_tokens}{cached} in, {r.completion_tokens} out", "server's count"],
        ["end", r.finish_reason or "none", "stop: the model ended; length: max_tokens reached"],
    ]
    if r.spec:
        length = f"{r.spec.accept_length:.2f}"
        rows.insert(2, ["accept length", length, f"tokens kept ÷ {r.spec.rounds} rounds"])
    view = parts[0]
    for part in parts[1:]:
        view += part
    return view + table(rows, ["", "value", "definition"])


def endpoint(url: str, model: str, *, key: bool) -> View:
    """How to call a running server from another program."""
    base = url.rstrip("/").removesuffix("/v1") + "/v1"
    header = ' -H "Authorization: Bearer $SPARKLING_API_KEY"' if key else ""
    messages = '[{"role": "user", "content": "Hello"}]'
    body = f'{{"model": "{model}", "messages": {messages}}}'
    first = "# set SPARKLING_API_KEY to the server's key yourself, here and for Python: nothing else does"
    code = "\n".join(
        [
            *([first] if key else []),
            "# from a shell on this machine",
            f"curl {base}/chat/completions{header} -H 'Content-Type: application/json' -d '{body}'",
            "",
            "# from Python",
            *(["import os", ""] if key else []),
            "from openai import OpenAI",
            "",
            f'client = OpenAI(base_url="{base}", api_key='
            + ('os.environ["SPARKLING_API_KEY"])' if key else '"none")'),
            f'reply = client.chat.completions.create(model="{model}", messages={messages})',
            "print(reply.choices[0].message.content)",
        ]
    )
    return View(f"<pre>{esc(code)}</pre>", code)


def measured(arms: Iterable[Any]) -> View:
    """Summaries of one or more arms (`bench.summarise`), one line for each workload."""
    arms = list(arms)
    rows = []
    for arm in arms:
        lengths = arm.accept_length
        same = {True: "yes", False: "no", None: None}[arm.deterministic]
        rows.append(
            {
                "arm": arm.arm,
                "workload": arm.workload,
                "tokens/s": arm.decode_rate.text(1) if arm.decode_rate else None,
                "first token, p50": shown(arm.ttft_s.p50, 3, "s") if arm.ttft_s else None,
                "accept length": lengths.text(2) if lengths else None,
                "rows": rows_of(arm),
                "repeats alike": same,
            }
        )
    definition = RATE_DEFINITION[0].upper() + RATE_DEFINITION[1:]
    caption = f"{definition}. n = prompts. Accept length = Σ tokens ÷ Σ rounds"
    caption += "." if all(arm.accept_length for arm in arms) else " (n/a: no round was counted)."
    if any(arm.deterministic is None for arm in arms):
        caption += " Repeats alike is n/a where nothing was asked twice."
    warning = unsteady(a.spread for a in arms)
    return table(rows, caption=f"{warning} {caption}" if warning else caption)


def rows_of(arm: Any) -> str:
    """How many rows an arm has, and how many of them are in no rate."""
    failed = f", {arm.failed} failed" if arm.failed else ""
    return f"{arm.rows}{failed}" + (f", {arm.unrated} without a rate" if arm.unrated else "")


def round_costs(costs: Sequence[Any]) -> View:
    """What a round of speculation costs (`bench.round_costs`), one line for each workload."""
    rows = [
        {
            "workload": c.workload,
            "accept length": c.accept_length.text(2).split(" (n=")[0],
            "gain": c.gain.text(2).split(" (n=")[0],
            "verification cost": f"{c.cost:.2f}",
            "n": c.prompts,
        }
        for c in costs
    ]
    warning = unsteady(c.spread for c in costs)
    caption = (
        "Cost = accept length ÷ gain, over the n prompts of a workload that both stages measured. "
        f"{GAIN_DEFINITION[0].upper()}{GAIN_DEFINITION[1:]}; the baseline is the plain stage."
    )
    return table(rows, caption=f"{warning} {caption}" if warning else caption)


def ladder(summary: Any, **options: Any) -> View:
    """Every arm's decode rate as one picture (see `plots.ladder`)."""
    from sparkling import plots

    return plots.ladder(summary, **options)


__all__ = [
    "Live",
    "View",
    "banner",
    "command",
    "diff",
    "ladder",
    "note",
    "proof",
    "recording",
    "reply",
    "table",
]
