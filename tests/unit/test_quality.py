"""The practice model's figures: asked, judged and shown; the servers here are stand-ins."""

from __future__ import annotations

import contextlib
import json
from types import SimpleNamespace

import pytest
from sparklet import questions
from sparkling import quality
from sparkling.errors import RequestError, SparklingError
from sparkling.reply import Reply, SpecCounts
from tokenizers import Tokenizer


class Sage:
    """Answers every third problem wrongly, copies well, calls tools rightly; ranks as it is told."""

    def __init__(self, root, n, seed, *, rounds=True, swap=0):
        self.model = root / "models" / "sparklet"
        self.tok = Tokenizer.from_file(str(self.model / "tokenizer.json"))
        self.right = {t: p.answer for t, p, _ in questions.problems(n, seed)}
        self.wrong = set(list(self.right)[::3])
        self.calls = dict(questions.tool_requests(max(8, n // 4), seed))
        self.rounds, self.swap, self.asked = rounds, swap, []

    def model_info(self):
        return {"model_path": str(self.model)}

    def generate(self, prompt=None, *, input_ids=None, max_tokens, stream, extra=None, **sampling):
        self.asked.append((prompt, max_tokens, sampling))
        reply = Reply(complete=True, finish_reason="stop")
        if input_ids is not None:
            assert extra["return_logprob"] and extra["top_logprobs_num"] == 1
            tokens = input_ids[extra["logprob_start_len"] + 1 :]
            tops = [[[-0.1, t + (i < self.swap), None]] for i, t in enumerate(tokens)]
            reply.meta_info = {"input_top_logprobs": [None, *tops]}
            return reply
        if prompt in self.right:
            reply.text = f"so #### {self.right[prompt] + (prompt in self.wrong)}"
            tokens, rounds = 30, 10
        elif prompt in self.calls:
            reply.text, tokens, rounds = self.calls[prompt], 20, 6
        else:
            reply.text, tokens, rounds = "again and again", 117, 30
        reply.prompt_tokens = len(self.tok.encode(prompt, add_special_tokens=False).ids)
        reply.output_ids = [5, 6, 7, 8]
        reply.spec = SpecCounts(tokens, rounds) if self.rounds else None
        return reply


def test_every_figure_is_judged_by_its_goal(root):
    figures, sampled = quality.answers(Sage(root, 30, 3), 30, 3, say=lambda _line: None)
    rows = {f.name.split(",")[0]: f.row() for f in figures[:2]}
    assert rows["accuracy"]["value"] == "66.7 %" and rows["accuracy"][""] == "ok"
    assert rows["accuracy"]["n"] == "30 problems"
    assert rows["accept length"]["value"] == "3.00" and rows["accept length"]["n"] == "300 rounds"
    assert [f.interval.value for f in figures[2:]] == [3.9, 1.0]
    assert len(sampled) == 30 and all(f.meets for f in figures)


def test_problems_are_sampled_as_ling_advises_and_the_rest_is_greedy(root):
    sage = Sage(root, 12, 3)
    quality.answers(sage, 12, 3, say=lambda _line: None)
    for prompt, most, sampling in sage.asked:
        if prompt in sage.right:
            assert (most, sampling) == (160, {"temperature": 0.6, "top_p": 0.95, "top_k": 29})
        else:
            assert sampling == {} and most in (128, 80)


def test_a_server_without_speculation_is_named(root):
    with pytest.raises(SparklingError, match="counted no rounds"):
        quality.answers(Sage(root, 8, 3, rounds=False), 8, 3, say=lambda _line: None)


def test_an_answer_that_was_cut_stops_it(root, monkeypatch):
    sage = Sage(root, 8, 3)
    plain = sage.generate

    def cut(*args, **given):
        reply = plain(*args, **given)
        reply.complete, reply.problem = False, "the connection ended"
        return reply

    monkeypatch.setattr(sage, "generate", cut)
    with pytest.raises(RequestError, match="the connection ended"):
        quality.answers(sage, 8, 3, say=lambda _line: None)


def test_heads_are_compared_position_by_position(root):
    prompts = [text for text, _, _ in questions.problems(20, 3)]
    texts = [[5, 6, 7, 8]] * 20
    fp8 = quality.top_tokens(Sage(root, 20, 3), prompts, texts)
    assert fp8 == texts
    figure = quality.agreement(fp8, quality.top_tokens(Sage(root, 20, 3, swap=1), prompts, texts))
    assert (figure.interval.value, figure.n, figure.meets) == (0.75, 80, False)
    assert figure.row()[""] == "OUT" and figure.row()["value"] == "75.00 %"


def test_the_rounding_of_weights_is_shown_as_recorded(root, tmp_path):
    (figure,) = quality.recorded(root)
    assert figure.where.startswith("recorded") and figure.meets
    assert figure.interval.low < figure.interval.value < figure.interval.high
    assert quality.recorded(tmp_path) == []


def test_the_whole_way_starts_two_servers_one_after_the_other(root, tmp_path, monkeypatch):
    from sparkling import server

    started = []

    @contextlib.contextmanager
    def start(launch, **given):
        started.append(launch.stage)
        swap = 1 if launch.stage == "baseline" else 0
        yield SimpleNamespace(client=lambda: Sage(root, 12, 7, swap=swap))
        started.append("stopped")

    monkeypatch.setattr(server, "start", start)
    lane = SimpleNamespace(root=root, runs=tmp_path, cache=tmp_path, server_python=tmp_path)
    figures = quality.measure(lane, n=12, seed=7, say=lambda _line: None)
    assert started == ["nextn", "stopped", "baseline", "stopped"]
    assert [f.unit for f in figures] == [
        "problems", "rounds", "rounds", "positions", "calls", "problems each",
    ]  # fmt: skip
    (saved,) = tmp_path.glob("*/sparklet-quality/quality.json")
    assert len(json.loads(saved.read_text())) == 6
