"""The cpu lane's numbers: against transformers' own Ling-3.0, and sampling under speculation.

Three starts, all with float32 checkpoints. A random one with SwiGLU limits, factor 2.5 and expert
bias, NEXTN off and on: it proves the kernels, but a random draft is hardly ever accepted. The
constructed one with NEXTN and the FP8 head: drafts are accepted there, so states are committed
after verifications of every length.

What is compared is exact up to float32 rounding (largest difference 2e-4, typical 1e-5), because
each place where SGLang leaves float32 has been found and is switched off or copied. What each does
to the random checkpoint's log-probabilities, measured alone:

* `--dtype auto` turns a float32 checkpoint into float16: `--dtype float32`. That makes the KV cache
  float32 too; a BF16 one (`--kv-cache-dtype bfloat16`) moves them by up to 1e-2;
* the LM head's weight is BF16 whatever `--dtype` says (`BailingMoeV3ForCausalLM.__init__`), up to
  2.4e-2: the reference rounds it as well;
* its logits are rounded to BF16, steps of 2**-5 from 8 on: `--enable-fp32-lm-head` (the FP8 head
  keeps the dtype of its input and needs no flag);
* the convolution's state is BF16: 6e-2 to 1e-1 at a typical decoded token, and now and then it
  tips a close choice of experts, which moves them by up to 9 and changes the greedy text:
  `SGLANG_MAMBA_CONV_DTYPE=float32`. Prefill does not read that state.

Sampled requests are compared with the exact distribution: the log-probabilities that the server
itself returns for one more token, with temperature, top-k and top-p applied here.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import random
import shutil
import subprocess
from pathlib import Path

import httpx
import numpy as np
import pytest
from sparkling import recipe, server, tiny

pytestmark = [pytest.mark.server, pytest.mark.slow, pytest.mark.timeout(1800)]

READY_S = 600.0  # the machine may be busy with other tests
NEW = 24
# Largest difference seen: 2.0e-4, at one position in a thousand; typical: 1e-5.
TOLERANCE = 1e-3

HERE = Path(__file__).parent
EXACT_FLAGS = ("--dtype", "float32")
EXACT_ENV = {"SGLANG_MAMBA_CONV_DTYPE": "float32"}


@pytest.fixture(scope="module")
def reference(root, server_python, tmp_path_factory):
    """reference(model, sequences, fp8_head) → for each sequence [tokens, vocab] log-softmax."""
    place = root / ".cache" / "reference"
    pins = (root / "env" / "reference.txt").read_text()
    stamp = place / "installed.txt"
    if not stamp.is_file() or stamp.read_text() != pins:
        shutil.rmtree(place, ignore_errors=True)
        install = ["install", "--quiet", "--no-deps", "--disable-pip-version-check"]
        subprocess.run(
            [server_python, "-m", "pip", *install, "--target", place, "-r", "env/reference.txt"],
            cwd=root,
            check=True,
            timeout=600,
        )
        stamp.write_text(pins)
    out = tmp_path_factory.mktemp("reference") / "logprobs.npz"

    known: dict[str, list[np.ndarray]] = {}

    def run(model: Path, sequences: list[list[int]], fp8_head: bool = False) -> list[np.ndarray]:
        asked = {"model": str(model), "sequences": sequences, "fp8_head": fp8_head}
        key = json.dumps(asked)
        if key in known:
            return known[key]
        done = subprocess.run(
            [server_python, HERE / "reference_ling.py"],
            input=json.dumps({**asked, "out": str(out)}),
            env={**os.environ, "PYTHONPATH": str(place), "HF_HUB_OFFLINE": "1"},
            capture_output=True,
            text=True,
            timeout=900,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        with np.load(out) as arrays:
            known[key] = [arrays[f"logprobs_{i}"] for i in range(len(sequences))]
        return known[key]

    return run


class Engine:
    """A running server and the token ids it returns."""

    def __init__(self, running: server.Server, vocab: int) -> None:
        self.running, self.vocab = running, vocab
        self.http = httpx.Client(base_url=running.url, timeout=600, trust_env=False)

    def post(self, **body) -> list[dict]:
        reply = self.http.post("/generate", json=body)
        reply.raise_for_status()
        return reply.json()

    def generate(self, prompts: list[list[int]], new: int = NEW, **asked) -> list[dict]:
        """Greedy continuations of `new` tokens with log-probabilities of the whole vocabulary."""
        return self.post(
            input_ids=prompts,
            sampling_params={"temperature": 0, "max_new_tokens": new, "ignore_eos": True},
            return_logprob=True,
            top_logprobs_num=self.vocab,
            **asked,
        )

    def table(self, rows: list) -> np.ndarray:
        """SGLang's top log-probabilities [[(value, token, text), ...], ...] as [rows, vocab]."""
        out = np.full((len(rows), self.vocab), np.nan, np.float32)
        for i, row in enumerate(rows):
            for value, token, _ in row:
                out[i, token] = value
        return out


