#!/usr/bin/env python3
"""Records Sparklet on one NVIDIA GPU: NEXTN, NEXTN with the FP8 head, the trap, and the baseline.

    python scripts/record_sparklet_gpu.py OUT_FOLDER [--seconds 540] [--port 30790]

For a machine that holds SGLang and nothing else of ours. Each arm is one server of the recipe
`sparklet-gpu`; its answers (`h200-ARM.json`, see record_sparklet.py) and its log are on the disk
while it runs, the log compressed when it has ended. The first arm compiles kernels for minutes, so
the others start, all at once, when it is ready. `nextn` and `baseline` are stock SGLang; the other
two find the plugin in a temporary folder.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import record_sparklet as rec

# torch 2.11 lacks what the Rust prefix tree of SGLang 0.5.23 was compiled against, and DeepGEMM does
# not load; the pools are sized by max-total-tokens, so a large share only tolerates other programs.
FLAGS = ("--disable-radix-cache", "--mem-fraction-static", "0.8")
ENV = {
    "SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK": "1",
    "SGLANG_ENABLE_JIT_DEEPGEMM": "0",
    "FLASHINFER_DISABLE_VERSION_CHECK": "1",
    "HUMMING_COMPILER": "nvrtc",
    "HF_HUB_OFFLINE": "1",
}

# What the first sampled request would compile, made while the first server starts.
WARM = """
import math, sys, time
began = time.monotonic()
def one(name, make):
    try:
        make()
    except Exception as error:
        print(name, "failed:", repr(error)[:300], flush=True)
    else:
        print(f"{name} compiled after {time.monotonic() - began:.0f} s", flush=True)
def verify():
    from sglang.kernels.ops.speculative import sampling
    sampling._jit_sampling_module(math.gcd(4, int(sys.argv[1])), True)
def flashinfer():
    from flashinfer.sampling import get_sampling_module
    get_sampling_module()
one("verification", verify)
one("sampling", flashinfer)
"""

PLUGIN = "sparkling_sglang"


@dataclass(frozen=True)
class Arm:
    """A server and how many of each kind of request it is asked."""

    switches: tuple[str, ...]
    greedy: int
    sampled: int
    repeated: int
    variant: str | None = None
    plugin: bool = False


ARMS = {
    "nextn": Arm(("humming", "nextn"), 50, 50, 16),
    "fp8-nextn": Arm(("humming", "fp8-head", "nextn"), 50, 50, 16, plugin=True),
    "trap": Arm(("humming", "fp8-head", "nextn"), 20, 20, 8, variant="trap", plugin=True),
    "baseline": Arm(("humming",), 50, 0, 16),
}
FIRST = "nextn"


def versions() -> dict[str, str]:
    """Versions of what computes, and the GPU's name."""
    out = {"python": sys.version.split()[0]}
    for name in (
        "torch",
        "triton",
        "sglang",
        "sglang-kernel",
        "humming-kernels",
        "flashinfer-python",
        "transformers",
    ):
        try:
            out[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            out[name] = "none"
    asked = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        said = subprocess.run(asked, capture_output=True, text=True, timeout=30).stdout
        out["gpus"] = "; ".join(said.split("\n")).strip("; ")
    except (OSError, subprocess.SubprocessError) as error:
        out["gpus"] = repr(error)
    return out


def plugin_site(folder: Path) -> Path:
    """A folder for PYTHONPATH in which SGLang finds the plugin."""
    shutil.copytree(rec.ROOT / "lib" / PLUGIN / PLUGIN, folder / PLUGIN)
    info = folder / f"{PLUGIN}-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: sparkling-sglang\nVersion: 0.1.0\n"
    )
    (info / "entry_points.txt").write_text(f"[sglang.srt.plugins]\nsparkling = {PLUGIN}:register\n")
    return folder


