"""Sampled verification: the filters, the draw, the acceptance rule, and SGLang's eagle_sample.

The statistical tests compare counts with an exact distribution by Pearson's chi-square. Seeds are
fixed; with other seeds each would raise a false alarm once in 100,000 runs.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from scipy.stats import chi2
from sparkling_sglang.cpu import sampling

ALPHA = 1e-5
VOCAB = 6
DRAWS = 40_000


def p_value(tokens: torch.Tensor, p: torch.Tensor) -> float:
    """Chi-square p-value of ``tokens`` [n] having been drawn from ``p`` [vocab]."""
    counts = torch.bincount(tokens, minlength=p.numel()).double()
    expected = p.double() * tokens.numel()
    if counts[expected == 0].any():
        return 0.0
    used = expected > 0
    statistic = ((counts - expected)[used] ** 2 / expected[used]).sum()
    return float(chi2.sf(float(statistic), int(used.sum()) - 1))


def distributions(*shape: int, seed: int, sharpness: float = 1.5) -> torch.Tensor:
    noise = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=noise) * sharpness).softmax(-1)


# ------------------------------------------------------------------------------------- filters


@pytest.mark.parametrize("top_k", [1 << 30, 29, 5, 2])
@pytest.mark.parametrize("top_p", [1.0, 0.95, 0.5])
@pytest.mark.parametrize("min_p", [0.0, 0.1])
def test_filters_match_sglangs_own_sampler(top_k, top_p, min_p):
    from sglang.srt.layers.sampler import top_k_top_p_min_p_sampling_from_probs_torch

    probs = distributions(50, 40, seed=1)
    top_ks, top_ps = torch.full((50,), top_k, dtype=torch.int32), torch.full((50,), top_p)
    min_ps = torch.full((50,), min_p)
    _, kept, ids, _ = top_k_top_p_min_p_sampling_from_probs_torch(
        probs.clone(),
        top_ks,
        top_ps,
        min_ps,
        min_p > 0,
        None,
        torch.zeros(50),
        return_filtered_probs=True,
    )
    wanted = torch.zeros_like(probs).scatter_(1, ids.long(), kept / kept.sum(-1, keepdim=True))
    got = sampling.joint_filter(probs, top_ks, top_ps, min_ps if min_p else None)
    torch.testing.assert_close(got, wanted, atol=1e-6, rtol=1e-5)


def test_top_p_looks_at_the_unfiltered_probabilities():
    # Renormalised after top-k 3, the first two would hold 0.7 / 0.9 = 0.78 > 0.75 and the third
    # would go; jointly they hold 0.7 and it stays.
    probs = torch.tensor([[0.4, 0.3, 0.2, 0.1]])
    got = sampling.joint_filter(probs, torch.tensor([3]), torch.tensor([0.75]))
    torch.testing.assert_close(got, torch.tensor([[4 / 9, 3 / 9, 2 / 9, 0.0]]))


def test_a_greedy_row_is_a_point_mass_on_the_argmax_even_among_ties():
    probs = torch.full((3, 512), 1 / 512)
    probs[1, 7] += 0.5
    got = sampling.joint_filter(probs, torch.ones(3, dtype=torch.int32), torch.ones(3))
    assert got.argmax(-1).tolist() == probs.argmax(-1).tolist()
    assert torch.equal(got.max(-1).values, torch.ones(3))
    assert torch.equal(got.sum(-1), torch.ones(3))


# ---------------------------------------------------------------------------------------- draw


def test_draw_inverts_the_cumulative_sum_exactly():
    weights = torch.tensor([0.0, 3.0, 0.0, 1.0, 4.0, 0.0])
    coins = (torch.arange(8000) + 0.5) / 8000
    got = sampling.draw(weights.expand(8000, -1), coins)
    assert torch.bincount(got, minlength=6).tolist() == [0, 3000, 0, 1000, 4000, 0]


@pytest.mark.parametrize("coin", [0.0, 1.0 - 2**-24, 1.0])
def test_draw_never_returns_a_weight_of_zero(coin):
    weights = torch.tensor([[0.0, 1e-30, 0.0, 0.7, 0.0], [0.0, 0.0, 5.0, 0.0, 0.0]])
    got = sampling.draw(weights, torch.full((2,), coin))
    assert (weights[torch.arange(2), got] > 0).all()


# ------------------------------------------------------------------------------ the chain's rule


def chain(probs, drafts, seed, verify=sampling.verify_chain, **kw):
    """The first two tokens of DRAWS chains: first [DRAWS], and (which, second) where it exists."""
    noise = torch.Generator().manual_seed(seed)
    n = drafts.shape[-1]
    correct, bonus = verify(
        probs.expand(DRAWS, -1, -1),
        drafts.expand(DRAWS, -1),
        torch.rand(DRAWS, n + 1, generator=noise),
        torch.rand(DRAWS, generator=noise),
        **kw,
    )
    tokens = torch.cat([drafts.expand(DRAWS, -1), drafts.new_zeros(DRAWS, 1)], 1).clone()
    tokens[torch.arange(DRAWS), correct] = bonus
    return tokens, correct


def emitted_p_values(tokens, correct, probs):
    """For every position that was reached: how well its tokens fit the target's distribution."""
    values = []
    for i in range(probs.shape[0]):
        reached = tokens[correct >= i, i]
        if reached.numel() > 500:
            values.append(p_value(reached, probs[i]))
    return values


