"""Records of Ling's decode kernels alone: read, checked, and put against the device's byte limit.

A record is what `python -m sparkling_sglang.bench_shapes` writes in the server's Python (see
`shapes_live`): how fast the device reads memory, the LM head in three formats, routed experts for a
few tokens. One recorded on an H200 comes with the library (`read()`).

Definitions. A *sample* is one replay of a CUDA graph divided by its calls, in microseconds; n counts
samples. The *limit* is the fastest measured reading of a large buffer on the same device in the same
run, in bytes/s; the *least time* of a case is its bytes over the limit. A *cost* is the median time of
some tokens over the median time of one token. The *union* is the number of different experts that a
call's tokens chose, counted on the routes that were timed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from sparkling import stats, traffic
from sparkling.checked import Wrong, count_of, list_of, number_of, table_of, text_of
from sparkling.costmodel import Range
from sparkling.errors import UsageError

SCHEMA = "sparkling-kernel-shapes/1"
RECORDED = Path(__file__).parent / "facts" / "h200-kernel-shapes.json"
ROUTINGS = ("random", "repeated")
PARTS = ("layer", "products")
LEAST = 3  # samples
ROUNDING = 0.02
"""Relative distance from float32 up to which an output of the experts is called rounded; the benchmark
has the same (`shapes_experts.WRONG`)."""
EQUAL = 0.02
"""Costs that differ by less are called equal (our choice of a word)."""


@dataclass(frozen=True)
class Times:
    """Samples of one case in microseconds, and how many calls a sample is the mean of."""

    us: tuple[float, ...]
    calls: int
    graph: bool

    @property
    def n(self) -> int:
        return len(self.us)

    @property
    def median(self) -> float:
        return median(self.us)

    @property
    def quartiles(self) -> tuple[float, float]:
        """The first and the third."""
        first, _, third = quantiles(self.us, n=4, method="inclusive")
        return first, third


@dataclass(frozen=True)
class HeadCase:
    """The LM head's product for `rows` rows; `error` is the logits' distance from float32."""

    format: str
    rows: int
    kernel: str
    bytes: int
    error: float
    times: Times


@dataclass(frozen=True)
class ExpertCase:
    """Routed experts of one layer for `tokens` tokens.

    part: "layer", all that SGLang does once the router has chosen; "products", its two matrix
    products alone. union: mean over all timed calls; least and most of a single call beside it.
    """

    backend: str
    tokens: int
    routing: str
    part: str
    union: float
    union_span: tuple[int, int]
    times: Times


@dataclass(frozen=True)
class Record:
    """One run of the benchmark on one device."""

    device: str
    facts: Mapping[str, Any]
    taken: str
    command: str
    versions: Mapping[str, str]
    clocks: Mapping[str, Any]
    limit: float  # bytes/s
    reader: str
    readers: Mapping[str, Times]
    read_bytes: int
    head: tuple[HeadCase, ...]
    head_shape: tuple[int, int]  # vocabulary, hidden
    experts: tuple[ExpertCase, ...]
    experts_of: int
    top_k: int
    expert_bytes: Mapping[str, float]  # as stored, by backend
    expert_errors: Mapping[str, float]  # distance from float32, by backend
    missing: tuple[str, ...]
    remarks: tuple[str, ...] = ()  # what was found about the record after the run

    def shown_right(self, backend: str) -> bool:
        """Whether one token's output of this backend was shown to be float32's but for rounding."""
        return self.expert_errors[backend] < ROUNDING

    def moved(self, case: HeadCase | ExpertCase) -> float:
        """Bytes of weights that a call of this case must read."""
        if isinstance(case, HeadCase):
            return float(case.bytes)
        return case.union * self.expert_bytes[case.backend]

    def least_us(self, case: HeadCase | ExpertCase) -> float:
        """The least time of a case: its bytes at the limit."""
        return self.moved(case) / self.limit * 1e6

    def share(self, case: HeadCase | ExpertCase) -> float:
        """Least time over measured time: the share of the limit that is reached."""
        return self.least_us(case) / case.times.median

    def expert_case(
        self, tokens: int, routing: str = "random", part: str = "layer", backend: str = "humming"
    ) -> ExpertCase | None:
        """The case, or None when it was not measured. One token stands as "random"."""
        routing = "random" if tokens == 1 else routing
        wanted = (backend, tokens, routing, part)
        for case in self.experts:
            if (case.backend, case.tokens, case.routing, case.part) == wanted:
                return case
        return None

    def cost(self, case: ExpertCase) -> stats.Interval | None:
        """Median time of this case over that of one token, with a 95 % interval from resampled
        samples; None where one token was not measured (or with another number of samples)."""
        one = self.expert_case(1, part=case.part, backend=case.backend)
        if one is None or one.times.n != case.times.n:
            return None
        return stats.bootstrap_quantile_ratio(case.times.us, one.times.us, 0.5)

    def predicted(self, case: ExpertCase) -> Range | None:
        """What the cost model says of this case's cost, from bytes and the time of one token.

        One end: time is proportional to bytes, so the cost is union / top k. The other: only the
        added experts count, read at the limit. Unions are the model's own: independent choices for
        random routing, top k for repeated.
        """
        one = self.expert_case(1, part=case.part, backend=case.backend)
        if one is None:
            return None
        union = float(self.top_k)
        if case.routing == "random":
            union = traffic.union(case.tokens, experts=self.experts_of, top_k=self.top_k)
        added = (union - self.top_k) * self.expert_bytes[case.backend]
        part = 1 + added / self.limit * 1e6 / one.times.median
        return Range(min(part, union / self.top_k), max(part, union / self.top_k))


def verdict(cost: stats.Interval, predicted: Range) -> str:
    """Measured against predicted cost in words; an interval that comes within `EQUAL` of the range is
    within, since samples of a graph scatter less than one run differs from the next."""
    low = cost.value if cost.low is None else cost.low
    high = cost.value if cost.high is None else cost.high
    if low > predicted.high * (1 + EQUAL):
        return "above: it costs more than its bytes"
    if high < predicted.low * (1 - EQUAL):
        return "below: cheaper than the added bytes at the limit"
    return "within"


# -- reading ---------------------------------------------------------------------------------------


@cache
def recorded() -> Record:
    """The record that comes with the library, from one NVIDIA H200."""
    return read(RECORDED)


def read(path: Path | str) -> Record:
    """Read and check a record.

    Raises:
        UsageError: the file cannot be read, is no such record, or what no case can do without
            (the limit) was not measured.
    """
    path = Path(path)
    try:
        data = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise UsageError(f"{path} cannot be read ({error.strerror or error}).") from None
    except ValueError:
        raise UsageError(f"{path} is not JSON, so it is no record of the kernels.") from None
    try:
        return of(data)
    except Wrong as wrong:
        raise UsageError(
            f"{path} is no usable record of the kernels: {wrong}; measure again with "
            "`sparkling shapes --measure`."
        ) from None


def of(data: Any) -> Record:
    """A record from its JSON; raises `Wrong`. Cases that failed are named in `Record.missing`."""
    top = table_of(data, "it")
    if top.get("schema") != SCHEMA:
        raise Wrong(f"its schema is {top.get('schema')!r} and {SCHEMA!r} is known")
    band = table_of(top.get("bandwidth"), "bandwidth")
    facts = table_of(top.get("device"), "device")
    shape = table_of(top.get("expert_shape", {}), "expert_shape")
    sizes = table_of(top.get("head_shape", {"vocab": 1, "hidden": 1}), "head_shape")
    backends = table_of(top.get("backends", {}), "backends")
    missing = [
        f"{text_of(one.get('part'), 'failed.part')}: {text_of(one.get('reason'), 'failed.reason')}"
        for one in (table_of(row, "failed") for row in list_of(top.get("failed"), "failed"))
    ]
    if top.get("stopped"):
        missing.append(text_of(top["stopped"], "stopped"))
    readers = {
        name: _times(table_of(way, f"bandwidth.ways.{name}"), f"bandwidth.ways.{name}")
        for name, way in table_of(band.get("ways"), "bandwidth.ways").items()
        if "error" not in table_of(way, f"bandwidth.ways.{name}")
    }
    reader = text_of(band.get("best"), "bandwidth.best")
    if reader not in readers:
        raise Wrong(f"bandwidth.best is {reader!r}, of which bandwidth.ways has no times")
    experts = tuple(
        _expert(table_of(case, f"experts[{i}]"), f"experts[{i}]", backends)
        for i, case in enumerate(list_of(top.get("experts", []), "experts"))
        if "error" not in table_of(case, f"experts[{i}]")
    )
    if experts and not shape:
        raise Wrong("expert_shape is missing")
    many, top_k = (count_of(shape.get(k, 1), f"expert_shape.{k}") for k in ("experts", "top_k"))
    if top_k > many:
        raise Wrong(f"expert_shape.top_k is {top_k} of {many} experts")
    return Record(
        device=text_of(facts.get("name"), "device.name"),
        facts=facts,
        taken=text_of(top.get("taken"), "taken"),
        command=text_of(top.get("command"), "command"),
        versions={
            name: text_of(version, f"versions.{name}")
            for name, version in table_of(top.get("versions"), "versions").items()
        },
        clocks={
            when: table_of(said, f"clocks.{when}")
            for when, said in table_of(top.get("clocks", {}), "clocks").items()
        },
        limit=number_of(band.get("bytes_s"), "bandwidth.bytes_s"),
        reader=reader,
        readers=readers,
        read_bytes=count_of(band.get("bytes"), "bandwidth.bytes"),
        head=tuple(
            _head(table_of(case, f"head[{i}]"), f"head[{i}]")
            for i, case in enumerate(list_of(top.get("head", []), "head"))
            if "error" not in table_of(case, f"head[{i}]")
        ),
        head_shape=(
            count_of(sizes.get("vocab"), "head_shape.vocab"),
            count_of(sizes.get("hidden"), "head_shape.hidden"),
        ),
        experts=experts,
        experts_of=many,
        top_k=top_k,
        expert_bytes=_numbers(backends, "expert_bytes_stored"),
        expert_errors=_numbers(backends, "relative_error", least=0.0),
        missing=tuple(missing),
        remarks=tuple(
            text_of(one, "remarks") for one in list_of(top.get("remarks", []), "remarks")
        ),
    )


def _head(case: dict[str, Any], where: str) -> HeadCase:
    return HeadCase(
        text_of(case.get("format"), f"{where}.format"),
        count_of(case.get("rows"), f"{where}.rows"),
        text_of(case.get("kernel"), f"{where}.kernel"),
        count_of(case.get("bytes"), f"{where}.bytes"),
        number_of(case.get("relative_error"), f"{where}.relative_error", least=0.0),
        _times(case, where),
    )


def _expert(case: dict[str, Any], where: str, backends: Mapping[str, Any]) -> ExpertCase:
    backend = text_of(case.get("backend"), f"{where}.backend")
    if backend not in backends:
        raise Wrong(f"{where}.backend is {backend!r}, of which backends says nothing")
    for key, known in (("routing", ROUTINGS), ("part", PARTS)):
        if case.get(key) not in known:
            raise Wrong(f"{where}.{key} is {case.get(key)!r} and not {' or '.join(known)}")
    unions = [number_of(u, f"{where}.union") for u in list_of(case.get("union"), f"{where}.union")]
    times = _times(case, where)
    if len(unions) != times.n:
        raise Wrong(f"{where} has {times.n} times and {len(unions)} unions")
    span = (
        count_of(case.get("union_least"), f"{where}.union_least"),
        count_of(case.get("union_most"), f"{where}.union_most"),
    )
    tokens = count_of(case.get("tokens"), f"{where}.tokens")
    mean = sum(unions) / len(unions)
    return ExpertCase(backend, tokens, case["routing"], case["part"], mean, span, times)


def _times(case: dict[str, Any], where: str) -> Times:
    us = [number_of(v, f"{where}.us") for v in list_of(case.get("us"), f"{where}.us")]
    if len(us) < LEAST:
        raise Wrong(f"{where}.us has {len(us)} samples and {LEAST} are needed")
    return Times(tuple(us), count_of(case.get("calls"), f"{where}.calls"), bool(case.get("graph")))


def _numbers(
    backends: Mapping[str, Any], key: str, *, least: float | None = None
) -> dict[str, float]:
    return {
        name: number_of(
            table_of(b, f"backends.{name}").get(key), f"backends.{name}.{key}", least=least
        )
        for name, b in backends.items()
    }
