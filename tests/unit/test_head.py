"""Head agreement against straightforward arithmetic on whole matrices, and on heads made to differ."""

from __future__ import annotations

import json

import ml_dtypes
import numpy as np
import pytest
from sparkling import cli, head, head_live, show_head
from sparkling.errors import RequestError, UsageError
from sparkling.reply import Reply


def states_of(hidden, targets=None):
    return head.States(np.asarray(hidden, np.float32), targets, "made for a test")


@pytest.fixture(scope="module")
def made():
    rng = np.random.default_rng(3)
    weight = rng.standard_normal((700, 192)).astype(np.float32) * rng.lognormal(0, 1, (700, 1))
    weight = weight.astype(ml_dtypes.bfloat16)
    hidden = rng.standard_normal((80, 192)).astype(np.float32)
    targets = rng.integers(0, 40, 80) ** 2 % 700
    return weight, states_of(hidden, targets)


# -- quantization ----------------------------------------------------------------------------------


def test_codes_are_e4m3_and_scales_are_the_documented_ones(made):
    weight = np.asarray(made[0], np.float32)
    codes, scale = head.quantize(weight, "per-row")
    assert codes.dtype == ml_dtypes.float8_e4m3fn and scale.shape == (700, 1)
    assert np.abs(codes.astype(np.float32)).max(axis=1) == pytest.approx(448)
    back = codes.astype(np.float32) * scale
    # Half a step of three mantissa bits, and half a subnormal step.
    assert (np.abs(back - weight) <= np.abs(weight) * 2**-4 + scale * 2**-10).all()
    _, one = head.quantize(weight, "per-tensor")
    assert one.shape == (1, 1) and one[0, 0] == pytest.approx(np.abs(weight).max() / 448)
    _, blocks = head.quantize(weight, "block-128")
    assert len(np.unique(blocks)) == 6 * 2
    assert blocks[130, 5] == pytest.approx(np.abs(weight[128:256, :128]).max() / 448)


def test_zero_rows_stay_zero_and_infinities_are_refused():
    weight = np.zeros((256, 128), np.float32)
    for scheme in head.SCHEMES:
        codes, scale = head.quantize(weight, scheme)
        assert (codes.astype(np.float32) == 0).all() and (scale == 1).all()
    weight[3, 3] = np.inf
    with pytest.raises(UsageError, match="infinite or NaN"):
        head.quantize(weight, "per-row")
    with pytest.raises(UsageError, match="per-row, per-tensor"):
        head.quantize(np.ones((2, 2), np.float32), "int4")


def test_the_plugin_quantizes_alike(made):
    """The same rule as `sparkling_sglang.fp8_head.quantize_rows`, written here in float64."""
    weight = np.asarray(made[0], np.float32)
    codes, scale = head.quantize(weight, "per-row")
    top = np.abs(weight).max(axis=1)
    assert scale[:, 0] == pytest.approx(top / 448, rel=1e-6)
    again = (weight.astype(np.float64) / (top[:, None] / 448)).clip(-448, 448)
    same = codes == again.astype(ml_dtypes.float8_e4m3fn)
    assert same.mean() > 0.999  # a quotient at the border of two codes may fall on either side


def test_bytes():
    sizes = head.scheme_bytes(157_184, 2560)
    assert sizes["BF16"] == 804_782_080 and sizes["per-row"] == 157_184 * 2560 + 157_184 * 4
    assert sizes["per-tensor"] < sizes["block-128"] < sizes["per-row"]


# -- the comparison --------------------------------------------------------------------------------


def naive(weight, states, scheme):
    w = np.asarray(weight, np.float32)
    codes, scale = head.quantize(w, scheme)
    p = (states.hidden @ w.T).astype(np.float64)
    q = (states.hidden @ (codes.astype(np.float32) * scale).T).astype(np.float64)
    log_p = (
        p
        - np.log(np.exp(p - p.max(1, keepdims=True)).sum(1, keepdims=True))
        - p.max(1, keepdims=True)
    )
    log_q = (
        q
        - np.log(np.exp(q - q.max(1, keepdims=True)).sum(1, keepdims=True))
        - q.max(1, keepdims=True)
    )
    return p, q, log_p, log_q


