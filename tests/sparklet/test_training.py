"""A few steps of training, resuming, measuring, storing and reading back."""

from __future__ import annotations

import platform
from dataclasses import replace

import pytest
import torch
from sparklet import batches, decode, evaluate, export, training
from sparklet.model import Sparklet


@pytest.fixture(scope="module")
def monkeypatch_module():
    patch = pytest.MonkeyPatch()
    patch.setattr(batches.Plan.__init__, "__defaults__", (256, 48, False))  # small pools
    yield patch
    patch.undo()


SETTINGS = replace(training.PRESETS["smoke"], steps=4, tokens=512, length=64)


@pytest.fixture(scope="module")
def run(small, tmp_path_factory, monkeypatch_module):
    made = training.Run(tmp_path_factory.mktemp("run"), SETTINGS, "cpu", small)
    made.train(report=0.0, show=lambda line: None)
    return made


def test_it_learns_and_leaves_its_files(run):
    assert run.step == 4
    assert run.history[-1]["loss"] < run.history[0]["loss"]
    for name in ("state.pt", "losses.jsonl", "loss.svg", "settings.json"):
        assert (run.folder / name).stat().st_size > 0
    assert "<polyline" in (run.folder / "loss.svg").read_text()


def test_a_stopped_run_continues_to_the_same_weights(small, run, tmp_path):
    first = training.Run(tmp_path, SETTINGS, "cpu", small)
    first.train(stop_at=2, show=lambda line: None)
    second = training.Run(tmp_path, SETTINGS, "cpu", small)
    assert second.resume() and second.step == 2
    second.train(show=lambda line: None)
    for (name, a), (_, b) in zip(
        run.model.state_dict().items(), second.model.state_dict().items(), strict=True
    ):
        assert torch.equal(a, b), name
    other = training.Run(tmp_path, replace(SETTINGS, seed=9), "cpu", small)
    with pytest.raises(ValueError, match="other settings"):
        other.resume()


def test_parts_on_threads_give_the_same_step(small, tmp_path, monkeypatch_module):
    """The gradient of a batch is that of its parts, and the same each time."""
    batch = batches.pool(batches.Plan(1, 1024, 64), 0)[0]
    made = []
    for n, name in ((1, "a"), (2, "b"), (2, "c")):
        one = training.Run(tmp_path / name, SETTINGS, "cpu", small, parts=n)
        each = one.update(batch)
        made.append((one, each, {k: p.grad for k, p in one.model.named_parameters()}))
    (whole, want, grads), (parted, got, mine), (again, _, _) = made
    assert torch.allclose(want, got, rtol=1e-3)
    for name, grad in grads.items():  # BF16 sums in another order
        assert (grad - mine[name]).norm() <= 0.03 * grad.norm() + 1e-6, name
    for (name, a), (_, b) in zip(
        parted.model.state_dict().items(), again.model.state_dict().items(), strict=True
    ):
        assert torch.equal(a, b), name
    assert whole.model.layers[-1].mlp.gate.expert_bias.any()


def test_every_weight_gets_a_gradient(small, monkeypatch_module):
    torch.manual_seed(0)
    model = Sparklet(small).train().prepare(torch.bfloat16, True)
    batch = batches.pool(batches.Plan(1, 1024, 64), 0)[0]
    tensors = [torch.from_numpy(x) for x in (batch.ids, batch.weights, batch.valid)]
    sum(training.losses(model, SETTINGS, *tensors)).backward()
    without = [n for n, p in model.named_parameters() if p.grad is None or not p.grad.any()]
    assert without == []


def test_export_holds_exactly_the_rounded_weights(run, tmp_path):
    size = export.save(run.model, tmp_path, SETTINGS)
    assert size < 10_000_000
    stored = export.read(tmp_path)
    assert stored["model.layers.1.mlp.experts.0.gate_proj.weight"].dtype == torch.int8
    scale = stored["model.layers.1.mlp.experts.0.gate_proj.weight_scale_inv"]
    assert scale.dtype == torch.float8_e8m0fnu
    assert stored["model.layers.0.attention.q_proj.weight"].dtype == torch.float8_e4m3fn
    assert stored["model.layers.0.attention.b_proj.weight"].dtype == torch.bfloat16
    assert stored["lm_head.weight"].dtype == torch.bfloat16
    assert stored["model.layers.4.eh_proj.weight_scale_inv"].dtype == torch.float32
    assert len(list(tmp_path.glob("model-*.safetensors"))) >= 1
    model, tok = export.load(tmp_path)
    ids = torch.randint(0, 1000, (2, 20))
    with torch.no_grad():
        run.model.eval().prepare(torch.bfloat16, True)
        model.prepare(torch.bfloat16, False)
        assert torch.equal(run.model(ids), model(ids))
    assert tok.get_vocab_size() <= model.c.vocab_size


