"""How many experts several positions wake together: counted on text, beside the formula.

The formula (`traffic.union`) assumes that positions choose independently. Text does not: neighbours are
about the same thing. Counted here on the experts that Sparklet's routers chose (recorded), over windows
of k consecutive positions of one text, which is what a verification of k reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np

from sparkling.errors import UsageError
from sparkling.stats import Interval, bootstrap_mean

RECORDED = Path(__file__).parent / "recordings" / "sparklet-routing.npz"
KINDS = {"answers": "answers, sampled", "repeated": "repeated text, greedy"}


@dataclass(frozen=True)
class Routing:
    """Experts chosen at n consecutive positions: `experts` [n, layers, top k], `text` [n] which text
    each position belongs to; `kind` and `label` say what it is."""

    kind: str
    experts: np.ndarray
    text: np.ndarray
    label: str


def read(path: Path | str = RECORDED) -> list[Routing]:
    """The recorded routings (`scripts/record_hidden.py`). Raises UsageError."""
    try:
        with np.load(path, allow_pickle=False) as data:
            return [
                Routing(kind, data[f"{kind}_experts"], data[f"{kind}_text"], str(data["label"]))
                for kind in KINDS
            ]
    except (OSError, ValueError, KeyError, EOFError, BadZipFile) as error:
        raise UsageError(f"{path} holds no recorded routing ({error}).") from None


def counted(routing: Routing, ks: Sequence[int] = (1, 2, 3, 4, 6, 8)) -> dict[int, Interval]:
    """k -> mean number of different experts in a layer over windows of k positions.

    Windows do not cross texts; every layer of a window counts. A text is the unit of the bootstrap, so
    that neighbouring windows do not pass for independent ones. Raises UsageError when no text has k
    positions.
    """
    out = {}
    for k in ks:
        means = []
        for text in np.unique(routing.text):
            mine = routing.experts[routing.text == text]
            if len(mine) < k:
                continue
            sizes = [
                len(np.unique(mine[start : start + k, layer]))
                for start in range(len(mine) - k + 1)
                for layer in range(mine.shape[1])
            ]
            means.append(float(np.mean(sizes)))
        if not means:
            raise UsageError(f"No recorded text has {k} positions, so no window can be counted.")
        out[k] = bootstrap_mean(means)
    return out


def rows(
    found: Sequence[tuple[Routing, dict[int, Interval]]], expected: Any
) -> list[dict[str, Any]]:
    """One row for each k: the formula (`expected(k)`) and what each kind of text counted."""
    ks = sorted({k for _, unions in found for k in unions})
    return [
        {
            "positions": k,
            "independent": expected(k),
            **{KINDS[r.kind]: unions[k].text(2) for r, unions in found if k in unions},
        }
        for k in ks
    ]
