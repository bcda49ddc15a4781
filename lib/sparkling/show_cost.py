"""The cost model to look at: tables, and pictures of computed bytes.

A picture holds computed numbers only, or computed and measured ones told apart by their marks;
published figures stand in tables, never in a picture.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from sparkling import canvas, costmodel, traffic
from sparkling import devices as _devices
from sparkling import published as _published
from sparkling import unions as _unions
from sparkling.costmodel import Measured, Prediction
from sparkling.devices import Device
from sparkling.errors import SparklingError
from sparkling.inventory import Inventory
from sparkling.puzzle import Puzzle
from sparkling.show import View, note, table

GREY, BLUE, GREEN, ORANGE, PURPLE, RED = (
    "#5b6675",
    "#2f6f9f",
    "#3a8f5c",
    "#c9772b",
    "#8a5aa8",
    "#a33f4b",
)
_GROUPS = (
    ("routed experts", BLUE),
    ("KDA attention", GREEN),
    ("LM head", ORANGE),
    ("MLA attention", PURPLE),
    ("shared expert", "#6b9ac4"),
    ("router", "#b58b3c"),
    ("state and KV cache", RED),
    ("other", GREY),
)


def inventory(inv: Inventory) -> View:
    """Bytes by component and dtype, drawn by component and listed below."""
    caption = (
        f"From {inv.source}. {inv.bytes_total:,} bytes: {_size(inv.bytes_total)}, "
        f"{inv.bytes_total / 2**30:,.2f} GiB; {inv.tensors:,} tensors. MB and GB are 10^6 and 10^9 bytes; "
        "SGLang's log says GB for 2^30."
    )
    listed = table(_rounded(inv.rows()), title=f"What {inv.model} consists of", caption=caption)
    return View(listed.html, listed.text, None)


def inventory_picture(inv: Inventory) -> View:
    """One bar a component, coloured by dtype."""
    names: dict[str, dict[str, int]] = {}
    for part in inv.components:
        names.setdefault(part.name, {})[part.dtype] = part.bytes
    order = sorted(names, key=lambda name: -sum(names[name].values()))
    dtypes = sorted({part.dtype for part in inv.components})
    colours = dict(zip(dtypes, (BLUE, GREEN, ORANGE, PURPLE, RED, GREY), strict=False))
    figure, axes = canvas.axes(0.34 * len(order) + 1.2, left=0.21)
    unit, word = (1e9, "GB") if inv.bytes_total > 1e9 else (1e6, "MB")
    for i, name in enumerate(order):
        start = 0.0
        for dtype in dtypes:
            size = names[name].get(dtype, 0) / unit
            axes.barh(i, size, left=start, height=0.66, color=colours.get(dtype, GREY), zorder=2)
            start += size
        whole = sum(names[name].values())
        share = f"{100 * whole / inv.bytes_total:.2f} %"
        axes.text(start, i, f"  {_size(whole)}, {share}", va="center", fontsize=8)
    axes.set_yticks(range(len(order)), order, fontsize=8.5)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.22 * max(sum(sizes.values()) for sizes in names.values()) / unit)
    handles = [canvas.patch(colours.get(dtype, GREY), dtype) for dtype in dtypes]
    axes.legend(handles=handles, fontsize=8, frameon=False, loc="lower right")
    axes.set_xlabel(f"{word} on the disk", fontsize=8.5)
    return canvas.picture(
        figure, f"Bytes of {inv.model} by component and dtype", inventory(inv).text
    )


def step(step_bytes: traffic.StepBytes, *devices: Device) -> View:
    """One step's traffic part by part, and its least time on each device."""
    times = "; ".join(
        f"at least {1000 * step_bytes.seconds(d.bandwidth):.3g} ms at {d.text()}" for d in devices
    )
    caption = (
        f"{step_bytes.what[0].upper()}{step_bytes.what[1:]}, {step_bytes.head} head, "
        f"{step_bytes.context:,} tokens in the cache, {step_bytes.union:.1f} experts a layer: "
        f"{_size(step_bytes.read)} read, {_size(step_bytes.written)} written"
        f"{'; ' + times if times else ''}."
    )
    return table(
        _rounded(step_bytes.rows()), title=f"Bytes of one {step_bytes.what}", caption=caption
    )