def test_names_are_those_sglang_loads(run):
    names = {n for n, _ in export.tensors(run.model)}
    layer = "model.layers."
    assert {
        "model.word_embeddings.weight",
        "lm_head.weight",
        "model.norm.weight",
        f"{layer}0.attention.A_log",
        f"{layer}0.attention.dt_bias",
        f"{layer}0.attention.q_conv1d.weight",
        f"{layer}0.attention.o_norm.weight",
        f"{layer}0.mlp.gate_proj.weight",
        f"{layer}1.mlp.gate.expert_bias",
        f"{layer}3.attention.kv_a_proj_with_mqa.weight",
        f"{layer}3.attention.g_proj.weight",
        f"{layer}3.attention.dense.weight_scale_inv",
        f"{layer}4.enorm.weight",
        f"{layer}4.eh_proj.weight",
        f"{layer}4.final_layernorm.weight",
        f"{layer}4.mlp.experts.7.down_proj.weight_scale_inv",
        f"{layer}4.mlp.shared_experts.up_proj.weight",
    } <= names


def test_accept_length_counts_rounds(small):
    """A model whose drafts are always the next token of a fixed text, and one where they never are."""

    class Perfect:
        word_embeddings = type("W", (), {"now": torch.zeros(1)})()
        shift = 0

        def __call__(self, ids, valid=None):
            return ids

        def drafts(self, hidden, ids, valid=None):
            out = []
            for k in (1, 2, 3):
                want = torch.roll(ids, -k - 1, 1) + self.shift
                out.append(torch.nn.functional.one_hot(want % 50, 50))
            return out

    text = decode.Text([1, 2, 3, *range(10, 23)], 3, True)  # 13 answer tokens, 12 after the first
    perfect = Perfect()
    kept = decode.accepted(perfect, [text])
    assert (kept.tokens, kept.rounds, kept.histogram) == (12, 3, (0, 0, 0, 3))
    assert kept.length == 4.0
    perfect.shift = 1
    kept = decode.accepted(perfect, [text])
    assert (kept.tokens, kept.rounds, kept.length) == (12, 12, 1.0)


def test_sampling_keeps_the_right_tokens():
    logits = torch.tensor([[3.0, 2.0, 1.0, -9.0]]).log_softmax(-1).repeat(4000, 1)
    g = torch.Generator().manual_seed(0)
    top = decode.choose(logits, decode.Sampling(1.0, 0.9, 0), g)
    assert set(top.tolist()) == {0, 1}  # 0.665 + 0.245 = 0.91 covers 0.9
    two = decode.choose(logits, decode.Sampling(1.0, 1.0, 2), g)
    assert set(two.tolist()) == {0, 1}
    share = (two == 0).float().mean().item()
    assert share == pytest.approx(0.731, abs=0.03)
    cold = decode.choose(logits, decode.Sampling(0.5, 1.0, 2), g)
    assert (cold == 0).float().mean().item() == pytest.approx(0.881, abs=0.03)
    assert decode.choose(logits, decode.Sampling(), None).eq(0).all()


def test_the_report_prints_every_goal(run, tok):
    run.model.eval().prepare(torch.float32, True)
    result = evaluate.report(run.model, tok, n=4, batch=4)
    text = "\n".join(evaluate.lines(result))
    for goal, *_ in evaluate.GOALS:
        assert goal in text


def test_generate_matches_plain_argmax(small, tok):
    torch.manual_seed(1)
    model = Sparklet(small).eval()
    prompt = [5, 6, 7, 8]
    (text,) = decode.generate(model, [prompt], most=6, stop=None)
    ids = list(prompt)
    with torch.no_grad():
        for _ in range(6):
            ids.append(int(model.logits(model(torch.tensor([ids]))[:, -1]).argmax()))
    assert text.ids == ids


def test_muon_s_iteration_is_the_published_one():
    """Against its formula in float64, for one matrix, wide or tall, and for stacks of them."""
    torch.manual_seed(0)
    g = torch.randn(2, 3, 32, 48)
    want = g.double() / g.double().norm(dim=(-2, -1), keepdim=True)
    for _ in range(5):
        a = want @ want.mT
        want = 3.4445 * want + (-4.7750 * a + 2.0315 * (a @ a)) @ want
    got = training.orthogonal(g)
    assert got.shape == g.shape and (got - want).abs().max() < 0.05  # BF16
    assert torch.equal(training.orthogonal(g[0, 0]), got[0, 0])
    assert torch.equal(training.orthogonal(g.mT.contiguous()), got.mT)
    values = torch.linalg.svdvals(got)
    assert values.min() > 0.6 and values.max() < 1.3


def test_memory_is_kept_where_glibc_can_be_asked():
    assert training.keep_memory() is (platform.libc_ver()[0] == "glibc")
