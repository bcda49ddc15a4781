"""Verification of sampled requests on a CPU: chain rejection sampling instead of argmax.

SGLang 0.5.23 has no sampling verification for CPUs: ``eagle_utils._verify_uses_greedy`` commits the
argmax there whatever the temperature, so speculation changes what a sampled request says. Here
``eagle_sample`` takes its sampling branch on a CPU too, with PyTorch in place of the missing ops.

The rule. Without ``--speculative-use-rejection-sampling`` the NEXTN draft at top-k 1 proposes its
argmax (``EagleDraftWorker.draft_forward``), so its distribution q is a point mass on the proposed
token x. Accept x with probability p(x); otherwise draw from p with x removed and renormalised. That
is Leviathan et al. 2023 (arXiv 2211.17192) for this q: min(1, p/q), then max(p - q, 0) normalised.
With the flag the draft samples from a q that it hands over, and the general rule is applied to it.

p is what SGLang's own sampler draws from on a CPU, that is after penalties, logit bias and grammar
(``eagle_sample`` applies those), then temperature, then top-k, top-p and min-p *jointly*, as in
``top_k_top_p_min_p_sampling_from_probs_torch``. SGLang's CUDA verification instead renormalises
after top-k before it applies top-p, and leaves min-p out; that is not repeated here.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from sparkling_sglang.patches import Patches

_EAGLE = "sglang.srt.speculative.eagle_utils"

# The sampling parameters of the batch inside eagle_sample, which passes only probabilities on.
_sampling_info: ContextVar[Any] = ContextVar("sparkling_sampling_info")


def joint_filter(
    probs: torch.Tensor,
    top_ks: torch.Tensor,
    top_ps: torch.Tensor,
    min_ps: torch.Tensor | None = None,
) -> torch.Tensor:
    """Top-k, top-p and min-p as SGLang's PyTorch sampler applies them, renormalised.

    All three look at the same unfiltered probabilities. A row with top-k 1 (SGLang's form of
    temperature 0) becomes a point mass on its argmax.

    Args:
        probs: [rows, vocab], each row sums to 1.
        top_ks, top_ps, min_ps: [rows]; ``min_ps`` None leaves min-p out.

    Returns:
        [rows, vocab] float32, each row sums to 1.
    """
    ordered, ids = probs.sort(dim=-1, descending=True)
    before = ordered.cumsum(-1) - ordered
    rank = torch.arange(probs.shape[-1], device=probs.device)
    drop = (rank >= top_ks.view(-1, 1)) | (before > top_ps.view(-1, 1))
    if min_ps is not None:
        drop |= ordered < ordered[:, :1] * min_ps.view(-1, 1)
    kept = ordered.masked_fill(drop, 0.0)
    out = torch.zeros_like(probs).scatter_(-1, ids, kept / kept.sum(-1, keepdim=True))
    # A sort may order tied probabilities differently from argmax, which the greedy path uses.
    greedy = top_ks <= 1
    out[greedy] = torch.nn.functional.one_hot(probs[greedy].argmax(-1), probs.shape[-1]).to(
        out.dtype
    )
    return out


def draw(weights: torch.Tensor, coins: torch.Tensor) -> torch.Tensor:
    """One index per row, by inverting the cumulative sum.

    Args:
        weights: [rows, n] >= 0, not necessarily normalised, at least one positive per row.
        coins: [rows] uniform in [0, 1).

    Returns:
        [rows] int64; never an index of weight 0.
    """
    cdf = weights.double().cumsum(-1)
    # The first entry whose cumulative sum exceeds the coin; its own weight is then positive.
    at = coins.double().unsqueeze(-1) * cdf[:, -1:]
    index = torch.searchsorted(cdf, at, right=True).squeeze(-1)
    # coin * total can round up to total: then take the last entry that has weight.
    last = (weights > 0).long().mul(torch.arange(weights.shape[-1], device=weights.device))
    return torch.minimum(index, last.amax(-1))


def verify_chain(
    probs: torch.Tensor,
    drafts: torch.Tensor,
    coins: torch.Tensor,
    final_coins: torch.Tensor,
    draft_probs: torch.Tensor | None = None,
    *,
    threshold_single: float = 1.0,
    threshold_acc: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Decide how many drafts of each chain stand and draw the token after them.

    Args:
        probs: [batch, n + 1, vocab]; row i is the target's p after i drafts.
        drafts: [batch, n] proposed tokens.
        coins: [batch, >= n] uniform in [0, 1), one for each draft.
        final_coins: [batch] uniform in [0, 1).
        draft_probs: [batch, n, vocab] q that the drafts were sampled from; None when the draft
            proposed its argmax.
        threshold_single, threshold_acc: SGLang's ``--speculative-accept-threshold-*``. Below 1 they
            accept more than is exact, as SGLang's CUDA kernel does; used only without
            ``draft_probs``.

    Returns:
        ``correct`` [batch] int64, number of accepted drafts, and ``bonus`` [batch] int64, the token
        drawn after them.
    """
    batch, n = drafts.shape
    rows = torch.arange(batch, device=probs.device)
    p = probs[:, :n].gather(2, drafts.unsqueeze(-1)).squeeze(-1)
    coins = coins[:, :n]
    if draft_probs is None:
        accept = (p > 0) & ((coins < p / threshold_acc) | (p >= threshold_single))
    else:
        accept = coins * draft_probs.gather(2, drafts.unsqueeze(-1)).squeeze(-1) < p
    correct = accept.long().cumprod(-1).sum(-1)

    target = probs[rows, correct]
    rejected = correct < n
    at = correct.clamp(max=max(n - 1, 0))
    if draft_probs is None:
        rest = target.clone()
        rest[rows[rejected], drafts[rows, at][rejected]] = 0.0
    else:
        rest = (target - draft_probs[rows, at]).clamp_min_(0.0)
    # All mass can vanish only by rounding (p equal to q): then p itself is the best answer.
    usable = rejected & (rest.sum(-1) > 0)
    return correct, draw(torch.where(usable.unsqueeze(-1), rest, target), final_coins)