class Runner:
    """All arms of one call: where they write, and until when."""

    def __init__(self, args: argparse.Namespace, site: Path) -> None:
        self.out, self.model, self.port, self.site = args.out, args.model, args.port, site
        self.recipe, self.ready = args.recipe, args.ready
        self.began = time.monotonic()
        self.end = self.began + args.seconds
        self.facts = {"versions": versions()}
        self.failed: list[str] = []
        self.flags = FLAGS if args.recipe == "sparklet-gpu" else ()

    def say(self, text: str) -> None:
        print(f"[{time.monotonic() - self.began:5.0f} s] {text}", flush=True)

    def left(self) -> float:
        return self.end - time.monotonic() - 15  # stopping a server takes some seconds

    def arm(self, name: str, ready: threading.Event | None = None) -> None:
        """Starts, asks and stops one server; says and keeps what failed instead of raising."""
        try:
            self._arm(name, ready)
        except Exception as error:
            self.failed.append(name)
            self.say(f"{name}: {error!r}"[:500])
        finally:
            if ready is not None:
                ready.set()
            log = self.out / f"h200-{name}.log"
            if log.exists():
                with gzip.open(f"{log}.gz", "wb", 9) as file:
                    file.write(log.read_bytes())

    def _arm(self, name: str, ready: threading.Event | None) -> None:
        arm = ARMS[name]
        env, status = dict(ENV), self.out / f"h200-{name}.status.json"
        if arm.plugin:
            path = os.environ.get("PYTHONPATH")
            env["PYTHONPATH"] = f"{self.site}:{path}" if path else str(self.site)
            env["SPARKLING_STATUS_FILE"] = str(status)
        log = self.out / f"h200-{name}.log"
        server = rec.started(
            self.recipe,
            self.model,
            self.port + list(ARMS).index(name) * 10,
            log,
            switches=arm.switches,
            variant=arm.variant,
            flags=self.flags,
            env=env,
        )
        self.say(f"{name}: starting")
        with server as (url, facts, process):
            took = rec.wait(url, min(self.ready, self.left()), process)
            self.say(f"{name}: ready after {took:.0f} s")
            if ready is not None:
                ready.set()
            facts |= self.facts | {"ready_s": round(took, 1)}
            if status.exists():
                facts["status"] = json.loads(status.read_text())
            made = rec.record(
                url,
                self.model,
                self.out / f"h200-{name}.json",
                arm.greedy,
                arm.sampled,
                arm.repeated,
                self.left(),
                facts,
            )
            kept = ("complete", "seconds", "accept_length", "right")
            self.say(f"{name}: {json.dumps({k: made[k] for k in kept})}")
            if not made.get("complete"):
                self.failed.append(name)

    def run(self, names: list[str]) -> int:
        """0 when every arm is complete."""
        config: dict[str, Any] = json.loads((self.model / "config.json").read_text())
        self.say(json.dumps(self.facts))
        warm = subprocess.Popen(
            [sys.executable, "-c", WARM, str(config["vocab_size"])],
            env={**os.environ, **ENV},
            stdin=subprocess.DEVNULL,
            stdout=(self.out / "h200-warm.log").open("wb"),
            stderr=subprocess.STDOUT,
        )
        ready, threads = threading.Event(), []
        first = FIRST if FIRST in names else names[0]
        try:
            for name in [first, *(n for n in names if n != first)]:
                event = ready if name == first else None
                threads.append(threading.Thread(target=self.arm, args=(name, event)))
                threads[-1].start()
                ready.wait()
            for thread in threads:
                thread.join()
        finally:
            if warm.poll() is None:
                warm.kill()
            warm.wait()
        self.say(f"failed: {', '.join(self.failed)}" if self.failed else "all arms are complete")
        return 1 if self.failed else 0


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--arms", default=",".join(ARMS), help="some of them, with commas")
    parser.add_argument("--seconds", type=float, default=540.0, help="for everything")
    parser.add_argument("--ready", type=float, default=360.0, help="for one server to be ready")
    parser.add_argument("--port", type=int, default=30790, help="this one and 10, 20, 30 higher")
    parser.add_argument("--recipe", default="sparklet-gpu", help="sparklet: a dry run on a CPU")
    parser.add_argument("--model", type=Path, default=rec.ROOT / "models" / "sparklet")
    args = parser.parse_args(argv)
    names = args.arms.split(",")
    if unknown := [n for n in names if n not in ARMS]:
        parser.error(f"unknown arms {unknown}; there are {', '.join(ARMS)}")
    args.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        return Runner(args, plugin_site(Path(folder) / "site")).run(names)


if __name__ == "__main__":
    raise SystemExit(main())