def steps_picture(inv: Inventory, *, context: int = 0) -> View:
    """Decode step, verification of four and whole round, with both heads, as stacked bars."""
    bars = [
        made
        for head in traffic.HEADS
        for made in (
            inv.step_bytes(context=context, head=head),
            inv.step_bytes(costmodel.STEPS + 1, context=context, head=head),
            inv.round_bytes(costmodel.STEPS, context=context, head=head),
        )
    ]
    figure, axes = canvas.axes(0.36 * len(bars) + 1.5, left=0.235)
    unit, word = (1e9, "GB") if inv.bytes_total > 1e9 else (1e6, "MB")
    for i, bar in enumerate(bars):
        start, sizes = 0.0, _grouped(bar)
        for name, colour in _GROUPS:
            axes.barh(i, sizes[name] / unit, left=start, height=0.66, color=colour, zorder=2)
            start += sizes[name] / unit
        digits = 2 if start < 10 else 1 if start < 100 else 0
        axes.text(start, i, f"  {start:,.{digits}f} {word}", va="center", fontsize=8)
    labels = [f"{bar.what}, {bar.head} head" for bar in bars]
    axes.set_yticks(range(len(bars)), labels, fontsize=8.5)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.15 * max(bar.total for bar in bars) / unit)
    axes.set_xlabel(
        f"{word} moved, independent experts, {context:,} tokens in the cache", fontsize=8.5
    )
    handles = [canvas.patch(colour, name) for name, colour in _GROUPS]
    axes.legend(
        handles=handles,
        fontsize=7.5,
        frameon=False,
        ncols=4,
        loc="lower center",
        bbox_to_anchor=(0.4, 1.0),
    )
    text = "\n".join(
        f"{label}: {bar.total / unit:,.4g} {word}" for label, bar in zip(labels, bars, strict=True)
    )
    return canvas.picture(
        figure, f"Bytes of a step, a verification and a round, {inv.model}", text, top=0.75
    )


def union_picture(inv: Inventory, counted: dict[int, float] | None = None) -> View:
    """Experts that k positions read in one layer: independent choices, equal choices, and counted
    ones where there are any (k -> mean union)."""
    shape = inv.known()
    ks = list(range(1, 17))
    expected = [traffic.union(k, experts=shape.experts, top_k=shape.top_k) for k in ks]
    figure, axes = canvas.axes(3.0, left=0.09)
    axes.plot(ks, expected, color=BLUE, marker="o", ms=3.5, lw=1.3, label="independent choices")
    axes.plot(ks, [shape.top_k] * len(ks), color=GREY, lw=1.3, ls="--", label="all alike")
    rows: list[dict[str, Any]] = [
        {"positions": k, "expected union": e, "counted": (counted or {}).get(k)}
        for k, e in zip(ks, expected, strict=True)
        if k in (1, 2, 3, 4, 8, 16)
    ]
    if counted:
        axes.plot(
            list(counted), list(counted.values()), color=RED, marker="D", ls="", label="counted"
        )
    axes.set_xlabel("positions verified together", fontsize=8.5)
    axes.set_ylabel("experts read a layer", fontsize=8.5)
    axes.legend(fontsize=8, frameon=False)
    listed = table(rows, caption=f"{shape.experts}·(1 - (1 - {shape.top_k}/{shape.experts})^k)")
    return canvas.picture(figure, f"Union of experts, {inv.model}", listed.text)


def unions_picture(inv: Inventory) -> View:
    """Experts that k consecutive positions of real text wake in a model this small, with 95 % intervals
    over texts, beside the formula and the least there can be."""
    shape = inv.known()
    found = [(routing, _unions.counted(routing)) for routing in _unions.read()]
    ks = list(range(1, 9))

    def expected(k: int) -> float:
        return traffic.union(k, experts=shape.experts, top_k=shape.top_k)

    figure, axes = canvas.axes(3.0, left=0.09)
    axes.plot(ks, [expected(k) for k in ks], color=BLUE, lw=1.3, label="independent choices")
    axes.plot(ks, [shape.top_k] * len(ks), color=GREY, lw=1.3, ls="--", label="all alike")
    for (routing, unions), colour, mark in zip(found, (GREEN, RED), "sD", strict=True):
        values = list(unions.values())
        spans = [
            [v.value - (v.low if v.low is not None else v.value) for v in values],
            [(v.high if v.high is not None else v.value) - v.value for v in values],
        ]
        label = f"counted, {_unions.KINDS[routing.kind]}"
        axes.errorbar(
            list(unions),
            [v.value for v in values],
            yerr=spans,
            color=colour,
            fmt=mark,
            ms=4,
            label=label,
        )
    axes.set_xlabel("consecutive positions", fontsize=8.5)
    axes.set_ylabel("experts a layer", fontsize=8.5)
    axes.legend(fontsize=8, frameon=False, loc="upper left")
    caption = (
        f"{shape.experts} experts, top {shape.top_k}; mean over windows and layers, 95 % bootstrap interval "
        f"over n texts. {found[0][0].label}."
    )
    listed = table(_unions.rows(found, expected), caption=caption)
    return canvas.picture(figure, f"Union of experts on text, {inv.model}", listed.text)


