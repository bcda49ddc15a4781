"""The training loop: main loss plus three recurrent uses of the NEXTN layer, then with rounding.

The last part of a run computes with the stored formats' roundings (MXFP4 experts, FP8 dense), so
that the exported model is the one that was trained.
"""

from __future__ import annotations

import ctypes
import json
import math
import os
import time
from concurrent import futures
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from . import batches
from .config import Config
from .model import Router, Sparklet, Weight


@dataclass(frozen=True)
class Settings:
    """Everything that decides the result of a run."""

    seed: int = 1
    steps: int = 4000
    tokens: int = 32_768  # per step, padding included
    length: int = 288
    rate: float = 3e-3
    warmup: int = 100
    decay: float = 0.02  # weight decay
    muon: bool = True
    draft_weight: float = 0.5
    draft_rows: float = 1.0  # share of a batch's rows that also train the draft layer
    quantize_from: float = 0.7  # share of the run after which weights are rounded
    balance: float = 2e-3


# gpu: 89 s on an H200. cpu: 57 minutes on two Zen 4 cores (AVX-512 with BF16, no AMX), in two parts
# (`--parts`): median 1.10 s a step (quartiles 1.07, 1.14; n = 250 windows of 10 s), 1.24 s with rounded
# weights (1.21, 1.29; n = 70), drawing the texts (0.03 s) included; at nice -10 beside light work. Twice
# the rows for the drafts take 0.08 to 0.11 s more (n = 20 steps each).
PRESETS = {
    "gpu": Settings(steps=1800, tokens=16_384),
    "cpu": Settings(steps=3000, tokens=4096, draft_rows=0.25, warmup=60, quantize_from=0.8),
    "smoke": Settings(steps=6, tokens=1024, length=96, warmup=2, quantize_from=0.5),
}


class Muon(torch.optim.Optimizer):
    """Momentum, orthogonalised by a Newton-Schulz iteration (K. Jordan et al., 2024).

    For matrices, or stacks of them. The step is scaled to the size of an AdamW step, 0.2 x
    sqrt(larger side) (Moonlight, arXiv 2502.16982), so both share one learning rate.
    """

    def __init__(
        self,
        params: list[Tensor],
        lr: float,
        weight_decay: float,
        pool: futures.Executor | None = None,
    ) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})
        self.pool = pool  # matrices of different shapes at the same time

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            shapes: dict[tuple[int, ...], list[Tensor]] = {}
            for p in group["params"]:
                if p.grad is not None:
                    shapes.setdefault(tuple(p.shape), []).append(p)
                    self.state[p].setdefault("momentum", torch.zeros_like(p))
            if self.pool is None:
                for params in shapes.values():
                    self._move(group, params)
            else:  # the largest first
                order = sorted(shapes.values(), key=lambda x: -sum(p.numel() for p in x))
                list(self.pool.map(partial(self._move, group), order))

    @torch.no_grad()
    def _move(self, group: dict[str, Any], params: list[Tensor]) -> None:
        """One step of the parameters of one shape."""
        moved = []
        for p in params:
            m = self.state[p]["momentum"]
            m.lerp_(p.grad, 0.05)
            moved.append(p.grad.lerp(m, 0.95))
        update = orthogonal(torch.stack(moved))
        update = update * (group["lr"] * 0.2 * max(params[0].shape[-2:]) ** 0.5)
        keep = 1 - group["lr"] * group["weight_decay"]
        for p, u in zip(params, update, strict=True):
            p.mul_(keep).sub_(u)


def orthogonal(g: Tensor, steps: int = 5) -> Tensor:
    """About U V^T of g = U S V^T, for each matrix of [..., m, n]."""
    x = g.to(torch.bfloat16)
    if not x.is_cuda:
        x = x.reshape(-1, *x.shape[-2:])
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.mT
    x = x / (x.float().norm(dim=(-2, -1), keepdim=True).to(x.dtype) + 1e-7)
    for _ in range(steps):
        a = x @ x.mT
        if x.is_cuda:  # as the shipped weights were made
            x = 3.4445 * x + (-4.7750 * a + 2.0315 * (a @ a)) @ x
        else:  # the same with fewer passes over memory, and rounded less often
            a = torch.baddbmm(a, a, a, beta=-4.7750, alpha=2.0315)
            x = torch.baddbmm(x, a, x, beta=3.4445)
    return (x.mT if tall else x).to(g.dtype).reshape(g.shape)


