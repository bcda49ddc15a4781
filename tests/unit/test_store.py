"""Runs on disk: atomic, repaired, redacted, distinct; full disks and foreign folders in a sentence."""

import errno
import json
import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from sparkling import files, store
from sparkling.errors import SparklingError, UsageError
from sparkling.files import Journal, read_rows, write_atomic
from sparkling.redact import is_secret_name, mask_text, redact
from sparkling.store import latest, list_runs, open_run

# -- journal -----------------------------------------------------------------------------------------


def test_rows_come_back(tmp_path):
    path = tmp_path / "deep" / "rows.jsonl"
    with Journal(path) as journal:
        journal.append({"a": 1, "text": "a\u2028b\n✅"})
        journal.append({"nan": float("nan"), "path": Path("x"), "set": {1}})
    with Journal(path) as journal:
        assert journal.rows == read_rows(path)
        assert journal.rows[0] == {"a": 1, "text": "a\u2028b\n✅"}
        assert journal.rows[1] == {"nan": None, "path": "x", "set": [1]}
    assert read_rows(tmp_path / "none.jsonl") == []


def test_any_cut_of_the_last_line_is_repaired(tmp_path):
    path = tmp_path / "rows.jsonl"
    with Journal(path) as journal:
        journal.append({"n": 1})
        journal.append({"n": 2, "text": "ä{}"})
    whole = path.read_bytes()
    first = whole.index(b"\n") + 1
    for size in range(first, len(whole)):
        path.write_bytes(whole[:size])
        assert read_rows(path)[0] == {"n": 1}
        assert path.stat().st_size == size  # reading repairs nothing
        with Journal(path) as journal:
            journal.append({"n": 3})
        kept = [r["n"] for r in read_rows(path)]
        # The last line survives only if nothing but its newline is missing.
        assert kept == ([1, 2, 3] if size == len(whole) - 1 else [1, 3])
        assert path.read_bytes().endswith(b"}\n")


