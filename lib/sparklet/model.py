"""BailingMoeV3 with its NEXTN layer, in plain PyTorch, as SGLang 0.5.23 computes it.

Sources: `srt/models/bailing_moe_v3.py` (layers, MoE, gated MLA), `kimi_linear.py` (KDA),
`bailing_moe_nextn.py` (draft), `layers/moe/topk.py` (grouped sigmoid router). Parameter names are
the checkpoint's, except that a layer's experts are stacked: `mlp.experts.gate_proj` [E, I, H].

Master weights are float32. `prepare()` casts them once per step to the compute type, through the
rounding of the stored format when `quantize` is set; `forward` and `drafts` then use those copies.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from . import kda
from .config import Config
from .quantize import fake_fp8, fake_mxfp4, fp8_activation

COUNTING = threading.Lock()  # parts of a batch are computed by threads
ROWS = 64  # an expert's rows are filled up to a multiple of this when a CPU trains


class Weight(nn.Module):
    """One stored tensor: `weight`, and `now`, the copy that a step computes with.

    `store` says how the checkpoint keeps it: "fp8", "mxfp4", "bf16" or "fp32".
    """

    now: Tensor

    def __init__(self, shape: tuple[int, ...], store: str, std: float = 0.0) -> None:
        super().__init__()
        self.store = store
        self.weight = nn.Parameter(torch.randn(shape) * std if std else torch.ones(shape))
        self.round_input = False
        self.prepare(torch.float32, False)

    def prepare(self, dtype: torch.dtype, quantize: bool) -> None:
        w: Tensor = self.weight
        if quantize and self.store == "fp8":
            w = fake_fp8(w)
        elif quantize and self.store == "mxfp4":
            w = fake_mxfp4(w)
        # past nn.Module, which would register a parameter a second time
        object.__setattr__(self, "now", w if self.store == "fp32" else w.to(dtype))

    def forward(self, x: Tensor) -> Tensor:
        """x @ weight^T."""
        if self.round_input and self.store == "fp8":
            x = fp8_activation(x)
        return F.linear(x, self.now)


def linear(rows: int, columns: int, store: str = "fp8", gain: float = 1.0) -> Weight:
    return Weight((rows, columns), store, gain * (3 * columns) ** -0.5)


class Norm(Weight):
    """RMSNorm over the last dimension, computed in float32."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__((width,), "bf16")
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        y = F.rms_norm(x.float(), (x.shape[-1],), self.now.float(), self.eps)
        return y.to(x.dtype)


def rotate(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """Interleaved rotary embedding. x [B, T, heads, D], positions [B, T] (or [1, T])."""
    d = x.shape[-1]
    inv = theta ** (-torch.arange(0, d, 2, device=x.device, dtype=torch.float32) / d)
    angle = positions.float()[..., None, None] * inv
    cos, sin = angle.cos(), angle.sin()
    a, b = x[..., ::2].float(), x[..., 1::2].float()
    return torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2).to(x.dtype)


def short_convolution(window: Tensor, taps: Tensor) -> Tensor:
    """Causal convolution of each channel, float32. window [B, T + k - 1, C], taps [C, k]."""
    k = taps.shape[-1]
    t = window.shape[1] - k + 1
    return sum(window[:, i : i + t].float() * taps[:, i] for i in range(k))


class _ShortConvolution(torch.autograd.Function):
    """`short_convolution` with a third of its passes over memory, for a CPU."""

    @staticmethod
    def forward(ctx, window: Tensor, taps: Tensor) -> Tensor:
        ctx.save_for_backward(window, taps)
        k, wide = taps.shape[-1], window.float()
        t = window.shape[1] - k + 1
        out = wide[:, :t] * taps[:, 0]
        for i in range(1, k):
            out.addcmul_(wide[:, i : i + t], taps[:, i])
        return out

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor]:
        window, taps = ctx.saved_tensors
        wide, t = window.float(), grad.shape[1]
        back = torch.zeros_like(wide)
        each = []
        for i in range(taps.shape[-1]):
            back[:, i : i + t].addcmul_(grad, taps[:, i])
            each.append((grad * wide[:, i : i + t]).sum((0, 1)))
        return back.to(window.dtype), torch.stack(each, -1)