def optimizers(
    model: Sparklet, s: Settings, pool: futures.Executor | None = None
) -> list[torch.optim.Optimizer]:
    """AdamW for embeddings, head, routers and vectors; Muon for the other matrices."""
    matrices, others, plain = [], [], []
    outside = {id(model.word_embeddings.weight), id(model.lm_head.weight)}
    for module in model.modules():
        for p in module.parameters(recurse=False):
            if p.ndim < 2 or (isinstance(module, Weight) and module.store == "fp32"):
                plain.append(p)  # norms, gates' constants, convolution taps: no weight decay
            elif s.muon and id(p) not in outside and not isinstance(module, Router):
                matrices.append(p)
            else:
                others.append(p)
    groups = [{"params": others, "weight_decay": s.decay}, {"params": plain, "weight_decay": 0.0}]
    device = model.norm.weight.device
    rate = torch.tensor(s.rate, device=device) if device.type == "cuda" else s.rate
    adam = torch.optim.AdamW(
        groups, lr=rate, betas=(0.9, 0.95), capturable=device.type == "cuda", foreach=True
    )
    return [adam, Muon(matrices, rate, s.decay, pool)] if matrices else [adam]


def _drafted(s: Settings) -> slice:
    """The rows that also train the draft layer; rows come sorted by length."""
    return slice(None, None, max(1, round(1 / s.draft_rows)))


def totals(s: Settings, weights: Tensor) -> Tensor:
    """[4]: the weight that each of the four losses is a mean over."""
    some = weights[_drafted(s)]
    return torch.stack([weights[:, 1:].sum(), *(some[:, k + 1 :].sum() for k in (1, 2, 3))])


def losses(
    model: Sparklet,
    s: Settings,
    ids: Tensor,
    weights: Tensor,
    valid: Tensor,
    of: Tensor | None = None,
) -> list[Tensor]:
    """Weighted mean cross entropy of the target and of draft steps 1 to 3.

    `of`: the totals to divide by, where these rows are a part of a batch.
    """
    of = (totals(s, weights) if of is None else of).clamp_min(1.0)
    hidden = model(ids, valid)
    out = [_cross_entropy(model.logits(hidden[:, :-1]), ids[:, 1:], weights[:, 1:]) / of[0]]
    some = _drafted(s)
    logits = model.drafts(hidden[some], ids[some], valid[some])
    for k, z in enumerate(logits, 1):
        one = _cross_entropy(z[:, : -k - 1], ids[some, k + 1 :], weights[some, k + 1 :])
        out.append(one / of[k])
    return out


def _cross_entropy(logits: Tensor, target: Tensor, weight: Tensor) -> Tensor:
    each = F.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="none")
    return (each * weight.flatten()).sum()


def keep_memory() -> bool:
    """Keeps freed memory in the process (glibc); False where that cannot be asked for.

    A step frees and takes hundreds of tensors of megabytes. glibc gives such memory back to the
    kernel and faults it in again, page by page: 3 % of a step's time on a Zen 4 core.
    """
    trim_threshold, top_pad, mmap_threshold = -1, -2, -3  # malloc.h
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return False
    wanted = ((mmap_threshold, 32 << 20), (trim_threshold, 1 << 30), (top_pad, 64 << 20))
    return all([mallopt(name, value) == 1 for name, value in wanted])