@pytest.mark.parametrize("scheme", head.SCHEMES)
@pytest.mark.parametrize("rows", [128, 256, 1024])
def test_streaming_gives_what_whole_matrices_give(made, scheme, rows):
    weight, states = made
    found = head.compare(weight, states, schemes=[scheme], chunk_rows=rows).of(scheme)
    p, q, log_p, log_q = naive(weight, states, scheme)
    kl = (np.exp(log_p) * (log_p - log_q)).sum(axis=1)
    assert found.kl_mean == pytest.approx(kl.mean(), rel=1e-3)
    assert found.kl_max == pytest.approx(kl.max(), rel=1e-3)
    assert found.first.value == (p.argmax(1) == q.argmax(1)).mean()
    ten = [
        len(set(np.argsort(-a, kind="stable")[:10]) & set(np.argsort(-b, kind="stable")[:10])) / 10
        for a, b in zip(p, q, strict=True)
    ]
    assert found.top[10] == pytest.approx(np.mean(ten), abs=1e-3)
    at = np.arange(len(states.hidden))
    shift = log_q[at, states.targets] - log_p[at, states.targets]
    assert found.shift_mean == pytest.approx(shift.mean(), abs=1e-4)
    assert found.shift_size == pytest.approx(np.abs(shift).mean(), rel=1e-3)
    assert found.n == 80


def test_a_head_that_fp8_holds_exactly_does_not_move():
    rng = np.random.default_rng(1)
    exact = rng.choice([-1.0, -0.5, 0.25, 1.0], (256, 128)).astype(np.float32)
    exact[:, 0] = 1.75  # 448 times a power of two, so every scale is one
    found = head.compare(exact, states_of(rng.standard_normal((20, 128))))
    for one in found.agreements:
        assert one.first.value == 1.0 and one.kl_max == pytest.approx(0, abs=1e-9)
        assert one.top == {1: 1.0, 5: 1.0, 10: 1.0} and one.shift_size == pytest.approx(0, abs=1e-6)
    assert all(error == 0 for error in found.weight_error.values())


def test_one_scale_for_all_loses_small_rows():
    """Rows a thousand times smaller than the largest vanish into e4m3's subnormals with one scale."""
    rng = np.random.default_rng(2)
    weight = rng.standard_normal((512, 128)).astype(np.float32)
    weight[:256] *= 1e-6
    hidden = rng.standard_normal((40, 128))
    found = head.compare(weight[:512], states_of(hidden, np.arange(40)))
    assert found.weight_error["per-row"] < found.weight_error["per-tensor"] * 1.001
    small = head.compare(
        weight, states_of(hidden * 1e6, np.arange(40)), schemes=["per-tensor", "per-row"]
    )
    assert small.of("per-row").shift_size < small.of("per-tensor").shift_size


def test_rare_positions():
    targets = np.array([1] * 50 + [2] * 40 + [3] * 6 + [4] * 2 + [5, 6])
    rare = head.rare_positions(targets)
    assert set(targets[rare]) == {3, 4, 5, 6} and len(rare) == 10
    assert set(targets[head.rare_positions(targets, 0.04)]) == {4, 5, 6}
    assert len(head.rare_positions(np.array([1, 1, 1, 1, 2]), 0.01)) == 1
    assert head.rare_positions(np.array([7, 7, 7])) is None
    assert head.rare_positions(None) is None


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"hidden": np.ones((4, 100))}, "another model"),
        ({"targets": np.array([700, 1, 2, 3])}, "another tokenizer"),
        ({"schemes": ["int4"]}, "A scheme is one of"),
        ({"chunk_rows": 100}, "multiple of 128"),
    ],
)
def test_what_does_not_fit_is_refused(made, change, sentence):
    states = states_of(change.pop("hidden", np.ones((4, 192))), change.pop("targets", None))
    with pytest.raises(UsageError, match=sentence):
        head.compare(made[0], states, **change)


# -- Sparklet --------------------------------------------------------------------------------------


def test_sparklet_s_recording_belongs_to_its_head(root):
    """The recorded states predict the tokens that followed: they are this head's, in this order."""
    folder = root / "models" / "sparklet"
    states = head.states_for(folder)
    weight = np.asarray(head.head_of(folder), np.float32)
    assert weight.shape == (1280, 256) and len(states.hidden) > 1000
    right = ((states.hidden @ weight.T).argmax(axis=1) == states.targets).mean()
    assert right > 0.7  # the text was sampled; by chance it would be 1 in 1,280


