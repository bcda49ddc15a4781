"""Timing of a short GPU function: a CUDA graph of many calls, replayed between two events.

One sample is one replay's time divided by its calls. Python and the launches are no part of it (a
decode step of SGLang replays a graph too), and each call of a graph gets its own weights and inputs
from the caller, so that nothing it reads is still in the cache.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

Step = Callable[[int], Any]
"""One call; its argument is the call's number within the graph."""
Refill = Callable[[int], Any]
"""Give the buffers that the calls read new contents before replay number n."""

SLEEP_CYCLES = 400_000  # about 0.2 ms: the GPU is still busy when the replay has been queued
WARM_UPS = 2


@dataclass(frozen=True)
class Timing:
    """Microseconds a call, one entry for each replay; `graph` says whether a graph was replayed."""

    us: list[float]
    calls: int
    graph: bool = True
    notes: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        return {
            "us": [round(value, 4) for value in self.us],
            "calls": self.calls,
            "graph": self.graph,
            **({"notes": self.notes} if self.notes else {}),
        }


class GraphTimer:
    """Times calls on the current CUDA device.

    Args:
        repeats: replays, each one sample.
    """

    def __init__(self, repeats: int = 20) -> None:
        self.repeats = repeats

    def time(self, step: Step, calls: int, refill: Refill | None = None) -> Timing:
        """Time `step(0)` to `step(calls - 1)`, captured once and replayed `repeats` times.

        A function that cannot be captured is launched call by call instead, which adds the cost of
        the launches; `Timing.graph` is False then and a note says why.
        """
        if refill is not None:
            refill(0)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_UPS):  # compiles, and lets libraries choose before the capture
                for call in range(min(calls, 8)):
                    step(call)
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        notes: list[str] = []
        graph: torch.cuda.CUDAGraph | None = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                for call in range(calls):
                    step(call)
        except Exception as error:
            torch.cuda.synchronize()
            graph = None
            notes.append(f"no CUDA graph: {type(error).__name__}: {error}"[:300])

        def run() -> None:
            if graph is not None:
                graph.replay()
            else:
                for call in range(calls):
                    step(call)

        run()
        torch.cuda.synchronize()
        samples = []
        for repeat in range(self.repeats):
            if refill is not None:
                refill(repeat + 1)
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            if hasattr(torch.cuda, "_sleep"):
                torch.cuda._sleep(SLEEP_CYCLES)
            start.record()
            run()
            end.record()
            torch.cuda.synchronize()
            samples.append(start.elapsed_time(end) * 1000 / calls)
        return Timing(samples, calls, graph is not None, notes)


class HostTimer:
    """The same by the host's clock, for a device without events: tests, never a record."""

    def __init__(self, repeats: int = 3) -> None:
        self.repeats = repeats

    def time(self, step: Step, calls: int, refill: Refill | None = None) -> Timing:
        samples = []
        for repeat in range(self.repeats):
            if refill is not None:
                refill(repeat)
            began = time.perf_counter()
            for call in range(calls):
                step(call)
            samples.append((time.perf_counter() - began) * 1e6 / calls)
        return Timing(samples, calls, graph=False, notes=["host clock"])
