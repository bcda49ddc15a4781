"""Whether every expert layer computes with the SwiGLU limit that its checkpoint asks for.

Ling-3.0 limits the experts of its last layers (`expert_swiglu_limit_list` for the routed ones,
`share_expert_swiglu_limit_list` for the shared one), and not every runner of SGLang obeys. The
plugin's status file says what each layer wants and does, whether the plugin's own switch
(SPARKLING_SWIGLU_CLAMP) is on or not; this reads it. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

SWITCH = "SPARKLING_SWIGLU_CLAMP"
KINDS = {"limits": "routed", "shared_limits": "shared"}


@dataclass(frozen=True)
class Limit:
    """One layer's experts. `layer`: its number in the checkpoint, NEXTN's after the last.

    wanted: the checkpoint's limit; applied: the one computed with; None stands for no limit. by:
    "sglang" or "sparkling", who applies it. runner: which code computes these experts.
    """

    layer: int
    experts: str  # "routed" | "shared"
    wanted: float | None
    applied: float | None
    by: str | None = None
    runner: str | None = None

    @property
    def ok(self) -> bool:
        """Whether the layer computes with the checkpoint's limit."""
        return self.wanted == self.applied


def read(status: Mapping[str, Any] | None) -> list[Limit] | None:
    """What a status file says of every MoE layer, routed before shared; None when it says nothing.

    Where the layer's own code noted with which limit it last computed (this plugin's on a CPU),
    that counts and not what it was built with.
    """
    moe = (status or {}).get("moe") or {}
    used = moe.get("swiglu_limits") or {}
    found = []
    for kind, experts in KINDS.items():
        for number, entry in (moe.get(kind) or {}).items():
            applied = entry.get("applied")
            if experts == "routed":
                applied = used.get(number, applied)
            who = entry.get("by"), entry.get("runner")
            found.append(Limit(int(number), experts, entry.get("wanted"), applied, *who))
    return sorted(found, key=lambda one: (one.experts, one.layer)) or None


def spans(limits: Sequence[Limit]) -> list[tuple[str, Limit]]:
    """Layers with the same entry as one: ("35–41", the first of them)."""
    groups: list[list[Limit]] = []
    for one in limits:
        last = groups[-1][-1] if groups else None
        same = last and (one.layer == last.layer + 1) and _entry(one) == _entry(last)
        if same:
            groups[-1].append(one)
        else:
            groups.append([one])
    return [
        (f"{g[0].layer}" if len(g) == 1 else f"{g[0].layer}–{g[-1].layer}", g[0]) for g in groups
    ]


def _entry(one: Limit) -> tuple[Any, ...]:
    return one.experts, one.wanted, one.applied, one.by, one.runner


def text(limit: float | None) -> str:
    """A limit for a table."""
    return "none" if limit is None else f"{limit:g}"


def problem(limits: Sequence[Limit]) -> str | None:
    """The layers that compute something else than the checkpoint, in one clause, or None."""
    said = [
        f"the {one.experts} experts of layer{'s' if '–' in layers else ''} {layers} want "
        f"{text(one.wanted)} and {one.runner or 'an unknown runner'} applies {text(one.applied)}"
        for layers, one in spans(limits)
        if not one.ok
    ]
    return "; ".join(said) or None
