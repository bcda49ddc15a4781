#!/usr/bin/env python3
"""Time products for the FP8 LM head on a CUDA GPU, cold caches, side by side in one run.

    python3 scripts/bench_head.py --tune --out head.json --limit-s 180

Needs torch and cuda.bindings; Triton and Humming are timed if they can be imported. Every result is
written as it comes. A time is that of one product within a CUDA graph that walks through four
copies of the weights twice, so each product reads its 402 MB from memory; a repeat is one replay.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import itertools
import json
import os
import pickle
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "lib" / "sparkling_sglang"))

from sparkling_sglang import head_kernels  # noqa: E402
from sparkling_sglang.head_kernels import Config  # noqa: E402

ROWS, HIDDEN, COPIES, ROUNDS, REPEATS = 157_184, 2_560, 4, 2, 15
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


def say(text: str) -> None:
    print(f"[{time.monotonic() - STARTED:6.1f} s] {text}", flush=True)


def cuda_configs() -> list[Config]:
    """The configurations of our kernel that are worth a try on an H200."""
    made = []
    for waves in (1, 4):
        for prefetch in (0, 128, 256):
            made += [
                Config(10, 0, 2, prefetch=prefetch, waves=waves),
                Config(8, 0, 2, prefetch=prefetch, waves=waves),
                Config(10, 0, 3, x_shared=1, prefetch=prefetch, waves=waves),
                Config(20, 0, 1, prefetch=prefetch, waves=waves),
                Config(5, 0, 3, x_shared=1, prefetch=prefetch, waves=waves),
                Config(8, 0, 3, x_shared=1, prefetch=prefetch, waves=waves),
            ]
        for fetch in (1, 2):
            made += [
                Config(warps, fetch, blocks, stages, waves=waves)
                for warps, blocks, stages in (
                    (10, 1, 5),
                    (10, 1, 4),
                    (10, 1, 3),
                    (20, 1, 5),
                    (20, 1, 4),
                    (8, 1, 5),
                    (5, 1, 5),
                    (10, 2, 2),
                    (8, 2, 2),
                    (5, 2, 2),
                )
                if (fetch, warps, stages) != (2, 20, 5)  # too much shared memory
            ]
    return made


def wide_configs() -> list[Config]:
    """The same for 9 to 16 tokens."""
    return [
        Config(10, 0, 1, groups=2, prefetch=256),
        Config(10, 0, 2, groups=2, x_shared=1, prefetch=256),
        Config(8, 0, 2, groups=2, x_shared=1, prefetch=256),
        Config(10, 1, 1, 4, groups=2),
        Config(10, 1, 1, 3, groups=2, x_shared=1),
        Config(10, 2, 1, 4, groups=2),
        Config(10, 2, 1, 2, groups=2, x_shared=1),
        Config(8, 2, 1, 4, groups=2),
        Config(20, 2, 1, 4, groups=1),
    ]


def architecture() -> str:
    """``sm_90`` and the like, without starting CUDA in this process (it forks compilers)."""
    told = subprocess.run(
        ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"],
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    return "sm_" + told.stdout.split()[0].replace(".", "")


def compiled(job: tuple[Config, str]) -> bytes | str:
    try:
        return head_kernels.compile_kernel(job[0], HIDDEN, job[1])
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def name_of(config: Config) -> str:
    short = {"fetch": "f", "blocks": "b", "stages": "s", "x_shared": "x", "prefetch": "p",
             "waves": "v", "groups": "g", "warps": "w"}  # fmt: skip
    return "cuda-" + "-".join(f"{short[k]}{v}" for k, v in asdict(config).items())


class Bench:
    """The weights' copies, the results so far and how to add one."""

    def __init__(self, out: Path, limit_s: float) -> None:
        import torch

        self.torch, self.out, self.limit_s = torch, out, limit_s
        self.device = torch.device("cuda")
        props = torch.cuda.get_device_properties(0)
        self.sms = props.multi_processor_count
        self.result = {
            "device": props.name,
            "multiprocessors": self.sms,
            "shared_per_block": getattr(props, "shared_memory_per_block_optin", None),
            "versions": versions(),
            "command": " ".join(sys.argv),
            "rows": ROWS,
            "hidden": HIDDEN,
            "copies": COPIES,
            "calls_per_replay": COPIES * ROUNDS,
            "read_gb_per_s": None,
            "read": [],
            "products": [],
            "failures": [],
        }
        noise = torch.Generator(device=self.device).manual_seed(1)
        first = torch.empty(ROWS, HIDDEN, dtype=torch.float8_e4m3fn, device=self.device)
        for start in range(0, ROWS, 16384):
            rows = slice(start, min(start + 16384, ROWS))
            shape = (rows.stop - rows.start, HIDDEN)
            values = torch.randn(shape, device=self.device, generator=noise) * 100
            first[rows] = values.clamp_(-448, 448).to(torch.float8_e4m3fn)
        self.q = [first] + [first.clone() for _ in range(COPIES - 1)]
        self.scale = torch.rand(ROWS, device=self.device, generator=noise) * 1e-3 + 1e-4
        x = torch.randn(16, HIDDEN, device=self.device, generator=noise)
        x *= torch.logspace(-3, 3, 16, device=self.device)[:, None]  # tokens of any size
        self.x = x.bfloat16()
        self.wanted = torch.empty(16, ROWS, device=self.device)
        for start in range(0, ROWS, 16384):
            rows = slice(start, min(start + 16384, ROWS))
            self.wanted[:, rows] = self.x.float() @ first[rows].float().T
        self.wanted *= self.scale
        torch.cuda.synchronize()

    def left(self) -> float:
        return self.limit_s - (time.monotonic() - STARTED)

    def save(self) -> None:
        self.result["seconds"] = round(time.monotonic() - STARTED, 1)
        part = self.out.with_suffix(".part")
        part.write_text(json.dumps(self.result, indent=1, default=str) + "\n", encoding="utf-8")
        os.replace(part, self.out)

    def error(self, got, tokens: int) -> dict[str, float]:
        """Largest error relative to the token's RMS logit, and entries off by > 1 BF16 step."""
        wanted = self.wanted[:tokens]
        rms = wanted.square().mean(1, keepdim=True).sqrt()
        off = (got[:tokens].float() - wanted).abs()
        bad = (off > wanted.abs() * 2**-8 + rms * 1e-4).sum() + (~got[:tokens].isfinite()).sum()
        return {"max_error_of_rms": float((off / rms).max()), "beyond_one_step": int(bad)}

    def graph_us(self, calls: list[Callable[[], object]], repeats: int) -> list[float]:
        torch = self.torch
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for call in calls:
                call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(ROUNDS):
                for call in calls:
                    call()
        for _ in range(3):
            graph.replay()
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
        marks[0].record()
        for mark in marks[1:]:
            graph.replay()
            mark.record()
        torch.cuda.synchronize()
        number = ROUNDS * len(calls)
        return [1e3 * a.elapsed_time(b) / number for a, b in itertools.pairwise(marks)]

    def time(
        self,
        name: str,
        tokens: int,
        bytes_read: int,
        make: Callable[[int], Callable[[], object]],
        repeats: int = REPEATS,
        **more: object,
    ) -> float | None:
        """Check and time ``make(copy)()`` and record it; the median in us, None if it failed."""
        try:
            calls = [make(copy) for copy in range(COPIES)]
            got = calls[-1]()
            self.torch.cuda.synchronize()
            record = {"name": name, "tokens": tokens, **more, **self.error(got, tokens)}
            times = self.graph_us(calls, repeats)
        except Exception as error:
            self.fail(name, tokens, error)
            return None
        median = statistics.median(times)
        record |= {
            "us_median": round(median, 2),
            "us_min": round(min(times), 2),
            "us_max": round(max(times), 2),
            "n": len(times),
            "bytes": bytes_read,
            "gb_per_s": round(bytes_read / median / 1e3, 1),
        }
        if self.result["read_gb_per_s"]:
            record["of_read"] = round(record["gb_per_s"] / self.result["read_gb_per_s"], 4)
        self.result["products"].append(record)
        self.save()
        say(
            f"{name:44s} M={tokens:<3d} {median:8.2f} us (min {min(times):.2f}, max "
            f"{max(times):.2f})  {record['gb_per_s']:7.1f} GB/s  "
            f"{100 * record.get('of_read', 0):5.1f} %  error {record['max_error_of_rms']:.1e} "
            f"beyond {record['beyond_one_step']}"
        )
        return median

    def fail(self, name: str, tokens: int, error: Exception) -> None:
        text = f"{type(error).__name__}: {error}"[:1500]
        where = traceback.format_exc().strip().splitlines()[-8:]
        self.result["failures"].append(
            {"name": name, "tokens": tokens, "error": text, "where": where}
        )
        self.save()
        say(f"{name} M={tokens} FAILED: {text[:300]}")
        try:
            self.torch.cuda.synchronize()
        except Exception as broken:
            say(f"CUDA is lost after {name}: {broken}")
            raise SystemExit(1) from broken

    # ---------------------------------------------------------------------------- candidates

    def read(self, cubin: bytes) -> None:
        """The device's read bandwidth: the best of several grids over the same copies."""
        module = head_kernels.Module(cubin)
        function = module.function(b"read_all", 0)
        sink = self.torch.zeros(1, dtype=self.torch.int32, device=self.device)
        size = ROWS * HIDDEN

        def make(copy: int, grid: int) -> Callable[[], object]:
            values = (self.q[copy].data_ptr(), size // 16, sink.data_ptr())
            types = (ctypes.c_void_p, ctypes.c_ulonglong, ctypes.c_void_p)
            return lambda: head_kernels.launch(
                function, grid, 512, 0, self.torch.cuda.current_stream().cuda_stream, values, types
            )

        for blocks in (1, 2, 3, 4, 8, 16, 32):
            times = self.graph_us([make(c, self.sms * blocks) for c in range(COPIES)], 15)
            median = statistics.median(times)
            self.result["read"].append(
                {"blocks_per_sm": blocks, "us_median": round(median, 2),
                 "us_min": round(min(times), 2), "gb_per_s": round(size / median / 1e3, 1)}
            )  # fmt: skip
        for what, view in (("torch.sum int64", self.torch.int64),):
            calls = [lambda c=c, v=view: self.q[c].view(v).sum() for c in range(COPIES)]
            median = statistics.median(self.graph_us(calls, 15))
            self.result["read"].append(
                {"how": what, "us_median": round(median, 2), "gb_per_s": round(size / median / 1e3)}
            )
        # Eight times as much at once: what is lost at a kernel's start and end counts for less.
        long = self.torch.empty(8 * size, dtype=self.torch.uint8, device=self.device).zero_()
        values = (long.data_ptr(), 8 * size // 16, sink.data_ptr())
        types = (ctypes.c_void_p, ctypes.c_ulonglong, ctypes.c_void_p)
        for blocks in (4, 16, 32):
            times = self.graph_us(
                [
                    lambda b=blocks: head_kernels.launch(
                        function, self.sms * b, 512, 0,
                        self.torch.cuda.current_stream().cuda_stream, values, types,
                    )
                ],
                8,
            )  # fmt: skip
            median = statistics.median(times)
            self.result["read"].append(
                {"how": f"{8 * size} bytes at once, {blocks} blocks per SM",
                 "us_median": round(median, 2), "gb_per_s": round(8 * size / median / 1e3, 1)}
            )  # fmt: skip
        del long
        best = max(self.result["read"], key=lambda r: r["gb_per_s"])
        self.result["read_gb_per_s"] = best["gb_per_s"]
        self.save()
        say(f"read {self.result['read']}")
        say(f"read bandwidth {best}")

    def ours(self, config: Config, cubin: bytes, tokens: int, **more) -> float | None:
        try:
            kernel = head_kernels.HeadKernel(cubin, config, ROWS, HIDDEN, self.sms)
        except Exception as error:
            self.fail(name_of(config), tokens, error)
            return None
        x = self.x[:tokens]
        size = ROWS * HIDDEN + ROWS * 4

        def make(copy: int) -> Callable[[], object]:
            return lambda: kernel(x, self.q[copy], self.scale)

        return self.time(name_of(config), tokens, size, make, config=asdict(config), **more)

    def bf16(self, tokens: int) -> None:
        if not hasattr(self, "wide"):
            self.wide = [self.q[0].bfloat16()]
            self.wide += [self.wide[0].clone() for _ in range(COPIES - 1)]
        x = self.x[:tokens]
        scale = self.scale

        # The row scales are not part of a BF16 head: they are applied to the check alone.
        class Scaled:
            def __init__(self, weight):
                self.weight = weight

            def __call__(self):
                return self.torch_linear(x, self.weight)

        Scaled.torch_linear = staticmethod(self.torch.nn.functional.linear)
        calls = [Scaled(w) for w in self.wide]
        got = (calls[0]().float() * scale).bfloat16()
        try:
            times = self.graph_us(calls, REPEATS)
        except Exception as error:
            self.fail("bf16-cublas", tokens, error)
            return
        median = statistics.median(times)
        size = ROWS * HIDDEN * 2
        record = {
            "name": "bf16-cublas", "tokens": tokens, **self.error(got, tokens),
            "us_median": round(median, 2), "us_min": round(min(times), 2),
            "us_max": round(max(times), 2), "n": len(times), "bytes": size,
            "gb_per_s": round(size / median / 1e3, 1),
        }  # fmt: skip
        record["of_read"] = round(record["gb_per_s"] / self.result["read_gb_per_s"], 4)
        self.result["products"].append(record)
        self.save()
        say(f"bf16-cublas M={tokens} {median:.2f} us {100 * record['of_read']:.1f} %")

    def scaled_mm(self, tokens: int) -> None:
        torch = self.torch
        padded = max(16, tokens)
        x = torch.zeros(padded, HIDDEN, device=self.device)
        x[:tokens] = self.x[:tokens].float()
        sx = (x.abs().amax(1, keepdim=True) / 448).clamp(min=1e-12)
        a, sb = (x / sx).to(torch.float8_e4m3fn), self.scale[None, :].contiguous()
        self.time(
            "torch._scaled_mm", tokens, ROWS * HIDDEN + ROWS * 4,
            lambda c: lambda: torch._scaled_mm(
                a, self.q[c].t(), scale_a=sx, scale_b=sb, out_dtype=torch.bfloat16
            ),
            note="activations quantized to e4m3 beforehand",
        )  # fmt: skip

    def humming(self, tokens: list[int], sweep: bool) -> None:
        os.environ.setdefault("HUMMING_COMPILER", "nvrtc")
        try:
            from humming import dtypes
            from humming.kernel.humming import HummingKernel
            from humming.layer import HummingLayer
            from humming.tune import get_heuristics_config
        except Exception as error:
            self.fail("humming", 0, error)
            return
        torch = self.torch
        layers = []
        try:
            for copy in range(COPIES):
                with torch.device(self.device):
                    layer = HummingLayer(
                        shape_n=ROWS, shape_k=HIDDEN,
                        weight_config={"b_dtype": dtypes.float8e4m3, "weight_scale_group_size": 0},
                        torch_dtype=torch.bfloat16,
                    )  # fmt: skip
                layer.load_from_tensors(
                    {"weight": self.q[copy].view(torch.int32), "weight_scale":
                     self.scale[:, None].bfloat16()}
                )  # fmt: skip
                layer = layer.to(self.device)
                layer.transform()
                layers.append(layer)
        except Exception as error:
            self.fail("humming", 0, error)
            return
        x = self.x
        size = ROWS * HIDDEN + ROWS * 2
        meta = layers[0].humming_config
        base = {m: dict(get_heuristics_config(meta, shape_m=m)) for m in tokens}
        say(f"humming's own choice: {base}")

        def tuning(config: dict) -> str:
            return json.dumps([[0, 1 << 30, config]], default=str)

        def compile_one(text: str) -> None:
            # A configuration that Humming refuses is reported when it is timed.
            with contextlib.suppress(Exception):
                HummingKernel.prepare_kernels(meta.to_str(), None, text)

        best = None
        tries = [
            {"num_stages": 6}, {"num_stages": 8}, {"num_stages": 3},
            {"num_ctas_per_sm": 2, "num_stages": 3}, {"use_stream_k": False},
            {"block_shape": [8, 128, 128], "warp_shape": [8, 32, 64]},
            {"block_shape": [8, 128, 128], "warp_shape": [8, 32, 64], "num_stages": 8},
            {"block_shape": [8, 128, 256], "warp_shape": [8, 32, 64]},
            {"block_shape": [8, 256, 128], "warp_shape": [8, 32, 64]},
            {"block_shape": [8, 512, 64], "warp_shape": [8, 64, 64]},
            {"use_warp_spec": False, "use_tma": False, "use_mbarrier": False},
            {"block_shape": [8, 128, 128], "warp_shape": [8, 32, 64], "num_ctas_per_sm": 2},
        ]  # fmt: skip
        tuned = []
        for change in tries if sweep else []:
            config = base[tokens[0]] | change
            if "block_shape" in change:
                config.pop("raster_group_m", None)
            tuned.append((change, tuning(config)))
        texts = [tuning(c) for c in base.values()] + [t for _, t in tuned]
        with ThreadPoolExecutor(14, initializer=torch.cuda.set_device, initargs=(0,)) as pool:
            list(pool.map(compile_one, dict.fromkeys(texts)))
        say("humming's kernels are compiled")
        for m in tokens:
            self.time(
                "humming-default", m, size,
                lambda c, m=m: lambda: layers[c](x[:m], tuning_config=tuning(base[m])),
                note="scales in BF16", config=base[m],
            )  # fmt: skip
        for change, text in tuned:
            if self.left() < 5:
                say("humming's sweep ends for lack of time")
                break
            us = self.time(
                "humming-tuned", tokens[0], size,
                lambda c, t=text: lambda: layers[c](x[: tokens[0]], tuning_config=t),
                config=change, note="scales in BF16",
            )  # fmt: skip
            if us and (best is None or us < best[0]):
                best = (us, text, change)
        for m in tokens[1:] if best else []:
            self.time(
                "humming-tuned", m, size,
                lambda c, m=m: lambda: layers[c](x[:m], tuning_config=best[1]),
                config=best[2], note="scales in BF16",
            )  # fmt: skip

    def triton(self, tokens: list[int], configs: list[dict] | None = None) -> None:
        try:
            import bench_head_triton
        except Exception as error:
            self.fail("triton", 0, error)
            return
        best: dict[str, tuple[float, dict]] = {}
        for config in configs or bench_head_triton.CONFIGS:
            if self.left() < 10:
                say("Triton's sweep ends for lack of time")
                break
            us = self.triton_one(bench_head_triton, config, 1)
            if us and (config["kind"] not in best or us < best[config["kind"]][0]):
                best[config["kind"]] = (us, config)
        for _, config in best.values():
            for m in [m for m in tokens if 1 < m <= (4 if config["kind"] == "gemv" else 16)]:
                if self.left() > 6:
                    self.triton_one(bench_head_triton, config, m)

    def triton_one(self, kernels, config: dict, tokens: int) -> float | None:
        x = self.x[:tokens]
        return self.time(
            f"triton-{config['kind']}", tokens, ROWS * HIDDEN + ROWS * 4,
            lambda c: lambda: kernels.product(x, self.q[c], self.scale, config, self.sms),
            config=config,
        )  # fmt: skip


def versions() -> dict[str, str]:
    from importlib import metadata

    found = {"python": sys.version.split()[0]}
    for name in ("torch", "triton", "humming-kernels", "cuda-bindings", "nvidia-cuda-nvrtc",
                 "nvidia-cublas"):  # fmt: skip
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    try:
        told = subprocess.run(
            ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
            capture_output=True, text=True, timeout=60, check=True,
        )  # fmt: skip
        found["driver"] = told.stdout.split()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        pass
    return found


def compile_all(configs: list[Config], arch: str) -> dict[Config, bytes | str]:
    """Compile in processes, before this one starts CUDA; ``waves`` needs no kernel of its own."""
    unique = list(dict.fromkeys(replace(c, waves=1) for c in configs))
    workers = max(1, min(len(unique), (os.cpu_count() or 2) - 1))
    with ProcessPoolExecutor(workers) as pool:
        return dict(zip(unique, pool.map(compiled, [(c, arch) for c in unique]), strict=True))


def compile_read(arch: str) -> bytes:
    head_kernels.SOURCE, kept = Source(READ), head_kernels.SOURCE
    try:
        return head_kernels.compile_kernel(Config(1, 0, 1), HIDDEN, arch)
    finally:
        head_kernels.SOURCE = kept


class Source:
    def __init__(self, text: str) -> None:
        self.text = text

    def read_bytes(self) -> bytes:
        return self.text.encode()


def part_ours(bench: Bench, cubins: dict[Config, bytes | str], fetch: int) -> None:
    def run(config: Config, tokens: int) -> float | None:
        cubin = cubins[replace(config, waves=1)]
        if isinstance(cubin, str):
            bench.fail(name_of(config), tokens, RuntimeError(cubin))
            return None
        return bench.ours(config, cubin, tokens)

    timed = []
    for config in cuda_configs():
        if config.fetch == fetch and bench.left() > 5 and (us := run(config, 1)):
            timed.append((us, name_of(config), config))
    timed.sort()
    for tokens in (2, 3, 4, 8):
        for _, _, config in timed[:4]:
            run(config, tokens)
    for config in wide_configs():
        if config.fetch == fetch:
            run(config, 16 if config.groups == 2 else 8)


def part_plain(bench: Bench) -> None:
    for tokens in (1, 2, 3, 4, 8, 16):
        bench.bf16(tokens)
    del bench.wide
    for tokens in (1, 4, 16):
        try:
            bench.scaled_mm(tokens)
        except Exception as error:
            bench.fail("torch._scaled_mm", tokens, error)
    bench.triton([2, 4, 16])


PARTS = {"ours-registers": 40, "ours-cp-async": 30, "ours-bulk": 30, "plain": 50, "humming": 60}


def part(name: str, out: Path, limit_s: float, saved: Path) -> None:
    """One process's share of a run: a kernel that hangs or faults takes down this one alone."""
    cubins, read = pickle.loads(saved.read_bytes())
    bench = Bench(out, limit_s)
    bench.read(read)
    if name.startswith("ours"):
        part_ours(bench, cubins, list(PARTS).index(name))
    elif name == "plain":
        part_plain(bench)
    else:
        bench.humming([1, 2, 3, 4, 8, 16], sweep=True)
    bench.save()


def tune(out: Path, limit_s: float, arch: str | None, parts: list[str], dry: bool) -> None:
    arch = arch or architecture()
    cubins = compile_all(cuda_configs() + wide_configs(), arch)
    bad = {name_of(c): v for c, v in cubins.items() if isinstance(v, str)}
    saved = out.with_suffix(".cubins")
    saved.write_bytes(pickle.dumps((cubins, compile_read(arch))))
    say(f"{len(cubins) - len(bad)} of {len(cubins)} kernels compiled for {arch}; {bad}")
    whole: dict[str, object] = {}
    for name in [] if dry else parts:
        left = limit_s - (time.monotonic() - STARTED)
        seconds = min(PARTS[name], left - 3)
        if seconds < 8:
            say(f"no time left for {name}")
            break
        say(f"---- {name}, at most {seconds:.0f} s")
        mine = out.with_name(f"{out.stem}-{name}.json")
        command = [sys.executable, __file__, "--part", name, "--out", str(mine), "--limit-s",
                   str(seconds - 2), "--cubins", str(saved)]  # fmt: skip
        with contextlib.suppress(subprocess.TimeoutExpired):
            subprocess.run(command, timeout=seconds, check=False)
        if mine.exists():
            whole[name] = json.loads(mine.read_text())
            out.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")
            mine.unlink()
    saved.unlink()
    say("done")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tune", action="store_true", help="every candidate (the default)")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--limit-s", type=float, default=150)
    parser.add_argument("--arch", help="compile for this instead of the GPU here")
    parser.add_argument("--parts", default=",".join(PARTS), help="which parts, in this order")
    parser.add_argument("--dry-run", action="store_true", help="compile only; needs no GPU")
    parser.add_argument("--part", choices=list(PARTS), help=argparse.SUPPRESS)
    parser.add_argument("--cubins", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    if args.part:
        part(args.part, args.out, args.limit_s, args.cubins)
    else:
        tune(args.out, args.limit_s, args.arch, args.parts.split(","), args.dry_run)


if __name__ == "__main__":
    main()
