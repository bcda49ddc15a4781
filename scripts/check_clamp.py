#!/usr/bin/env python3
"""Is Ling's SwiGLU limit applied to the routed experts? Measured on one CUDA GPU, without a server.

One MoE layer at Ling-3.0-flash's shapes is built through SGLang's own FusedMoE and quantization
method, once as SGLang does it and once with the hook of ``SPARKLING_SWIGLU_CLAMP=1``, from the same
random MXFP4 weights, and both are compared with float32 references with and without the limit, on
inputs that exceed it and on inputs that stay below. Then both are timed in CUDA graphs.

    PYTHONPATH=SITE_WITH_SGLANG python3 scripts/check_clamp.py --out OUT.json [--limit-s 90]

Each runner works in a child process, all at once, because nvcc may need minutes for Marlin; only who
measures times has the GPU alone. What is not done at the limit is ended and reported. OUT.json is
rewritten after every case. ``--dry-run`` needs no GPU: it builds and hooks the layers, and
multiplies only those that a CPU can, with SGLang's CPU code and this plugin's experts.

Exit codes: 0 every runner was done, or not tried for a reason that is told; 1 one failed, or was ended
at the limit; 2 wrong arguments.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import fcntl
import functools
import importlib
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


@dataclasses.dataclass(frozen=True)
class Shape:
    """One MoE layer: Ling-3.0-flash's, or that of a checkpoint's config.json."""

    hidden: int = 2560
    intermediate: int = 768
    top_k: int = 8
    layer: int = 41
    limit: float = 4.0
    factor: float = 2.5

    @property
    def exponent(self) -> int:
        """Of every weight's scale 2**e, so that pre-activations deviate by some 2.3 for inputs that
        deviate by 1: then about 4 % of gates and 8 % of ups exceed a limit of 4. (A random E2M1
        code has a mean square of 8.56.)"""
        return round(math.log2(2.3 / math.sqrt(8.56 * self.hidden)))

    @staticmethod
    def of(config: Path) -> Shape:
        """The last layer of a checkpoint whose routed experts have a limit."""
        read = json.loads(config.read_text())
        limits = read["expert_swiglu_limit_list"]
        layer = max(number for number, limit in enumerate(limits) if limit)
        return Shape(
            read["hidden_size"],
            read["moe_intermediate_size"],
            read["num_experts_per_tok"],
            layer,
            float(limits[layer]),
            read["routed_scaling_factor"],
        )


SHAPE = Shape()
TOKENS = (1, 2, 4, 8)
ROUNDS, CALLS = 60, 8
# marlin_torch: SGLang's Marlin runner with its two products done by torch, which needs no long nvcc.
RUNNERS = ("marlin", "marlin_torch", "humming", "triton", "flashinfer_mxfp4")
# As for a server on a machine without network and with an older sglang-kernel.
ENVIRONMENT = {
    "SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK": "1",
    "SGLANG_ENABLE_JIT_DEEPGEMM": "0",
    "FLASHINFER_DISABLE_VERSION_CHECK": "1",
    "HF_HUB_OFFLINE": "1",
    "HUMMING_COMPILER": "nvrtc",
}


# ---- the parent ---------------------------------------------------------------------------------


def merged(parts: dict[str, Path], notes: dict[str, str], head: dict) -> dict:
    """One document of what all children have written so far."""
    document = dict(head, runners={})
    for runner, path in parts.items():
        try:
            found = json.loads(path.read_text())
        except (OSError, ValueError):
            found = {"cases": [], "failures": []}
        found["outcome"] = notes.get(runner, "running")
        document["runners"][runner] = found
    return document


def write(path: Path, document: dict) -> None:
    part = path.with_suffix(".part")
    part.write_text(json.dumps(document, indent=1) + "\n")
    os.replace(part, path)


def end(process: subprocess.Popen) -> None:
    """End a child and the compilers it started: it leads a process group of its own."""
    for sign in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, sign)
        except ProcessLookupError:
            return
        try:
            process.wait(3)
        except subprocess.TimeoutExpired:
            continue


def flashinfer_is_built() -> bool:
    """Whether FlashInfer's CUTLASS module for this GPU lies in its cache: building takes minutes."""
    base = Path(os.environ.get("FLASHINFER_WORKSPACE_BASE", Path.home()))
    return any((base / ".cache" / "flashinfer").rglob("fused_moe_*/*.so"))