@pytest.fixture(scope="module")
def begin(root, server_python, tmp_path_factory):
    """begin(model, stage, flags, without) → a ready Engine; one at a time."""
    book = recipe.load("tiny-ling", root=root)
    folder = tmp_path_factory.mktemp("runs") / "runs"
    started: list[Engine] = []

    def stop() -> None:
        for one in started:
            one.http.close()
            one.running.stop()

    def start(model: Path, stage: str, flags: tuple[str, ...], without: tuple[str, ...] = ()):
        stop()
        launch = book.render(stage, model=model, port=0)
        env = {k: v for k, v in launch.env.items() if k not in without}
        launch = dataclasses.replace(launch, argv=launch.argv + EXACT_FLAGS + flags, env=env)
        log = folder / f"{stage}-{len(started)}.log"
        running = server.start(
            launch,
            python=server_python,
            log=log,
            extra_env=EXACT_ENV,
            deadline_s=READY_S,
            runs=folder,
        )
        vocab = json.loads((model / "config.json").read_text())["vocab_size"]
        started.append(Engine(running, vocab))
        return started[-1]

    yield start
    stop()
    shutil.rmtree(folder, ignore_errors=True)


def prompts(vocab: int) -> list[list[int]]:
    """Random ids of lengths around the KDA chunk of 64 and from a single token on."""
    noise = random.Random(0)
    return [[noise.randrange(vocab) for _ in range(n)] for n in (1, 7, 64, 90, 131)]


def compare(engine: Engine, asked: list[list[int]], reference, model: Path, fp8_head=False):
    """Greedy text and all log-probabilities against the reference, alone and four at a time.

    Returns the continuations and the largest difference of a log-probability.
    """
    alone = [engine.generate([p], logprob_start_len=0)[0] for p in asked]
    texts = [r["output_ids"] for r in alone]
    wanted = reference(model, [p + t for p, t in zip(asked, texts, strict=True)], fp8_head)
    together = engine.generate(asked)
    worst = 0.0
    for prompt, one, other, table in zip(asked, alone, together, wanted, strict=True):
        assert len(one["output_ids"]) == NEW
        first = len(prompt) - 1  # the row that predicts the first new token
        # Greedy decoding by the reference gives the same text exactly if its argmax after every
        # token of that text is the next one.
        assert table[first:-1].argmax(-1).tolist() == one["output_ids"]
        assert other["output_ids"] == one["output_ids"]
        meta = one["meta_info"]
        rows = engine.table(meta["input_top_logprobs"][1:] + meta["output_top_logprobs"])
        assert rows.shape == table[:-1].shape and not np.isnan(rows).any()
        more = engine.table(other["meta_info"]["output_top_logprobs"])
        worst = max(worst, float(np.abs(rows - table[:-1]).max()))
        worst = max(worst, float(np.abs(more - table[first:-1]).max()))
    print(f"largest difference of a log-probability: {worst:.1e}")
    assert worst < TOLERANCE
    return texts, worst