def greedy_rule(probs, drafts, coins, final_coins, draft_probs=None):
    """What SGLang does on a CPU: accept while the draft is the argmax, then the argmax."""
    best = probs.argmax(-1)
    correct = (best[:, :-1] == drafts).long().cumprod(-1).sum(-1)
    return correct, best[torch.arange(len(best)), correct]


def always_rule(probs, drafts, coins, final_coins, draft_probs=None):
    """Accepts every draft and samples only the token after them."""
    correct = torch.full((len(drafts),), drafts.shape[1])
    return correct, sampling.draw(probs[:, -1], final_coins)


def redraw_rule(probs, drafts, coins, final_coins, draft_probs=None):
    """Accepts rightly but redraws from p instead of p without the rejected token."""
    correct, _ = sampling.verify_chain(probs, drafts, coins, final_coins)
    return correct, sampling.draw(probs[torch.arange(len(probs)), correct], final_coins)


PROBS = distributions(4, VOCAB, seed=3)
# The argmax, a middling token, the argmax: chains end after each number of accepted drafts.
DRAFTS = torch.stack([PROBS[0].argmax(), PROBS[1].argsort()[VOCAB // 2], PROBS[2].argmax()])


def test_a_deterministic_draft_leaves_the_distribution_unchanged():
    tokens, correct = chain(PROBS, DRAFTS, seed=4)
    assert set(correct.tolist()) == {0, 1, 2, 3}
    values = emitted_p_values(tokens, correct, PROBS)
    assert len(values) == 4 and min(values) > ALPHA, values
    accepted = float((correct >= 1).double().mean())
    assert accepted == pytest.approx(float(PROBS[0, DRAFTS[0]]), abs=0.01)


@pytest.mark.parametrize("rule", [greedy_rule, always_rule, redraw_rule])
def test_wrong_rules_are_noticed(rule):
    tokens, correct = chain(PROBS, DRAFTS, seed=4, verify=rule)
    assert min(emitted_p_values(tokens, correct, PROBS)) < 1e-12


def test_a_sampled_draft_leaves_the_distribution_unchanged():
    q = distributions(3, VOCAB, seed=5)
    noise = torch.Generator().manual_seed(6)
    drafts = torch.stack([torch.multinomial(q[i], DRAWS, True, generator=noise) for i in range(3)])
    kw = {"draft_probs": q.expand(DRAWS, -1, -1)}
    tokens, correct = chain(PROBS, drafts.T, seed=7, **kw)
    values = emitted_p_values(tokens, correct, PROBS)
    assert len(values) == 4 and min(values) > ALPHA, values
    # The same drafts with a q that they were not drawn from.
    kw = {"draft_probs": distributions(3, VOCAB, seed=12).expand(DRAWS, -1, -1)}
    tokens, correct = chain(PROBS, drafts.T, seed=7, **kw)
    assert min(emitted_p_values(tokens, correct, PROBS)) < 1e-12


def test_equal_distributions_accept_every_sampled_draft():
    drafts = torch.multinomial(PROBS[0], DRAWS, True).unsqueeze(1)
    probs = PROBS[[0, 0]]
    _, correct = chain(probs, drafts, seed=8, draft_probs=PROBS[:1].expand(DRAWS, 1, -1))
    assert bool((correct == 1).all())


def test_certain_and_impossible_drafts():
    probs = torch.eye(3)[[0, 1]].unsqueeze(0)  # token 0 is certain, then token 1
    for draft, wanted in ((0, (1, 1)), (2, (0, 0))):
        for coin in (0.0, 1 - 2**-24):
            coins = torch.full((1, 2), coin)
            got = sampling.verify_chain(probs, torch.tensor([[draft]]), coins, coins[:, 0])
            assert (int(got[0]), int(got[1])) == wanted


def test_accept_thresholds_accept_more_as_sglangs_kernel_does():
    probs = torch.tensor([[[0.3, 0.7], [0.5, 0.5]]])
    drafts, coins = torch.tensor([[0]]), torch.tensor([[0.5]])
    final = torch.tensor([0.9])
    assert int(sampling.verify_chain(probs, drafts, coins, final)[0]) == 0
    assert int(sampling.verify_chain(probs, drafts, coins, final, threshold_acc=0.5)[0]) == 1
    assert int(sampling.verify_chain(probs, drafts, coins, final, threshold_single=0.3)[0]) == 1


# ------------------------------------------------------------------- through SGLang's eagle_sample


@pytest.fixture(scope="module")
def eagle(engine_context):
    """SGLang's eagle_utils with the plugin's sampled verification."""
    import sgl_kernel
    from sglang.srt.speculative import eagle_utils
    from sparkling_sglang.patches import Patches

    assert hasattr(sgl_kernel, "verify_tree_greedy_cpu")
    patches = Patches()
    sampling.register(patches)
    patches.apply()
    return eagle_utils


ROWS = 8000
LOGITS = torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(9)) * 1.5


def verify(eagle, *, top_k, top_p=1.0, min_p=0.0, temperature=1.0, bias=None, draft_probs=None):
    """One verification of ROWS equal requests through SGLang's eagle_sample.

    Args:
        top_k: [ROWS], 1 for a greedy request as SGLang stores it.

    Returns:
        predict [ROWS, 4], accept lengths [ROWS], accept index [ROWS, 4].
    """
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    chain = torch.arange(4)
    batch = SimpleNamespace(
        device="cpu",
        forward_mode=ForwardMode.TARGET_VERIFY,
        seq_lens=torch.full((ROWS,), 10),
        return_logprob=False,
        sampling_info=SimpleNamespace(
            acc_additive_penalties=None,
            acc_scaling_penalties=None,
            logit_bias=None if bias is None else bias.expand(ROWS, -1),
            has_watermark_candidates=False,
            sampling_seed=None,
            is_all_greedy=bool((top_k <= 1).all()),
            need_top_k_sampling=bool((top_k < 1 << 30).any()),
            need_top_p_sampling=top_p != 1.0,
            need_min_p_sampling=min_p > 0,
            temperatures=torch.full((ROWS, 1), temperature),
            top_ks=top_k,
            top_ps=torch.full((ROWS,), top_p),
            min_ps=torch.full((ROWS,), min_p),
        ),
    )
    drafts = torch.cat([torch.tensor([5]), DRAFTS])
    asked = SimpleNamespace(
        draft_token=drafts.repeat(ROWS),
        draft_token_num=4,
        max_tree_depth=4,
        tree_topk=1,
        draft_probs=draft_probs,
        retrieve_index=(torch.arange(ROWS) * 4).unsqueeze(1) + chain,
        retrieve_next_token=torch.tensor([1, 2, 3, -1]).repeat(ROWS, 1),
        retrieve_next_sibling=torch.full((ROWS, 4), -1),
    )
    logits = SimpleNamespace(next_token_logits=LOGITS.repeat(ROWS, 1))
    predict, lengths, index = eagle.eagle_sample(asked, batch, logits)
    return predict.view(ROWS, 4), lengths, index


def check_layout(lengths, index):
    """accept_index holds the flat rows of the accepted chain, then -1."""
    steps = torch.arange(4)
    rows = (torch.arange(ROWS) * 4).unsqueeze(1) + steps
    assert torch.equal(index.long(), rows.where(steps < lengths.unsqueeze(1), -1))


@pytest.mark.parametrize(
    "asked",
    [
        {},
        {"temperature": 0.6, "top_p": 0.9},
        {"temperature": 1.7, "min_p": 0.2},
        {"top_p": 0.8, "bias": torch.tensor([0.0, 2.0, 0.0, -1.0, 0.0, 0.0])},
    ],
)
def test_requests_get_the_target_distribution_and_greedy_ones_stay_greedy(eagle, asked):
    torch.manual_seed(10)
    greedy = torch.arange(ROWS) % 4 == 0
    top_k = torch.where(greedy, 1, 4).int()
    predict, lengths, index = verify(eagle, top_k=top_k, **asked)
    check_layout(lengths, index)

    biased = LOGITS + asked.get("bias", torch.zeros(VOCAB))
    p = sampling.joint_filter(
        (biased / asked.get("temperature", 1.0)).softmax(-1),
        torch.full((4,), 4),
        torch.full((4,), asked.get("top_p", 1.0)),
        torch.full((4,), asked.get("min_p", 0.0)),
    )
    sampled = predict[~greedy].long(), lengths[~greedy].long() - 1
    values = emitted_p_values(*sampled, p)
    assert len(values) >= 2 and min(values) > ALPHA, values

    best = biased.argmax(-1)
    correct = int((best[:3] == DRAFTS).long().cumprod(0).sum())
    assert set(lengths[greedy].tolist()) == {correct + 1}
    assert torch.equal(predict[greedy][0, : correct + 1].long(), best[: correct + 1])


def test_an_all_greedy_batch_takes_sglangs_own_path(eagle):
    predict, lengths, _ = verify(eagle, top_k=torch.ones(ROWS, dtype=torch.int32))
    best = LOGITS.argmax(-1)
    correct = int((best[:3] == DRAFTS).long().cumprod(0).sum())
    assert set(lengths.tolist()) == {correct + 1}
    assert bool((predict[:, : correct + 1] == best[: correct + 1]).all())


def test_branching_drafts_are_refused_for_sampled_requests(eagle, monkeypatch):
    batch = SimpleNamespace(
        forward_mode=SimpleNamespace(is_idle=lambda: False),
        sampling_info=SimpleNamespace(is_all_greedy=False),
    )
    with pytest.raises(NotImplementedError, match="--speculative-eagle-topk 1"):
        eagle.eagle_sample(SimpleNamespace(tree_topk=4), batch, None)