def parent(options: argparse.Namespace) -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the children end with us
    with tempfile.TemporaryDirectory(prefix="clamp-") as folder:
        return watched(options, Path(folder))


def watched(options: argparse.Namespace, folder: Path) -> int:
    """Run the children and put together what they write into `folder`."""
    began = time.monotonic()
    out = Path(options.out)
    out.parent.mkdir(parents=True, exist_ok=True)
    head = {
        "what": __doc__.splitlines()[0],
        "command": " ".join(["python3", "scripts/check_clamp.py", *sys.argv[1:]]),
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "shape": dataclasses.asdict(SHAPE),
        "limit_s": options.limit_s,
    }
    parts, notes, running = {}, {}, {}

    def start(runner: str) -> None:
        command = [sys.executable, __file__, "--child", runner, "--out", str(parts[runner])]
        command += ["--gpu", str(folder / "gpu"), "--experts", str(options.experts), "--until"]
        command += [str(time.time() + options.limit_s - (time.monotonic() - began))]
        command += ["--dry-run"] if options.dry_run else []
        command += ["--config", options.config] if options.config else []
        command += ["--warm"] if options.warm else []
        command += ["--short-marlin", options.short_marlin] if options.short_marlin else []
        with open(out.with_name(f"{out.stem}-{runner}.log"), "w") as log:
            running[runner] = subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )
        print(f"{time.monotonic() - began:6.1f} s: {runner} started", flush=True)

    waiting = []
    for runner in options.runners.split(","):
        parts[runner] = folder / f"{runner}.json"
        if runner == "flashinfer_mxfp4" and not (options.dry_run or flashinfer_is_built()):
            notes[runner] = "not tried: FlashInfer's CUTLASS module is not built on this machine"
        else:
            waiting.append(runner)
    try:
        for runner in waiting:
            start(runner)
        while running:
            late = time.monotonic() - began > options.limit_s
            for runner, process in list(running.items()):
                code = process.poll()
                if code is None and not late:
                    continue
                if code is None:
                    notes[runner] = f"ended after {options.limit_s:g} s"
                else:
                    notes[runner] = "done" if code == 0 else f"failed with exit status {code}"
                end(process)  # a compiler that it started may have outlived it
                del running[runner]
                print(f"{time.monotonic() - began:6.1f} s: {runner} {notes[runner]}", flush=True)
            write(out, merged(parts, notes, head))
            time.sleep(0.3)
    finally:
        for process in running.values():
            end(process)
        head["seconds"] = round(time.monotonic() - began, 1)
        write(out, merged(parts, notes, head))
    whole = True
    for runner, found in merged(parts, notes, head)["runners"].items():
        cases, failures = len(found["cases"]), len(found["failures"])
        print(f"{runner}: {found['outcome']}, {cases} cases, {failures} failures", flush=True)
        whole &= not failures and found["outcome"].startswith(("done", "not tried"))
    return 0 if whole else 1


# ---- a child: one runner ------------------------------------------------------------------------


class Part:
    """What one runner has found, rewritten after every case."""

    def __init__(self, path: Path, until: float) -> None:
        self.path, self.until = path, until
        self.found: dict = {"versions": {}, "cases": [], "failures": []}

    def add(self, **case) -> None:
        self.found["cases"].append(case)
        print(json.dumps(case), flush=True)
        write(self.path, self.found)

    def step(self, name: str, function, *args):
        """Call it; a failure is recorded and the next step goes on. None then."""
        began = time.monotonic()
        if time.time() > self.until - 2:
            self.found["failures"].append({"step": name, "error": "no time was left"})
            return None
        try:
            return function(*args)
        except Exception as error:
            traceback.print_exc()
            text = f"{type(error).__name__}: {error}"[:2000]
            self.found["failures"].append({"step": name, "error": text})
            return None
        finally:
            seconds = time.monotonic() - began
            self.found.setdefault("seconds", {})[name] = round(seconds, 2)
            print(f"{name}: {seconds:.2f} s", flush=True)
            write(self.path, self.found)