@pytest.fixture(scope="module")
def random_model(tmp_path_factory):
    # The limits cut 5 to 14 % of the gates and 14 to 37 % of the other factors; without them
    # log-probabilities move by up to 12. NEXTN uses entry 0 of both lists.
    return tiny.build(
        tmp_path_factory.mktemp("model") / "random",
        random=True,
        swiglu_limits=[2.5, 2.0, 1.5, 2.2],
        shared_swiglu_limits=[1.5, 2.0, 0, 2.4],
    )


@pytest.fixture(scope="module")
def plain(begin, random_model, reference):
    engine = begin(random_model, "baseline", ("--enable-fp32-lm-head",))
    texts, _ = compare(engine, prompts(engine.vocab), reference, random_model)
    return texts


def test_random_weights_without_nextn_match_transformers(plain):
    assert len(plain) == 5


def test_random_weights_with_nextn_match_and_give_the_same_text(
    plain, begin, random_model, reference
):
    off = ("SPARKLING_FP8_LM_HEAD",)
    engine = begin(random_model, "nextn", ("--enable-fp32-lm-head",), without=off)
    texts, _ = compare(engine, prompts(engine.vocab), reference, random_model)
    assert texts == plain
    status = json.loads(engine.running.status_file.read_text())
    moe = status["moe"]
    assert {name: moe[name] for name in moe if not name.endswith("limits") or "swiglu" in name} == {
        "routed_scaling_applied": True,
        "routed_scaling": {"1": 2.5, "2": 2.5, "3": 2.5, "4": 2.5},
        "swiglu_limits": {"1": 2.0, "2": 1.5, "3": 2.2, "4": 2.5},
    }
    for number, limit in (("1", 2.0), ("2", 1.5), ("3", 2.2)):
        entry = moe["limits"][number]
        assert (entry["wanted"], entry["applied"], entry["by"]) == (limit, limit, "sparkling")
    assert status["head"]["dtype"] == "bfloat16" and status["draft"]["head_shared"] is True


@pytest.fixture(scope="module")
def constructed(tmp_path_factory):
    return tiny.build(tmp_path_factory.mktemp("model") / "constructed", dtype="float32")


@pytest.fixture(scope="module")
def everything(begin, constructed, plain):
    """NEXTN and the FP8 head on the constructed checkpoint. Asks for `plain` to start after it."""
    return begin(constructed, "nextn", ("--max-running-requests", "32"))


def test_accepted_drafts_and_the_fp8_head_match_transformers(everything, constructed, reference):
    before = json.loads(everything.running.status_file.read_text())["head"]["applied"]
    asked = prompts(everything.vocab)
    compare(everything, asked, reference, constructed, fp8_head=True)
    # Drafts were accepted in every number from none to all three, so every commit was exercised.
    counts = np.zeros(4, int)
    for reply in everything.generate(asked):
        counts += np.array(reply["meta_info"]["spec_correct_drafts_histogram"])
    assert counts.min() > 0, counts
    status = json.loads(everything.running.status_file.read_text())
    assert status["head"]["dtype"] == "float8_e4m3fn"
    assert status["draft"]["head_is_target_module"] is True
    assert status["head"]["applied"] > before + 20


# ------------------------------------------------------------------------------------- sampling

ASKED = {"temperature": 3.0, "top_p": 0.95, "top_k": 29}
PROMPT = [300, 310, 320]
DRAWS = 2048
ALPHA = 5e-5  # of each of two tests