def break_even_picture(
    inv: Inventory, *, context: int = 0, head: str = "FP8", arms: Sequence[Measured] = ()
) -> View:
    """Gain of speculation over a plain step against the accept length, between equal and independent
    experts; rounds that a run measured are marked."""
    span = costmodel.byte_costs(inv, context=context, head=head)
    most = costmodel.STEPS + 1
    figure, axes = canvas.axes(3.1, left=0.09)
    xs = [1.0, float(most)]
    axes.fill_between(
        xs,
        [x / span.high for x in xs],
        [x / span.low for x in xs],
        color=BLUE,
        alpha=0.18,
        lw=0,
        label=f"bytes alone: a round costs {span.text()} steps",
    )
    axes.axhline(1.0, color=GREY, lw=1.0)
    steps = {arm.arm: arm for arm in arms if arm.what == "step"}
    plain = steps.get("fp8-head") or next(iter(steps.values()), None)
    points = [arm for arm in arms if arm.what == "round" and plain is not None]
    for arm in points:
        assert plain is not None and arm.accept_length is not None
        gain = arm.accept_length * plain.seconds / arm.seconds
        axes.plot(arm.accept_length, gain, color=RED, marker="D", ls="")
        axes.annotate(f" {arm.arm}, measured", (arm.accept_length, gain), fontsize=8)
    for cost in (span.low, span.high):
        axes.plot(cost, 1.0, color=BLUE, marker="|", ms=12)
    axes.set_xlim(1, most)
    axes.set_xlabel("accept length, tokens a round", fontsize=8.5)
    axes.set_ylabel("gain over a plain step", fontsize=8.5)
    axes.legend(fontsize=8, frameon=False, loc="upper left")
    text = (
        f"Speculation pays above an accept length of {span.low:.2f} (all positions choose the same "
        f"experts) to {span.high:.2f} (independent choices), {head} head, if bytes are all."
    )
    return canvas.picture(figure, f"Where speculation pays, {inv.model}", text)


def break_even_text(inv: Inventory, *, context: int = 0) -> View:
    """Round cost and break-even accept length for both heads, from bytes."""
    rows = []
    for head in traffic.HEADS:
        span = costmodel.byte_costs(inv, context=context, head=head)
        rows.append(
            {
                "head": head,
                "round cost, all positions alike": span.low,
                "round cost, independent": span.high,
                "pays above an accept length of": span.text(),
            }
        )
    caption = (
        "Costs in plain steps with the same head, from bytes alone; time that is no bytes (launches, "
        "sampling) comes on top."
    )
    return table(rows, title="Where speculation pays", caption=caption)


def devices(inv: Inventory, found: Iterable[Device], *, context: int = 0) -> View:
    """Least times of a step and a round on each device."""
    rows = []
    for one in found:
        row: dict[str, Any] = {"device": one.text()}
        for head in traffic.HEADS:
            plain = inv.step_bytes(context=context, head=head)
            whole = inv.round_bytes(costmodel.STEPS, context=context, head=head)
            row[f"step, {head} head"] = _ms(plain.seconds(one.bandwidth))
            row[f"round, {head} head"] = _ms(whole.seconds(one.bandwidth))
        rows.append({**row, "source": one.source})
    caption = (
        "Bytes over bandwidth: no step or round can be faster. Rounds with independent experts, "
        f"{context:,} tokens in the cache."
    )
    return table(rows, title=f"Least times of {inv.model}", caption=caption)


def predictions(found: Sequence[Prediction]) -> View:
    """Predicted gain of each switch beside the measured or recorded one."""
    rows = [
        {
            "switch": p.switch,
            "device": p.device,
            "predicted": f"× {p.gain.text()}",
            "measured": _gain(p),
            "verdict": p.verdict,
            "what": "; ".join(filter(None, (p.why, p.source))),
        }
        for p in found
    ]
    caption = (
        "Predicted from bytes: one end counts only the difference in bytes, at the ceiling, the other "
        "lets the whole step scale with its bytes. For NEXTN equal and independent experts widen it."
    )
    return table(rows, title="Predicted against measured", caption=caption)


def measured(arms: Sequence[Measured], on: Device) -> View:
    """What a run's steps and rounds mean in bytes a second."""
    rows = [
        {
            "arm": a.arm,
            "": a.what,
            "ms": 1000 * a.seconds,
            "accept length": a.accept_length,
            "MB": a.bytes / 1e6,
            "effective": a.effective.text(),
            "n prompts": a.n,
        }
        for a in arms
    ]
    limit = (
        "Memory is the limit."
        if any(a.effective.bound for a in arms)
        else "Memory is not the limit here, so bytes do not predict these times; the lower ends do."
    )
    return table(rows, title=f"Measured, against {on.text()}", caption=limit)