@contextlib.contextmanager
def gpu(path: str, until: float, *, alone: bool):
    """The GPU together with the other children, or alone; gives up shortly before ``until``."""
    with open(path, "a") as file:
        while True:
            try:
                fcntl.flock(file, (fcntl.LOCK_EX if alone else fcntl.LOCK_SH) | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.time() > until - 5:
                    raise TimeoutError("other runners used the GPU until the end") from None
                time.sleep(0.1)
        yield


def context(runner: str, device: str, rendezvous: Path) -> None:
    """SGLang's process-wide state: arguments, one rank (which meets itself in the file `rendezvous`),
    the MoE runner of the command line."""
    import sglang.srt.managers.scheduler  # noqa: F401  (the order in which SGLang imports)
    from sglang.srt.distributed import bootstrap
    from sglang.srt.layers.moe import initialize_moe_config
    from sglang.srt.runtime_context import SpawnRanks, publish
    from sglang.srt.server_args import ServerArgs

    more = {"attention_backend": "triton", "disable_radix_cache": True} if device != "cpu" else {}
    args = ServerArgs(
        model_path="dummy",
        device=device,
        dtype="bfloat16",
        skip_tokenizer_init=True,
        moe_runner_backend=runner,
        **more,
    )
    args.resolve_once()
    publish(args, role="scheduler", ranks=SpawnRanks(world_rank=0, gpu_id=0))
    bootstrap._init_parallel_groups(
        backend="gloo",
        dist_init_method=f"file://{rendezvous}",
        server_args=args,
        gpu_id=0,
    )
    initialize_moe_config()


def codes(experts: int, device: str) -> dict:
    """Random MXFP4 weights in the checkpoint's layout: two codes a byte, gate rows first."""
    import torch

    noise = torch.Generator(device=device).manual_seed(experts)
    size = {
        "w13": (2 * SHAPE.intermediate, SHAPE.hidden // 2),
        "w2": (SHAPE.hidden, SHAPE.intermediate // 2),
    }
    made = {}
    for name, (rows, half) in size.items():
        made[name] = torch.randint(
            0, 256, (experts, rows, half), dtype=torch.uint8, device=device, generator=noise
        )
    return made


def dequantized(packed, rows_first: bool = True):
    """float32 [rows, 2 * half] of one expert's codes; every scale is 2**SHAPE.exponent."""
    import torch

    table = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    table = torch.tensor([*table, *(-x for x in table)], device=packed.device)
    both = torch.stack([packed & 15, packed >> 4], -1).flatten(-2)
    return table[both.long()] * 2.0**SHAPE.exponent


def reference(x, ids, weights, packed: dict, limit: float | None):
    """float32 [tokens, hidden] and the shares of (silu(gate), up) beyond SHAPE.limit."""
    import torch
    from torch.nn import functional as F

    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    gates = ups = total = 0
    for expert in ids.unique().tolist():
        token, slot = (ids == expert).nonzero(as_tuple=True)
        gate, up = (x[token].float() @ dequantized(packed["w13"][expert]).T).chunk(2, -1)
        gate = F.silu(gate)
        gates += int((gate > SHAPE.limit).sum())
        ups += int((up.abs() > SHAPE.limit).sum())
        total += gate.numel()
        if limit:
            gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        down = (gate * up) @ dequantized(packed["w2"][expert]).T
        out.index_add_(0, token, down * weights[token, slot].unsqueeze(-1))
    return out * SHAPE.factor, gates / total, ups / total


def build(runner: str, experts: int, packed: dict, limit: float | None, device: str):
    """SGLang's layer with these weights, processed as after loading."""
    import torch
    from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE
    from sglang.srt.layers.quantization.fp8 import Fp8Config

    quantization = None
    if runner != "triton":
        quantization = Fp8Config(
            is_checkpoint_fp8_serialized=True,
            activation_scheme="dynamic",
            weight_block_size=[128, 128],
            is_fp4_experts=True,
            scale_fmt="ue8m0",
        )
    torch.set_default_dtype(torch.bfloat16)  # as SGLang builds its models
    with torch.device(device):
        layer = FusedMoE(
            num_experts=experts,
            top_k=SHAPE.top_k,
            layer_id=SHAPE.layer,
            hidden_size=SHAPE.hidden,
            intermediate_size=SHAPE.intermediate,
            params_dtype=torch.bfloat16,
            quant_config=quantization,
            routed_scaling_factor=SHAPE.factor,
            prefix=f"model.layers.{SHAPE.layer}.mlp.experts",
            gemm1_clamp_limit=limit,
        )
    torch.set_default_dtype(torch.float32)
    for name, values in packed.items():
        weight = getattr(layer, f"{name}_weight")
        scale = getattr(layer, f"{name}_weight_scale_inv", None)
        if scale is None:
            for expert in range(experts):
                weight.data[expert] = dequantized(values[expert]).to(weight.dtype)
            continue
        if getattr(layer.quant_method, "load_up_proj_weight_first", False) and name == "w13":
            values = torch.cat(
                [values[:, SHAPE.intermediate :], values[:, : SHAPE.intermediate]], 1
            )
        weight.data.copy_(values.view(torch.int8))
        scale.data.copy_(torch.full_like(scale, 2.0**SHAPE.exponent, dtype=torch.float32))
    if device != "cpu":
        layer.quant_method.process_weights_after_loading(layer)
    return layer


def routing(tokens: int, experts: int, device: str, seed: int):
    """Distinct random experts a token and weights that sum to 1, as Ling normalizes them."""
    import torch

    noise = torch.Generator().manual_seed(seed)
    ids = torch.stack(
        [torch.randperm(experts, generator=noise)[: SHAPE.top_k] for _ in range(tokens)]
    )
    weights = torch.rand(tokens, SHAPE.top_k, generator=noise) + 0.1
    weights /= weights.sum(-1, keepdim=True)
    return ids.to(torch.int32).to(device), weights.to(device)


def choice(layer, ids, weights):
    """The router's answer as SGLang hands it to this layer: some runners want the factor in it."""
    import torch
    from sglang.srt.layers.moe.topk import StandardTopKOutput

    if layer.should_fuse_routed_scaling_factor_in_topk:
        weights = weights * SHAPE.factor
    logits = torch.zeros(ids.shape[0], layer.num_experts, device=ids.device)
    return StandardTopKOutput(topk_weights=weights, topk_ids=ids, router_logits=logits)


def run(layer, x, ids, weights):
    """The layer's output; ``x`` is kept, though a runner may work in place."""
    import torch

    CURRENT["ids"] = ids
    with torch.inference_mode():
        return layer.forward_impl(x.clone(), choice(layer, ids, weights))


CURRENT: dict = {}
"""What :func:`torch_product` needs to know: the routes and the weights of the running layer."""


def torch_product(a, c, *rest, top_k: int, mul_topk_weights: bool, size_n: int, **_):
    """Takes the place of ``moe_wna16_marlin_gemm``: the same product in float32, rounded once.

    Positional arguments after ``a`` [rows, k] and ``c`` [routes, n] end with the routing weights.
    """
    weights = CURRENT["packed"]["w13" if size_n == 2 * SHAPE.intermediate else "w2"]
    routes = CURRENT["ids"].flatten().tolist()
    factors = rest[-1].flatten() if mul_topk_weights else None
    for row, expert in enumerate(routes):
        product = dequantized(weights[expert]) @ a[row // top_k].float()
        c[row] = product if factors is None else product * factors[row]
    return c


def relative(got, wanted) -> float:
    """Root mean square of the difference over that of ``wanted``."""
    return float((got.float() - wanted).norm() / wanted.norm())


def values(tokens: int, scale: float, device: str, seed: int = 7):
    import torch

    noise = torch.Generator().manual_seed(seed + tokens)
    x = torch.randn(tokens, SHAPE.hidden, generator=noise) * scale
    return x.to(torch.bfloat16).to(device)


def stock_activation(runner: str):
    """The plain SwiGLU of that runner: ``(gate_up, out)``."""
    if runner == "humming":
        from sgl_kernel import silu_and_mul
    else:
        from sglang.kernels.ops.activation.activation import silu_and_mul
    return silu_and_mul


def activation_case(part: Part, runner: str) -> None:
    """The kernel alone: against float32, and bit for bit against the runner's own below the limit.

    Also through the hooked functions themselves, so that there is a finding if no layer runs.
    """
    import torch
    from sparkling_sglang import clamp, clamp_kernel
    from torch.nn import functional as F

    noise = torch.Generator(device="cuda").manual_seed(3)
    for rows in (8, 64, 8192):
        wide = torch.randn(rows, 2 * SHAPE.intermediate, device="cuda", generator=noise) * 2.3
        wide = wide.to(torch.bfloat16)
        gate, up = wide.float().chunk(2, -1)
        silu = F.silu(gate)
        wanted = silu.clamp(max=SHAPE.limit) * up.clamp(-SHAPE.limit, SHAPE.limit)
        below = (silu <= SHAPE.limit) & (up.abs() <= SHAPE.limit)
        plain = torch.empty(rows, SHAPE.intermediate, dtype=torch.bfloat16, device="cuda")
        stock_activation(runner)(wide, plain)
        case = {"level": "activation", "runner": runner, "rows": rows}
        case["beyond_the_limit"] = 1 - float(below.float().mean())
        case["stock_error"] = relative(plain, wanted)
        for fast in (True, False):
            clamp_kernel.FAST = fast
            out = torch.full_like(plain, float("nan"))
            clamp.swiglu(wide, out, SHAPE.limit)
            name = "fast" if fast else "exact"
            case[f"{name}_error"] = relative(out, wanted)
            case[f"{name}_bits_differ_below"] = int((out != plain)[below].sum())
        clamp_kernel.FAST = True
        case["entries_below"] = int(below.sum())
        part.add(**case)


def activation_times(part: Part, runner: str) -> None:
    """Microseconds of the activation alone, stock's and ours in turns, for every number of tokens."""
    import torch
    from sparkling_sglang import clamp

    plain = stock_activation(runner)
    for tokens in TOKENS:
        rows = tokens * SHAPE.top_k
        wide = torch.randn(rows, 2 * SHAPE.intermediate, device="cuda").to(torch.bfloat16)
        out = torch.empty(rows, SHAPE.intermediate, dtype=torch.bfloat16, device="cuda")
        calls = {
            "stock": functools.partial(plain, wide, out),
            "hooked": functools.partial(clamp.swiglu, wide, out, SHAPE.limit),
        }
        graphs = {}
        for name, call in calls.items():
            call()
            torch.cuda.synchronize()
            graphs[name] = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graphs[name]):
                for _ in range(CALLS):
                    call()
        case = in_turns(graphs)
        part.add(level="activation time", runner=runner, rows=rows, tokens=tokens, **case)


def hooked_function_case(part: Part, runner: str) -> None:
    """The runner's hooked activation called directly with the marked limit."""
    import torch

    wide = torch.randn(64, 2 * SHAPE.intermediate, device="cuda").to(torch.bfloat16) * 2.3
    out = torch.empty(64, SHAPE.intermediate, dtype=torch.bfloat16, device="cuda")
    gate, up = wide.float().chunk(2, -1)
    wanted = torch.nn.functional.silu(gate).clamp(max=SHAPE.limit) * up.clamp(
        -SHAPE.limit, SHAPE.limit
    )
    if runner == "humming":
        from sglang.srt.layers.moe.moe_runner.humming import HummingRunnerCore

        core = HummingRunnerCore.__new__(HummingRunnerCore)
        core.activation, core.swiglu_limit = "silu", -SHAPE.limit
        core.apply_activation(inputs=wide, outputs=out)
    else:
        marlin = importlib.import_module("sglang.srt.layers.moe.fused_moe_triton.fused_marlin_moe")
        marlin.swiglu_limit_func(out, wide, -SHAPE.limit)
    part.add(level="hooked function", runner=runner, error=relative(out, wanted))


def reproduction(part: Part) -> None:
    """The few lines of the upstream report: stock Humming's activation, told of a limit of 4."""
    import torch
    from sglang.srt.layers.moe.moe_runner.base import MoeRunnerConfig
    from sglang.srt.layers.moe.moe_runner.humming import HummingRunnerCore

    asked = MoeRunnerConfig(num_experts=8, num_local_experts=8, gemm1_clamp_limit=4.0)
    core = HummingRunnerCore(asked)
    eights = torch.full((1, 512), 8.0, dtype=torch.bfloat16, device="cuda")
    out = torch.empty(1, 256, dtype=torch.bfloat16, device="cuda")
    core.apply_activation(inputs=eights, outputs=out)
    seen = core.swiglu_limit, float(out[0, 0])
    part.add(level="reproduction", runner="humming", swiglu_limit=seen[0], output=seen[1])


def hook() -> None:
    """What ``SPARKLING_SWIGLU_CLAMP=1`` does in SGLang's scheduler process."""
    from sparkling_sglang import clamp
    from sparkling_sglang.patches import Patches

    patches = Patches()
    clamp.register(patches)
    if os.environ.get("SGLANG_USE_CPU_ENGINE"):  # a dry run
        from sparkling_sglang.cpu import moe

        moe.register(patches)
    patches.apply()


def layer_cases(
    part: Part, runner: str, experts: int, packed: dict, layers: dict, device: str
) -> None:
    """Each layer's output against the references, and bit for bit where that is due."""
    import torch
    from sparkling_sglang import limits

    CURRENT["packed"] = packed
    for tokens in (1, 4, 8):
        for kind, scale in (("exceeding", 1.0), ("below", 0.02)):
            x = values(tokens, scale, device)
            ids, weights = routing(tokens, experts, device, seed=tokens)
            clamped, gates, ups = reference(x, ids, weights, packed, SHAPE.limit)
            free, _, _ = reference(x, ids, weights, packed, None)
            outputs = {name: run(layer, x, ids, weights) for name, layer in layers.items()}
            again = run(layers["stock"], x, ids, weights)
            case = {"level": "layer", "runner": runner, "experts": experts, "tokens": tokens}
            case |= {"input": kind, "gates_beyond": gates, "ups_beyond": ups}
            case["clamped_against_unclamped"] = relative(clamped, free)
            for name, output in outputs.items():
                case[name] = {
                    "error_to_clamped": relative(output, clamped),
                    "error_to_unclamped": relative(output, free),
                    "entries_unlike_stock": int((output != outputs["stock"]).sum()),
                    "applied": limits.applied(layers[name]),
                }
            case["stock_repeats"] = bool(torch.equal(again, outputs["stock"]))
            case["entries"] = outputs["stock"].numel()
            part.add(**case)


@dataclasses.dataclass
class Graphed:
    """A CUDA graph of CALLS runs, each with experts of its own: more than the L2 cache holds.

    It holds all that the graph reads: a graph keeps the addresses of its inputs, and not the inputs.
    """

    layer: Any
    x: Any
    routes: list[tuple[Any, Any]]
    chosen: list[Any]
    graph: Any
    outputs: list[Any]

    def equal(self) -> bool:
        """Whether the last replay computed what the layer computes without a graph."""
        import torch

        torch.cuda.synchronize()
        return all(
            bool(torch.equal(run(self.layer, self.x, *route), out))
            for route, out in zip(self.routes, self.outputs, strict=True)
        )


def graphed(layer, tokens: int, experts: int) -> Graphed:
    """Capture the layer's CALLS runs."""
    import torch

    x = values(tokens, 1.0, "cuda")
    routes = [routing(tokens, experts, "cuda", seed=100 + call) for call in range(CALLS)]
    chosen = [choice(layer, ids, weights) for ids, weights in routes]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.inference_mode():
        with torch.cuda.stream(stream):
            for topk in chosen:
                layer.forward_impl(x, topk)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outputs = [layer.forward_impl(x, topk) for topk in chosen]
    return Graphed(layer, x, routes, chosen, graph, outputs)


def spread(samples: list[float]) -> dict:
    low, _, high = statistics.quantiles(samples, n=4)
    return {"median": statistics.median(samples), "q1": low, "q3": high, "n": len(samples)}


def interval(samples: list[float]) -> list[float]:
    """95 % of the medians of 2,000 bootstrap samples."""
    import numpy as np

    draws = np.random.default_rng(0).choice(samples, (2000, len(samples)))
    return [float(q) for q in np.percentile(np.median(draws, axis=1), [2.5, 97.5])]


def timing_case(part: Part, runner: str, experts: int, layers: dict, tokens: int) -> None:
    """Microseconds a layer, stock and hooked in turns, order swapped every round."""

    graphs = {name: graphed(layers[name], tokens, experts) for name in ("stock", "hooked")}
    case = in_turns({name: one.graph for name, one in graphs.items()})
    part.add(
        level="time",
        runner=runner,
        experts=experts,
        tokens=tokens,
        unit="microseconds a layer, CUDA graph, cold experts",
        graph_equals_eager={name: one.equal() for name, one in graphs.items()},
        **case,
    )


def in_turns(graphs: dict) -> dict:
    """Microseconds a call of two graphs of CALLS calls, the order swapped every round."""
    import torch

    took: dict[str, list[float]] = {name: [] for name in graphs}
    for turn in range(ROUNDS + 5):
        for name in sorted(graphs, reverse=bool(turn % 2)):
            begin, finish = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graphs[name].replay()
            finish.record()
            finish.synchronize()
            if turn >= 5:
                took[name].append(begin.elapsed_time(finish) * 1000 / CALLS)
    more = [b - a for a, b in zip(took["stock"], took["hooked"], strict=True)]
    return {
        "stock": spread(took["stock"]),
        "hooked": spread(took["hooked"]),
        "difference": spread(more) | {"interval": interval(more)},
    }


def short_sources(part: Part, options: argparse.Namespace) -> bool:
    """Have SGLang compile Marlin from a copy with the kernels of an MXFP4 checkpoint alone."""
    sys.path.insert(0, str(Path(__file__).parent))
    from full_size_plugin import short_marlin

    short_marlin(Path(options.short_marlin).resolve())
    part.found["compiled"] = "SGLang's source with the kernels of an MXFP4 checkpoint alone"
    return True


def compile_marlin() -> None:
    """Build Marlin's two specializations at once instead of one after the other."""
    import torch
    from sglang.kernels.jit.utils import parallel_compile
    from sglang.kernels.ops.activation.activation import activation_module
    from sglang.kernels.ops.moe import moe_wna16_marlin as marlin

    module = marlin._jit_moe_wna16_marlin_module
    parallel_compile(
        [
            functools.partial(module, torch.bfloat16, False, False, True, False, True),
            functools.partial(module, torch.bfloat16, False, False, True, True, True),
            functools.partial(activation_module, torch.bfloat16),
        ]
    )


def versions() -> dict:
    from importlib import metadata

    import torch

    found = {"torch": torch.__version__, "python": sys.version.split()[0]}
    for name in ("sglang", "sglang-kernel", "humming-kernels", "flashinfer-python", "triton"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        found |= {"gpu": properties.name, "cuda": torch.version.cuda}
        found["sm"] = f"{properties.major}.{properties.minor}"
    return found


def child(options: argparse.Namespace) -> int:
    runner, device = options.child, "cpu" if options.dry_run else "cuda"
    part = Part(Path(options.out), options.until)
    if device == "cpu":
        os.environ |= {"SGLANG_USE_CPU_ENGINE": "1", "TORCHDYNAMO_DISABLE": "1"}
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    sys.path.insert(0, str(ROOT / "lib" / "sparkling_sglang"))
    import torch

    part.found["versions"] = versions()
    rendezvous = Path(options.out).resolve().with_suffix(".rendezvous")
    product_of, runner = runner, runner.removesuffix("_torch")
    if part.step("context", lambda: context(runner, device, rendezvous) or True) is None:
        return 1
    ours = runner in ("humming", "marlin")
    if product_of != runner:
        marlin = importlib.import_module("sglang.srt.layers.moe.fused_moe_triton.fused_marlin_moe")
        marlin.moe_wna16_marlin_gemm = torch_product
        part.found["products"] = "torch, in float32"
    if product_of == "marlin" and device != "cpu":
        if (
            options.short_marlin
            and part.step("short sources", short_sources, part, options) is None
        ):
            return 1
        if part.step("compile", lambda: compile_marlin() or True) is None:
            return 1
        if options.warm:
            return 0
    whole = ours and product_of == runner
    sizes = [8] if device == "cpu" else [64, options.experts] if whole else [64]
    with gpu(options.gpu, part.until, alone=False):
        built = correctness(part, runner, sizes, device)
    largest = sizes[-1]
    if device != "cpu" and ours:
        with gpu(options.gpu, part.until, alone=True):
            part.step("activation times", activation_times, part, runner)
            if whole and {"stock", "hooked"} <= set(built[largest]):
                for tokens in TOKENS:
                    more = part, runner, largest, built[largest], tokens
                    part.step(f"time {tokens}", timing_case, *more)
            torch.cuda.synchronize()
    return 0


def correctness(part: Part, runner: str, sizes: list[int], device: str) -> dict[int, dict]:
    """The layers of each size by name, compared with the references; on a CPU only built."""
    ours = runner in ("humming", "marlin")
    if ours and device != "cpu":
        part.step("activation", activation_case, part, runner)
    packed = {experts: codes(experts, device) for experts in sizes}
    built: dict[int, dict] = {experts: {} for experts in sizes}

    def add(name: str, limit: float | None) -> None:
        for experts in sizes:
            made = part.step(
                f"build {name} {experts}", build, runner, experts, packed[experts], limit, device
            )
            if made is not None:
                built[experts][name] = made

    if runner == "humming" and device != "cpu":
        part.step("reproduction", reproduction, part)
    add("stock", SHAPE.limit)
    if part.step("hook", lambda: hook() or True) is None:
        return built
    if ours and device != "cpu":
        part.step("hooked function", hooked_function_case, part, runner)
    add("hooked", SHAPE.limit)
    add("hooked_without_limit", None)
    if device == "cpu":
        for name, layer in built[8].items():
            marked = layer.moe_runner_config.swiglu_limit
            part.add(level="build", runner=runner, name=name, swiglu_limit=marked)
        if runner != "triton":  # the one whose weights a CPU can multiply, in SGLang's own code
            return built
    for experts in sizes:
        if "stock" in built[experts]:
            layers = built[experts]
            more = packed[experts], layers, device
            part.step(f"layer {experts}", layer_cases, part, runner, experts, *more)
    return built


def seconds(text: str) -> float:
    """A positive, finite number of seconds from the command line."""
    value = float(text)
    if not (math.isfinite(value) and value > 0):
        raise ValueError(text)
    return value


def names(text: str) -> str:
    """Comma-separated runners from the command line, as they were given."""
    if not text or not set(text.split(",")) <= set(RUNNERS):
        raise argparse.ArgumentTypeError(f"{text!r} (choose from {', '.join(RUNNERS)})")
    return text


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", required=True)
    parser.add_argument("--limit-s", type=seconds, default=90.0, help="seconds for everything")
    parser.add_argument("--runners", type=names, default=",".join(RUNNERS))
    parser.add_argument("--experts", type=int, default=512)
    parser.add_argument("--config", help="a checkpoint's config.json, for its shapes and its limit")
    parser.add_argument("--dry-run", action="store_true", help="no GPU: build and hook only")
    parser.add_argument("--warm", action="store_true", help="only compile Marlin into its cache")
    parser.add_argument(
        "--short-marlin",
        metavar="FOLDER",
        help="compile a copy of Marlin's source, made in this folder, with the MXFP4 kernels alone: "
        "the same code in one minute instead of more than five",
    )
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--gpu", help=argparse.SUPPRESS)
    parser.add_argument("--until", type=float, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.warm:
        options.runners = "marlin"
    if options.config:
        global SHAPE
        try:
            SHAPE = Shape.of(Path(options.config))
        except OSError as error:
            parser.error(f"--config {options.config} cannot be read ({error.strerror}).")
        except (ValueError, KeyError, TypeError):
            parser.error(f"--config {options.config} is no config.json of a Ling with limits.")
    if Path(options.out).is_dir():
        parser.error(f"--out {options.out} is a folder; name a file.")
    if options.experts < SHAPE.top_k:
        parser.error(f"--experts is {options.experts}; a token takes {SHAPE.top_k}.")
    return child(options) if options.child else parent(options)


if __name__ == "__main__":
    sys.exit(main())
