"""Ling's decode kernels alone, on the CUDA device at hand: memory, LM head, routed experts.

    python -m sparkling_sglang.bench_shapes --out shapes.json

runs in the server's Python (torch, SGLang, Humming) and needs no server and no checkpoint: weights
are random, shapes are Ling-3.0-flash's. The record is rewritten after every case, so a run that is
stopped keeps what it had. Nothing else may use the GPU meanwhile.

Exit codes: 0 all cases measured; 1 no CUDA device, a case that failed, or the time limit (the record
then says what is missing); 2 wrong arguments.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from statistics import median
from typing import Any

SCHEMA = "sparkling-kernel-shapes/1"
PARTS = ("bandwidth", "head", "experts", "marlin")
DEFAULT = ("bandwidth", "head", "experts")  # Marlin compiles for minutes when first used
LIMIT_S = 300.0
PACKAGES = ("torch", "triton", "sglang", "sglang-kernel", "humming-kernels", "numpy")
SMI_FIELDS = "clocks.sm,clocks.mem,clocks.max.sm,clocks.max.mem,power.draw,driver_version"


class Record:
    """The JSON file of one run, rewritten whole after every case. Safe to use from two threads."""

    def __init__(self, path: Path, fields: dict[str, Any]) -> None:
        self.path, self.fields = path, fields
        self.began = time.monotonic()
        self._lock = threading.RLock()

    def put(self, **fields: Any) -> None:
        """Set top-level fields and write."""
        with self._lock:
            self.fields.update(fields)
            self.write()

    def add(self, part: str, case: dict[str, Any]) -> None:
        """Append a case to a part's list and write."""
        with self._lock:
            self.fields.setdefault(part, []).append(case)
            self.write()

    def fail(self, part: str, reason: str) -> None:
        """Note that a part, or a case of it, could not be measured."""
        with self._lock:
            self.fields["failed"].append({"part": part, "reason": reason[:500]})
            self.write()

    def write(self) -> None:
        with self._lock:
            self.fields["seconds"] = round(time.monotonic() - self.began, 2)
            part = self.path.with_name(self.path.name + ".part")
            text = json.dumps(self.fields, indent=1, default=str)
            part.write_text(text + "\n", "utf-8")
            part.replace(self.path)


def seconds(text: str) -> float:
    """A positive, finite number of seconds from the command line."""
    value = float(text)
    if not (math.isfinite(value) and value > 0):
        raise ValueError(text)
    return value


def parts(text: str) -> tuple[str, ...]:
    """Comma-separated names of parts, in the order in which they are measured."""
    asked = [name.strip() for name in text.split(",") if name.strip()]
    if not asked or not set(asked) <= set(PARTS):
        raise argparse.ArgumentTypeError(f"{text!r} (choose from {', '.join(PARTS)})")
    return tuple(name for name in PARTS if name in asked)


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m sparkling_sglang.bench_shapes", description=__doc__.split("\n")[0]
    )
    made.add_argument("--out", type=Path, required=True, help="the record to write (JSON)")
    made.add_argument(
        "--limit-s", type=seconds, default=LIMIT_S, help=f"stop after so long ({LIMIT_S:g})"
    )
    made.add_argument(
        "--only", type=parts, default=DEFAULT, help=f"of {','.join(PARTS)} ({','.join(DEFAULT)})"
    )
    made.add_argument("--repeats", type=int, default=20, help="graph replays a case (20)")
    return made


def command_of(args: argparse.Namespace) -> str:
    """The command that measures the same again, without this machine's paths."""
    return (
        f"python -m sparkling_sglang.bench_shapes --out {args.out.name} "
        f"--only {','.join(args.only)} --repeats {args.repeats} --limit-s {args.limit_s:g}"
    )


