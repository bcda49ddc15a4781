"""Tables of the SwiGLU limit's check (`clampcheck`): the report's own lines, outputs, the activation
alone, times."""

from __future__ import annotations

import math
from typing import Any

from sparkling import clampcheck
from sparkling.clampcheck import Record
from sparkling.show import MARK, View, note, table

LIMITED_LAYERS = 7
"""Of Ling-3.0-flash: 35 to 41, so often does a step pay what one layer costs more."""


RUNNERS = {"cpu": "this CPU", "marlin_torch": "marlin, its products by torch"}


def name_of(runner: str) -> str:
    """A runner for a table."""
    return RUNNERS.get(runner, runner)


def where(record: Record) -> View:
    """One line: on what, when, with which versions and by which command."""
    names = ("sglang", "sglang-kernel", "humming-kernels", "torch", "triton", "cuda")
    listed = ", ".join(f"{n} {record.versions[n]}" for n in names if record.versions.get(n))
    compiled = "".join(f" {name_of(r)}: {how}." for r, how in record.compiled.items())
    return note(f"{record.where}, {record.date[:10]}: {listed}.{compiled} By `{record.command}`.")


ASKED, EIGHT = 4.0, 8.0
"""The limit of the report's own lines, and the value of all their gates and ups."""


def reproduction(record: Record) -> View:
    """What the lines of the report to SGLang gave: Humming's activation, told of a limit."""
    if record.reproduction is None:
        return note("The report's own lines were not run here: they need Humming.")
    kept, output = record.reproduction["swiglu_limit"], record.reproduction["output"]
    silu = EIGHT / (1 + math.exp(-EIGHT))
    limited, free = min(silu, ASKED) * min(EIGHT, ASKED), silu * EIGHT
    row = {
        "limit that the model hands over": f"{ASKED:g}",
        "limit that the runner keeps": "none" if kept is None else f"{kept:g}",
        "computed": f"{output:g}",
        "with the limit": f"{limited:g}",
        "without": f"{free:.2f}",
        "": MARK[abs(output - limited) < abs(output - free)],
    }
    title = f"The report's own lines: stock Humming's activation of gates and ups of {EIGHT:g}"
    return table([row], title=title)


def shape(record: Record) -> str:
    """The layer in words."""
    s = record.shape
    return f"{s['hidden']:,} × {s['intermediate']:,}, {s['top_k']} experts a token, limit {s['limit']:g}"


def percent(value: float) -> str:
    """An error or a share, in per cent with two digits that matter."""
    return f"{100 * value:.2f} %"


NAMES = {"stock": "stock SGLang", "hooked": "with the switch"}
# On a CPU the plugin's experts take stock's place anyway; there the layer without a limit is telling.
CPU_NAMES = {"hooked": "this lane's experts", "hooked_without_limit": "the same, without a limit"}


def outputs(record: Record) -> View:
    """What each runner computes of inputs that exceed the limit, against both references."""
    rows = []
    for runner in record.runners:
        for one in record.largest(runner):
            if not one.exceeds:
                continue
            gates, ups = map(percent, one.beyond)
            for kind, name in (CPU_NAMES if runner == "cpu" else NAMES).items():
                if kind not in one.errors or (runner, kind) == ("triton", "hooked"):
                    continue  # Triton obeys by itself: no hook touches it
                limited, free = one.errors[kind]
                row = {
                    "runner": name_of(runner),
                    "experts": one.experts,
                    "tokens": one.tokens,
                    "gates, ups beyond": f"{gates}, {ups}",
                    "layer": name,
                    "error to limited": percent(limited),
                    "error to unlimited": percent(free),
                }
                row[""] = MARK[limited < free] if kind != "hooked_without_limit" else ""
                rows.append(row)
    title = f"One MoE layer of {shape(record)}: root mean square error of its output"
    return table(rows, title=title, caption="✓: it is the limited reference that is met.")


def untouched(record: Record) -> View:
    """Where the switch must change nothing: inputs below the limit, and layers without one."""
    rows = []
    for runner in record.runners:
        for kind, name in (
            ("hooked", "inputs below the limit"),
            ("hooked_without_limit", "a layer without a limit, all inputs"),
        ):
            mine = [
                one
                for one in record.outputs
                if one.runner == runner
                and kind in one.unlike_stock
                and not (kind == "hooked" and one.exceeds)
            ]
            if runner.startswith(("humming", "marlin")) and mine:
                rows.append(
                    {
                        "runner": name_of(runner),
                        "what": name,
                        "outputs": len(mine),
                        "entries": f"{sum(one.entries for one in mine):,}",
                        "unlike stock's": f"{sum(one.unlike_stock[kind] for one in mine):,}",
                        "stock repeats its bits": "yes" if all(x.repeats for x in mine) else "no",
                    }
                )
    if not rows:
        return note("Only a GPU has runners that the switch changes.")
    return table(rows, title="What the switch leaves alone, bit for bit")