def _verify(
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
    candidates: torch.Tensor,
    retrive_index: torch.Tensor,
    retrive_next_token: torch.Tensor,
    retrive_next_sibling: torch.Tensor,
    uniform_samples: torch.Tensor,
    uniform_samples_for_final_sampling: torch.Tensor,
    target_probs: torch.Tensor,
    draft_probs: torch.Tensor | None,
    threshold_single: float,
    threshold_acc: float,
) -> None:
    """SGLang's verification op for one chain per request; fills the first three in place."""
    info = _sampling_info.get()
    batch, width, vocab = target_probs.shape
    if info.need_top_k_sampling or info.need_top_p_sampling or info.need_min_p_sampling:
        probs = joint_filter(
            target_probs.reshape(batch * width, vocab),
            info.top_ks.repeat_interleave(width),
            info.top_ps.repeat_interleave(width),
            info.min_ps.repeat_interleave(width) if info.need_min_p_sampling else None,
        ).view(batch, width, vocab)
    else:
        probs = target_probs
    drafts = candidates[:, 1:].long()
    correct, bonus = verify_chain(
        probs,
        drafts,
        uniform_samples,
        uniform_samples_for_final_sampling,
        draft_probs,
        threshold_single=threshold_single,
        threshold_acc=threshold_acc,
    )
    # predicts[i] is the token that follows row i: the drafts that stand, then the drawn one.
    following = torch.cat([drafts, drafts[:, -1:]], 1)
    following[torch.arange(batch, device=drafts.device), correct] = bonus
    steps = torch.arange(width, device=drafts.device)
    kept = steps <= correct.unsqueeze(-1)
    predicts[retrive_index[kept].long()] = following[kept].to(predicts.dtype)
    accept_index.copy_(retrive_index.masked_fill(~kept, -1)[:, : accept_index.shape[1]])
    accept_token_num.copy_(correct)


def verify_point_mass(**kw: Any) -> None:
    """``tree_speculative_sampling_target_only`` for a chain whose draft proposed its argmax."""
    kw.pop("deterministic", None)
    _verify(**{**kw, "draft_probs": None})


def verify_sampled_draft(**kw: Any) -> None:
    """``chain_speculative_sampling_triton``: the draft sampled from ``draft_probs``."""
    kw.pop("deterministic", None)
    _verify(**kw)


def uses_greedy(*, is_all_greedy: bool, **_: Any) -> bool:
    """``_verify_uses_greedy`` without its exception for CPUs."""
    return is_all_greedy


def eagle_sample(
    original: Callable[..., Any], verify_input: Any, batch: Any, *args: Any, **kw: Any
) -> Any:
    """Around ``eagle_sample``: makes the batch's sampling parameters known to :func:`_verify`."""
    info = batch.sampling_info
    sampled = not batch.forward_mode.is_idle() and not info.is_all_greedy
    if sampled and verify_input.tree_topk != 1:
        raise NotImplementedError(
            "Sampled requests are verified on a CPU only for draft chains: set "
            "--speculative-eagle-topk 1."
        )
    token = _sampling_info.set(info)
    try:
        return original(verify_input, batch, *args, **kw)
    finally:
        _sampling_info.reset(token)


def _unchanged(probs: torch.Tensor, _values: torch.Tensor) -> torch.Tensor:
    """Stands for SGLang's separate top-k and top-p steps: :func:`_verify` filters jointly."""
    return probs


def _row_argmax(x: torch.Tensor) -> torch.Tensor:
    return x.argmax(dim=-1)


def register(patches: Patches) -> None:
    """Make SGLang's speculative workers sample on a CPU.

    Ops that are None or a Triton kernel on this platform are assigned and not hooked.
    """
    name = "sampling"
    patches.assign(name, "sglang.srt.speculative.spec_utils.row_argmax", _row_argmax)
    patches.assign(name, f"{_EAGLE}.top_k_renorm_prob", _unchanged)
    patches.assign(name, f"{_EAGLE}.top_p_renorm_prob", _unchanged)
    patches.assign(name, f"{_EAGLE}.tree_speculative_sampling_target_only", verify_point_mass)
    patches.assign(name, f"{_EAGLE}.chain_speculative_sampling_triton", verify_sampled_draft)
    patches.hook(name, f"{_EAGLE}._verify_uses_greedy", uses_greedy)
    patches.hook(name, f"{_EAGLE}.eagle_sample", eagle_sample, "around")
