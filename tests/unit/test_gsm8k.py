"""What is asked: the files, their checksums, the prompts, and the hubs that they come from."""

from __future__ import annotations

import hashlib
import json
import os
import random
from collections import Counter
from fractions import Fraction
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from urllib.parse import parse_qs, unquote, urlsplit

import pytest
from sparkling import extract, gsm8k, gsm8k_fetch, parquet
from sparkling.errors import SparklingError, UsageError

TOLD = os.environ.get("GSM8K_DATA")
DATA = Path(TOLD) if TOLD else Path(__file__).parents[3] / "shared" / "data" / "gsm8k"
LIB = Path(gsm8k.__file__).parents[1]


def lines(*rows):
    return "".join(json.dumps(r) + "\n" for r in rows)


TOY = [{"question": f"What is {i} plus 1?", "answer": f"{i}+1=<<{i}+1={i + 1}>>{i + 1}\n#### {i + 1}"}
       for i in range(9)]  # fmt: skip


@pytest.fixture
def toy(tmp_path):
    path = tmp_path / "toy.jsonl"
    path.write_text(lines(*TOY))
    return path


# -- files ---------------------------------------------------------------------------------------


def test_a_file_is_read(toy):
    questions, digest = gsm8k.read(toy)
    assert [q.id for q in questions[:2]] == ["0000", "0001"] and len(questions) == 9
    assert questions[3].gold == 4 and questions[3].text == "What is 3 plus 1?"
    assert digest == hashlib.sha256(toy.read_bytes()).hexdigest()


@pytest.mark.parametrize(
    ("answer", "gold"),
    [
        ("#### 1,234", 1234),
        ("18", 18),
        (18, 18),
        ("-0.5", Fraction(-1, 2)),
        ("3/4", Fraction(3, 4)),
        (" \u22125 ", -5),
        (r"\frac{3}{4}", Fraction(3, 4)),
    ],
)
def test_a_solution_may_be_the_number_alone(tmp_path, answer, gold):
    path = tmp_path / "q.jsonl"
    path.write_text(lines({"question": "?", "answer": answer}))
    assert gsm8k.read(path)[0][0].gold == gold


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "holds no questions"),
        (lines(TOY[0]) + "{", r"line 2: is not JSON"),
        (lines(TOY[0], ["x"]), "line 2: needs a `question`"),
        (lines({"question": " ", "answer": "#### 1"}), "line 1: needs a `question`"),
        (lines({"question": "x"}), "line 1: needs a `question` and an `answer`"),
        (lines({"question": "x", "answer": "none"}), "line 1: the answer has no number"),
        (lines({"question": "x", "answer": "so 5 or 6"}), "line 1: the answer has no number"),
    ],
)
def test_what_is_wrong_with_a_file_is_said(tmp_path, content, said):
    path = tmp_path / "q.jsonl"
    path.write_text(content)
    with pytest.raises(UsageError, match=said):
        gsm8k.read(path)


def test_a_missing_or_other_file_is_refused(toy, tmp_path):
    with pytest.raises(UsageError, match="There is no file"):
        gsm8k.read(tmp_path / "none.jsonl")
    with pytest.raises(UsageError, match="not the file it should be: its SHA-256"):
        gsm8k.read(toy, sha256=gsm8k.SHA256["test"])
    with pytest.raises(UsageError, match="not the file it should be"):
        gsm8k.gsm8k(toy)


def test_where_the_files_are(toy, tmp_path, monkeypatch):
    root = tmp_path / "root"
    assert gsm8k.find("test", root) is None
    (root / ".cache/data/gsm8k").mkdir(parents=True)
    kept = root / ".cache/data/gsm8k/test.jsonl"
    kept.write_text("x")
    assert gsm8k.find("test", root) == kept
    monkeypatch.setenv(gsm8k.VARIABLE, str(tmp_path / "else"))
    assert gsm8k.find("test", root) is None
    (tmp_path / "else").mkdir()
    (tmp_path / "else" / "test.jsonl").write_text("x")
    assert gsm8k.find("test", root) == tmp_path / "else" / "test.jsonl"


