"""The network: cached equals uncached, both expert paths agree, the draft's attention is right."""

from __future__ import annotations

import pytest
import torch
from sparklet import model
from sparklet.config import Config
from sparklet.model import MoE, Router, Sparklet, rotate, swiglu


@pytest.fixture(scope="module")
def net(small):
    torch.manual_seed(3)
    return Sparklet(small).eval()


def test_keeping_state_changes_nothing(net):
    ids = torch.randint(0, 1000, (3, 30))
    lengths = torch.tensor([20, 13, 2])
    with torch.no_grad():
        want = net(ids)
        cache = net.new_cache(3, 40)
        valid = torch.arange(20) < lengths[:, None]
        got = net(ids[:, :20], valid, torch.zeros(3, dtype=torch.long), cache)
        for i, n in enumerate(lengths):
            assert torch.allclose(got[i, :n], want[i, :n], atol=1e-4)
        at = lengths.clone()
        for _ in range(8):
            step = net(ids[torch.arange(3), at][:, None], None, at, cache)[:, 0]
            assert torch.allclose(step, want[torch.arange(3), at], atol=1e-4)
            at += 1


def test_padding_does_not_leak(net):
    ids = torch.randint(0, 1000, (1, 24))
    other = ids.clone()
    other[:, 17:] = 5
    with torch.no_grad():
        assert torch.allclose(net(ids)[:, :17], net(other)[:, :17], atol=1e-5)


def test_both_expert_paths_agree(net):
    moe = next(m for m in net.modules() if isinstance(m, MoE))
    x = torch.randn(50, net.c.hidden_size)
    w, ids = moe.gate(x)
    want = moe.all_experts(x, w, ids)
    assert torch.allclose(want, moe.chosen_experts(x, w, ids), atol=1e-6)
    moe.train()  # with rows that fill
    try:
        one = torch.zeros(50, 2, dtype=torch.long)  # every slot the same expert, the others without
        for chosen in (ids, one):
            x.grad = None
            x.requires_grad_()
            got = moe.chosen_experts(x, w, chosen)
            assert torch.allclose(moe.all_experts(x, w, chosen), got, atol=1e-6)
            (mine,) = torch.autograd.grad(got.square().sum(), x, retain_graph=True)
            (other,) = torch.autograd.grad(moe.all_experts(x, w, chosen).square().sum(), x)
            assert torch.allclose(mine, other, atol=1e-5)
    finally:
        moe.eval()


def test_router_picks_inside_the_best_groups_and_the_bias_only_chooses():
    c = Config()
    router = Router(c)
    x = torch.randn(200, c.hidden_size)
    w, ids = router(x)
    score = torch.sigmoid(x @ router.weight.T)
    groups = score.view(200, c.n_group, -1).topk(2, -1).values.sum(-1)
    best = groups.topk(c.topk_group, -1).indices
    assert all(int(i) // 4 in best[n].tolist() for n in range(200) for i in ids[n])
    assert torch.allclose(w.sum(-1), torch.ones(200), atol=1e-5)
    router.expert_bias[3] = 100.0
    w, ids = router(x)
    assert (ids == 3).any(-1).all()
    chosen = score.gather(1, ids)
    assert torch.allclose(w, chosen / chosen.sum(-1, keepdim=True), atol=1e-5)


def test_the_cpu_s_convolution_is_the_plain_one():
    torch.manual_seed(0)
    window, taps = torch.randn(2, 11, 6), torch.randn(6, 4)
    for x in (window, taps):
        x.requires_grad_()
    ways = (model.short_convolution, model._ShortConvolution.apply)
    out = [way(window, taps) for way in ways]
    assert out[0].shape == (2, 8, 6) and torch.allclose(*out, atol=1e-6)
    weight = torch.randn_like(out[0])
    grads = [torch.autograd.grad((y * weight).sum(), (window, taps)) for y in out]
    for a, b in zip(*grads, strict=True):
        assert torch.allclose(a, b, atol=1e-5)


def test_balance_moves_the_bias_towards_unused_experts():
    router = Router(Config())
    router.count(torch.tensor([[0, 1], [0, 1], [0, 2]]), torch.tensor([True, True, False]))
    router.balance(0.1)
    assert router.expert_bias[0] < 0 < router.expert_bias[5]
    assert router.load.sum() == 0


def test_rotation_is_interleaved_and_relative():
    q, k = torch.randn(1, 1, 1, 64), torch.randn(1, 1, 1, 64)
    dot = lambda a, b: (  # noqa: E731
        rotate(q, torch.tensor([[a]]), 6e6) * rotate(k, torch.tensor([[b]]), 6e6)
    ).sum()
    assert torch.allclose(dot(7, 3), dot(104, 100), atol=1e-4)
    one = rotate(q, torch.tensor([[1]]), 6e6)[0, 0, 0]
    a, b = q[0, 0, 0, 0], q[0, 0, 0, 1]
    c, s = torch.tensor(1.0).cos(), torch.tensor(1.0).sin()
    assert torch.allclose(one[:2], torch.stack([a * c - b * s, a * s + b * c]), atol=1e-5)


def test_clamp_is_after_silu():
    gate, up = torch.tensor([9.0, 1.0]), torch.tensor([-9.0, 2.0])
    assert torch.allclose(swiglu(gate, up, 4.0), torch.tensor([-16.0, torch.sigmoid(gate[1]) * 2]))
    assert swiglu(gate, up, 0.0)[0] < -80


def chain(net, hidden, ids, t):
    """Draft logits at index t, one step at a time with an explicit list of keys and values."""
    layer, a = net.layers[-1], net.layers[-1].attention

    def run(token, h, position, past):
        x = torch.cat([layer.enorm(net.embed(token)), layer.hnorm(h)], -1)
        x = layer.eh_proj(x)
        y = layer.input_layernorm(x)
        q, k, v = a.project(y, torch.tensor([[position]]))
        past.append((k, v))
        keys = torch.cat([p[0] for p in past], 2)
        values = torch.cat([p[1] for p in past], 2)
        x = x + a.finish(y, a.scores(q, keys).softmax(-1) @ values)
        x = layer.feed_forward(x, None)
        return layer.final_layernorm(x)

    past, out = [], []
    for s in range(t + 1):
        h = run(ids[:, s + 1 : s + 2], hidden[:, s : s + 1], s, past)
    out.append(net.logits(h))
    for k in (2, 3):
        h = run(ids[:, t + k : t + k + 1], h, t + k - 1, past)
        out.append(net.logits(h))
    return out


def test_drafts_equal_a_chain_run_step_by_step(net):
    ids = torch.randint(0, 1000, (1, 14))
    with torch.no_grad():
        hidden = net(ids)
        many = net.drafts(hidden, ids)
        for t in (0, 5, 9):
            for got, want in zip(many, chain(net, hidden, ids, t), strict=True):
                assert torch.allclose(got[:, t], want[:, 0], atol=1e-4)


def test_config_round_trip_and_limits():
    c = Config()
    assert Config.from_hf(c.to_hf(pad=1, eos=2)) == c
    with pytest.raises(ValueError, match="128"):
        Config(moe_intermediate_size=96)
    with pytest.raises(ValueError, match="layer_group_size"):
        Config(num_hidden_layers=5)