def activations(record: Record) -> View:
    """The activation alone: our kernel against float32 and, below the limit, bit for bit."""
    # Marlin's is tried again beside the products by torch: where that gives the same, once is enough.
    cases = [one for n, one in enumerate(record.activations) if one not in record.activations[:n]]
    rows = [
        {
            "in the place of": _stock(case["runner"]),
            "rows": f"{case['rows']:,}",
            "entries beyond": percent(case["beyond_the_limit"]),
            "stock's error": percent(case["stock_error"]),
            "ours": percent(case["fast_error"]),
            "below, other bits": f"{case['fast_bits_differ_below']:,} of {case['entries_below']:,}",
        }
        for case in cases
    ]
    if not rows:
        return note("The activation alone was not tried here: it is a CUDA kernel.")
    caption = (
        "Beyond: entries whose gate or up exceeds the limit. Error: root mean square distance from the "
        "limited activation in float32 over its size. Below, other bits: entries within the limit that "
        "are not bit for bit stock's."
    )
    return table(rows, title="The activation alone", caption=caption)


CAPTION = (
    "Median and quartiles of n replays in turns; the difference is that of each turn, its median with "
    "95 % of the bootstrapped medians. A negative one: it is faster with the switch."
)
LAYERS = "The two layers have weights of their own: a difference may be more than the activation's."
ALONE = "Compare the two times of a row, not of two rows: each runner has a process of its own."


def times(record: Record) -> View:
    """Microseconds of a layer without and with the switch, and the difference with an interval."""
    rows = []
    for one in record.times:
        row = {"runner": name_of(one.runner), "experts": one.experts, **_times(one, "a layer")}
        row[f"over {LIMITED_LAYERS} layers, µs"] = f"{LIMITED_LAYERS * one.more['median']:+.1f}"
        rows.append(row)
    if not rows:
        return note("No layer was timed here.")
    return table(rows, title="What it costs: a whole layer", caption=f"{CAPTION} {LAYERS}")


def kernel_times(record: Record) -> View:
    """The same of the activation alone."""
    rows = [
        {"in the place of": _stock(one.runner), **_times(one, "a call")}
        for one in record.kernel_times
    ]
    if not rows:
        return note("The activation alone was not timed here.")
    return table(rows, title="What it costs: the activation alone", caption=f"{CAPTION} {ALONE}")


def _stock(runner: str) -> str:
    again = ", in a second process" if runner.endswith("_torch") else ""
    return f"{runner.removesuffix('_torch')}'s silu_and_mul{again}"


def _times(one: Any, what: str) -> dict[str, Any]:
    low, high = one.more["interval"]
    return {
        "tokens": one.tokens,
        f"stock, µs {what}": _spread(one.stock),
        "with the switch": _spread(one.hooked),
        "difference": f"{one.more['median']:+.2f} [{low:+.2f}, {high:+.2f}]",
        "n": one.more["n"],
    }


def _spread(found: Any) -> str:
    return f"{found['median']:.2f} ({found['q1']:.2f} to {found['q3']:.2f})"


def unfinished(record: Record) -> View:
    """What was not done, and why; nothing when all was."""
    rows = [
        {"runner": name_of(runner), "what": "all of it", "why": outcome}
        for runner, outcome in record.outcomes.items()
        if outcome != "done"
    ]
    rows += [
        {"runner": name_of(runner), "what": step, "why": why}
        for runner, step, why in record.failures
    ]
    return table(rows, title="Not done") if rows else note("Every runner was tried to the end.")


def live(nb: Any) -> View:
    """Run the check on this machine, and show its outputs and times; the reason where it cannot."""
    if reason := clampcheck.refusal(nb.lane):
        return note(reason, strong=True)
    record = clampcheck.run(nb.lane, nb.run.path("swiglu-clamp.json"))
    lines = where(record) + reproduction(record) if record.reproduction else where(record)
    view = lines + outputs(record)
    if not record.times:
        return view
    return view + times(record) + kernel_times(record)
