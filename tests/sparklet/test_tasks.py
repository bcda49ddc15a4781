"""The problems: right answers, a real split, a template that equals the Python renderer."""

from __future__ import annotations

import random
import re

import pytest
from sparklet import chat, evaluate, tasks, tokenizer
from sparklet.batches import Plan, encode, pool, shared_encoder, stream


def test_every_template_is_solved_by_its_text():
    rng, seen = random.Random(0), set()
    for _ in range(600):
        s = tasks.word_problem(rng)
        seen.add(s.problem.template)
        assert evaluate.extract(s.text) == s.answer == s.problem.answer
        for a, op, b, c in re.findall(r"(\d+) ([-+*/]) (\d+) = (\d+)", s.text):
            a, b, c = int(a), int(b), int(c)
            assert {"+": a + b, "-": a - b, "*": a * b, "/": a / b}[op] == c
        for step in s.problem.steps:  # every operand is given or was computed before
            assert step.op != "/" or step.a % step.b == 0
        assert 0 <= s.answer <= 9999
    assert seen == set(tasks.TEMPLATES)


def test_training_and_measurement_never_share_a_problem():
    rng = random.Random(1)
    train = {(p.template, p.numbers) for p in (tasks.problem(rng) for _ in range(800))}
    other = {(p.template, p.numbers) for p in (tasks.problem(rng, True) for _ in range(800))}
    assert not train & other
    assert len(other) > 400


def test_drills_are_right():
    rng = random.Random(2)
    for _ in range(200):
        for a, op, b, c in re.findall(
            r"</think>(\d+) ([-+*/]) (\d+) = (\d+)", tasks.drill(rng).text
        ):
            assert tasks.Step(int(a), op, int(b)).result == int(c)


def test_pieces_tokenize_like_the_whole_and_decode_back(tok):
    rng = random.Random(3)
    for _ in range(200):
        s = tasks.sample(rng)
        ids, weights = encode(s, shared_encoder())
        assert ids == tok.encode(s.text, add_special_tokens=False).ids
        assert tok.decode(ids, skip_special_tokens=False) == s.text
        assert len(ids) == len(weights)


def test_tokenizer_has_lings_tokens_single_digits_and_every_word(tok):
    assert 900 < tok.get_vocab_size() <= tokenizer.SIZE
    for t in (*chat.HIDDEN, *chat.SHOWN):
        assert tok.encode(t, add_special_tokens=False).tokens == [t]
    assert tok.encode("473", add_special_tokens=False).tokens == ["4", "7", "3"]
    assert tok.encode(" apples", add_special_tokens=False).tokens == ["\u0120apples"]
    text = "Ünknown wörds 🙂\tare bytes\n"
    assert tok.decode(tok.encode(text, add_special_tokens=False).ids) == text


def test_the_same_seed_gives_the_same_tokenizer(tok):
    assert tokenizer.build(samples=300).to_str() == tokenizer.build(samples=300).to_str()


CALL = {"function": {"name": "get_weather", "arguments": {"city": "Oslo"}}}
CONVERSATIONS = [
    [{"role": "user", "content": "Hi"}],
    [
        {"role": "user", "content": "A"},
        {"role": "assistant", "content": "B"},
        {"role": "user", "content": "C"},
    ],
    [
        {"role": "user", "content": "A"},
        {"role": "assistant", "content": "", "reasoning_content": "R", "tool_calls": [CALL]},
        {"role": "tool", "content": '{"sky": "sunny"}'},
    ],
    [
        {"role": "user", "content": "A"},
        {"role": "assistant", "content": "B", "reasoning_content": "old"},
        {"role": "user", "content": "C"},
        {"role": "assistant", "content": "D", "reasoning_content": "new"},
    ],
]


@pytest.mark.parametrize("thinking", [True, False])
@pytest.mark.parametrize("tools", [None, ["get_weather", "convert_money"]])
@pytest.mark.parametrize("system", [None, "Answer briefly."])
@pytest.mark.parametrize("which", range(len(CONVERSATIONS)))
def test_template_equals_the_renderer(thinking, tools, system, which):
    jinja2 = pytest.importorskip("jinja2")
    messages = CONVERSATIONS[which]
    if not thinking:  # with thinking off, reasoning is not part of what Sparklet learns
        messages = [{k: v for k, v in m.items() if k != "reasoning_content"} for m in messages]
    env = jinja2.Environment()
    env.globals["raise_exception"] = None
    given = ([{"role": "system", "content": system}] if system else []) + messages
    schemas = [chat.tool_schema(t) for t in tools] if tools else None
    generate = messages[-1]["role"] != "assistant"
    got = env.from_string(chat.TEMPLATE).render(
        messages=given, tools=schemas, enable_thinking=thinking, add_generation_prompt=generate
    )
    want = chat.prompt(messages, thinking=thinking, tools=tools, system=system, generate=generate)
    assert got == want


def test_template_thinks_by_default():
    jinja2 = pytest.importorskip("jinja2")
    text = (
        jinja2.Environment()
        .from_string(chat.TEMPLATE)
        .render(messages=[{"role": "user", "content": "Hi"}], add_generation_prompt=True)
    )
    want = (
        "<role>SYSTEM</role>detailed thinking on<|role_end|><role>HUMAN</role>Hi<|role_end|>"
        "<role>ASSISTANT</role>\n<think>"
    )
    assert text == want


def test_batches_are_the_same_for_a_seed_and_resume_in_the_middle(tok):
    plan = Plan(seed=5, tokens=1024, length=96, pool=64)
    first = pool(plan, 0)
    assert all((a.ids == b.ids).all() for a, b in zip(first, pool(plan, 0), strict=True))
    assert any(
        a.ids.shape != b.ids.shape or (a.ids != b.ids).any()
        for a, b in zip(first, pool(plan, 1), strict=False)
    )
    run = stream(plan)
    seen = [next(run) for _ in range(len(first) + 2)]
    position = seen[1][0]
    again = stream(plan, position)
    for (_, a), (_, b) in zip(seen[2:], again, strict=False):
        assert (a.ids == b.ids).all()
    for b in first:
        assert b.ids.size <= plan.tokens and b.ids.shape[1] % 16 == 0
        assert (b.weights[~b.valid] == 0).all()