def versions() -> dict[str, str]:
    """Versions of what was measured with; a package without metadata is left out."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def clocks() -> dict[str, str]:
    """What nvidia-smi says of clocks and power now; {} where it is not there or does not answer."""
    ask = ["nvidia-smi", f"--query-gpu={SMI_FIELDS}", "--format=csv,noheader"]
    ask.append(f"--id={os.environ.get('CUDA_VISIBLE_DEVICES', '0').split(',')[0] or '0'}")
    try:
        said = subprocess.run(ask, capture_output=True, text=True, timeout=10, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return {}
    values = [value.strip() for value in said.strip().splitlines()[0].split(",")]
    return dict(zip(SMI_FIELDS.split(","), values, strict=False))


def device_facts(torch: Any, device: Any) -> dict[str, Any]:
    """Name and size of the device."""
    facts = torch.cuda.get_device_properties(device)
    return {
        "name": facts.name,
        "capability": f"{facts.major}.{facts.minor}",
        "sms": facts.multi_processor_count,
        "memory_bytes": facts.total_memory,
        "l2_bytes": getattr(facts, "L2_cache_size", None),
        "cuda": torch.version.cuda,
    }


def stop_at(limit: float, record: Record, leave: Callable[[int], Any] = os._exit) -> Any:
    """Start the watch that ends this process at the limit, however stuck it is: the record keeps
    what it has and says that it was stopped."""

    def stop() -> None:
        text = f"stopped at the limit of {limit:g} s"
        record.put(stopped=text)
        print(f"bench_shapes: error: {text}; {record.path} holds what was measured.", flush=True)
        leave(1)

    watch = threading.Timer(limit, stop)
    watch.daemon = True
    watch.start()
    return watch


def _say(record: Record, text: str) -> None:
    print(f"[{time.monotonic() - record.began:6.1f} s] {text}", flush=True)


def _share(record: Record, moved: float, us: list[float]) -> str:
    limit = record.fields.get("bandwidth", {}).get("bytes_s")
    rate = moved / (median(us) * 1e-6)
    share = f", {100 * rate / limit:.0f} % of the limit" if limit else ""
    return f"{median(us):.1f} us, {rate / 1e9:,.0f} GB/s{share}"


def measure_bandwidth(record: Record, timer: Any, device: Any) -> None:
    from sparkling_sglang import shapes_read

    found = shapes_read.measure(timer, device, shapes_read.buffer_size(device))
    record.put(bandwidth=found)
    _say(record, f"memory read at {found['bytes_s'] / 1e9:,.0f} GB/s ({found['best']})")


def measure_head(record: Record, timer: Any, device: Any) -> None:
    from sparkling_sglang import shapes_head

    record.put(head_shape=vars(shapes_head.HeadShape()))
    for case in shapes_head.measure(timer, device):
        record.add("head", case)
        what = f"head {case['format']}, {case.get('rows', '?')} rows ({case.get('kernel', '?')})"
        if "error" in case:
            record.fail("head", f"{what}: {case['error']}")
            _say(record, f"{what} FAILED: {case['error']}")
        else:
            _say(record, f"{what}: {_share(record, case['bytes'], case['us'])}")


def measure_experts(record: Record, timer: Any, device: Any, backend: str) -> None:
    from sparkling_sglang import shapes_backends
    from sparkling_sglang import shapes_experts as experts

    shape = shapes_backends.ExpertShape()
    record.put(expert_shape=vars(shape))
    layers = experts.layers_that_fit(shape, device)
    bench = experts.Bench(shapes_backends.BACKENDS[backend](shape), shape, device, layers=layers)
    if not math.isfinite(bench.relative_error):  # nothing to time, and JSON has no word for it
        raise RuntimeError(f"one token's output of {backend} has values that are no numbers")
    facts = bench.facts()
    record.put(backends={**record.fields.get("backends", {}), backend: facts})
    _say(record, f"{backend}: {layers} layers ready in {bench.setup_s:.1f} s, {facts}")
    if not bench.right:
        reason = f"one token's output is {bench.relative_error:.2g} away from float32"
        record.fail(backend, f"{reason}, which is not rounding: its times stand for nothing")
        _say(record, f"{backend} is WRONG: {reason}")
    for case in experts.measure(timer, bench):
        record.add("experts", case)
        what = f"{backend} {case['part']}, {case['tokens']} tokens {case['routing']}"
        if "error" in case:
            record.fail(backend, f"{what}: {case['error']}")
            _say(record, f"{what} FAILED: {case['error']}")
        else:
            union = sum(case["union"]) / len(case["union"])
            moved = union * facts["expert_bytes_stored"]
            _say(record, f"{what}: union {union:.1f}, {_share(record, moved, case['us'])}")


def measure_all(record: Record, wanted: Sequence[str], timer: Any, device: Any) -> None:
    """Every wanted part; one that fails is noted and the next follows."""
    todo: dict[str, Callable[[], None]] = {
        "bandwidth": lambda: measure_bandwidth(record, timer, device),
        "head": lambda: measure_head(record, timer, device),
        "experts": lambda: measure_experts(record, timer, device, "humming"),
        "marlin": lambda: measure_experts(record, timer, device, "marlin"),
    }
    for part in wanted:
        try:
            todo[part]()
        except Exception as error:
            record.fail(part, f"{type(error).__name__}: {error}")
            _say(record, f"{part} FAILED: {type(error).__name__}: {error}")
        _free()


def _free() -> None:
    import gc

    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and write the record; see the module's text for the exit codes."""
    asked = list(sys.argv[1:] if argv is None else argv)
    args = parser().parse_args(asked)
    if args.repeats < 3:
        parser().error(f"--repeats is {args.repeats}: a median needs 3 or more.")
    if not args.out.resolve().parent.is_dir():
        parser().error(f"--out lies in a folder that does not exist: {args.out.parent}.")
    import torch

    if not torch.cuda.is_available():
        print(
            "bench_shapes: error: PyTorch sees no CUDA device here: run this in the server "
            "environment of a machine with an NVIDIA GPU.",
            file=sys.stderr,
        )
        return 1
    device = torch.device("cuda", torch.cuda.current_device())
    record = Record(
        args.out,
        {
            "schema": SCHEMA,
            "taken": datetime.now(UTC).isoformat(timespec="seconds"),
            "command": command_of(args),
            "complete": False,
            "stopped": None,
            "failed": [],
            "parts": list(args.only),
            "repeats": args.repeats,
            "device": device_facts(torch, device),
            "clocks": {"before": clocks()},
            "versions": versions(),
        },
    )
    record.write()
    watch = stop_at(args.limit_s, record)
    _say(record, f"{record.fields['device']}")
    from sparkling_sglang.shapes_timing import GraphTimer

    with torch.no_grad():
        measure_all(record, args.only, GraphTimer(args.repeats), device)
    watch.cancel()
    after = {**record.fields["clocks"], "after": clocks()}
    record.put(clocks=after, complete=not record.fields["failed"])
    failed = len(record.fields["failed"])
    _say(record, f"written to {args.out}" + (f"; {failed} cases FAILED" if failed else ""))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
