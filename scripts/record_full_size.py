#!/usr/bin/env python3
"""Measures Ling-3.0-flash at full size with random weights: 2 x 2 x 2 switches on one or two GPUs.

    PYTHONPATH=SITE python3 scripts/record_full_size.py --gpus 0,1 --budget 570 --out OUT

SITE holds SGLang (see env/server-spark.txt for what it needs); no network and no checkpoint is used:
`--load-format dummy`, and `full_size_plugin.py` beside this file fills the weights with seeded noise.
Every arm is a server of its own: {Marlin, Humming} x {BF16, FP8 head} x {plain, NEXTN 3/1/4}, batch 1,
then a few extras. Two servers share a GPU only while the next one imports Python.

What is measured, for each request by itself: the client's time between the first and the last token of
a streamed answer, divided by the tokens after the first (`step`) or, with NEXTN, by the rounds that
the server counts (`round`). Prefill is in neither. Random weights accept next to no draft, so a round
here is the pure cost of a round.

An arm that is done lies in STATE and is not measured again: call it until all are done. Results are
written to OUT after every arm: full.json, and the arms' logs in logs.tar.gz.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import os
import random
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tarfile
import threading
import time
import tomllib
import traceback
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # loopback: no proxy

# What the facts file leaves out because no size follows from it.
CONFIG = {
    "num_key_value_heads": 32,
    "hidden_act": "silu",
    "use_qkv_bias": False,
    "use_bias": False,
    "use_qk_norm": True,
    "rms_norm_eps": 1e-6,
    "rope_theta": 6000000,
    "rope_scaling": None,
    "rope_interleave": True,
    "partial_rotary_factor": 0.5,
    "rotary_dim": 64,
    "pad_token_id": 156892,
    "eos_token_id": 156895,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
    "group_norm_size": 1,
    "linear_silu": True,
    "q_lora_rank": None,
    "qk_rope_head_dim": 64,
    "kda_safe_gate": True,
    "kda_lower_bound": -5,
    "use_mla_nope": False,
    "full_attention_type": "mla",
    "expert_swiglu_limit_list": [0] * 35 + [4] * 7,
    "share_expert_swiglu_limit_list": [0] * 34 + [5] * 6 + [7] * 2,
}

FLAGS = (
    "--load-format dummy --skip-tokenizer-init --dtype bfloat16 --max-running-requests 1 "
    "--max-mamba-cache-size 8 --chunked-prefill-size 8192 --page-size 64 --context-length 65536 "
    "--cuda-graph-backend-decode full --cuda-graph-max-bs-decode 1 --cuda-graph-bs-decode 1 "
    "--cuda-graph-backend-prefill disabled --attention-backend triton --fp8-gemm-backend triton "
    "--mem-fraction-static 0.75 --disable-radix-cache --disable-flashinfer-autotune "
    "--random-seed 308534008 --enable-metrics"
).split()
# The practice model of the cpu lane, to try this script without a GPU.
CPU_FLAGS = (
    "--device cpu --load-format dummy --skip-tokenizer-init --mem-fraction-static 0.1 --max-total-tokens 8192 "
    "--context-length 4096 --max-running-requests 1 --max-mamba-cache-size 128 "
    "--mamba-radix-cache-strategy no_buffer --disable-overlap-schedule --attention-backend intel_amx "
    "--random-seed 308534008"
).split()
NEXTN = (
    "--speculative-algorithm NEXTN --speculative-num-steps 3 --speculative-eagle-topk 1 "
    "--speculative-num-draft-tokens 4"
).split()


@dataclass(frozen=True)
class Arm:
    """One server to measure; `env` is what it sets besides the machine's own."""

    name: str
    kernels: str
    nextn: bool
    env: dict[str, str]


def arms() -> dict[str, Arm]:
    """Every arm by name: the eight of the design first, then the extras."""
    found = {}
    clamp = {"SPARKLING_SWIGLU_CLAMP": "1"}
    for kernels in ("humming", "marlin"):
        for head in ("bf16", "fp8"):
            for mode in ("plain", "nextn"):
                name = f"{kernels}-{head}-{mode}"
                env = clamp | ({"SPARKLING_FP8_LM_HEAD": "1"} if head == "fp8" else {})
                found[name] = Arm(name, kernels, mode == "nextn", env)
    fp8 = clamp | {"SPARKLING_FP8_LM_HEAD": "1"}
    off = {"SPARKLING_SWIGLU_CLAMP": "0"}
    for name, nextn, env in (
        ("unshared", True, fp8 | {"SPARKLING_SHARE_HEAD": "0"}),
        ("clamp-off", False, fp8 | off),
        ("clamp-off-nextn", True, fp8 | off),
        ("stock", False, {}),
        ("trap", True, fp8 | {"SPARKLING_TRAP": "tensor-only"}),
        ("swap", False, clamp),
    ):
        found[name] = Arm(name, "humming", nextn, env)
    return found