def distribution(logprobs: np.ndarray) -> np.ndarray:
    """What ASKED makes of log-probabilities [vocab]: temperature, then top-k and top-p jointly."""
    p = np.exp((logprobs - logprobs.max()).astype(float) / ASKED["temperature"])
    p /= p.sum()
    order = np.argsort(-p)
    before = np.cumsum(p[order]) - p[order]
    p[order[(before > ASKED["top_p"]) | (np.arange(p.size) >= ASKED["top_k"])]] = 0
    return p / p.sum()


def chi_square(tokens: list[int], p: np.ndarray) -> tuple[float, int]:
    """Statistic and degrees of freedom; cells that expect fewer than 5 are one cell."""
    counts = np.bincount(tokens, minlength=p.size)
    expected = p * len(tokens)
    if counts[p == 0].any():
        return math.inf, 1
    large = expected >= 5
    counts = np.append(counts[large], counts[~large].sum())
    expected = np.append(expected[large], expected[~large].sum())
    used = expected > 0
    statistic = ((counts - expected)[used] ** 2 / expected[used]).sum()
    return float(statistic), int(used.sum()) - 1


def chance(statistic: float, freedom: int) -> float:
    """Upper tail of the chi-square distribution, in closed form for whole degrees of freedom."""
    half = statistic / 2
    if half > 700:
        return 0.0
    odd = freedom % 2
    tail, term = (math.erfc(math.sqrt(half)), math.sqrt(half) / math.gamma(1.5)) if odd else (0, 1)
    for i in range(freedom // 2):
        tail += math.exp(-half) * term
        term *= half / (i + 1 + odd / 2)
    return tail


def test_the_chi_square_tail_has_its_known_quantiles():
    for freedom, quantile in ((1, 10.828), (2, 13.816), (7, 24.322), (30, 59.703)):
        assert chance(quantile, freedom) == pytest.approx(1e-3, rel=2e-3)


def test_sampled_requests_keep_their_distribution_under_nextn(everything):
    greedy = {"temperature": 0, "max_new_tokens": 3, "ignore_eos": True}
    sampled = {**ASKED, "max_new_tokens": 3, "ignore_eos": True}
    wanted = everything.generate([PROMPT], new=3)[0]["output_ids"]
    drawn, accepted = [], 0
    while len(drawn) < DRAWS:
        # Every eighth request is greedy, in the same batches.
        mixed = [greedy if i % 8 == 0 else sampled for i in range(64)]
        for i, reply in enumerate(everything.post(input_ids=[PROMPT] * 64, sampling_params=mixed)):
            if i % 8 == 0:
                assert reply["output_ids"] == wanted
            else:
                drawn.append(tuple(reply["output_ids"]))
                accepted += reply["meta_info"]["spec_num_correct_drafts"]
    assert accepted > DRAWS // 4  # else little was verified
    after: dict[tuple[int, ...], list[int]] = {}
    for one in drawn:
        for n in range(3):
            after.setdefault(one[:n], []).append(one[n])
    contexts = [c for c, tokens in after.items() if len(tokens) >= 40]
    assert len(contexts) >= 6
    replies = everything.generate([PROMPT + list(c) for c in contexts], new=1)
    rows = [everything.table(r["meta_info"]["output_top_logprobs"])[0] for r in replies]
    exact = dict(zip(contexts, map(distribution, rows), strict=True))

    def fit(tokens: dict[tuple[int, ...], list[int]], used) -> float:
        parts = [chi_square(tokens[c], exact[c]) for c in used]
        return chance(sum(s for s, _ in parts), sum(f for _, f in parts))

    verified = [c for c in contexts if c]
    # The first token comes from prefill, that is from SGLang's own sampler; the others from
    # verifications.
    print("first", fit(after, [()]), "verified", fit(after, verified), "contexts", len(verified))
    assert fit(after, [()]) > ALPHA
    assert fit(after, verified) > ALPHA
    # What upstream does on a CPU, for comparison: the argmax.
    upstream = {c: [int(exact[c].argmax())] * len(after[c]) for c in verified}
    assert fit(upstream, verified) < 1e-12
