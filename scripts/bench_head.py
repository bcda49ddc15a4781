#!/usr/bin/env python3
"""Time the FP8 LM head against everything else that could compute it, side by side on a CUDA GPU.

    python3 scripts/bench_head.py --out lm-head.json

Needs torch and cuda.bindings; Triton and Humming (``--parts plain`` leaves it out) are timed where
they can be imported. A time is that of one product within a CUDA graph that walks through four
copies of the weights twice, so that each product reads them from memory: no cache holds 402 MB.
Every case is captured once and replayed in three passes over all cases; n counts the replays.
Shares are of the read bandwidth measured in the same process by reading 3.2 GB at once.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import functools
import importlib.util
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "lib" / "sparkling_sglang"))

ROWS, HIDDEN, COPIES, ROUNDS = 157_184, 2_560, 4, 2
PASSES, REPLAYS = 3, 10
TOKENS = (1, 2, 3, 4, 8, 16)
LIMIT_S = {"plain": 60, "humming": 40}
PACKAGES = ("torch", "triton", "humming-kernels", "cuda-bindings", "nvidia-cuda-nvrtc",
            "nvidia-cublas")  # fmt: skip
STARTED = time.monotonic()

READ = r"""
extern "C" __global__ void __launch_bounds__(512) read_all(const uint4* p, unsigned long long n,
                                                          unsigned int* sink) {
    const unsigned long long step = (unsigned long long)gridDim.x * blockDim.x;
    unsigned int all = 0;
    unsigned long long i = (unsigned long long)blockIdx.x * blockDim.x + threadIdx.x;
    for (; i + 7 * step < n; i += 8 * step) {
        uint4 v[8];
#pragma unroll
        for (int j = 0; j < 8; ++j)
            asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
                         : "=r"(v[j].x), "=r"(v[j].y), "=r"(v[j].z), "=r"(v[j].w)
                         : "l"(p + i + j * step));
#pragma unroll
        for (int j = 0; j < 8; ++j) all ^= v[j].x ^ v[j].y ^ v[j].z ^ v[j].w;
    }
    for (; i < n; i += step) { uint4 v = p[i]; all ^= v.x ^ v.y ^ v.z ^ v.w; }
    if (all == 0x12345678u) *sink = all;
}
"""

Call = Callable[[], object]


def say(text: str) -> None:
    print(f"[{time.monotonic() - STARTED:6.1f} s] {text}", flush=True)


def versions() -> dict[str, str]:
    found = {"python": sys.version.split()[0]}
    for name in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    with contextlib.suppress(OSError, subprocess.SubprocessError, IndexError):
        command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        told = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
        found["driver"] = told.stdout.split()[0]
    return found


class Bench:
    """The heads' copies, the cases captured so far and the record that they make.

    Args:
        out: the JSON file, written anew after each step.
        limit_s: seconds after which nothing more is captured or replayed.
    """

    def __init__(self, out: Path, limit_s: float) -> None:
        import torch

        if not torch.cuda.is_available():
            raise SystemExit("torch sees no CUDA GPU here, and the head's kernel needs one.")
        self.torch, self.out, self.limit_s = torch, out, limit_s
        self.device = torch.device("cuda", 0)
        props = torch.cuda.get_device_properties(0)
        self.multiprocessors = props.multi_processor_count
        self.cases: list[tuple[dict, object, list[float], object]] = []
        self.record: dict = {
            "device": props.name,
            "multiprocessors": self.multiprocessors,
            "versions": versions(),
            "command": "python3 " + " ".join(sys.argv),
            "rows": ROWS,
            "hidden": HIDDEN,
            "copies": COPIES,
            "products_per_replay": COPIES * ROUNDS,
            "passes": PASSES,
            "replays_per_pass": REPLAYS,
            "products": [],
            "failures": [],
        }
        self.noise = torch.Generator(device=self.device).manual_seed(1)
        x = torch.randn(16, HIDDEN, device=self.device, generator=self.noise)
        self.x = x.bfloat16()

    def weight(self):
        """A head [ROWS, HIDDEN] in BF16, normal with a standard deviation of 0.02."""
        torch = self.torch
        made = torch.empty(ROWS, HIDDEN, dtype=torch.bfloat16, device=self.device)
        return made.normal_(0, 0.02, generator=self.noise)

    def time_left(self) -> bool:
        return time.monotonic() - STARTED < self.limit_s

    def save(self) -> None:
        self.record["seconds"] = round(time.monotonic() - STARTED, 1)
        part = self.out.with_suffix(".part")
        part.write_text(json.dumps(self.record, indent=1) + "\n", encoding="utf-8")
        os.replace(part, self.out)

    def add(
        self,
        name: str,
        tokens: int,
        size: int,
        make: Callable[[int], Call],
        wanted=None,
        copies: int = COPIES,
        **more: object,
    ) -> None:
        """Check and capture ``make(copy)``, a product that reads ``size`` bytes; replayed later.

        ``wanted`` are the float32 logits; recorded are the largest error in units of the token's
        root mean square and how many logits are off by more than one BF16 step and 1e-4 of that.
        """
        if not self.time_left():
            self.record["failures"].append({"name": name, "tokens": tokens, "error": "no time"})
            return
        torch = self.torch
        case = {"name": name, "tokens": tokens, "bytes": size, **more}
        try:
            calls = [make(copy) for copy in range(copies)]
            stream = torch.cuda.Stream()
            with torch.cuda.stream(stream):
                results = [call() for call in calls]
            torch.cuda.synchronize()
            if wanted is not None:
                rms = wanted.square().mean(1, keepdim=True).sqrt()
                off = (results[-1].float() - wanted).abs()
                bad = ~(off <= wanted.abs() * 2**-8 + rms * 1e-4)
                case["max_error_of_rms"] = float(f"{float((off / rms).max()):.3g}")
                case["beyond_one_step"] = int(bad.sum())
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                for _ in range(ROUNDS):
                    kept = [call() for call in calls]
            graph.replay()
            torch.cuda.synchronize()
            if wanted is not None and not torch.equal(kept[-1], results[-1]):
                case["replay_differs"] = float((kept[-1].float() - results[-1].float()).abs().max())
        except Exception as error:
            text = f"{type(error).__name__}: {error}"[:1000]
            self.record["failures"].append({"name": name, "tokens": tokens, "error": text})
            say(f"{name} {tokens}: {text[:200]}")
            torch.cuda.synchronize()  # raises, and ends this part, where CUDA is lost
        else:
            self.cases.append((case, graph, [], (calls, kept)))
        self.save()

    def replay(self) -> None:
        """Replay all cases, pass after pass, and complete the record."""
        torch = self.torch
        for _ in range(PASSES):
            for case, graph, times, (calls, _) in self.cases:
                if not self.time_left():
                    break
                graph.replay()
                marks = [torch.cuda.Event(enable_timing=True) for _ in range(REPLAYS + 1)]
                marks[0].record()
                for mark in marks[1:]:
                    graph.replay()
                    mark.record()
                torch.cuda.synchronize()
                number = ROUNDS * len(calls)
                times += [1e3 * a.elapsed_time(b) / number for a, b in itertools.pairwise(marks)]
                median = statistics.median(times)
                case |= {
                    "us": round(median, 2),
                    "us_min": round(min(times), 2),
                    "us_max": round(max(times), 2),
                    "n": len(times),
                    "gb_per_s": round(case["bytes"] / median / 1e3, 1),
                }
        done = [case for case, *_ in self.cases if "us" in case]
        reads = [case for case in done if case["name"].startswith("read ")]
        best = max(case["gb_per_s"] for case in reads)
        for case in done:
            case["of_read"] = round(case["gb_per_s"] / best, 4)
            say(
                f"{case['name']:24s} M={case['tokens']:<4d} {case['us']:8.2f} us ({case['us_min']}"
                f" to {case['us_max']}, n={case['n']})  {case['gb_per_s']:7.1f} GB/s  "
                f"{100 * case['of_read']:5.1f} %  {case.get('max_error_of_rms')} "
                f"{case.get('beyond_one_step')} {case.get('config', '')}"
            )
        self.record |= {"read_gb_per_s": best, "products": done}
        self.save()

    def add_reads(self) -> None:
        """Plain reads: of the size of a head, and of eight times that without an end between."""
        from sparkling_sglang import head_kernels

        architecture = "sm_{}{}".format(*self.torch.cuda.get_device_capability())
        module = head_kernels.Module(head_kernels.compile_source(READ.encode(), [], architecture))
        function = module.function(b"read_all")
        sink = self.torch.zeros(1, dtype=self.torch.int32, device=self.device)
        size = ROWS * HIDDEN
        self.long = self.torch.zeros(8 * size, dtype=self.torch.uint8, device=self.device)
        types = (ctypes.c_void_p, ctypes.c_ulonglong, ctypes.c_void_p)

        def reader(start: int, length: int, blocks: int) -> Call:
            values = (self.long.data_ptr() + start, length // 16, sink.data_ptr())

            def call() -> None:
                stream = self.torch.cuda.current_stream().cuda_stream
                grid = self.multiprocessors * blocks
                head_kernels.launch(function, grid, 512, stream, values, types)

            return call

        for blocks in (2, 4, 16, 32):
            self.add(
                "read 402 MB", 0, size,
                lambda c, b=blocks: reader(c * size, size, b), blocks=blocks,
            )  # fmt: skip
            self.add(
                "read 3.2 GB", 0, 8 * size,
                lambda c, b=blocks: reader(0, 8 * size, b), copies=1, blocks=blocks,
            )  # fmt: skip

    def add_ours(self) -> None:
        """What the server uses, from a BF16 head through the plugin; and the other candidates."""
        from dataclasses import asdict

        from sparkling_sglang import fp8_head, head_choice, head_kernels

        torch = self.torch
        first = self.weight()
        self.bf16 = [first, *(first.clone() for _ in range(COPIES - 1))]
        self.heads = []
        for weight in self.bf16:
            head = torch.nn.Module()
            head.weight = torch.nn.Parameter(weight, requires_grad=False)
            torch.cuda.synchronize()
            started = time.monotonic()
            before, after = fp8_head.quantize_head(head)
            torch.cuda.synchronize()
            seconds = round(time.monotonic() - started, 2)
            method = head.quant_method
            self.record.setdefault("quantized", []).append(
                {"seconds": seconds, "bytes_before": before, "bytes_after": after,
                 "kernel": method.kernel, "details": method.details}
            )  # fmt: skip
            self.heads.append(head)
            say(f"quantized: {self.record['quantized'][-1]}")
        self.q = [head.weight.data for head in self.heads]
        self.scale = self.heads[0].weight_scale.data
        self.wanted = fp8_head.dequantized_product(self.x, self.q[0], self.scale)
        size = ROWS * HIDDEN + 4 * ROWS

        def applied(head, x) -> Call:
            return lambda: head.quant_method.apply(head, x)

        for m in TOKENS:
            x, wanted = self.x[:m], self.wanted[:m]
            self.add("sparkling", m, size, lambda c, x=x: applied(self.heads[c], x), wanted)
        for m in (17, 64, 129, 512):
            x = torch.randn(m, HIDDEN, device=self.device, generator=self.noise).bfloat16()
            wanted = fp8_head.dequantized_product(x, self.q[0], self.scale)
            self.add("sparkling", m, size, lambda c, x=x: applied(self.heads[c], x), wanted)
            self.add_bf16(m, x)
        limits = head_choice.Limits.of(self.device)

        @functools.cache  # built within add(), which notes what fails and goes on
        def built(config):
            cubin = head_kernels.compile_kernel(config, HIDDEN, limits.architecture)
            return head_kernels.HeadKernel(cubin, config, ROWS, limits.multiprocessors, self.device)

        for groups, m in ((1, 1), (2, 16)):
            for config in head_choice.candidates(HIDDEN, groups, limits):
                x = self.x[:m]
                self.add(
                    "sparkling candidate", m, size,
                    lambda c, config=config, x=x: functools.partial(
                        built(config), x, self.q[c], self.scale
                    ),
                    self.wanted[:m], config=asdict(config),
                )  # fmt: skip

    def add_bf16(self, m: int, x) -> None:
        """The head as it was: BF16 through cuBLAS. Its float32 logits are computed in chunks."""
        torch = self.torch
        wanted = torch.cat([x.float() @ w.float().T for w in self.bf16[0].split(8192)], dim=1)
        linear = torch.nn.functional.linear
        self.add(
            "bf16 cublas", m, 2 * ROWS * HIDDEN, lambda c: lambda: linear(x, self.bf16[c]), wanted
        )

    def add_others(self) -> None:
        """torch._scaled_mm and Triton."""
        torch = self.torch
        size = ROWS * HIDDEN + 4 * ROWS
        scales = self.scale[None, :].contiguous()
        for m in TOKENS:
            x = torch.zeros(16, HIDDEN, device=self.device)
            x[:m] = self.x[:m].float()
            own = (x.abs().amax(1, keepdim=True) / 448).clamp(min=1e-12)
            a = (x / own).to(torch.float8_e4m3fn)
            self.add(
                "torch._scaled_mm", m, size,
                lambda c, a=a, own=own, m=m: lambda: torch._scaled_mm(
                    a, self.q[c].t(), scale_a=own, scale_b=scales, out_dtype=torch.bfloat16
                )[:m],
                self.wanted[:m], note="activations in e4m3, padded to 16 rows, not timed",
            )  # fmt: skip
        try:
            import bench_head_triton
        except ImportError as error:
            self.record["failures"].append({"name": "triton", "tokens": 0, "error": str(error)})
            return
        for config in bench_head_triton.CONFIGS:
            for m in (1, 4) if config["kind"] == "gemv" else (1, 4, 16):
                self.add(
                    f"triton {config['kind']}", m, size,
                    lambda c, m=m, config=config: lambda: bench_head_triton.product(
                        self.x[:m], self.q[c], self.scale, config
                    ),
                    self.wanted[:m], config=config,
                )  # fmt: skip

    def add_humming(self) -> None:
        """Humming's dense kernel: FP8 weights, BF16 activations, its own choice and a better one.

        ``num_stages`` 3 with two blocks on a multiprocessor was the best of twelve changes to its
        own choice that were tried on an H200 (up to 8 tokens).
        """
        os.environ.setdefault("HUMMING_COMPILER", "nvrtc")
        from humming import dtypes
        from humming.layer import HummingLayer
        from humming.tune import get_heuristics_config
        from sparkling_sglang import fp8_head

        torch = self.torch
        q, scale = fp8_head.quantize_rows(self.weight())
        wanted = fp8_head.dequantized_product(self.x, q, scale)
        layers = []
        for _ in range(COPIES):
            with self.device:
                layer = HummingLayer(
                    shape_n=ROWS, shape_k=HIDDEN,
                    weight_config={"b_dtype": dtypes.float8e4m3, "weight_scale_group_size": 0},
                    torch_dtype=torch.bfloat16,
                )  # fmt: skip
            layer.load_from_tensors(
                {"weight": q.view(torch.int32), "weight_scale": scale[:, None].bfloat16()}
            )
            layer = layer.to(self.device)
            layer.transform()
            layers.append(layer)
        size = ROWS * HIDDEN + 2 * ROWS
        better = {"num_ctas_per_sm": 2, "num_stages": 3}
        for name, change in (("humming", {}), ("humming tuned", better)):
            for m in TOKENS:
                own = dict(get_heuristics_config(layers[0].humming_config, shape_m=m))
                tuning = json.dumps([[0, 1 << 30, own | change]], default=str)
                x = self.x[:m]
                self.add(
                    name, m, size,
                    lambda c, x=x, tuning=tuning: lambda: layers[c](x, tuning_config=tuning),
                    wanted[:m], note="scales in BF16", config=json.loads(tuning)[0][2],
                )  # fmt: skip


def part(name: str, out: Path) -> None:
    """One process's share of a run: whatever hangs or faults takes down this one alone."""
    bench = Bench(out, LIMIT_S[name] - 10)
    bench.add_reads()
    if name == "plain":
        bench.add_ours()
        for m in TOKENS:
            bench.add_bf16(m, bench.x[:m])
        bench.add_others()
    else:
        try:
            bench.add_humming()
        except Exception as error:
            text = f"{type(error).__name__}: {error}"[:1000]
            bench.record["failures"].append({"name": "humming", "tokens": 0, "error": text})
            say(text)
    bench.replay()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="the JSON file to write")
    parser.add_argument("--parts", default=",".join(LIMIT_S), help="which, of plain and humming")
    parser.add_argument("--part", choices=list(LIMIT_S), help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    if args.part:
        part(args.part, args.out)
        return
    asked = args.parts.split(",")
    if unknown := [name for name in asked if name not in LIMIT_S]:
        parser.error(f"no such part: {', '.join(unknown)}; there are {', '.join(LIMIT_S)}")
    if importlib.util.find_spec("torch") is None:
        parser.error(f"{sys.executable} has no torch; call this with a server environment's Python")
    whole = {"command": "python3 " + " ".join(sys.argv)}
    with tempfile.TemporaryDirectory() as cache:
        # Nothing that an earlier start has kept: the first head is tried, the others remember.
        env = {**os.environ, "XDG_CACHE_HOME": cache}
        for name in asked:
            mine = args.out.with_name(f"{args.out.stem}-{name}.json")
            command = [sys.executable, __file__, "--part", name, "--out", str(mine)]
            with contextlib.suppress(subprocess.TimeoutExpired):
                subprocess.run(command, timeout=LIMIT_S[name], env=env, check=False)
            if mine.exists():
                whole[name] = json.loads(mine.read_text(encoding="utf-8"))
                args.out.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")
                mine.unlink()
    if missing := [name for name in asked if name not in whole]:
        raise SystemExit(f"not measured: {', '.join(missing)}; what was raised is above")
    say("done")


if __name__ == "__main__":
    main()