CORE = [name for name in arms() if name.count("-") == 2 and name.split("-")[1] in ("bf16", "fp8")]
EXTRA = ["clamp-off-nextn", "trap", "clamp-off", "stock", "unshared", "swap"]
# swap is humming-bf16-plain on the other GPU: what of Marlin against Humming is the two GPUs.


def queues(gpus: list[int], wanted: list[str]) -> dict[int, list[str]]:
    """Which GPU measures which arms, in order: of two, Marlin has the last one to itself, as its first
    start compiles kernels of its own; one GPU measures all but `swap`, as they were given."""
    if len(gpus) == 1:
        return {gpus[0]: [name for name in wanted if name != "swap"]}
    marlin = [name for name in wanted if name.startswith("marlin") or name == "swap"]
    rest = [name for name in wanted if name not in marlin]
    return {gpus[0]: rest, gpus[-1]: marlin}


# -- one server --------------------------------------------------------------------------------------


@dataclass
class Server:
    """A started server: its process group, its gate and its files."""

    arm: Arm
    process: subprocess.Popen[bytes]
    url: str
    command: list[str]
    env: dict[str, str]
    folder: Path
    launched: float
    opened: float | None = None
    times: dict[str, float] = field(default_factory=dict)

    @property
    def log(self) -> Path:
        return self.folder / "server.log"

    @property
    def at_gate(self) -> bool:
        return (self.folder / "gate.at").exists()

    def open(self) -> None:
        """Let it use its GPU."""
        self.opened = time.time()
        (self.folder / "gate").touch()

    def dead(self) -> bool:
        return self.process.poll() is not None


class Failed(RuntimeError):
    """An arm that could not be measured; the message says why."""


def put(path: Path, text: str) -> None:
    """Write a file unless it holds this already: another server may be reading it."""
    if not path.exists() or path.read_text() != text:
        path.write_text(text)


