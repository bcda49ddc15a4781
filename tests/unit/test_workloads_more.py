"""The further workloads and the user's own prompts: the same for every arm, mistakes named."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from sparkling import bench, promptfile, workloads_more
from sparkling.client import Client
from sparkling.errors import UsageError
from sparkling.workloads import NAMES, digest, workloads

sys.path.insert(0, str(Path(__file__).parent))
from paced_server import paced

SIZES = {"short_output": 8, "long_output": 16, "prompts": 2}


def named(*names, **sizes):
    return workloads({**SIZES, **sizes}, names)


def test_they_are_there_by_name_only():
    assert [w.name for w in workloads(SIZES)] == list(NAMES)
    here = workloads_more.NAMES[:-1]  # gsm8k is not part of the repository
    made = named(*here)
    assert [w.name for w in made] == list(here)
    assert all(w.greedy and w.description for w in made)
    assert [w.max_tokens for w in made] == [8, 16, 8, 16, 16]
    texts = [p.text for w in named(*workloads_more.NAMES[:4], prompts=6) for p in w.prompts]
    assert len(set(texts)) == 4 * 6  # a tool's two rounds begin with one question
    with pytest.raises(UsageError, match=r"There is no workload 'cod'; there are .*, code, tools"):
        named("cod")
    with pytest.raises(UsageError, match="tools has 6 questions, not 7"):
        named("tools", prompts=7)
    with pytest.raises(UsageError, match="code has 8 prompts, not 9"):
        named("code", prompts=9)


def test_gsm8k_is_asked_as_in_an_evaluation(monkeypatch, tmp_path):
    from sparkling import gsm8k

    task = gsm8k.sparklet()
    work = workloads(SIZES, ["gsm8k"], texts="practice")[0]
    assert [p.id for p in work.prompts] == [str(q.id) for q in task.questions[:2]]
    assert work.prompts[0].text == task.prompt(task.questions[0], task.defaults)
    assert work.greedy and work.max_tokens == 16 and work.thinking == task.defaults.thinking
    monkeypatch.setenv(gsm8k.VARIABLE, str(tmp_path))
    with pytest.raises(UsageError, match=r"needs GSM8K's test file.*SPARKLING_GSM8K\.$"):
        named("gsm8k")


def test_thinking_on_and_off_ask_the_same():
    on, off = named("thinking-on", "thinking-off")
    assert on.prompts == off.prompts and (on.thinking, off.thinking) == (True, False)


def test_a_tool_turn_has_two_rounds_and_the_second_brings_the_first():
    tools = named("tools")[0]
    assert [p.id for p in tools.prompts] == ["00.call", "00.answer", "01.call", "01.answer"]
    call, answer = (p.render() for p in tools.prompts[:2])
    assert [m["role"] for m in call] == ["user"]
    assert [m["role"] for m in answer] == ["user", "assistant", "tool"] and answer[0] == call[0]
    function = answer[1]["tool_calls"][0]["function"]
    offered = {t["function"]["name"]: t["function"]["parameters"] for t in tools.tools}
    assert set(json.loads(function["arguments"])) == set(offered[function["name"]]["required"])
    assert answer[2]["tool_call_id"] == answer[1]["tool_calls"][0]["id"]
    assert json.loads(answer[2]["content"])
    # Other tools are other settings: their rows do not compare.
    assert tools.settings()["tools"] == digest(tools.tools)
    assert "tools" not in named("code")[0].settings()


def launch():
    argv = ("-m", "sglang.launch_server", "--model-path", "/m", "--port", "1")
    return SimpleNamespace(
        argv=argv, env={}, recipe="r", stage="s", variant=None, switches={}, served_name="paced"
    )


def test_messages_and_tools_reach_the_server_and_the_row(tmp_path):
    sent = []
    with paced(rate=4000, first_s=0.002) as server:
        client = Client(server.url, model="paced")
        chat = client.chat
        client.chat = lambda what, **more: sent.append((what, more)) or chat(what, **more)
        rows = bench.run(
            client, arm="a", launch=launch(), workloads=named("tools"), repeats=1,
            out=tmp_path / "rows.jsonl", warmup=0,
        )  # fmt: skip
    assert [r["prompt"] for r in rows] == ["00.call", "00.answer", "01.call", "01.answer"]
    assert len({r["case_hash"] for r in rows}) == 4 and all(r["complete"] for r in rows)
    assert [len(what) for what, _ in sent] == [1, 3, 1, 3]
    assert all(more["tools"] == list(workloads_more.TOOLS) for _, more in sent)


# -- the user's own ------------------------------------------------------------------------------


def written(tmp_path, text):
    path = tmp_path / "mine.jsonl"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def test_own_prompts(tmp_path):
    odd = "a\u2028b\u0085c ✅"
    lines = [
        json.dumps({"prompt": odd}, ensure_ascii=False),
        "",
        json.dumps({"id": "refund", "messages": [{"role": "user", "content": "Hi"}]}),
        json.dumps({"id": 7, "prompt": "x"}),
    ]
    path = written(tmp_path, b"\xef\xbb\xbf" + "\r\n".join(lines).encode())
    work = promptfile.load(path, max_tokens=33, thinking=True)
    assert (work.name, work.max_tokens, work.thinking, work.greedy) == ("prompts", 33, True, True)
    assert [p.id for p in work.prompts] == ["1", "refund", "7"]
    assert work.prompts[0].render() == odd
    assert work.prompts[1].render() == [{"role": "user", "content": "Hi"}]
    assert work.description == "3 prompts of mine.jsonl, answers of at most 33 tokens"
    assert (
        promptfile.load(written(tmp_path, '{"prompt":"x"}'), max_tokens=1).description[:8]
        == "1 prompt"
    )


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "line 2 is not JSON"),
        ('"text"', "line 2 is not a JSON object"),
        ('{"prompt": "x", "max_tokens": 3}', "line 2 has the unknown key 'max_tokens'"),
        ('{"id": "a"}', "line 2 must have either prompt or messages"),
        ('{"prompt": "x", "messages": []}', "line 2 must have either"),
        ('{"prompt": " "}', "line 2 has an empty prompt"),
        ('{"prompt": 3}', "line 2 has an empty prompt"),
        ('{"messages": []}', "line 2 has no messages"),
        ('{"messages": ["x"]}', "line 2 message 1 is not an object"),
        ('{"messages": [{"role": "bot", "content": "x"}]}', "message 1 has the role 'bot'"),
        ('{"messages": [{"role": "user"}]}', "message 1 has no content"),
        ('{"id": 1, "prompt": "x"}', "line 2 has the id '1' of line 1"),
        ('{"id": null, "prompt": "x"}', "line 2 has None for an id"),
    ],
)
def test_a_bad_line_is_named(tmp_path, line, said):
    path = written(tmp_path, '{"prompt": "fine"}\n' + line + "\n")
    with pytest.raises(UsageError, match=said) as refusal:
        promptfile.load(path, max_tokens=5)
    assert str(path) in str(refusal.value) and "\n" not in str(refusal.value)


def test_many_bad_lines_are_counted_and_empty_files_refused(tmp_path):
    with pytest.raises(UsageError, match=r"line 1 .*; line 2 .*; line 3 .* and 2 more\.$"):
        promptfile.load(written(tmp_path, "{\n" * 5), max_tokens=5)
    for text in ("", "\n\n"):
        with pytest.raises(UsageError, match="holds no prompt"):
            promptfile.load(written(tmp_path, text), max_tokens=5)
    with pytest.raises(UsageError, match="absent"):
        promptfile.load(tmp_path / "absent.jsonl", max_tokens=5)


def test_own_prompts_are_the_same_everywhere(tmp_path):
    path = written(tmp_path, '{"id": "b", "prompt": "2"}\n{"id": "a", "prompt": "1"}\n')
    script = (
        "import sys; from pathlib import Path; from sparkling import promptfile\n"
        "print(promptfile.load(Path(sys.argv[1]), max_tokens=5))"
    )
    words = [sys.executable, "-c", script, str(path)]
    out = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    assert out.strip() == str(promptfile.load(path, max_tokens=5))