def test_sparklet_s_agreement(root):
    folder = root / "models" / "sparklet"
    found = head.compare(head.head_of(folder), head.states_for(folder), name="Sparklet")
    for scheme in head.SCHEMES:
        all_, rare = found.of(scheme), found.of(scheme, "rare")
        assert all_.first.low > 0.99 and all_.kl_mean < 0.002
        assert 0 < rare.n <= 0.1 * all_.n + 1 and rare.first.value > 0.95
        assert 0.02 < found.weight_error[scheme] < 0.04  # three mantissa bits
    text = str(show_head.report(found))
    assert "block-128" in text and "KL(BF16 || FP8)" in text.replace("\n", " ")
    with pytest.raises(UsageError):
        found.of("int4")


def test_other_checkpoints_get_random_directions_and_say_so(tmp_path):
    from sparkling import tiny

    folder = tiny.build(tmp_path / "ling")
    states = head.states_for(folder)
    assert "random directions" in states.label and states.targets is None
    found = head.compare(head.head_of(folder), states)
    assert {one.group for one in found.agreements} == {"all"}


@pytest.mark.parametrize("content", [b"", b"not a zip", b"PK\x03\x04broken"])
def test_a_recording_that_is_none(tmp_path, content):
    path = tmp_path / "h.npz"
    path.write_bytes(content)
    with pytest.raises(UsageError, match="no recorded hidden states"):
        head.read_states(path)
    with pytest.raises(UsageError, match="no recorded hidden states"):
        head.read_states(tmp_path / "missing.npz")
    (tmp_path / "notes.md").write_text("# Notes\n")
    with pytest.raises(UsageError, match=r"no recorded hidden states \(it is no .npz file\)"):
        head.read_states(tmp_path / "notes.md")
    np.savez(path, hidden=np.ones((3, 4), np.float32), targets=np.ones(2, int))
    with pytest.raises(UsageError, match="one hidden state and one target"):
        head.read_states(path)


def test_heads_that_cannot_be_compared(root, tmp_path):
    with pytest.raises(UsageError, match="There is no checkpoint"):
        head.head_of(tmp_path / "none")


# -- two servers -----------------------------------------------------------------------------------


class Server:
    """Answers /generate from a table of logits [token -> next]; `noise` shifts them."""

    def __init__(self, logits, answers=None, broken=False):
        self.log_p = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
        self.answers, self.broken = answers or {}, broken

    def generate(
        self, prompt=None, *, input_ids=None, max_tokens, stream, logprobs=None, extra=None
    ):
        ids = list(input_ids) if input_ids is not None else [ord(c) % 16 for c in prompt]
        out = self.answers.get(prompt, [1] * max_tokens)[:max_tokens]
        rows = [None, *(self.log_p[t] for t in ids[:-1])]
        read = [
            [None if row is None else float(row[token]), token, None]
            for token, row in zip(ids, rows, strict=True)
        ]
        top = [
            None
            if row is None
            else [[float(row[t]), int(t), None] for t in np.argsort(-row)[:logprobs]]
            for row in rows
        ]
        meta = {
            "input_token_logprobs": read[1:] if self.broken else read,
            "input_top_logprobs": top,
        }
        return Reply(complete=True, output_ids=out, meta_info=meta)


@pytest.fixture
def logits():
    return np.random.default_rng(4).standard_normal((16, 16)) * 2


def test_a_server_agrees_with_itself(logits):
    server = Server(logits)
    ids = head_live.texts(server, max_tokens=5)
    assert ids[0][-5:] == [1] * 5
    judged = head_live.force(server, ids)
    for one in head_live.compare_forced(judged, head_live.force(server, ids)):
        assert one.first.value == 1.0 and one.overlap == 1.0
        assert one.kl == pytest.approx(0, abs=1e-12) and one.shift_max == 0