def real(name):
    if not (DATA / name).is_file():
        pytest.skip(f"GSM8K's {name} is not here: set GSM8K_DATA to the folder that holds it")
    return DATA / name


def test_the_real_files():
    task = gsm8k.gsm8k(real("test.jsonl"), real("train.jsonl"))
    assert len(task.questions) == gsm8k.COUNT["test"] and len(task.training) == gsm8k.COUNT["train"]
    assert task.defaults == gsm8k.Settings()
    shown = task.prompt(task.questions[0], task.defaults)
    assert shown.count("Question: ") == shown.count("\nAnswer:") == 6
    assert shown.count("\n#### ") == 5 and "<<" not in shown
    assert shown.endswith(f"Question: {task.questions[0].text}\nAnswer:")


# -- prompts -------------------------------------------------------------------------------------


def test_the_defaults_are_the_published_ones():
    s = gsm8k.Settings()
    assert (s.mode, s.thinking, s.max_tokens, s.seed) == ("5-shot", True, 32_768, 42)
    assert s.sampling == {"temperature": 0.6, "top_p": 0.95, "top_k": 29}
    assert s.greedy().sampling == {"temperature": 0.0}


def test_examples_are_chosen_by_the_seed_and_are_the_same_for_all_questions(toy):
    task = gsm8k.custom(toy, toy)
    assert task.defaults.mode == "5-shot"
    one, two = (gsm8k.Settings(seed=s) for s in (1, 2))
    assert task.shots(one) == task.shots(one) != task.shots(two)
    assert len(set(task.shots(one))) == 5
    first, second = (task.prompt(q, one) for q in task.questions[:2])
    assert first.startswith(task.instruction)
    assert first.rpartition("Question: ")[0] == second.rpartition("Question: ")[0]
    for name in task.shots(one):
        example = task.questions[int(name)]
        assert f"Question: {example.text}\nAnswer: {int(name)}+1={int(name) + 1}\n####" in first


def test_the_choice_does_not_change_with_pythons_version():
    chosen = random.Random(42).sample(range(gsm8k.COUNT["train"]), 5)
    assert chosen == [5238, 912, 204, 6074, 2253]


def test_zero_shot_is_the_instruction_and_the_question(toy):
    task = gsm8k.custom(toy)
    assert task.defaults.mode == "zero-shot"
    assert task.prompt(task.questions[0], task.defaults) == (
        f"{gsm8k.INSTRUCTION}\n\nQuestion: What is 0 plus 1?\nAnswer:"
    )
    with pytest.raises(UsageError, match="5-shot needs 5 training questions and there are 0"):
        task.shots(gsm8k.Settings())


@pytest.mark.parametrize("bad", [{"mode": "4-shot"}, {"max_tokens": 0}])
def test_settings_that_make_no_sense_are_refused(bad):
    with pytest.raises(UsageError):
        gsm8k.Settings(**bad)


# -- Sparklet's problems ---------------------------------------------------------------------------


def test_sparklets_problems_are_asked_in_its_own_words():
    task = gsm8k.sparklet()
    assert len({q.text for q in task.questions}) == len(task.questions) == 600
    assert task.prompt(task.questions[5], task.defaults) == task.questions[5].text
    assert task.defaults.max_tokens == 512 and task.defaults.mode == "zero-shot"


def test_sparklets_problems_come_from_the_half_it_was_not_trained_on(monkeypatch):
    monkeypatch.syspath_prepend(str(LIB))
    tasks = pytest.importorskip("sparklet.tasks")
    rng, made, kinds = random.Random("sparkling practice evaluation"), {}, Counter()
    while len(made) < 600:
        problem = tasks.problem(rng, held_out=True)
        assert problem.held_out
        made.setdefault(problem.question, problem)
    for question in gsm8k.sparklet().questions:
        problem = made[question.text]
        assert question.gold == problem.answer
        kinds[problem.template] += 1
    assert set(kinds) == set(tasks.TEMPLATES) and min(kinds.values()) >= 20