class Run:
    """One training run in a folder: `state.pt`, `losses.jsonl`, `loss.svg`, `settings.json`."""

    def __init__(
        self,
        folder: Path,
        s: Settings,
        device: str,
        config: Config | None = None,
        parts: int = 1,
    ) -> None:
        """`parts`: on a CPU, threads that each compute a part of every batch's rows. Most operations
        are too small to be shared between threads; give each part one core."""
        self.folder, self.s, self.device = folder, s, torch.device(device)
        self.parts = parts
        self.pool = futures.ThreadPoolExecutor(parts) if parts > 1 else None
        folder.mkdir(parents=True, exist_ok=True)
        torch.manual_seed(s.seed)
        self.model = Sparklet(config or Config()).to(self.device)
        self.optimizers = optimizers(self.model, s, self.pool)
        for p in self.model.parameters():
            p.grad = torch.zeros_like(p)
        self.grads = [p.grad for p in self.model.parameters()]
        self.rates = torch.zeros(2, device=self.device)  # learning rate, balance rate
        self.stream = torch.cuda.Stream() if self.device.type == "cuda" else None
        self.warm = 0
        self.graphs: dict[Any, tuple[Any, list[Tensor], Tensor]] = {}
        self.step, self.position, self.seconds = 0, (0, 0), 0.0
        self.history: list[dict[str, float]] = []

    @property
    def quantizing(self) -> bool:
        return self.step >= self.s.quantize_from * self.s.steps

    def rate(self) -> float:
        """Linear warm-up, then linear decay to zero."""
        s, t = self.s, self.step + 1
        return s.rate * min(t / s.warmup, (s.steps - self.step) / max(1, s.steps - s.warmup))

    def resume(self) -> bool:
        """Continues from `state.pt` if there is one made with the same settings."""
        path = self.folder / "state.pt"
        if not path.exists():
            return False
        kept = torch.load(path, map_location=self.device, weights_only=True)
        if kept["settings"] != asdict(self.s):
            raise ValueError(f"{path} was made with other settings; use another folder")
        self.model.load_state_dict(kept["model"])
        for o, state in zip(self.optimizers, kept["optimizers"], strict=True):
            o.load_state_dict(state)
        self.step, self.seconds = kept["step"], kept["seconds"]
        self.position, self.history = tuple(kept["position"]), kept["history"]
        return True

    def save(self) -> None:
        kept = {
            "settings": asdict(self.s),
            "config": self.model.c.to_dict(),
            "model": self.model.state_dict(),
            "optimizers": [o.state_dict() for o in self.optimizers],
            "step": self.step,
            "seconds": self.seconds,
            "position": list(self.position),
            "history": self.history,
        }
        part = self.folder / "state.part"
        torch.save(kept, part)
        os.replace(part, self.folder / "state.pt")
        (self.folder / "settings.json").write_text(json.dumps(asdict(self.s), indent=1) + "\n")
        lines = "".join(json.dumps(row) + "\n" for row in self.history)
        (self.folder / "losses.jsonl").write_text(lines)
        (self.folder / "loss.svg").write_text(plot(self.history))

    def update(self, batch: batches.Batch) -> Tensor:
        """One step; returns the four losses (not yet synchronised).

        On a GPU a step is thousands of small kernels, so from the fourth step on it is captured as
        a CUDA graph per batch shape and replayed.
        """
        move = lambda x: torch.from_numpy(x).to(self.device, non_blocking=True)  # noqa: E731
        inputs = [move(batch.ids), move(batch.weights), move(batch.valid)]
        rate = self.rate()
        balance = self.s.balance * rate / self.s.rate
        if self.device.type == "cuda":
            # one stream for all: autograd's accumulation nodes remember the stream they were made on
            self.stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.stream):
                self.rates.copy_(torch.tensor([rate, balance]))
                each = self._replay(inputs)
            torch.cuda.current_stream().wait_stream(self.stream)
        else:
            for o in self.optimizers:
                for group in o.param_groups:
                    group["lr"] = rate
            each = self._compute(inputs, balance)
        self.step += 1
        return each

    def _compute(self, inputs: list[Tensor], balance: float | Tensor) -> Tensor:
        if self.device.type == "cuda":  # a captured graph needs them where they were
            torch._foreach_zero_(self.grads)
        else:  # the first gradient is kept as it is, instead of added to zeros
            for p in self.model.parameters():
                p.grad = None
        self.model.train().prepare(torch.bfloat16, self.quantizing)
        if self.pool is None:
            each = losses(self.model, self.s, *inputs)
            self._total(each).backward()
        else:
            each = self._in_parts(inputs)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for o in self.optimizers:
            o.step()
        self.model.balance(balance)
        return torch.stack([x.detach() for x in each])

    def _total(self, each: list[Tensor]) -> Tensor:
        return each[0] + self.s.draft_weight / 3 * (each[1] + each[2] + each[3])

    def _in_parts(self, inputs: list[Tensor]) -> list[Tensor]:
        """The losses, and every parameter's gradient, from parts of the rows at the same time.

        Added in the parts' order: the same for the same seed and number of parts.
        """
        rows = [[x[i :: self.parts] for x in inputs] for i in range(self.parts)]
        of = sum(totals(self.s, one[1]) for one in rows)
        params = list(self.model.parameters())

        def compute(part: list[Tensor]) -> tuple[list[Tensor], tuple[Tensor, ...]]:
            each = losses(self.model, self.s, *part, of=of)
            # the parts share the graph from the weights to their rounded copies
            return each, torch.autograd.grad(self._total(each), params, retain_graph=True)

        made = list(self.pool.map(compute, [one for one in rows if len(one[0])]))
        for p, *grads in zip(params, *(grads for _, grads in made), strict=True):
            p.grad = grads[0]
            for other in grads[1:]:
                p.grad += other
        return [sum(x.detach() for x in one) for one in zip(*(e for e, _ in made), strict=True)]

    def _replay(self, inputs: list[Tensor]) -> Tensor:
        for o in self.optimizers:
            for group in o.param_groups:
                group["lr"].copy_(self.rates[0])
        self.warm += 1
        if self.warm <= 3:
            return self._compute(inputs, self.rates[1])
        key = (tuple(inputs[0].shape), self.quantizing)
        if key not in self.graphs:
            graph = torch.cuda.CUDAGraph()
            pool = next(iter(self.graphs.values()))[0].pool() if self.graphs else None
            with torch.cuda.graph(graph, pool=pool, stream=self.stream):
                result = self._compute(inputs, self.rates[1])
            self.graphs[key] = (graph, inputs, result)
        graph, held, result = self.graphs[key]
        for a, b in zip(held, inputs, strict=True):
            a.copy_(b)
        graph.replay()
        return result

    def train(
        self,
        *,
        save_every: float = 120.0,
        workers: int = 0,
        report: float = 10.0,
        stop_at: int | None = None,
        show: Any = print,
    ) -> None:
        """Trains to the end, or to step `stop_at`; saves every `save_every` seconds and at the end."""
        cuda = self.device.type == "cuda"
        plan = batches.Plan(self.s.seed, self.s.tokens, self.s.length, fixed=cuda)
        end = min(self.s.steps, stop_at or self.s.steps)
        began, before = time.monotonic(), self.seconds
        saved = said = began
        tokens, mark, sums, count = 0, self.step, torch.zeros(4, device=self.device), 0
        source = batches.stream(plan, self.position, workers)
        while self.step < end:
            self.position, batch = next(source)
            sums += self.update(batch)
            count += 1
            tokens += int(batch.valid.sum())
            now = time.monotonic()
            self.seconds = before + now - began
            if now - said > report or self.step == end:
                mean = (sums / count).tolist()
                if not math.isfinite(mean[0]):
                    raise FloatingPointError(f"the loss is not finite at step {self.step}")
                names = ("loss", "draft1", "draft2", "draft3")
                row = {
                    "step": self.step,
                    "seconds": round(self.seconds, 1),
                    **{k: round(v, 5) for k, v in zip(names, mean, strict=True)},
                }
                self.history.append(row)
                speed = (self.step - mark) / (now - said)
                show(
                    f"step {self.step}/{self.s.steps}  loss {mean[0]:.4f}  drafts "
                    f"{mean[1]:.3f} {mean[2]:.3f} {mean[3]:.3f}  {speed:.2f} steps/s  "
                    f"{tokens / (now - said):,.0f} tokens/s  "
                    f"{'rounded  ' if self.quantizing else ''}{self.seconds:.0f} s, "
                    f"{(end - self.step) / speed:.0f} s left"
                )
                said, tokens, mark, count = now, 0, self.step, 0
                sums.zero_()
            if now - saved > save_every:
                self.save()
                saved = time.monotonic()
        source.close()
        self.seconds = before + time.monotonic() - began
        self.save()