def run(nb: Any, here: Device) -> View:
    """What this run, or the newest one, measured beside what bytes say; a sentence where none did.

    nb: the notebook's session. here: this machine's processor, used where the rows name no GPU.
    """
    rows, name = costmodel.rows_near(nb.run, nb.lane.runs)
    if not rows:
        return note(
            "No run on this machine holds measurements yet; run the ladder, then this again."
        )
    gpus = (rows[0].get("machine") or {}).get("gpus") or ()
    on = _devices.of_gpus(gpus) if gpus else here
    if on is None:
        return note(
            f"The bandwidth of {gpus[0]} is not known here: see `sparkling costmodel --device`."
        )
    try:
        inv = costmodel.inventory_of(rows, nb.lane)
        arms = costmodel.measured(rows, inv, on)
        found = costmodel.run_predictions(rows, inv, on)
    except SparklingError as error:
        return note(f"Run {name} cannot be compared with the cost model: {error}")
    text = f"Run {name}, {inv.model}, bytes as the checkpoint stores them."
    if not found:
        text += " No two of its arms differ in the head or in speculation alone, so no gain is compared."
    shown = note(text) + measured(arms, on)
    return shown + predictions(found) if found else shown


def sizes(inv: Inventory) -> View:
    """Every size given for the FP4 weights, beside what this inventory sums to."""
    target = inv.bytes_total - sum(
        part.bytes for part in inv.components if part.name.startswith(traffic.NEXTN)
    )
    rows = [
        {
            "what": "all tensors, from " + inv.source,
            "size": _both(inv.bytes_total),
            "where from": "computed",
        },
        {"what": "without the NEXTN layer", "size": _both(target), "where from": "computed"},
        *(
            {"what": one.what, "size": one.text(), "where from": _published.source_text(one)}
            for one in map(
                _published.figure,
                (
                    "weights_shards_gb",
                    "weights_loaded_gib",
                    "weights_bakeer_gb",
                    "weights_guides_gb",
                ),
            )
        ),
    ]
    caption = (
        "The shards' sum is the tensors' to the last digit given. The loaded weights are the target "
        "alone, in 2^30 bytes, so they look smaller than the download. On an H200 the log said 65.13 GB "
        "(2^30) for the target with dummy weights and 3.38 for the draft with its own embedding and head "
        "(recorded while designing this): 1.1 above the target's tensors, of which 0.05 is kv_b unpacked to "
        "BF16 and the rest not traced by us. Nothing here explains 60.5."
    )
    return table(rows, title="How large are the FP4 weights?", caption=caption)


def _both(count: int) -> str:
    return f"{count / 1e9:,.2f} GB = {count / 2**30:,.2f} GiB"


def puzzle(found: Puzzle) -> View:
    """The published figures beside what bytes say."""
    rows = [
        {
            "question": one.question,
            "published": one.published,
            "from bytes": one.bytes,
            "so": one.answer,
        }
        for one in found.lines()
    ]
    caption = (
        "Published for one DGX Spark by different people on different workloads, none measured by us; "
        "sources and conditions are in lib/sparkling/facts/published.toml. Costs are in steps of the stage before NEXTN. "
        'What weakens this: "about 41" and "about 11 %" are rounded by their authors, the context of the '
        "GSM8K run is estimated, and the per-step gain is another workload's."
    )
    return table(rows, title="The published figures, reconciled", caption=caption)


# -- pieces --------------------------------------------------------------------------------------


def _gain(p: Prediction) -> str | None:
    if p.measured is None:
        return None
    if p.low is None or p.high is None:
        return f"× {p.measured:.3f}"
    return f"× {p.measured:.3f} [{p.low:.3f}, {p.high:.3f}]"


def _grouped(step_bytes: traffic.StepBytes) -> dict[str, float]:
    sizes = dict.fromkeys((name for name, _ in _GROUPS), 0.0)
    for part in step_bytes.parts:
        name = part.name.removeprefix("draft: ")
        name = "state and KV cache" if name in ("KDA state", "KV cache") else name
        sizes[name if name in sizes else "other"] += part.read + part.written
    return sizes


def _rounded(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows with two decimals, counts grouped, and nothing like 8.18e-05."""
    return [{key: _decimals(value) for key, value in row.items()} for row in rows]


def _decimals(value: Any) -> Any:
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return "0" if value == 0 else f"{value:,.2f}" if value >= 0.005 else "< 0.01"
    return value


def _size(count: float) -> str:
    if count >= 1e9:
        return f"{count / 1e9:,.2f} GB"
    return f"{count / 1e6:,.1f} MB" if count >= 1e5 else f"{count / 1e3:,.1f} kB"


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.3g} ms"