def test_damage_in_the_middle_costs_that_line_only(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"n": 1}\n\0\0\0\0\n{"n"\n[1]\n\n' + b"[" * 99_999 + b'\n{"n": 2}\n')
    assert [r["n"] for r in read_rows(path)] == [1, 2]


def test_one_writer_at_a_time(tmp_path):
    path = tmp_path / "rows.jsonl"
    with Journal(path), pytest.raises(UsageError, match="is being written by another process"):
        Journal(path)
    Journal(path).close()


def test_a_full_disk_takes_nothing_and_says_so(tmp_path, monkeypatch):
    path = tmp_path / "rows.jsonl"
    journal = Journal(path)
    journal.append({"n": 1})
    before = path.read_bytes()
    real = os.write

    def full(fd, data):
        if os.path.samestat(os.fstat(fd), path.stat()):
            if len(data) > 4:
                return real(fd, data[: len(data) // 2])  # a part still fits
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(fd, data)

    monkeypatch.setattr(files.os, "write", full)
    with pytest.raises(SparklingError, match=r"disk is full: appending to .*rows\.jsonl failed"):
        journal.append({"n": 2, "text": "x" * 500})
    monkeypatch.setattr(files.os, "write", real)
    assert path.read_bytes() == before
    journal.append({"n": 3})
    assert [r["n"] for r in read_rows(path)] == [1, 3]


def test_a_really_full_file_system(tmp_path):
    """A file-size limit of the kernel, in a child: the write stops half-way through a row."""
    script = f"""
import resource, signal, sys
from pathlib import Path
from sparkling.errors import SparklingError
from sparkling.files import Journal, read_rows, write_atomic
path = Path({str(tmp_path / "rows.jsonl")!r})
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
journal, n = Journal(path), 0
try:
    while True:
        journal.append({{"n": n, "text": "x" * 300}})
        n += 1
except SparklingError as error:
    assert "disk is full" in str(error), error
assert [r["n"] for r in read_rows(path)] == list(range(n)) and n > 5
assert path.read_bytes().endswith(b"}}\\n")
target = path.with_name("m.json")
write_atomic(target, "old")
try:
    write_atomic(target, "y" * 5000)
except SparklingError as error:
    assert "disk is full" in str(error), error
else:
    raise AssertionError("nothing raised")
assert target.read_text() == "old"
assert sorted(p.name for p in path.parent.iterdir()) == ["m.json", "rows.jsonl"]
print("ok")
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60
    )
    assert done.stdout == "ok\n", done.stderr


@pytest.mark.skipif(
    os.geteuid() != 0 or not Path("/proc/self/ns/mnt").exists(), reason="needs root"
)
def test_a_full_tmpfs(tmp_path):
    inner = (
        "import sys; sys.argv = ['x']\n"
        + f"""
import os
from pathlib import Path
from sparkling.errors import SparklingError
from sparkling.store import open_run
room = Path({str(tmp_path)!r})
run = open_run(room / "runs", "r1")
(room / "filler").write_bytes(b"x" * (os.statvfs(room).f_bavail * os.statvfs(room).f_frsize - 16384))
n = 0
try:
    while n < 10000:
        run.append("rows", {{"n": n, "text": "x" * 200}})
        n += 1
except SparklingError as error:
    assert "disk is full" in str(error), error
assert 5 < n < 10000
try:
    run.save("big", "y" * 100000)
except SparklingError as error:
    assert "disk is full" in str(error), error
else:
    raise AssertionError("nothing raised")
assert [r["n"] for r in run.rows("rows")] == list(range(n))
(room / "filler").unlink()
run.append("rows", {{"n": n}})
assert len(run.rows("rows")) == n + 1 and run.manifest["run_id"] == "r1"
assert not list(run.dir.glob(".*.tmp"))
print("ok")
"""
    )
    mount = f'mount -t tmpfs -o size=256k none {tmp_path} && exec {sys.executable} -c "$INNER"'
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", mount],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "INNER": inner},
    )
    if "ermitted" in done.stderr or "not found" in done.stderr:
        pytest.skip(f"no private mount here: {done.stderr.strip()}")
    assert done.stdout == "ok\n", done.stderr


def test_atomic_write_leaves_the_old_or_the_new(tmp_path, monkeypatch):
    path = tmp_path / "m.json"
    write_atomic(path, "old")
    for name in ("write", "fsync", "replace"):
        with monkeypatch.context() as patch:

            def fail(*_, **__):
                raise OSError(errno.EDQUOT, "Disk quota exceeded")

            patch.setattr(files.os, name, fail)
            with pytest.raises(SparklingError, match="disk is full: writing"):
                write_atomic(path, "new")
        assert path.read_text() == "old"
        assert [p.name for p in tmp_path.iterdir()] == ["m.json"]
    write_atomic(path, b"new")
    assert path.read_text() == "new" and path.stat().st_mode & 0o777 == 0o644


# -- runs --------------------------------------------------------------------------------------------


def test_a_new_run_and_its_manifest(tmp_path):
    run = open_run(tmp_path / "runs", None, notebook="40_baseline", params={"repeats": 2})
    assert re.fullmatch(r"\d{8}-\d{6}-[0-9a-f]{4}", run.id)
    assert run.folder == run.dir / "40_baseline" and run.folder.is_dir()
    run.update(lane="cpu", recipe={"hash": "abc"})
    run.update(recipe={"name": "tiny"})
    manifest = json.loads((run.dir / "manifest.json").read_text())
    assert manifest == run.manifest
    assert manifest["recipe"] == {"hash": "abc", "name": "tiny"} and manifest["lane"] == "cpu"
    assert manifest["versions"]["sparkling"] and manifest["versions"]["python"]
    assert manifest["notebooks"]["40_baseline"]["params"] == {"repeats": 2}
    run.finish("failed", cell=3)
    notebook = run.manifest["notebooks"]["40_baseline"]
    assert (notebook["state"], notebook["cell"]) == ("failed", 3) and notebook["ended"]
    assert notebook["params"] == {"repeats": 2}


def test_notebooks_of_one_run_share_it_and_keep_apart(tmp_path):
    a = open_run(tmp_path, "r1", notebook="40_baseline")
    b = open_run(tmp_path, "r1", notebook="70_nextn")
    a.append("bench", {"arm": "baseline"})
    b.append("bench", {"arm": "nextn"})
    a.save("probe", {"top": [1]})
    assert a.rows("bench") == [{"arm": "baseline"}] == b.rows("bench", notebook="40_baseline")
    assert [r["arm"] for r in b.all_rows("bench")] == ["baseline", "nextn"]
    assert b.load("probe") == {"top": [1]} and b.load("probe", notebook="40_baseline") == {
        "top": [1]
    }
    b.save("probe", {"top": [2]})
    assert (a.load("probe"), b.load("probe")) == ({"top": [1]}, {"top": [2]})
    assert set(a.manifest["notebooks"]) == {"40_baseline", "70_nextn"}
    assert a.shared("report.html") == a.dir / "report.html"
    with pytest.raises(UsageError, match=r"has no nothing\.json; run the notebook that makes it"):
        a.load("nothing")
    assert open_run(tmp_path, "r1").rows("bench") == []


def test_concurrent_runs_get_distinct_ids_and_lose_no_update(tmp_path, monkeypatch):
    draws = iter(["aaaa"] * 40 + [f"{i:04x}" for i in range(999)])
    monkeypatch.setattr(store._random, "token_hex", lambda n: next(draws))
    monkeypatch.setattr(store.time, "strftime", lambda *_: "20310417-120000")
    ids, lock = [], threading.Lock()

    def make():
        run = open_run(tmp_path, None)
        with lock:
            ids.append(run.id)

    threads = [threading.Thread(target=make) for _ in range(12)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert len(set(ids)) == 12
    run = open_run(tmp_path, ids[0])
    threads = [threading.Thread(target=run.update, args=({"k": {str(i): i}},)) for i in range(12)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert run.manifest["k"] == {str(i): i for i in range(12)}


def test_latest_is_the_one_made_last(tmp_path):
    assert latest(tmp_path / "none") is None
    open_run(tmp_path, "b-first")
    open_run(tmp_path, "a-second")
    (tmp_path / "zz-foreign").mkdir()
    (tmp_path / "zz-broken").mkdir()
    (tmp_path / "zz-broken" / "manifest.json").write_text("{")
    assert latest(tmp_path).id == "a-second"
    assert [r.id for r in list_runs(tmp_path)] == ["b-first", "a-second"]


def test_what_is_not_a_run_is_refused_in_a_sentence(tmp_path):
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.jpg").write_text("x")
    (tmp_path / "file").write_text("x")
    for name, manifest in (
        ("other", '{"kind": "x"}'),
        ("old", '{"kind": "sparkling-run", "schema": 0}'),
        ("torn", '{"ki'),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "manifest.json").write_text(manifest)
    for run_id, said in (
        ("photos", "is not a Sparkling run (it has no manifest.json but cat.jpg)"),
        ("file", "is a file, not a run"),
        ("other", "of another kind"),
        ("old", "another version"),
        ("torn", "is not JSON"),
        ("../x", "no run id"),
        ("a/b", "no run id"),
        (".hidden", "no run id"),
    ):
        with pytest.raises(SparklingError) as caught:
            open_run(tmp_path, run_id)
        assert said in str(caught.value) and "\n" not in str(caught.value)
    assert sorted(p.name for p in (tmp_path / "photos").iterdir()) == ["cat.jpg"]
    with pytest.raises(UsageError, match="is a file, not a folder for runs"):
        open_run(tmp_path / "file", None)
    run = open_run(tmp_path, "ok")
    for bad in ("../up", "/etc/passwd"):
        with pytest.raises(UsageError, match="leads out of the run's folder"):
            run.path(bad)


def test_no_permission_is_one_sentence(tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise PermissionError(errno.EACCES, "Permission denied")

    with monkeypatch.context() as patch:
        patch.setattr(store.Path, "mkdir", refuse)
        with pytest.raises(UsageError, match=r"No permission for making .*runs"):
            open_run(tmp_path / "runs", None)
    run = open_run(tmp_path, "r")
    run.append("rows", {"n": 1})
    with monkeypatch.context() as patch:
        patch.setattr(store.Path, "read_bytes", refuse)
        with pytest.raises(UsageError, match=r"No permission for reading .*rows\.jsonl"):
            run.rows("rows")


# -- redaction ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        "api_key",
        "--api-key",
        "HF_TOKEN",
        "token",
        "SPARKLING_API_KEY",
        "ssl_keyfile_password",
        "Authorization",
        "aws_secret_access_key",
        "client-secret",
        "admin_api_key",
        "hub_token",
    ],
)
def test_names_of_secrets(name):
    assert is_secret_name(name)


@pytest.mark.parametrize(
    "name",
    [
        "max_tokens",
        "eos_token",
        "pad_token",
        "tokenizer_path",
        "completion_tokens",
        "ssl_keyfile",
        "key",
        "accept_token_num",
        "monkey",
        "watermark_key",
        "max_new_token",
        "think_end_token",
    ],
)
def test_names_of_other_things(name):
    assert not is_secret_name(name)


def test_redaction_of_settings_arguments_and_text():
    value = {
        "api_key": "abcdefgh",
        "admin_api_key": None,
        "argv": [
            "-m",
            "x",
            "--api-key",
            "abcdefgh",
            "--tp",
            "2",
            "--hf-token=zzzz",
            "--api-key",
            "--port",
        ],
        "env": {"HF_TOKEN": "qqqq1234", "OMP_NUM_THREADS": "2"},
        "command": "python -m x --api-key 'abc def' --port 3",
        "usage": {"max_tokens": 5},
        "note": "my key is sesame-1234; Authorization: Bearer abcdef123456",
        "url": "https://user:hunter2@example.org/x",
    }
    out = redact(value, secrets=["sesame-1234"])
    text = json.dumps(out)
    for secret in (
        "abcdefgh",
        "zzzz",
        "qqqq1234",
        "abc def",
        "sesame-1234",
        "abcdef123456",
        "hunter2",
    ):
        assert secret not in text
    assert out["argv"] == [
        "-m",
        "x",
        "--api-key",
        "***",
        "--tp",
        "2",
        "--hf-token=***",
        "--api-key",
        "--port",
    ]
    assert out["admin_api_key"] is None and out["env"]["OMP_NUM_THREADS"] == "2"
    assert out["usage"] == {"max_tokens": 5} and out["command"].endswith("--port 3")
    assert value["api_key"] == "abcdefgh"


def test_a_run_masks_what_it_writes(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "from-the-environment")
    run = open_run(
        tmp_path, "r", notebook="nb", params={"api_key": "in-params"}, secrets=["told-at-start"]
    )
    run.add_secret("told-later")
    hints = "told-at-start told-later from-the-environment"
    run.update(launch={"argv": ["--x", hints]}, api_key="by-name")
    run.append("rows", {"problem": hints})
    run.save("probe", {"text": hints, "token": "by-name"})
    everything = "".join(p.read_text() for p in run.dir.rglob("*") if p.is_file())
    for secret in ("in-params", "by-name", *hints.split()):
        assert secret not in everything
    assert run.mask(hints) == "*** *** ***"


def test_secrets_by_their_shape_and_what_only_looks_alike():
    keys = ["hf_" + "a1" * 17, "sk-" + "b2" * 12, "ghp_" + "c3" * 18]
    assert mask_text(" ".join(keys)) == "*** *** ***"
    plain = (
        "HF_HUB_DISABLE_TELEMETRY=1 hf_transformers_configuration_utilities sk-learn "
        "a bearer token; Bearer tokens; http://127.0.0.1:30000/v1 --max-new-tokens 5 user@example.org"
    )
    assert mask_text(plain) == plain


def test_short_values_do_not_blank_out_ordinary_text():
    assert mask_text("port 1 of 2", secrets=["1", "", None]) == "port 1 of 2"


def test_git_commit(tmp_path):
    assert store.git_commit(tmp_path) is None
    here = store.git_commit(Path(__file__).parent)
    assert here is None or re.fullmatch(r"[0-9a-f]{40}", here["commit"])