class KDA(nn.Module):
    """Kimi Delta Attention with short convolutions, safe gate and full-rank f and g."""

    def __init__(self, c: Config) -> None:
        super().__init__()
        self.c, p = c, c.kda_width
        for name in ("q_proj", "k_proj", "v_proj", "f_proj", "g_proj"):
            setattr(self, name, linear(p, c.hidden_size))
        self.b_proj = linear(c.num_attention_heads, c.hidden_size, "bf16")
        for name in ("q_conv1d", "k_conv1d", "v_conv1d"):
            taps = Weight((p, 1, c.short_conv_kernel_size), "fp32", 0.1)
            with torch.no_grad():
                taps.weight[..., -1] += 1.0  # starts as (almost) the identity
            setattr(self, name, taps)
        self.A_log = nn.Parameter(torch.zeros(c.num_attention_heads))
        # sigmoid(dt) * 5 between 0.005 and 1.3 a token: memories from a few to hundreds of tokens
        self.dt_bias = nn.Parameter(torch.empty(p).uniform_(-7.0, -1.0))
        self.o_norm = Norm(c.head_dim, 1e-6)
        self.o_proj = linear(c.hidden_size, p, gain=0.5)

    def forward(self, x: Tensor, valid: Tensor | None, cache: dict[str, Tensor] | None) -> Tensor:
        c, (b, t, _) = self.c, x.shape
        heads = lambda y: y.view(b, t, c.num_attention_heads, -1).transpose(1, 2)  # noqa: E731
        qkv = torch.cat([self.q_proj(x), self.k_proj(x), self.v_proj(x)], -1)
        taps = torch.cat([self.q_conv1d.now, self.k_conv1d.now, self.v_conv1d.now])
        k = c.short_conv_kernel_size
        past = None if cache is None else cache.get("conv")
        if past is None:
            past = qkv.new_zeros(b, k - 1, qkv.shape[-1])
        window = torch.cat([past, qkv], 1)
        if cache is not None:
            used = torch.full((b,), t, device=x.device) if valid is None else valid.sum(1)
            rows = used[:, None] + torch.arange(k - 1, device=x.device)
            cache["conv"] = window.gather(1, rows[..., None].expand(-1, -1, window.shape[-1]))
        mix = short_convolution if x.is_cuda else _ShortConvolution.apply
        mixed = mix(window, taps[:, 0])
        q, key, v = (heads(y) for y in F.silu(mixed).to(x.dtype).float().chunk(3, -1))
        beta = torch.sigmoid(self.b_proj(x).float()).transpose(1, 2)
        f = self.f_proj(x).view(b, t, c.num_attention_heads, c.head_dim)
        g = kda.safe_gate(f, self.A_log, self.dt_bias, c.kda_lower_bound).transpose(1, 2)
        if valid is not None:
            g = g * valid[:, None, :, None]
            beta = beta * valid[:, None]
        state = None if cache is None else cache.get("state")
        run = kda.recurrent if t == 1 else kda.chunked
        q = kda.l2norm(q) * c.head_dim**-0.5
        o, state = run(q, kda.l2norm(key), v, g, beta, state)
        if cache is not None:
            cache["state"] = state
        o = o.transpose(1, 2).to(x.dtype)
        gate = self.g_proj(x).view(b, t, c.num_attention_heads, c.head_dim)
        y = F.rms_norm(o.float(), (c.head_dim,), self.o_norm.now.float(), 1e-6)
        y = (y * torch.sigmoid(gate.float())).to(x.dtype)
        return self.o_proj(y.flatten(2))