def site(state: Path) -> Path:
    """A folder with both plugins as SGLang finds them: by an installed distribution's metadata."""
    folder = state / "site"
    folder.mkdir(parents=True, exist_ok=True)
    plugin = Path(__file__).with_name("full_size_plugin.py")
    put(folder / plugin.name, plugin.read_text())
    product = tomllib.loads((ROOT / "lib" / "sparkling_sglang" / "pyproject.toml").read_text())
    project = product["project"]
    ours = project["entry-points"]["sglang.srt.plugins"]
    for name, version, entries in (
        (project["name"], project["version"], ours),
        ("sparkling-full-size", "0.0.1", {"full_size": "full_size_plugin:register"}),
    ):
        info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir(exist_ok=True)
        put(info / "METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        lines = [f"{key} = {value}" for key, value in entries.items()]
        put(info / "entry_points.txt", "\n".join(["[sglang.srt.plugins]", *lines, ""]))
    return folder


def model_folder(state: Path) -> Path:
    """A folder with nothing but the config.json of Ling-3.0-flash."""
    facts = ROOT / "lib" / "sparkling" / "facts" / "ling-3.0-flash.toml"
    made = tomllib.loads(facts.read_text()) | CONFIG
    quantization = {"activation_scheme": "dynamic", **made["quantization_config"]}
    folder = state / "model"
    folder.mkdir(parents=True, exist_ok=True)
    config = made | {"quantization_config": quantization}
    put(folder / "config.json", json.dumps(config, indent=1))
    return folder


def environment(args: argparse.Namespace, arm: Arm, gpu: int, folder: Path) -> dict[str, str]:
    """What is set for a server on top of the machine's environment; holds no secrets."""
    caches = args.state / "cache"
    env = {
        "PYTHONUNBUFFERED": "1",
        "HF_HUB_OFFLINE": "1",
        "SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK": "1",
        "SGLANG_ENABLE_JIT_DEEPGEMM": "0",
        "FLASHINFER_DISABLE_VERSION_CHECK": "1",
        "HUMMING_COMPILER": "nvrtc",
        "HUMMING_CACHE_DIR": str(caches / "humming"),
        "TRITON_CACHE_DIR": str(caches / "triton"),
        "SGLANG_JIT_CACHE_DIR": str(caches / "sglang-jit"),
        "TVM_FFI_CACHE_DIR": str(caches / "tvm-ffi"),
        "FLASHINFER_WORKSPACE_BASE": str(caches / "flashinfer"),
        "MAX_JOBS": str(max(1, (os.cpu_count() or 2) // 2 - 2)),
        "CUDA_VISIBLE_DEVICES": str(gpu),
        "FULL_SIZE_RANDOM": "1",
        "FULL_SIZE_GATE": str(folder / "gate"),
    }
    if args.cpu:
        cpu = {
            "SGLANG_USE_CPU_ENGINE": "1",
            "OMP_NUM_THREADS": "2",
            "OMP_WAIT_POLICY": "PASSIVE",
            "TORCHDYNAMO_DISABLE": "1",
        }
        env = {k: v for k, v in env.items() if k.startswith(("PYTHON", "HF_", "FULL_"))} | cpu
    if arm.kernels == "marlin" and not args.cpu:
        env["FULL_SIZE_MARLIN"] = str(args.state / "marlin")
    # "stock" has none of our switches: what the clamp and the status file cost over the bare plugin.
    status = {} if arm.name == "stock" else {"SPARKLING_STATUS_FILE": str(folder / "status.json")}
    changed = dict(pair.split("=", 1) for pair in args.set)
    return env | status | arm.env | changed


def launch(args: argparse.Namespace, arm: Arm, gpu: int) -> Server:
    """Start one server in a session of its own; it waits at the gate."""
    # Another call may start the same arm within a second: --again, after a server that ended at once.
    folder = args.state / "work" / f"{arm.name}.{time.time_ns()}"
    folder.mkdir(parents=True)
    model = args.model or model_folder(args.state)
    flags = CPU_FLAGS if args.cpu else [*FLAGS, "--moe-runner-backend", arm.kernels]
    port = args.port + 100 * gpu + list(arms()).index(arm.name)
    where = ["--model-path", str(model), "--host", "127.0.0.1", "--port", str(port)]
    nextn = [*NEXTN, "--speculative-draft-model-path", str(model)] if arm.nextn else []
    command = ["-m", "sglang.launch_server", *where, *flags, *nextn]
    env = environment(args, arm, gpu, folder)
    paths = [str(site(args.state)), str(ROOT / "lib" / "sparkling_sglang")]
    if os.environ.get("PYTHONPATH"):
        paths.append(os.environ["PYTHONPATH"])
    with (folder / "server.log").open("wb") as log:
        process = subprocess.Popen(
            [str(args.python), *command],
            env={**os.environ, **env, "PYTHONPATH": os.pathsep.join(paths)},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    with (args.state / "groups").open("a") as file:
        file.write(f"{process.pid}\n")
    url = f"http://127.0.0.1:{port}"
    return Server(arm, process, url, ["python3", *command], env, folder, time.time())


def stop(server: Server) -> None:
    """End a server and everything it started: its processes share its process group."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(server.process.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        server.process.wait(20)


def leftovers(state: Path) -> None:
    """End servers of an earlier call that was itself ended: groups we noted, if they are still ours."""
    noted = state / "groups"
    for line in noted.read_text().split() if noted.exists() else []:
        with contextlib.suppress(OSError):
            words = Path(f"/proc/{line}/environ").read_bytes()
            if b"FULL_SIZE_GATE=" + os.fsencode(str(state)) in words:
                os.killpg(int(line), signal.SIGKILL)
    noted.unlink(missing_ok=True)


def smi(gpu: int, *fields: str) -> dict[str, str]:
    """Fields of one GPU as nvidia-smi gives them; empty without one."""
    query = ["nvidia-smi", f"--id={gpu}", f"--query-gpu={','.join(fields)}"]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        out = subprocess.run(
            [*query, "--format=csv,noheader,nounits"], capture_output=True, text=True, timeout=20
        )
        if out.returncode == 0:
            return dict(zip(fields, (x.strip() for x in out.stdout.split(",")), strict=False))
    return {}


def memory_of(server: Server) -> dict[str, int]:
    """GPU memory (MiB) of each of a server's processes, by process number; empty if not told."""
    query = ["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits"]
    made = {}
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        out = subprocess.run(query, capture_output=True, text=True, timeout=20)
        for pid, used in re.findall(r"(\d+), (\d+)", out.stdout):
            with contextlib.suppress(OSError):
                if os.getpgid(int(pid)) == server.process.pid:
                    made[pid] = int(used)
    return made


def wait_free(gpu: int, limit: float = 25) -> None:
    """Wait until the memory of an ended server is free again."""
    end = time.time() + limit
    while time.time() < end:
        used = smi(gpu, "memory.used").get("memory.used", "0")
        if not used.isdigit() or int(used) < 6000:  # MiB; a gated server may hold a context
            return
        time.sleep(0.5)


def wait_ready(server: Server, limit: float) -> None:
    """Wait for /health; notes how long it took. Raises Failed."""
    end = time.time() + limit
    while time.time() < end:
        if server.dead():
            raise Failed(f"the server ended with {server.process.returncode} while starting")
        with contextlib.suppress(OSError, urllib.error.URLError):
            with OPENER.open(f"{server.url}/health", timeout=10) as reply:
                if reply.status == 200:
                    break
        time.sleep(0.25)
    else:
        raise Failed(f"the server was not ready within {limit:.0f} s")
    now = time.time()
    at = json.loads((server.folder / "gate.at").read_text())["time"]
    opened = max(at, server.opened or at)
    server.times = {
        "import_s": round(at - server.launched, 2),
        "gate_s": round(opened - at, 2),
        "load_to_ready_s": round(now - opened, 2),
        "start_s": round(at - server.launched + now - opened, 2),
    }


# -- measuring ---------------------------------------------------------------------------------------


def ids(vocabulary: int, n: int, seed: int) -> list[int]:
    made = random.Random(f"full-size {seed}")
    return [made.randrange(10, vocabulary - min(1000, vocabulary // 2)) for _ in range(n)]


def generate(url: str, prompt: list[int], tokens: int, timeout: float) -> dict[str, Any]:
    """One streamed greedy answer of exactly `tokens` tokens, with its times. See the module."""
    sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
    body = {"input_ids": prompt, "sampling_params": sampling, "stream": True}
    request = urllib.request.Request(
        f"{url}/generate", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    began, arrived, last = time.perf_counter(), [], {}
    out: list[int] = []
    with OPENER.open(request, timeout=timeout) as reply:
        for line in reply:
            if not line.startswith(b"data:"):
                continue
            text = line[5:].strip()
            if text == b"[DONE]":
                break
            now = time.perf_counter()
            last = json.loads(text)
            if "error" in last:
                raise Failed(f"the server answers {last['error']}")
            arrived.append((now - began, last["meta_info"]["completion_tokens"]))
            given = last.get("output_ids") or []  # all so far, or those of this chunk
            out = given if len(given) == arrived[-1][1] else out + given
    return summary(len(prompt), arrived, last["meta_info"], out)


def summary(
    prompt: int, arrived: list[tuple[float, int]], meta: dict[str, Any], out: list[int]
) -> dict[str, Any]:
    """One request's row: `ms` per step or per round between the first and the last token, the same
    from the later half alone, and the same from the server's own clock.

    Args:
        prompt: tokens of the prompt.
        arrived: (seconds since sending, tokens so far) of every chunk.
        meta: the last chunk's `meta_info`.
        out: the answer's token ids.
    """
    if len(arrived) < 3:
        raise Failed(f"an answer came in {len(arrived)} chunks, too few to time its steps")
    (first, n0), (end, n) = arrived[0], arrived[-1]
    rounds = meta.get("spec_verify_ct")
    units = rounds or n - n0
    half = arrived[len(arrived) // 2]
    if not n0 < n or not half[1] < n:
        raise Failed(f"an answer's later half brought no token: {arrived[-1]}")
    later = (end - half[0]) / (n - half[1]) * (n - n0) / units
    server = None
    if meta.get("e2e_latency") and meta.get("first_token_latency"):
        server = 1e3 * (meta["e2e_latency"] - meta["first_token_latency"]) / units
    return {
        "prompt": prompt,
        "tokens": n,
        "chunks": len(arrived),
        "rounds": rounds,
        "of": "round" if rounds else "step",
        "ms": round(1e3 * (end - first) / units, 5),
        "later_ms": round(1e3 * later, 5),
        "server_ms": server and round(server, 5),
        "ttft_s": round(first, 4),
        "accept_length": (n - n0) / rounds if rounds else None,
        "histogram": meta.get("spec_correct_drafts_histogram"),
        "distinct": len(set(out)),
        "given": len(out),
        "finish": (meta.get("finish_reason") or {}).get("type"),
    }


def load_sample(server: Server, gpu: int, vocabulary: int) -> dict[str, str]:
    """Clocks and power in the middle of an answer that is not counted."""
    made: list[dict[str, str]] = []

    def ask() -> None:
        time.sleep(0.8)
        made.append(smi(gpu, "clocks.sm", "clocks.mem", "power.draw", "temperature.gpu"))

    thread = threading.Thread(target=ask)
    thread.start()
    generate(server.url, ids(vocabulary, 256, 99), 300, 60)
    thread.join()
    return made[0] if made else {}


def measure(args: argparse.Namespace, server: Server, gpu: int, until: float) -> dict[str, Any]:
    """All requests of one arm, in rounds over the contexts so that a drift hits them alike."""
    vocabulary = args.vocabulary
    rows: list[dict[str, Any]] = []
    made: dict[str, Any] = {"runs": rows}
    most = max(runs for *_, runs in args.plan)
    try:
        for run in range(most):
            for context, tokens, runs in args.plan:
                if run < runs and time.time() < until:
                    left = max(5.0, until - time.time())
                    prompt = ids(vocabulary, context, 1000 * run + context)
                    rows.append({"run": run, **generate(server.url, prompt, tokens, left)})
    except (OSError, Failed, ValueError, KeyError) as error:  # what there is, is kept
        made["error"] = f"{type(error).__name__}: {error}"
    made["complete"] = len(rows) == sum(runs for *_, runs in args.plan)
    if made.get("error"):
        return made
    if not args.cpu:
        with contextlib.suppress(Failed, OSError):
            made["under_load"] = load_sample(server, gpu, vocabulary)
    return made


TIMINGS = re.compile(r"Engine startup timings \(s\): (.*)")
RAISED = re.compile(r"^(?:\w+\.)*\w*(?:Error|Exception): .*$", re.MULTILINE)
LOADED = re.compile(r"Load weight end\. elapsed=([\d.]+) s, type=(\w+).*mem usage=([\d.]+) GB")


def from_log(text: str) -> dict[str, Any]:
    """What the server's log says of its start: SGLang's own timings, and memory by model (GB)."""
    timings = TIMINGS.findall(text)
    loads = {kind: float(gb) for _, kind, gb in LOADED.findall(text)}
    wanted = ("humming", "marlin", "lm_head", "clamp", "swiglu", "sparkling", "random weights")
    kept = [
        line[:400]
        for line in text.splitlines()
        if any(word in line.lower() for word in wanted)
        and "Preparing" not in line
        and "server_args=" not in line
    ]
    raised = RAISED.findall(text)
    layers = sum("Preparing" in line and "experts for" in line for line in text.splitlines())
    return {
        "timings": timings[-1] if timings else None,
        "weights_gb": loads,
        "expert_layers_prepared": layers,
        "lines": kept[:40],
        "raised": raised[-1] if raised else None,
    }


ASKED = (
    "version",
    "dtype",
    "attention_backend",
    "moe_runner_backend",
    "fp8_gemm_backend",
    "speculative_algorithm",
    "speculative_num_steps",
    "speculative_num_draft_tokens",
    "kv_cache_dtype",
    "max_total_num_tokens",
    "mem_fraction_static",
    "disable_overlap_schedule",
    "random_seed",
)


def finish(args: argparse.Namespace, server: Server, gpu: int) -> dict[str, Any]:
    """What is asked of a ready server beside its speed, and what it left on the disk."""
    made: dict[str, Any] = {}
    with contextlib.suppress(OSError, ValueError):
        with OPENER.open(f"{server.url}/server_info", timeout=20) as reply:
            info = json.load(reply)
        made["arguments"] = {key: info[key] for key in ASKED if key in info}
    status = server.folder / "status.json"
    with contextlib.suppress(OSError, ValueError):
        made["status"] = json.loads(status.read_text())
    made["gpu"] = smi(gpu, "name", "driver_version", "memory.total", "memory.used")
    made["memory_mib"] = memory_of(server)
    return made


def record(args: argparse.Namespace, server: Server, **fields: Any) -> dict[str, Any]:
    """The arm's record: how it was started, and what was found."""
    text = server.log.read_text(errors="replace")
    versions = {}
    for name in (
        "sglang",
        "sglang-kernel",
        "humming-kernels",
        "flashinfer-python",
        "torch",
        "triton",
    ):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return {
        "arm": server.arm.name,
        "command": server.command,
        "env": {k: v for k, v in server.env.items() if "KEY" not in k and "TOKEN" not in k},
        "versions": versions,
        "date": time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime()),
        "start": server.times,
        "log": from_log(text),
        **fields,
    }


# -- the queue of one GPU ------------------------------------------------------------------------------


class Lane:
    """Measures arms one after the other on one GPU; the next server imports meanwhile."""

    def __init__(self, args: argparse.Namespace, gpu: int, names: list[str]) -> None:
        self.args, self.gpu = args, gpu
        self.names = [n for n in names if not (args.state / "arms" / f"{n}.json").exists()]
        self.live: list[Server] = []
        # Until one arm is done here, a start compiles kernels.
        self.first = len(self.names) == len(names)

    def say(self, text: str) -> None:
        print(f"{time.strftime('%H:%M:%S')} gpu {self.gpu}: {text}", flush=True)

    def left(self) -> float:
        return self.args.until - time.time()

    def start_next(self) -> Server | None:
        """The next arm's server, if there is time for it."""
        # A first start that this call cuts short leaves its compiled kernels to the next call.
        if not self.names or self.left() < self.args.arm_s or self.args.stopping.is_set():
            return None
        server = launch(self.args, arms()[self.names.pop(0)], self.gpu)
        self.live.append(server)
        return server

    def run(self) -> None:
        try:
            current = self.start_next()
            bandwidth(self.args, self.gpu)
            while current is not None and not self.args.stopping.is_set():
                current = self.one(current)
        except Exception:
            self.say(traceback.format_exc())
        finally:
            self.close()

    def close(self) -> None:
        for server in self.live:
            stop(server)
        self.live = []

    def one(self, server: Server) -> Server | None:
        """Measure one arm, with the next on its way; returns the next."""
        name, began = server.arm.name, time.time()
        wait_free(self.gpu)
        server.open()
        limit = min(self.args.first_s if self.first else 2 * self.args.arm_s, self.left())
        self.first = False
        following = self.start_next()
        made: dict[str, Any] = {"complete": False}
        try:
            wait_ready(server, limit)
            self.say(f"{name} ready {server.times}")
            # The first prompt of a length compiles its kernels: none of this is counted.
            for context, *_ in self.args.plan:
                prompt = ids(self.args.vocabulary, context, 7)
                generate(server.url, prompt, 16, max(5, self.left()))
            while following and not following.at_gate and not following.dead() and self.left() > 60:
                time.sleep(0.2)  # imports share the processors: measure when they are over
            made = measure(self.args, server, self.gpu, self.args.until - 3)
        except Exception as error:  # a failed arm must not end the queue
            made["error"] = f"{type(error).__name__}: {error}"
            self.say(f"{name} failed: {made['error']}")
        made["ended"] = server.dead()
        if not server.dead():
            made |= finish(self.args, server, self.gpu)
        made["seconds"] = round(time.time() - began, 1)
        stop(server)
        self.live = [other for other in self.live if other is not server]
        self.save(server, made)
        return following or self.start_next()

    def save(self, server: Server, made: dict[str, Any]) -> None:
        name = server.arm.name
        row = record(self.args, server, **made)
        # A server that ended by itself is a result too; one that we ended, or was slow, is none.
        over = made["complete"] or (made["ended"] and not self.args.stopping.is_set())
        kept = self.args.state / ("arms" if over else "partial") / f"{name}.json"
        kept.parent.mkdir(exist_ok=True)
        with COLLECT:  # the other GPU's arm may be collecting
            kept.write_text(json.dumps(row))
            shutil.copy(server.log, kept.with_suffix(".log"))
        for context, *_ in self.args.plan:
            found = [r["ms"] for r in made.get("runs", []) if r["prompt"] == context]
            if found:
                self.say(
                    f"{name} at {context}: {statistics.median(found):.4f} ms, n = {len(found)}, "
                    f"{min(found):.4f} to {max(found):.4f}"
                )
        collect(self.args)


READ = r"""
import json, torch
x = torch.empty(4 << 30, dtype=torch.uint8, device="cuda").random_(0, 256)
found = {}
def best(name, call, moved):
    for _ in range(3): call()
    times = []
    for _ in range(10):
        a, b = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        a.record(); call(); b.record(); b.synchronize()
        times.append(a.elapsed_time(b))
    found[name] = {"ms": sorted(times), "bytes": moved, "bandwidth": moved / (min(times) / 1e3)}
ints, half = x.view(torch.int32), x.view(torch.bfloat16)
best("amax of int32", lambda: ints.amax(), x.numel())
best("sum of float32", lambda: x.view(torch.float32).sum(), x.numel())
w = half[: (half.numel() // 8192) * 8192].view(-1, 8192).zero_().add_(0.5)
v = torch.ones(8192, 1, dtype=torch.bfloat16, device="cuda")
best("bfloat16 matrix times vector", lambda: w @ v, w.numel() * 2)
y = torch.empty_like(x)
best("copy, read and write", lambda: y.copy_(x), 2 * x.numel())
print(json.dumps({"device": torch.cuda.get_device_name(), "torch": torch.__version__, "reads": found}))
"""


def bandwidth(args: argparse.Namespace, gpu: int) -> None:
    """What the GPU reads per second, measured once in a process of its own (4 GiB, best of 10)."""
    kept = args.state / f"bandwidth-{gpu}.json"
    if kept.exists() or args.cpu:
        return
    with contextlib.suppress(OSError, subprocess.SubprocessError, ValueError):
        out = subprocess.run(
            [str(args.python), "-c", READ],
            env={**os.environ, "CUDA_VISIBLE_DEVICES": str(gpu)},
            capture_output=True,
            text=True,
            timeout=60,
        )
        if out.returncode:
            told = out.stderr.strip().splitlines() or [f"exit status {out.returncode}"]
            print(f"gpu {gpu}: how fast it reads was not measured: {told[-1]}", flush=True)
            return
        kept.write_text(json.dumps(json.loads(out.stdout)))


COLLECT = threading.Lock()


def collect(args: argparse.Namespace) -> None:
    """All that is there, in two files."""
    with COLLECT:
        found = {}
        for part in ("partial", "arms"):  # a finished arm hides its unfinished try
            for path in sorted((args.state / part).glob("*.json")):
                found[path.stem] = json.loads(path.read_text())
        reads = {
            path.stem.removeprefix("bandwidth-"): json.loads(path.read_text())
            for path in sorted(args.state.glob("bandwidth-*.json"))
        }
        order = [name for name in arms() if name in found]
        made = {"plan": args.plan, "bandwidth": reads, "arms": {n: found[n] for n in order}}
        args.out.mkdir(parents=True, exist_ok=True)
        part = args.out / "full.json.part"
        part.write_text(json.dumps(made))
        part.replace(args.out / "full.json")
        with tarfile.open(args.out / "logs.tar.gz", "w:gz") as file:
            for folder in ("partial", "arms"):
                for path in sorted((args.state / folder).glob("*.log")):
                    file.add(path, f"{folder}/{path.name}")


# -- the library's short form ------------------------------------------------------------------------

WHAT = "Ling-3.0-flash at full size with random weights, every switch with every other"


def compact(made: dict[str, Any], conditions: str, logs: dict[str, str]) -> dict[str, Any]:
    """What lib/sparkling/fullsize.py reads: every request's time, without the rest of its row. An arm
    that was cut short, or slow to start, is named without its times.

    Args:
        logs: the arms' logs by name; what is read from a log is read again here.
    """
    whole = {n: a | {"log": from_log(logs[n])} if n in logs else a for n, a in made["arms"].items()}
    over = {n: a for n, a in whole.items() if a["complete"] or a.get("ended")}
    first = next(iter(over.values()))
    return {
        "schema": "sparkling-full-size/1",
        "what": WHAT,
        "device": _device(first),
        "date": first["date"][:10],
        "conditions": conditions,
        "command": "scripts/record_full_size.py; an arm: " + " ".join(_plain(first["command"])),
        "env": {k: v for k, v in first["env"].items() if _told(k, v)},
        "versions": first["versions"],
        "driver": (first.get("gpu") or {}).get("driver_version"),
        "bandwidth": {
            gpu: max(r["bandwidth"] for name, r in one["reads"].items() if "copy" not in name)
            for gpu, one in made["bandwidth"].items()
        },
        "reads": {
            gpu: {name: r["bandwidth"] for name, r in one["reads"].items()}
            for gpu, one in made["bandwidth"].items()
        },
        "unmeasured": {n: a.get("error") for n, a in whole.items() if n not in over},
        "arms": {name: _compact(arm) for name, arm in over.items()},
    }


KNOWN = ROOT / "lib" / "sparkling" / "facts" / "devices.toml"
DEVICES = {
    word: id_ for id_, one in tomllib.loads(KNOWN.read_text()).items() for word in one["match"]
}
"""The library's name of a device by a word of the GPU's."""


def _device(arm: dict[str, Any]) -> str | None:
    """On what an arm ran, in the library's words; the GPU's own name where it has none."""
    name = (arm.get("gpu") or {}).get("name")
    return next((id_ for word, id_ in DEVICES.items() if word in (name or "")), name)


def _told(name: str, value: str) -> bool:
    """Whether a setting belongs into the short form: it acts, and is no folder of the machine."""
    acts = name.startswith(("SGLANG", "FLASH", "HF_", "HUMMING", "MAX_JOBS"))
    return acts and not value.startswith("/")


def _limits(moe: dict[str, Any]) -> dict[str, Any]:
    """The layers that have a SwiGLU limit, and those where another is applied than wanted."""
    made: dict[str, Any] = {"layers": len(moe.get("limits", {}))}
    for kind in ("limits", "shared_limits"):
        found = moe.get(kind, {})
        made[kind] = {n: e["applied"] for n, e in found.items() if e["applied"] is not None}
        made[f"wrong_{kind}"] = [n for n, e in found.items() if e["applied"] != e["wanted"]]
    return made


def _plain(command: list[str]) -> list[str]:
    """A command without this machine's folders."""
    return ["FOLDER" if word.startswith("/") else word for word in command]


def _compact(arm: dict[str, Any]) -> dict[str, Any]:
    contexts: dict[str, dict[str, Any]] = {}
    for context in dict.fromkeys(r["prompt"] for r in arm.get("runs", [])):
        rows = [r for r in arm["runs"] if r["prompt"] == context]
        lengths = [r["accept_length"] for r in rows if r["accept_length"]]
        contexts[str(context)] = {
            "of": rows[0]["of"],
            "tokens": rows[0]["tokens"],
            "ms": [round(r["ms"], 4) for r in rows],
            "server_ms": [r["server_ms"] and round(r["server_ms"], 4) for r in rows],
            "later_ms": [round(r["later_ms"], 4) for r in rows],
            "ttft_s": [r["ttft_s"] for r in rows],
            "accept_length": statistics.fmean(lengths) if lengths else None,
            "distinct": [r["distinct"] for r in rows],
        }
    status, log = arm.get("status") or {}, arm["log"]
    kept = {
        "date": arm["date"],
        "gpu": arm["env"].get("CUDA_VISIBLE_DEVICES"),
        "env": {
            k: v for k, v in arm["env"].items() if k.startswith("SPARKLING") and "FILE" not in k
        },
        "contexts": contexts,
        "start": arm["start"],
        "timings": log["timings"],
        "weights_gb": log["weights_gb"],
        "expert_layers": log["expert_layers_prepared"],
        "memory_mib": sum(arm.get("memory_mib", {}).values()) or None,
        "gpu_used_mib": (arm.get("gpu") or {}).get("memory.used"),
        "under_load": arm.get("under_load"),
        "kv_tokens": (arm.get("arguments") or {}).get("max_total_num_tokens"),
        "error": arm.get("error"),
        "raised": log["raised"],
    }
    if status.get("moe"):
        kept["moe"] = _limits(status["moe"])
    told = ("head", "draft", "switches", "humming")
    return kept | {key: status[key] for key in told if status.get(key) is not None}


def _logs(packed: Path) -> dict[str, str]:
    """The arms' logs as `collect` packed them; a finished arm's hides its unfinished try's."""
    found = {}
    if packed.exists():
        with tarfile.open(packed) as file:
            for one in sorted(file.getnames(), reverse=True):  # partial/ before arms/
                held = file.extractfile(one)
                found[Path(one).stem] = held.read().decode(errors="replace") if held else ""
    return found


def plan(text: str) -> list[tuple[int, int, int]]:
    """`1024x256x5,32768x128x3`: prompt tokens, output tokens, runs."""
    found = [tuple(int(x) for x in part.split("x")) for part in text.split(",")]
    if any(len(one) != 3 or min(one) < 1 or one[1] < 2 for one in found):
        raise ValueError(text)
    return found  # type: ignore[return-value]


def indices(text: str) -> list[int]:
    """`0,1`: GPUs by their index."""
    found = [int(x) for x in text.split(",")]
    if len(found) > 2 or len(set(found)) < len(found) or min(found) < 0:
        raise ValueError(text)
    return found


def setting(text: str) -> str:
    """`NAME=VALUE`, as it is."""
    if not text.partition("=")[0] or "=" not in text:
        raise ValueError(text)
    return text


def short_form(args: argparse.Namespace, error: Any) -> int:
    """--compact: the library's short form, written to the file OUT."""
    source = Path(args.compact[0])
    try:
        logs = _logs(source.with_name("logs.tar.gz"))
        short = compact(json.loads(source.read_text()), args.compact[1], logs)
        args.out.write_text(json.dumps(short, indent=1) + "\n")
    except OSError as reason:
        error(f"{reason.filename} cannot be used: {reason.strerror}")
    except (ValueError, LookupError, TypeError, AttributeError, StopIteration, tarfile.TarError):
        error(f"{source}, or logs.tar.gz beside it, is not what a recording leaves")
    return 0


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "--gpus", type=indices, default=[0], help="one index, or two with a comma (0)"
    )
    parser.add_argument("--arms", default="core", help="core, extra, all or names with commas")
    parser.add_argument("--budget", type=float, default=570, help="seconds for this call (570)")
    parser.add_argument("--out", type=Path, required=True, help="folder for the results")
    parser.add_argument(
        "--compact",
        nargs=2,
        metavar=("FULL_JSON", "CONDITIONS"),
        help="measure nothing: write the library's short form of a full.json to the file OUT",
    )
    parser.add_argument(
        "--state",
        type=Path,
        default=Path("/var/tmp/full"),
        help="where finished arms and caches are kept between calls (/var/tmp/full)",
    )
    parser.add_argument(
        "--plan",
        type=plan,
        default=plan("1024x256x5,32768x128x3"),
        help="prompt tokens x output tokens x requests, with commas (1024x256x5,32768x128x3)",
    )
    parser.add_argument(
        "--set",
        type=setting,
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a variable of every server's environment; can be given again",
    )
    parser.add_argument("--first-s", type=float, default=450, help="the first start's limit (450)")
    parser.add_argument(
        "--arm-s",
        type=float,
        default=100,
        help="least time left to begin an arm; a later start may take twice as long (100)",
    )
    parser.add_argument("--again", action="store_true", help="measure failed arms again")
    parser.add_argument(
        "--python", type=Path, default=Path(sys.executable), help="what the servers run with"
    )
    parser.add_argument("--port", type=int, default=31000, help="the first server's (31000)")
    parser.add_argument("--model", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--vocabulary", type=int, default=157184, help=argparse.SUPPRESS)
    parser.add_argument("--cpu", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.compact:
        return short_form(args, parser.error)
    args.until, args.stopping = time.time() + args.budget, threading.Event()
    try:
        for part in ("arms", "partial", "work", "cache"):
            (args.state / part).mkdir(parents=True, exist_ok=True)
        args.out.mkdir(parents=True, exist_ok=True)  # before time is spent on what goes there
    except OSError as reason:
        parser.error(f"{reason.filename} cannot be written: {reason.strerror}")
    leftovers(args.state)
    groups = {"core": CORE, "extra": EXTRA, "all": CORE + EXTRA}
    wanted = groups.get(args.arms) or args.arms.split(",")
    if unknown := [name for name in wanted if name not in arms()]:
        parser.error(f"no such arm: {', '.join(unknown)}; known: {', '.join(arms())}")
    queued = queues(args.gpus, wanted)
    wanted = [name for name in wanted if any(name in names for names in queued.values())]
    if not wanted:
        parser.error("swap compares two GPUs: name two with --gpus.")
    for path in (args.state / "arms").glob("*.json") if args.again else ():
        if not json.loads(path.read_text())["complete"]:
            path.unlink()
    lanes = [Lane(args, g, w) for g, w in queued.items()]
    signal.signal(signal.SIGTERM, lambda *_: args.stopping.set())
    threads = [threading.Thread(target=lane.run, daemon=True) for lane in lanes]
    try:
        for thread in threads:
            thread.start()
        while any(t.is_alive() for t in threads):
            time.sleep(0.2)
            if args.stopping.is_set() or time.time() > args.until + 5:
                args.stopping.set()
                break
    finally:
        args.stopping.set()
        for lane in lanes:
            lane.close()
        for thread in threads:
            thread.join(10)
        for lane in lanes:
            lane.close()
        collect(args)
    done = {n for n in wanted if (args.state / "arms" / f"{n}.json").exists()}
    rows = {n: json.loads((args.state / "arms" / f"{n}.json").read_text()) for n in done}
    ended = [n for n in wanted if n in done and not rows[n]["complete"]]
    print(f"{len(done)} of {len(wanted)} arms done; left: {[n for n in wanted if n not in done]}")
    if ended:  # a result for one arm; for all of them a mistake in how this was called
        print(f"servers that ended unmeasured: {ended}; their logs are in {args.state / 'arms'}")
        print("--again starts them again")
    return 0 if len(done) == len(wanted) and len(ended) < len(wanted) else 1


if __name__ == "__main__":
    raise SystemExit(main())
