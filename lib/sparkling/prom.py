"""Prometheus' text format, as much of it as a `/metrics` page of SGLang needs."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

_SAMPLE = re.compile(r"([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(.*)\})?\s+(\S+)(?:\s+-?\d+)?\s*$")
_LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:\\.|[^"\\])*)"')


class Sample(NamedTuple):
    name: str
    labels: dict[str, str]
    value: float
    kind: str  # counter, gauge, histogram, summary, untyped


def parse(text: str) -> Iterator[Sample]:
    """Every sample of the page; lines that are none are skipped."""
    kinds: dict[str, str] = {}
    for line in text.splitlines():
        if line.startswith("# TYPE "):
            _, _, name, kind = [*line.split(None, 3), "untyped"][:4]
            kinds[name] = kind
            continue
        match = _SAMPLE.match(line)
        if line.startswith("#") or match is None:
            continue
        name, labels, value = match.groups()
        try:
            number = float(value)
        except ValueError:
            continue
        family = re.sub(r"_(bucket|sum|count)$", "", name)
        kind = kinds.get(name) or kinds.get(family) or "untyped"
        yield Sample(name, dict(_LABEL.findall(labels or "")), number, kind)


def flatten(text: str) -> dict[str, float]:
    """One number per metric name: counters (and sums and counts of histograms) added up over their
    labels, gauges the largest. Buckets are left out. A name that is absent stays absent: unknown is
    not zero."""
    out: dict[str, float] = {}
    for sample in parse(text):
        if sample.name.endswith("_bucket"):
            continue
        if sample.name not in out:
            out[sample.name] = sample.value
        elif sample.kind == "gauge":
            out[sample.name] = max(out[sample.name], sample.value)
        else:
            out[sample.name] += sample.value
    return out