class MLA(nn.Module):
    """Multi-head latent attention with a sigmoid gate per head."""

    def __init__(self, c: Config) -> None:
        super().__init__()
        self.c, h = c, c.num_attention_heads
        self.q_proj = linear(h * (c.qk_nope_head_dim + c.qk_rope_head_dim), c.hidden_size)
        self.kv_a_proj_with_mqa = linear(c.kv_lora_rank + c.qk_rope_head_dim, c.hidden_size)
        self.kv_a_layernorm = Norm(c.kv_lora_rank, c.rms_norm_eps)
        self.kv_b_proj = linear(h * (c.qk_nope_head_dim + c.v_head_dim), c.kv_lora_rank)
        self.g_proj = linear(h, c.hidden_size, "bf16")
        self.dense = linear(c.hidden_size, h * c.v_head_dim, gain=0.5)

    def project(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries and keys [B, heads, T, 192], values [B, heads, T, 128]."""
        c, (b, t, _) = self.c, x.shape
        h, nope = c.num_attention_heads, c.qk_nope_head_dim
        q = self.q_proj(x).view(b, t, h, -1)
        latent, k_pe = self.kv_a_proj_with_mqa(x).split([c.kv_lora_rank, c.qk_rope_head_dim], -1)
        kv = self.kv_b_proj(self.kv_a_layernorm(latent)).view(b, t, h, -1)
        k_pe = rotate(k_pe.unsqueeze(2), positions, c.rope_theta).expand(-1, -1, h, -1)
        q_pe = rotate(q[..., nope:], positions, c.rope_theta)
        q = torch.cat([q[..., :nope], q_pe], -1)
        k = torch.cat([kv[..., :nope], k_pe], -1)
        return q.transpose(1, 2), k.transpose(1, 2), kv[..., nope:].transpose(1, 2)

    def finish(self, x: Tensor, o: Tensor) -> Tensor:
        """Gate per head, then the output projection. o [B, heads, T, 128]."""
        gate = torch.sigmoid(self.g_proj(x).float()).to(x.dtype)
        return self.dense((o.transpose(1, 2) * gate.unsqueeze(-1)).flatten(2))

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        return (q @ k.transpose(-1, -2)).float() * q.shape[-1] ** -0.5

    def forward(self, x: Tensor, positions: Tensor, cache: dict[str, Tensor] | None) -> Tensor:
        q, k, v = self.project(x, positions)
        t = x.shape[1]
        if cache is None:
            visible = torch.ones(t, t, dtype=torch.bool, device=x.device).tril()
        else:  # cache["k"], cache["v"] are buffers [B, heads, length, *] indexed by position
            at = positions[:, None, :, None]
            cache["k"].scatter_(2, at.expand_as(k), k)
            cache["v"].scatter_(2, at.expand_as(v), v)
            n = int(positions.max()) + 1
            k, v = cache["k"][:, :, :n], cache["v"][:, :, :n]
            visible = torch.arange(n, device=x.device) <= at
        s = self.scores(q, k).masked_fill(~visible, float("-inf"))
        return self.finish(x, s.softmax(-1).to(v.dtype) @ v)


def swiglu(gate: Tensor, up: Tensor, limit: float) -> Tensor:
    """silu(gate) * up; with a limit L: silu(gate) at most L, up within [-L, L]."""
    if limit:
        return F.silu(gate).clamp(max=limit) * up.clamp(-limit, limit)
    return F.silu(gate) * up


class MLP(nn.Module):
    """Dense SwiGLU, also the shared expert."""

    def __init__(self, c: Config, width: int, limit: float = 0.0) -> None:
        super().__init__()
        self.limit = limit
        self.gate_proj = linear(width, c.hidden_size)
        self.up_proj = linear(width, c.hidden_size)
        self.down_proj = linear(c.hidden_size, width, gain=0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(swiglu(self.gate_proj(x), self.up_proj(x), self.limit))


class Router(nn.Module):
    """Sigmoid scores; a bias that only chooses; groups ranked by their two best experts."""

    def __init__(self, c: Config) -> None:
        super().__init__()
        self.c = c
        self.weight = nn.Parameter(torch.randn(c.num_experts, c.hidden_size) * c.hidden_size**-0.5)
        self.register_buffer("expert_bias", torch.zeros(c.num_experts))
        # tokens per expert since the last balance()
        self.register_buffer("load", torch.zeros(c.num_experts), persistent=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [N, H] -> normalised weights and expert ids [N, top k]."""
        c = self.c
        score = torch.sigmoid(F.linear(x.float(), self.weight))
        with torch.no_grad():
            choice = score + self.expert_bias
            groups = choice.unflatten(-1, (c.n_group, -1))
            rank = groups.topk(2, -1).values.sum(-1)
            keep = torch.zeros_like(rank).scatter_(1, rank.topk(c.topk_group, -1).indices, 1.0)
            choice = groups.masked_fill(keep.unsqueeze(-1) == 0, float("-inf")).flatten(-2)
            ids = choice.topk(c.num_experts_per_tok, -1).indices
        # as a product with 0 and 1: a gather's backward is not deterministic on a GPU
        w = (score.unsqueeze(1) * self.one_hot(ids)).sum(-1)
        return w / (w.sum(-1, keepdim=True) + 1e-20), ids

    def one_hot(self, ids: Tensor) -> Tensor:
        """float32 [N, top k, E]."""
        return (ids.unsqueeze(-1) == torch.arange(self.c.num_experts, device=ids.device)).float()

    @torch.no_grad()
    def count(self, ids: Tensor, valid: Tensor | None) -> None:
        one = self.one_hot(ids).sum(1)
        one = (one if valid is None else one * valid.reshape(-1, 1)).sum(0)
        with COUNTING:
            self.load += one

    @torch.no_grad()
    def balance(self, rate: float | Tensor) -> None:
        """The auxiliary-loss-free update: under-used experts become easier to choose."""
        self.expert_bias += rate * torch.sign(self.load.mean() - self.load)
        self.load.zero_()


class Experts(nn.Module):
    """All routed experts of a layer, stacked: gate, up [E, I, H], down [E, H, I]."""

    def __init__(self, c: Config) -> None:
        super().__init__()
        e, i, h = c.num_experts, c.moe_intermediate_size, c.hidden_size
        self.gate_proj = Weight((e, i, h), "mxfp4", (3 * h) ** -0.5)
        self.up_proj = Weight((e, i, h), "mxfp4", (3 * h) ** -0.5)
        self.down_proj = Weight((e, h, i), "mxfp4", 0.4 * (3 * i) ** -0.5)


class MoE(nn.Module):
    """Routed experts (scaled) plus one shared expert (not scaled)."""

    def __init__(self, c: Config, layer: int) -> None:
        super().__init__()
        self.c = c
        self.limit = c.expert_swiglu_limits[layer]
        self.gate = Router(c)
        self.experts = Experts(c)
        shared = c.moe_shared_expert_intermediate_size
        self.shared_experts = MLP(c, shared, c.shared_swiglu_limits[layer])

    def forward(self, x: Tensor, valid: Tensor | None) -> Tensor:
        flat = x.flatten(0, -2)
        weights, ids = self.gate(flat)
        if self.training:
            self.gate.count(ids, valid)
        routed = self.all_experts if flat.is_cuda else self.chosen_experts
        y = routed(flat, weights, ids) * self.c.routed_scaling_factor
        return (y.to(x.dtype) + self.shared_experts(flat)).view_as(x)

    def all_experts(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        """Every expert on every token, then weighted: three large products (for a GPU)."""
        e = self.experts
        full = (self.gate.one_hot(ids) * weights.unsqueeze(-1)).sum(1).to(x.dtype)
        h = swiglu(
            F.linear(x, e.gate_proj.now.flatten(0, 1)),
            F.linear(x, e.up_proj.now.flatten(0, 1)),
            self.limit,
        )
        h = h.unflatten(-1, (self.c.num_experts, -1)) * full.unsqueeze(-1)
        return h.flatten(1) @ e.down_proj.now.transpose(1, 2).flatten(0, 1)

    def chosen_experts(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        """Each expert on its own tokens only (for a CPU).

        A CPU's matrix library prepares a kernel for every new shape (0.5 ms on two Zen 4 cores, more
        than the product takes), so in training an expert's rows are filled up to a multiple of ROWS.
        """
        e, top = self.experts, ids.shape[1]
        # unbound once: the backward of indexing would fill and add a whole stack for each expert
        gate, up, down = (w.now.unbind(0) for w in (e.gate_proj, e.up_proj, e.down_proj))
        flat = ids.flatten()
        order = flat.argsort(stable=True)
        counts = torch.bincount(flat, minlength=self.c.num_experts)
        unit = ROWS if self.training else 1
        sizes = (counts + unit - 1) // unit * unit
        shift = (sizes.cumsum(0) - sizes) - (counts.cumsum(0) - counts)
        # place[i]: the filled row of (token, slot) i; rows that fill repeat token 0 and are not read
        place = torch.empty_like(order)
        place[order] = torch.arange(order.numel(), device=order.device) + shift[flat[order]]
        token = torch.zeros(int(sizes.sum()), dtype=torch.long, device=order.device)
        token[place] = torch.arange(order.numel(), device=order.device) // top
        parts = [
            F.linear(swiglu(F.linear(rows, gate[n]), F.linear(rows, up[n]), self.limit), down[n])
            for n, rows in enumerate(x[token].split(sizes.tolist()))
            if rows.shape[0]
        ]
        y = torch.cat(parts)[place] * weights.flatten().unsqueeze(-1).to(x.dtype)
        return y.view(x.shape[0], top, -1).sum(1)


class Layer(nn.Module):
    def __init__(self, c: Config, index: int, nextn: bool = False) -> None:
        super().__init__()
        self.linear = not nextn and c.is_kda(index)
        self.input_layernorm = Norm(c.hidden_size, c.rms_norm_eps)
        self.attention = KDA(c) if self.linear else MLA(c)
        self.post_attention_layernorm = Norm(c.hidden_size, c.rms_norm_eps)
        dense = not nextn and index < c.first_k_dense_replace
        self.mlp = MLP(c, c.intermediate_size) if dense else MoE(c, index)

    def feed_forward(self, x: Tensor, valid: Tensor | None) -> Tensor:
        y = self.post_attention_layernorm(x)
        return x + (self.mlp(y, valid) if isinstance(self.mlp, MoE) else self.mlp(y))


class Nextn(Layer):
    """The draft layer: embedding and hidden state in, hidden state out. MLA + MoE."""

    def __init__(self, c: Config) -> None:
        super().__init__(c, 0, nextn=True)  # SGLang builds it as layer 0: entry 0 of the limits
        self.enorm = Norm(c.hidden_size, c.rms_norm_eps)
        self.hnorm = Norm(c.hidden_size, c.rms_norm_eps)
        self.eh_proj = linear(c.hidden_size, 2 * c.hidden_size)
        self.final_layernorm = Norm(c.hidden_size, c.rms_norm_eps)


class _Embedding(torch.autograd.Function):
    """F.embedding with a backward that is one matrix product: deterministic, and free of
    synchronisation on a GPU."""

    @staticmethod
    def forward(ctx, ids: Tensor, table: Tensor) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.rows = table.shape[0]
        return F.embedding(ids, table)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[None, Tensor]:
        (ids,) = ctx.saved_tensors
        if not grad.is_cuda:
            table = grad.new_zeros(ctx.rows, grad.shape[-1], dtype=torch.float32)
            table.index_add_(0, ids.flatten(), grad.flatten(0, -2).float())
            return None, table.to(grad.dtype)
        one = ids.flatten().unsqueeze(0) == torch.arange(ctx.rows, device=ids.device).unsqueeze(1)
        return None, one.to(grad.dtype) @ grad.flatten(0, -2)


class Sparklet(nn.Module):
    """Target and draft. `layers[num_hidden_layers]` is the NEXTN layer, as in the checkpoint."""

    def __init__(self, c: Config) -> None:
        super().__init__()
        self.c = c
        self.word_embeddings = Weight((c.vocab_size, c.hidden_size), "bf16", 0.5)
        layers: list[Layer] = [Layer(c, i) for i in range(c.num_hidden_layers)]
        self.layers = nn.ModuleList([*layers, Nextn(c)])
        self.norm = Norm(c.hidden_size, c.rms_norm_eps)
        self.lm_head = Weight((c.vocab_size, c.hidden_size), "bf16", c.hidden_size**-0.5)

    def stored(self) -> Iterator[Weight]:
        return (m for m in self.modules() if isinstance(m, Weight))

    def prepare(
        self, dtype: torch.dtype, quantize: bool = False, round_inputs: bool = False
    ) -> Sparklet:
        """Makes the copies that the next forward uses; call again after a weight changed."""
        for w in self.stored():
            w.prepare(dtype, quantize)
            w.round_input = round_inputs
        return self

    def embed(self, ids: Tensor) -> Tensor:
        return _Embedding.apply(ids, self.word_embeddings.now)

    def logits(self, hidden: Tensor) -> Tensor:
        """float32 [..., V]."""
        return self.lm_head(hidden).float()

    def new_cache(self, batch: int, length: int) -> list[dict[str, Tensor]]:
        """An empty state for `batch` sequences of at most `length` tokens."""
        c, w = self.c, self.word_embeddings.now
        shape = (batch, c.num_attention_heads, length)
        wide = c.qk_nope_head_dim + c.qk_rope_head_dim
        return [
            {}
            if c.is_kda(i)
            else {"k": w.new_zeros(*shape, wide), "v": w.new_zeros(*shape, c.v_head_dim)}
            for i in range(c.num_hidden_layers)
        ]

    def forward(
        self,
        ids: Tensor,
        valid: Tensor | None = None,
        start: Tensor | None = None,
        cache: list[dict[str, Any]] | None = None,
    ) -> Tensor:
        """Final-norm hidden states [B, T, H] of ids [B, T].

        valid [B, T] is False on right padding. With a cache, row b continues at position start[b].
        """
        b, t = ids.shape
        positions = torch.arange(t, device=ids.device).expand(b, t)
        if start is not None:
            positions = positions + start[:, None]
        if cache is not None and "k" in cache[-1]:
            positions = positions.clamp(max=cache[-1]["k"].shape[2] - 1)
        x = self.embed(ids)
        for i, layer in enumerate(self.layers[:-1]):
            y = layer.input_layernorm(x)
            kept = None if cache is None else cache[i]
            if layer.linear:
                x = x + layer.attention(y, valid, kept)
            else:
                x = x + layer.attention(y, positions, kept)
            x = layer.feed_forward(x, valid)
        return self.norm(x)

    def drafts(
        self,
        hidden: Tensor,
        ids: Tensor,
        valid: Tensor | None = None,
        steps: int = 3,
        head: Callable[[Tensor], Tensor] | None = None,
    ) -> list[Tensor]:
        """The NEXTN layer used `steps` times, for all positions at once.

        Step k (from 1) at index t takes ids[t + k] and the hidden state of step k - 1 at t (the
        target's for k = 1) and predicts ids[t + k + 1]; its rope position is t + k - 1. As in
        SGLang, it attends to the step-1 entries up to t, which come from the target's hidden
        states, and to its own chain's entries. Returns logits [B, T, V] (or hidden states with
        `head=lambda h: h`) per step; the last k + 1 indices of step k mean nothing.
        """
        head = head or self.logits
        layer: Any = self.layers[-1]
        attention: MLA = layer.attention
        t = ids.shape[1]
        causal = torch.ones(t, t, dtype=torch.bool, device=ids.device).tril()
        base = torch.arange(t, device=ids.device).unsqueeze(0)
        out, chain = [], []
        k1 = v1 = hidden
        for step in range(1, steps + 1):
            token = F.pad(ids[:, step:], (0, step))
            x = torch.cat([layer.enorm(self.embed(token)), layer.hnorm(hidden)], -1)
            x = layer.eh_proj(x)
            y = layer.input_layernorm(x)
            q, k, v = attention.project(y, base + (step - 1))
            if step == 1:
                k1, v1 = k, v
            else:
                chain.append((k, v))
            s = attention.scores(q, k1).masked_fill(~causal, float("-inf"))
            own = [(q * ck).sum(-1, keepdim=True).float() * q.shape[-1] ** -0.5 for ck, _ in chain]
            p = torch.cat([s, *own], -1).softmax(-1).to(v.dtype)
            o = p[..., :t] @ v1
            for n, (_, cv) in enumerate(chain):
                o = o + p[..., t + n, None] * cv
            x = x + attention.finish(y, o)
            x = layer.feed_forward(x, valid)
            hidden = layer.final_layernorm(x)
            out.append(head(hidden))
        return out

    def balance(self, rate: float | Tensor) -> None:
        """Moves every router's bias; see `Router.balance`."""
        for m in self.modules():
            if isinstance(m, Router):
                m.balance(rate)