def test_teacher_forcing_sees_what_was_changed(logits):
    other = logits.copy()
    other[:, 3] += 0.5
    first, second = Server(logits), Server(other)
    ids = head_live.texts(first, max_tokens=8)
    a, b = head_live.force(first, ids), head_live.force(second, ids)
    found = head_live.compare_forced(a, b)[0]
    # By hand: every read token's log-probability under both tables.
    pairs = [(one[i], one[i + 1]) for one in ids for i in range(len(one) - 1)]
    shift = np.array([second.log_p[x, y] - first.log_p[x, y] for x, y in pairs])
    assert found.n == len(pairs)
    assert found.shift_mean == pytest.approx(shift.mean())
    assert found.shift_max == pytest.approx(np.abs(shift).max())
    true = np.mean(
        [(np.exp(first.log_p[x]) * (first.log_p[x] - second.log_p[x])).sum() for x, _ in pairs]
    )
    assert 0 < found.kl <= true + 1e-12
    same = np.mean([first.log_p[x].argmax() == second.log_p[x].argmax() for x, _ in pairs])
    assert found.first.value == pytest.approx(same)
    assert "a lower bound" in str(show_head.forced([found])).replace("\n", " ")


def test_texts_that_differ_are_not_compared(logits):
    server = Server(logits)
    a = head_live.force(server, [[1, 2, 3]])
    with pytest.raises(UsageError, match="different texts"):
        head_live.compare_forced(a, head_live.force(server, [[1, 2, 4]]))
    with pytest.raises(UsageError, match="different texts"):
        head_live.compare_forced([], [])


def test_a_server_without_input_logprobs_is_refused(logits):
    with pytest.raises(RequestError, match="every token it read"):
        head_live.force(Server(logits, broken=True), [[1, 2, 3]])


def test_free_running_answers():
    found = head_live.compare_answers(
        [[1, 2, 3], [1, 2, 3], [1, 2], [5]], [[1, 2, 3], [1, 9, 3], [1, 2, 3], [5]], max_tokens=3
    )
    assert found.first_difference == (1, 2) and found.n == 4 and found.identical.value == 0.5
    assert found.median_difference == 1.5 and found.tokens == 3 + 1 + 2 + 1
    assert "2 of 4 answers identical" in str(show_head.free(found))
    same = head_live.compare_answers([[1]], [[1]])
    assert same.median_difference is None and same.identical.value == 1.0
    with pytest.raises(UsageError, match="in pairs"):
        head_live.compare_answers([[1]], [])


def test_free_running_of_two_servers(logits):
    prompts = ("a", "b")
    first = Server(logits, {"a": [1, 2, 3], "b": [4, 5, 6]})
    second = Server(logits, {"a": [1, 2, 3], "b": [4, 5, 7]})
    found = head_live.free_run(first, second, prompts, max_tokens=3)
    assert found.first_difference == (2,) and json.loads(json.dumps(found.to_json()))["n"] == 2


# -- two stages, one after the other ---------------------------------------------------------------


class Started:
    """Stands for `server.start`: one server at a time, each with its own logits."""

    def __init__(self, logits):
        self.logits, self.launches, self.running = logits, [], 0

    def __call__(self, launch, **_):
        self.launches.append(launch)
        return self

    def __enter__(self):
        self.running += 1
        assert self.running == 1
        return self

    def __exit__(self, *_):
        self.running -= 1

    def client(self):
        return Server(self.logits[len(self.launches) - 1])


@pytest.fixture
def lane_here(root, tmp_path, monkeypatch):
    from sparkling import lane

    monkeypatch.setenv("SPARKLING_LANE", "cpu")
    monkeypatch.setenv("SPARKLING_RECIPE", "sparklet")
    monkeypatch.setenv("SPARKLING_RUNS", str(tmp_path / "runs"))
    return lane.detect("cpu")