def plot(history: list[dict[str, float]], width: int = 720, height: int = 360) -> str:
    """The losses over the steps as an SVG with a logarithmic vertical axis."""
    names = {"loss": "#1f4e79", "draft1": "#2e8b57", "draft2": "#c98a1b", "draft3": "#b03a2e"}
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}"'
    parts = [
        f'{head} font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    if len(history) > 1:
        left, right, top, bottom = 50, 16, 16, 34
        steps = [row["step"] for row in history]
        logs = [math.log10(max(row[k], 1e-4)) for row in history for k in names]
        low, high = min(logs), max(max(logs), min(logs) + 0.1)
        span = max(1, steps[-1] - steps[0])
        x = lambda s: left + (s - steps[0]) / span * (width - left - right)  # noqa: E731
        y = lambda v: top + (high - v) / (high - low) * (height - top - bottom)  # noqa: E731
        for v in (high, (high + low) / 2, low):
            parts.append(
                f'<line x1="{left}" x2="{width - right}" y1="{y(v):.1f}" y2="{y(v):.1f}" '
                'stroke="#ddd"/>'
            )
            parts.append(f'<text x="4" y="{y(v) + 4:.1f}">{10**v:.3g}</text>')
        for i, (name, color) in enumerate(names.items()):
            line = " ".join(
                f"{x(r['step']):.1f},{y(math.log10(max(r[name], 1e-4))):.1f}" for r in history
            )
            parts.append(f'<polyline points="{line}" fill="none" stroke="{color}"/>')
            parts.append(
                f'<text x="{left + 10 + 90 * i}" y="{height - 8}" fill="{color}">{name}</text>'
            )
        parts.append(f'<text x="{width - 120}" y="{height - 8}">step {steps[-1]}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def load_model(path: Path, device: str = "cpu") -> tuple[Sparklet, Settings]:
    """The model of a `state.pt`, for measuring or export."""
    kept = torch.load(path, map_location=device, weights_only=True)
    config = Config(
        **{k: tuple(v) if isinstance(v, list) else v for k, v in kept["config"].items()}
    )
    model = Sparklet(config).to(device)
    model.load_state_dict(kept["model"])
    return model.eval(), replace(Settings(), **kept["settings"])