# -- Parquet -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "times"),
    [("snappy", 1), ("plain-v2", 1), ("groups", 1), ("gzip-required", 2)],
)
def test_parquet_files_of_every_kind_are_read(data, name, times):
    """Written by pyarrow 26 (see rows.json for what is in them)."""
    rows = json.loads((data / "parquet" / "rows.json").read_text("utf-8")) * times
    raw = (data / "parquet" / f"{name}.parquet").read_bytes()
    columns = parquet.strings(raw, ("question", "answer"))
    assert [list(r) for r in zip(columns["question"], columns["answer"], strict=True)] == rows
    with pytest.raises(SparklingError, match="no column nope"):
        parquet.strings(raw, ("nope",))


@pytest.mark.parametrize(
    ("name", "said"), [("zstd", "compression 6 is not read"), ("empty-cell", "has empty cells")]
)
def test_other_parquet_files_are_refused_by_name(data, name, said):
    with pytest.raises(SparklingError, match=said):
        parquet.strings((data / "parquet" / f"{name}.parquet").read_bytes(), ("question", "answer"))


def test_damaged_parquet_files_are_refused(data):
    raw = (data / "parquet" / "snappy.parquet").read_bytes()
    rng = random.Random(3)
    good = parquet.strings(raw, ("question", "answer"))
    changed = 0
    for _ in range(150):
        spoiled = bytearray(raw)
        for _ in range(rng.randrange(1, 4)):
            spoiled[rng.randrange(len(raw))] ^= rng.randrange(1, 256)
        try:
            changed += parquet.strings(bytes(spoiled), ("question", "answer")) != good
        except SparklingError:
            changed += 1
    assert changed > 50  # the rest hit bytes that nobody reads
    for end in (0, 3, 40, len(raw) // 2, len(raw) - 1):
        with pytest.raises(SparklingError):
            parquet.strings(raw[:end], ("question", "answer"))


# -- hubs ----------------------------------------------------------------------------------------


class Hub:
    """Both hubs' data-set addresses on loopback: {"repo/file": bytes}."""

    def __init__(self, files):
        self.files, self.asked = files, []

    def __enter__(self):
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_):
                pass

            def answer(self, status, body=b"", **headers):
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name.replace("_", "-"), value)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(body)

            def do_HEAD(self):
                self.do_GET()

            def do_GET(self):
                url = urlsplit(self.path)
                path, query = unquote(url.path), parse_qs(url.query)
                hub.asked.append(path)
                parts = path.strip("/").split("/")
                if parts[0] == "datasets" and "resolve" in parts:  # Hugging Face
                    at = parts.index("resolve")
                    name = "/".join([*parts[1:at], *parts[at + 2 :]])
                elif path.startswith("/api/v1/datasets/") and path.endswith("/repo"):
                    name = "/".join([*parts[3:-1], query["FilePath"][0]])
                elif path.startswith("/api/v1/datasets/"):
                    self.listing("/".join(parts[3:5]), path)
                    return
                else:
                    self.answer(404, X_Error_Code="RepoNotFound")
                    return
                body = hub.files.get(name)
                if body is None:
                    self.answer(404, X_Error_Code="EntryNotFound")
                else:
                    tag = f'"{hashlib.sha256(body).hexdigest()}"'
                    self.answer(200, body, ETag=tag, X_Repo_Commit="c" * 40)

            def listing(self, repo, path):
                found = {n.removeprefix(f"{repo}/"): b for n, b in hub.files.items()
                         if n.startswith(f"{repo}/")}  # fmt: skip
                files = [
                    {"Path": n, "Name": n.rpartition("/")[2], "Type": "blob", "Size": len(b),
                     "Sha256": hashlib.sha256(b).hexdigest(), "Revision": "master"}
                    for n, b in found.items()
                ]  # fmt: skip
                if not found:
                    body, status = (
                        {"Code": 404, "Message": "no such data set", "Success": False},
                        404,
                    )
                elif path.endswith("/revisions"):
                    branches = {"Branches": [{"Revision": "master"}], "Tags": []}
                    body, status = (
                        {"Code": 200, "Success": True, "Data": {"RevisionMap": branches}},
                        200,
                    )
                else:
                    body, status = {"Code": 200, "Success": True, "Data": {"Files": files, "Id": 1,
                                    "Type": 1, "TotalCount": len(files)}}, 200  # fmt: skip
                self.answer(status, json.dumps(body).encode(), Content_Type="application/json")

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}"
        self.thread = Thread(target=self.http.serve_forever, kwargs={"poll_interval": 0.02})
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.http.shutdown()
        self.http.server_close()
        self.thread.join()


