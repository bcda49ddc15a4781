"""Ling's SwiGLU limit in SGLang's runners: what `scripts/check_clamp.py` found, read or run now.

One MoE layer, built as SGLang builds it ("stock") and with the plugin's hook ("hooked"), against a
float32 product of the same weights with the limit and without it. An *error* is the root mean square
of the difference over that of the reference. A time is one CUDA graph of several calls, divided by the
calls; a layer's calls have experts of their own. The two layers have weights of their own as well, at
other addresses, so their difference may be more than the activation's.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparkling import gpu_child, gpus
from sparkling.errors import SparklingError, UsageError
from sparkling.lane import Lane

RECORDED = Path("tests/data/h200/swiglu-clamp.json")
SCRIPT = Path("scripts/check_clamp.py")
PRACTICE = Path("models/sparklet/config.json")
LIMIT_S = 240.0
GRACE_S = 15.0
KINDS = ("stock", "hooked", "hooked_without_limit")


@dataclass(frozen=True)
class Output:
    """One layer's output for one input.

    errors: kind -> (to the limited, to the unlimited reference). unlike_stock: kind -> entries that
    differ in any bit from the stock layer's, of `entries`. beyond: shares of the gates and of the
    ups that exceed the limit.
    """

    runner: str
    experts: int
    tokens: int
    exceeds: bool
    beyond: tuple[float, float]
    errors: Mapping[str, tuple[float, float]]
    unlike_stock: Mapping[str, int]
    entries: int
    repeats: bool  # whether the stock layer gives the same bits twice


@dataclass(frozen=True)
class Times:
    """Microseconds of a layer, or of its activation alone, stock and hooked in turns.

    more: hooked minus stock, paired. experts: 0 for the activation alone.
    """

    runner: str
    experts: int
    tokens: int
    stock: Mapping[str, float]  # median, q1, q3, n
    hooked: Mapping[str, float]
    more: Mapping[str, Any]  # the same, and interval: 95 % of the bootstrapped medians
    graph_is_eager: bool  # whether the graphs' outputs are the eager ones


@dataclass(frozen=True)
class Record:
    """All that one run found."""

    where: str
    date: str
    command: str
    shape: Mapping[str, Any]
    versions: Mapping[str, Any]
    outcomes: Mapping[str, str]  # runner -> "done" or why not
    compiled: Mapping[str, str]  # runner -> which kernels, if not all as in a server
    outputs: list[Output]
    times: list[Times]
    kernel_times: list[Times]
    activations: list[Mapping[str, Any]]
    reproduction: Mapping[str, Any] | None
    failures: list[tuple[str, str, str]]  # runner, step, error

    @property
    def runners(self) -> list[str]:
        """Those that computed at least one output."""
        return list(dict.fromkeys(one.runner for one in self.outputs))

    def largest(self, runner: str) -> list[Output]:
        """A runner's outputs with the most experts that were tried."""
        mine = [one for one in self.outputs if one.runner == runner]
        most = max((one.experts for one in mine), default=0)
        return [one for one in mine if one.experts == most]


def read(path: Path) -> Record:
    """A file that `scripts/check_clamp.py` wrote. Raises SparklingError when it is none."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        return _record(data)
    except OSError as error:
        raise SparklingError(f"{path} cannot be read: {error.strerror}.") from error
    except (ValueError, KeyError, TypeError, StopIteration) as error:
        raise SparklingError(
            f"{path} is no result of {SCRIPT}: {type(error).__name__}: {error}."
        ) from error


def _record(data: Mapping[str, Any]) -> Record:
    runners: Mapping[str, Any] = data["runners"]
    cases = [(name, case) for name, found in runners.items() for case in found["cases"]]
    versions = next((f["versions"] for f in runners.values() if f.get("versions")), {})
    outputs, times, kernel_times = [], [], []
    for name, case in cases:
        runner = name if versions.get("gpu") else "cpu"
        if case["level"] == "layer":
            outputs.append(_output(runner, case))
        elif case["level"] == "time":
            graphs = all(case["graph_equals_eager"].values())
            size = runner, case["experts"], case["tokens"]
            times.append(Times(*size, case["stock"], case["hooked"], case["difference"], graphs))
        elif case["level"] == "activation time":
            found = case["stock"], case["hooked"], case["difference"]
            kernel_times.append(Times(runner, 0, case["tokens"], *found, True))
    return Record(
        where=versions.get("gpu") or "this CPU",
        date=data["date"],
        command=data["command"],
        shape=data["shape"],
        versions=versions,
        outcomes={name: found["outcome"] for name, found in runners.items()},
        compiled={name: f["compiled"] for name, f in runners.items() if "compiled" in f},
        outputs=outputs,
        times=times,
        kernel_times=kernel_times,
        activations=[case for _, case in cases if case["level"] == "activation"],
        reproduction=next((case for _, case in cases if case["level"] == "reproduction"), None),
        failures=[
            (name, failure["step"], failure["error"])
            for name, found in runners.items()
            for failure in found["failures"]
        ],
    )


def _output(runner: str, case: Mapping[str, Any]) -> Output:
    kinds = {kind: case[kind] for kind in KINDS if kind in case}
    return Output(
        runner,
        case["experts"],
        case["tokens"],
        case["input"] == "exceeding",
        (case["gates_beyond"], case["ups_beyond"]),
        {kind: (v["error_to_clamped"], v["error_to_unclamped"]) for kind, v in kinds.items()},
        {kind: v["entries_unlike_stock"] for kind, v in kinds.items()},
        case["entries"],
        case["stock_repeats"],
    )


def recorded(root: Path) -> Record:
    """The record that comes with this repository: one H200, without a server."""
    return read(root / RECORDED)


def refusal(lane: Lane, holders: Callable[[], gpus.Holders] = gpus.holders) -> str | None:
    """Why it cannot be run here now, in one sentence, or None."""
    if not lane.server_python.exists():
        return f"There is no server environment at {lane.server_python}; run {lane.set_up}."
    return None if lane.kind == "cpu" else gpus.not_alone(holders(), "times need it to themselves")


def run(lane: Lane, out: Path, *, limit_s: float = LIMIT_S) -> Record:
    """Run it on this machine: on a GPU Ling's shapes in Humming, on a CPU Sparklet's in the lane's
    own experts (nothing is timed there).

    out: the JSON file to write. Raises UsageError when it cannot run now, SparklingError when it
    failed; the script's own limit is `limit_s`.
    """
    if reason := refusal(lane):
        raise UsageError(reason)
    command = [str(lane.server_python), str(lane.root / SCRIPT), "--out", str(out)]
    command += ["--limit-s", f"{limit_s:g}"]
    if lane.kind == "cpu":
        command += ["--dry-run", "--runners", "triton", "--config", str(lane.root / PRACTICE)]
    else:
        command += ["--runners", "humming"]
    out.parent.mkdir(parents=True, exist_ok=True)
    out.unlink(missing_ok=True)
    last = gpu_child.run(
        lane,
        command,
        out.with_suffix(".log"),
        limit_s=limit_s,
        grace_s=GRACE_S,
        parting=signal.SIGTERM,  # it ends its own children
    )
    if not out.exists():
        raise SparklingError(f"The layers were not computed; {SCRIPT} said: {last}")
    found = read(out)
    if not found.outputs:
        why = found.failures[0][2] if found.failures else next(iter(found.outcomes.values()), "")
        raise SparklingError(f"{SCRIPT} computed nothing ({why}), see the logs in {out.parent}.")
    return found