def test_two_stages_are_started_one_after_the_other_and_compared(lane_here, logits, monkeypatch):
    from sparkling import head_stages, recipe, server

    other = logits.copy()
    other[:, 3] += 0.5
    started = Started([logits, other])
    monkeypatch.setattr(server, "start", started)
    book = recipe.load("sparklet", root=lane_here.root)
    said = []
    found = head_stages.measure(lane_here, book, prompts=("ab", "cd"), say=said.append)
    assert (
        [launch.stage for launch in started.launches] == ["baseline", "fp8-head"] == [*found.stages]
    )
    assert [launch.switches["fp8-head"] for launch in started.launches] == [False, True]
    assert found.noise[0].shift_max == 0 and found.forced[0].shift_max > 0.1
    assert found.forced[0].n == found.noise[0].n and found.free.n == 2
    assert said[0] == "Starting baseline …" and any("tokens are read" in line for line in said)
    (folder,) = (p for p in lane_here.runs.iterdir() if p.is_dir() and not p.name.startswith("."))
    kept = json.loads(next(folder.rglob("head-judged.json")).read_text())
    assert len(kept) == 3 and len(kept[0][0]["logprobs"]) == len(kept[0][0]["ids"]) - 1
    assert json.loads(next(folder.rglob("head.json")).read_text()) == json.loads(
        json.dumps(found.to_json())
    )


def test_lings_arms_differ_in_the_head_alone(root):
    from sparkling import head_stages, recipe

    book = recipe.load("ling-3.0-flash", root=root)
    before, after = head_stages.arms(book)
    assert (before, after) == (("humming", "bf16-logits"), ("fp8-head", None))
    one, other = (book.render(s, model="/m", variant=v) for s, v in (before, after))
    assert one.argv == other.argv
    assert set(head_live.PROMPTS) < set(head_stages.questions(book))
    practice = head_stages.questions(recipe.load("sparklet", root=root))
    assert len(practice) > 10 and not set(practice) & set(head_live.PROMPTS)
    assert set(other.env.items()) - set(one.env.items()) == {("SPARKLING_FP8_LM_HEAD", "1")}


def test_the_command_starts_stages_or_asks_servers_but_not_both(
    capsys, lane_here, logits, monkeypatch
):
    from sparkling import server

    monkeypatch.setattr(server, "start", Started([logits, logits]))
    assert cli.main(["head", "--stages", "--recipe", "sparklet"]) == 0
    shown = capsys.readouterr()
    assert "fp8-head against baseline" in shown.out.replace("\n", " ")
    assert "answers identical" in shown.out and "Starting fp8-head" in shown.err
    assert cli.main(["head", "--stages", "--servers", "http://a", "http://b"]) == 2
    assert "not both" in capsys.readouterr().err


# -- the command -----------------------------------------------------------------------------------


def test_the_command(capsys, root, tmp_path):
    folder = str(root / "models" / "sparklet")
    assert cli.main(["head", "--checkpoint", folder]) == 0
    assert "FP8 heads against the BF16 head" in capsys.readouterr().out
    assert cli.main(["head", "--checkpoint", folder, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {one["scheme"] for one in found["agreements"]} == set(head.SCHEMES)
    assert cli.main(["head", "--checkpoint", folder, "--hidden", str(tmp_path / "none.npz")]) == 2
    assert "no recorded hidden states" in capsys.readouterr().err
    assert cli.main(["head", "--servers", "http://127.0.0.1:9", "http://127.0.0.1:9"]) == 1
    assert capsys.readouterr().err.count("\n") == 1


def test_rows_of_very_different_size_are_told_and_only_one_scale_for_all_loses_them():
    rng = np.random.default_rng(8)
    weight = rng.standard_normal((256, 128)).astype(np.float32)
    weight /= np.abs(weight).max(axis=1, keepdims=True)
    weight *= np.logspace(-6, 0, 256, dtype=np.float32)[:, None]
    weight[7] = 0  # vocabulary padding
    found = head.compare(weight, head.gaussian_states(128, n=40))
    assert found.row_spread == pytest.approx(1e6, rel=1e-3)
    assert f"{found.row_spread:,.1f}" in str(show_head.report(found))
    small = weight[8:60]
    # With one scale for all, the small rows fall among e4m3's subnormals, or to zero.
    for scheme, least, most in (("per-row", 0.015, 0.03), ("per-tensor", 0.25, 1.01)):
        codes, scale = head.quantize(small, scheme, largest=1.0)
        off = np.sqrt(np.square(codes.astype(np.float32) * scale - small).sum() / (small**2).sum())
        assert least < off < most, scheme
    assert (
        head.compare(np.zeros((128, 4), np.float32), head.gaussian_states(4, n=2)).row_spread == 1
    )