@pytest.fixture
def sealed(monkeypatch, tmp_path, toy):
    """The toy file stands for GSM8K's test file; nothing leaves this machine."""
    monkeypatch.setitem(gsm8k.SHA256, "test", hashlib.sha256(toy.read_bytes()).hexdigest())
    for name in ("HF_TOKEN", "MODELSCOPE_API_TOKEN", "MODELSCOPE_DOMAIN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("MODELSCOPE_CACHE", str(tmp_path / "ms"))

    def at(huggingface, modelscope):
        monkeypatch.setenv("HF_ENDPOINT", huggingface)
        monkeypatch.setenv("MODELSCOPE_ENDPOINT", modelscope)

    return at


NOWHERE = "http://127.0.0.1:9"


def test_it_is_fetched_from_hugging_face(sealed, toy, tmp_path):
    with Hub({"openai/gsm8k/test.jsonl": toy.read_bytes()}) as hub:
        sealed(hub.url, NOWHERE)
        said = []
        path = gsm8k_fetch.ensure("test", tmp_path / "root", say=said.append)
        assert path.read_bytes() == toy.read_bytes()
        assert said == ["Asking Hugging Face for openai/gsm8k/test.jsonl"]
        asked = len(hub.asked)
        assert gsm8k_fetch.ensure("test", tmp_path / "root") == path
        assert len(hub.asked) == asked  # it is here now
    assert [p.name for p in path.parent.iterdir()] == ["test.jsonl"]


def test_it_is_fetched_from_modelscope(sealed, toy, tmp_path):
    with Hub({"modelscope/gsm8k/test.jsonl": toy.read_bytes()}) as hub:
        sealed(NOWHERE, hub.url)
        path = gsm8k_fetch.fetch("test", tmp_path / "root", hub="modelscope")
    assert path.read_bytes() == toy.read_bytes()


def test_rows_in_parquet_prove_themselves_by_the_same_checksum(sealed, data, tmp_path, monkeypatch):
    rows = json.loads((data / "parquet" / "rows.json").read_text("utf-8"))
    original = lines(*({"question": q, "answer": a} for q, a in rows)).encode()
    monkeypatch.setitem(gsm8k.SHA256, "test", hashlib.sha256(original).hexdigest())
    file = (data / "parquet" / "snappy.parquet").read_bytes()
    with Hub({"openai/gsm8k/main/test-00000-of-00001.parquet": file}) as hub:
        sealed(hub.url, NOWHERE)
        path = gsm8k_fetch.fetch("test", tmp_path / "root", hub="huggingface")
    assert path.read_bytes() == original


def test_other_content_is_never_kept(sealed, toy, tmp_path):
    spoiled = toy.read_bytes().replace(b"#### 4", b"#### 5")
    with Hub({"openai/gsm8k/test.jsonl": spoiled}) as hub:
        sealed(hub.url, hub.url)
        with pytest.raises(SparklingError) as caught:
            gsm8k_fetch.fetch("test", tmp_path / "root")
    said = str(caught.value)
    assert "openai/gsm8k/test.jsonl on Hugging Face: other content (SHA-256 " in said
    assert "AI-ModelScope/gsm8k/test.jsonl on ModelScope" in said
    assert "by hand and put it into" in said and "SPARKLING_GSM8K" in said
    assert not list((tmp_path / "root").rglob("*.jsonl"))
    with pytest.raises(UsageError, match="no hub 'github'"):
        gsm8k_fetch.fetch("test", tmp_path / "root", hub="github")


def test_the_golds_are_the_rules_own():
    for question in gsm8k.sparklet().questions:
        assert extract.gold(question.solution) == question.gold


@pytest.mark.parametrize("name", ["rows", "power", "x.errors"])
def test_a_file_of_ones_own_never_takes_the_name_of_other_rows(tmp_path, name):
    path = tmp_path / f"{name}.jsonl"
    path.write_text(lines(TOY[0]))
    assert gsm8k.custom(path).name == f"{name}-questions"
