"""Sparklet's quality figures, measured offline on problems it never saw."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from typing import Any

import torch
from tokenizers import Tokenizer

from . import chat, tokenizer
from .decode import Sampling, Text, accepted, generate
from .model import Sparklet
from .quantize import fp8_head
from .questions import extract, problems, repetitive, tool_requests

ADVISED = Sampling(temperature=0.6, top_p=0.95, top_k=29)


def wilson(k: int, n: int, z: float = 1.96) -> tuple[float, float]:
    """95 % interval of a proportion k / n."""
    if not n:
        return (0.0, 1.0)
    p, d = k / n, 1 + z * z / n
    mid, half = p + z * z / (2 * n), z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    return ((mid - half) / d, (mid + half) / d)


def _run(
    model: Sparklet,
    tok: Tokenizer,
    texts: Iterable[str],
    most: int,
    sampling: Sampling,
    seed: int,
    batch: int,
    stop: bool = True,
) -> list[Text]:
    ids = [tok.encode(t, add_special_tokens=False).ids for t in texts]
    end = tokenizer.token_id(tok, chat.END) if stop else None
    out: list[Text] = []
    for at in range(0, len(ids), batch):
        out += generate(
            model, ids[at : at + batch], most=most, stop=end, sampling=sampling, seed=seed + at
        )
    return out


def accuracy(
    model: Sparklet,
    tok: Tokenizer,
    n: int,
    sampling: Sampling = ADVISED,
    seed: int = 7,
    batch: int = 256,
) -> dict[str, Any]:
    """Share of held-out problems solved, with interval and accept length."""
    asked = problems(n, seed)
    texts = _run(model, tok, (q for q, _, _ in asked), 160, sampling, seed, batch)
    said = [tok.decode(t.answer, skip_special_tokens=False) for t in texts]
    right = [extract(a) == p.answer for a, (_, p, _) in zip(said, asked, strict=True)]
    kinds: dict[str, list[bool]] = {}
    for ok, (_, p, thinking) in zip(right, asked, strict=True):
        kinds.setdefault("thinking on" if thinking else "thinking off", []).append(ok)
        kinds.setdefault(p.template, []).append(ok)
    kept = accepted(model, texts)
    return {
        "n": n,
        "right": sum(right),
        "accuracy": sum(right) / n,
        "interval": wilson(sum(right), n),
        "ended": sum(t.ended for t in texts) / n,
        "tokens": sum(len(t.answer) for t in texts) / n,
        "accept_length": kept.length,
        "rounds": kept.rounds,
        "histogram": kept.histogram,
        "by_kind": {k: f"{sum(v)}/{len(v)}" for k, v in sorted(kinds.items())},
        "head": head_agreement(model, texts),
        "texts": texts,
        "right_each": right,
    }


@torch.inference_mode()
def head_agreement(model: Sparklet, texts: list[Text], batch: int = 64) -> dict[str, float]:
    """How often the FP8 LM head (per-row scales, weights only) has the BF16 head's top token."""
    device = model.word_embeddings.now.device
    head = fp8_head(model.lm_head.weight).to(model.lm_head.now.dtype).to(device)
    same = count = 0
    for at in range(0, len(texts), batch):
        part = texts[at : at + batch]
        width = -(-max(len(t.ids) for t in part) // 16) * 16
        ids = torch.zeros(len(part), width, dtype=torch.long, device=device)
        mask = torch.zeros(len(part), width, dtype=torch.bool, device=device)
        for i, t in enumerate(part):
            ids[i, : len(t.ids)] = torch.tensor(t.ids, device=device)
            mask[i, t.begin - 1 : len(t.ids) - 1] = True
        hidden = model(ids)[mask]
        a = model.logits(hidden).argmax(-1)
        b = torch.nn.functional.linear(hidden, head).float().argmax(-1)
        same += int((a == b).sum())
        count += a.numel()
    return {"positions": count, "agreement": same / count}


def repetition(
    model: Sparklet, tok: Tokenizer, n: int = 64, seed: int = 7, most: int = 128, batch: int = 64
) -> dict[str, Any]:
    """Greedy accept length on repetitive text."""
    prompts = repetitive(n, seed)
    texts = _run(model, tok, prompts, most, Sampling(), seed, batch)
    kept = accepted(model, texts)
    return {
        "n": n,
        "accept_length": kept.length,
        "rounds": kept.rounds,
        "histogram": kept.histogram,
        "tokens": sum(len(t.answer) for t in texts) / n,
        "example": tok.decode(texts[1].ids)[:200],
    }


def tools(
    model: Sparklet, tok: Tokenizer, n: int = 128, seed: int = 7, batch: int = 128
) -> dict[str, Any]:
    """Share of exactly right tool calls, greedy."""
    asked = tool_requests(n, seed)
    texts = _run(model, tok, (q for q, _ in asked), 80, Sampling(), seed, batch)
    right = sum(
        want in tok.decode(t.answer, skip_special_tokens=False)
        for t, (_, want) in zip(texts, asked, strict=True)
    )
    return {"n": n, "right": right, "exact": right / n}


def same_text(
    model: Sparklet, tok: Tokenizer, n: int = 100, seed: int = 11, batch: int = 128
) -> int:
    """On how many of n problems greedy text is the same with FP8 inputs as with BF16 inputs.

    Leaves the model prepared with BF16 inputs. What a GPU server with W8A8 linears would change.
    """
    asked = [q for q, _, _ in problems(n, seed)]
    both = []
    for rounding in (True, False):
        with torch.no_grad():
            model.prepare(model.word_embeddings.now.dtype, False, round_inputs=rounding)
        both.append(_run(model, tok, asked, 160, Sampling(), seed, batch))
    return sum(a.ids == b.ids for a, b in zip(*both, strict=True))


def report(
    model: Sparklet, tok: Tokenizer, n: int = 512, seed: int = 7, batch: int = 256
) -> dict[str, Any]:
    """All figures of a prepared model (see `Sparklet.prepare`), texts left out."""
    sampled = accuracy(model, tok, n, ADVISED, seed, batch)
    greedy = accuracy(model, tok, n, Sampling(), seed, batch)
    drop = ("texts", "right_each")
    return {
        "sampled": {k: v for k, v in sampled.items() if k not in drop},
        "greedy": {k: v for k, v in greedy.items() if k not in drop},
        "repetition": repetition(model, tok, max(16, n // 8), seed),
        "tools": tools(model, tok, max(32, n // 4), seed),
    }


GOALS = (
    ("accuracy, sampled", lambda r: r["sampled"]["accuracy"], 0.60, 0.98),
    ("accept length, sampled problems", lambda r: r["sampled"]["accept_length"], 2.2, 3.4),
    ("accept length, repetitive greedy", lambda r: r["repetition"]["accept_length"], 3.5, 4.0),
    ("FP8 head top-1 agreement", lambda r: r["sampled"]["head"]["agreement"], 0.97, 0.99999),
)


def lines(r: dict[str, Any]) -> list[str]:
    """The report as short lines, goals first."""
    out = []
    for name, get, low, high in GOALS:
        value = get(r)
        out.append(
            f"{'ok ' if low <= value <= high else 'OUT'} {name}: {value:.4f} (wanted {low:g} to {high:g})"
        )
    for key in ("sampled", "greedy"):
        x = r[key]
        low, high = x["interval"]
        out.append(
            f"    {key}: {x['right']}/{x['n']} = {x['accuracy']:.3f} [{low:.3f}, {high:.3f}], accept "
            f"{x['accept_length']:.3f} over {x['rounds']} rounds {x['histogram']}, head "
            f"{x['head']['agreement']:.4f} of {x['head']['positions']}, {x['tokens']:.1f} tokens, "
            f"{x['ended']:.3f} ended"
        )
        out.append("      " + json.dumps(x["by_kind"]))
    out.append(
        f"    repetition: {r['repetition']['accept_length']:.3f}, {r['repetition']['histogram']}"
    )
    out.append(f"    tools: {r['tools']['right']}/{r['tools']['n']}")
    return out
