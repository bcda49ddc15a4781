"""Batched generation with kept state, and the accept length that the text would have had."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .model import Sparklet


@dataclass(frozen=True)
class Sampling:
    """temperature 0 is greedy. Top-k and top-p both look at the probabilities after temperature
    (SGLang's joint rule)."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0


def choose(logits: Tensor, s: Sampling, generator: torch.Generator | None) -> Tensor:
    """Next tokens [B] of logits [B, V]."""
    if s.temperature == 0:
        return logits.argmax(-1)
    p, ids = (logits / s.temperature).softmax(-1).sort(-1, descending=True)
    keep = p.cumsum(-1) - p <= s.top_p
    if s.top_k:
        keep[:, s.top_k :] = False
    return ids.gather(1, torch.multinomial(p * keep, 1, generator=generator))[:, 0]


@dataclass
class Text:
    """One generated sequence: ids with the prompt, where the answer begins, whether it ended."""

    ids: list[int]
    begin: int
    ended: bool

    @property
    def answer(self) -> list[int]:
        return self.ids[self.begin :]


@torch.inference_mode()
def generate(
    model: Sparklet,
    prompts: list[list[int]],
    *,
    most: int,
    stop: int | None,
    sampling: Sampling = Sampling(),
    seed: int = 0,
) -> list[Text]:
    """Continues every prompt by at most `most` tokens, to the token `stop` included."""
    device, n = model.word_embeddings.now.device, len(prompts)
    generator = torch.Generator(device).manual_seed(seed)
    used = torch.tensor([len(p) for p in prompts], device=device)
    width = -(-int(used.max()) // 16) * 16
    ids = torch.zeros(n, width, dtype=torch.long, device=device)
    for i, p in enumerate(prompts):
        ids[i, : len(p)] = torch.tensor(p, device=device)
    valid = torch.arange(width, device=device) < used[:, None]
    cache = model.new_cache(n, width + most + 1)
    hidden = model(ids, valid, torch.zeros_like(used), cache)
    hidden = hidden[torch.arange(n, device=device), used - 1]
    rows, alive = [], torch.ones(n, dtype=torch.bool, device=device)
    for i in range(most):
        token = choose(model.logits(hidden), sampling, generator)
        rows.append(torch.where(alive, token, -1))
        if stop is not None:
            alive = alive & (token != stop)
        if i + 1 == most or not bool(alive.any()):
            break
        hidden = model(token[:, None], None, used + i, cache)[:, 0]
    made = torch.stack(rows, 1).tolist()
    out = []
    for prompt, row in zip(prompts, made, strict=True):
        answer = [t for t in row if t >= 0]
        out.append(Text([*prompt, *answer], len(prompt), bool(answer) and answer[-1] == stop))
    return out


@dataclass
class Accepted:
    """Σ tokens and Σ rounds (the first token of an answer comes from the prompt's pass and counts
    for neither), and how many rounds kept 1, 2, 3 or 4 tokens."""

    tokens: int = 0
    rounds: int = 0
    histogram: tuple[int, int, int, int] = (0, 0, 0, 0)

    @property
    def length(self) -> float:
        return self.tokens / self.rounds if self.rounds else float("nan")


@torch.inference_mode()
def accepted(model: Sparklet, texts: list[Text], batch: int = 64) -> Accepted:
    """The accept length of NEXTN 3/1/4 on these very texts.

    The draft is one deterministic chain, so a draft token x survives rejection sampling with
    probability p(x) under the target's transformed distribution: exactly when a token sampled from
    it equals x. Replaying a sampled text therefore gives the accept length without a second draw.
    """
    device = model.word_embeddings.now.device
    total, histogram, tokens = 0, [0, 0, 0, 0], 0
    for at in range(0, len(texts), batch):
        part = texts[at : at + batch]
        width = -(-max(len(t.ids) for t in part) // 16) * 16
        ids = torch.zeros(len(part), width, dtype=torch.long, device=device)
        valid = torch.zeros(len(part), width, dtype=torch.bool, device=device)
        for i, t in enumerate(part):
            ids[i, : len(t.ids)] = torch.tensor(t.ids, device=device)
            valid[i, : len(t.ids)] = True
        hidden = model(ids, valid)
        drafts = [d.argmax(-1).tolist() for d in model.drafts(hidden, ids, valid)]
        for i, t in enumerate(part):
            now, end = t.begin, len(t.ids) - 1
            while now < end:
                kept = 0
                while (
                    kept < 3
                    and now + kept + 1 <= end
                    and (drafts[kept][i][now - 1] == t.ids[now + kept + 1])
                ):
                    kept += 1
                histogram[kept] += 1
                tokens += min(kept + 1, end - now)
                total += 1
                now += kept + 1
    return Accepted(tokens, total, tuple(histogram))
