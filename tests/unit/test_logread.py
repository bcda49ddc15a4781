"""`sparkling log` reads real logs of SGLang 0.5.23: what ran, how far it came, why it failed."""

from __future__ import annotations

import io
import json
import sys
from types import SimpleNamespace

import pytest
from sparkling import cli, logread
from sparkling.errors import UsageError

BANNER = "!!! SPARKLING_TRAP=tensor-only: THIS SERVER IS BROKEN ON PURPOSE.    !!!\n"


@pytest.fixture
def logs(root):
    return root / "tests" / "data" / "logs"


def read(path):
    found = logread.read(path.read_bytes().decode("utf-8", "replace"))
    return dict(found.facts), found


def test_a_server_that_ran_is_told_by_what_it_logged(logs):
    facts, found = read(logs / "h200-humming-nextn.log")
    assert found.diagnosis is None and found.starts == 1
    assert facts["routed experts"] == "41 layers for humming"
    assert facts["layers"] == "35 with linear attention, 7 with MLA"
    assert "moe_runner_backend humming" in facts["arguments"]
    assert "speculative_num_draft_tokens 4" in facts["arguments"]
    assert facts["accept length of a report"].startswith("median 1.00 [1.00, 1.00] of ")
    assert "trap" not in facts and "LM head" not in facts
    text = found.view().text
    assert (
        "The log shows no failure that is known." in text and "BailingMoeV3ForCausalLM in " in text
    )


def test_a_server_that_failed_is_told_by_cause_and_remedy(logs, capsys):
    path = logs / "crash-fp8-draft-head.log"
    assert cli.main(["log", str(path)]) == 1
    text = " ".join(capsys.readouterr().out.split())
    assert "the draft model was given the FP8 LM-head tensor without its scales" in text
    assert "\"addmm_cuda\" not implemented for 'Float8_e4m3fn'" in text
    assert cli.main(["log", str(path), "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert (
        told["failure"]["kind"] == "fp8-draft-head"
        and "memory fraction" in told["failure"]["remedy"]
    )


@pytest.mark.parametrize("name", ["flag", "choice", "port", "noconf", "missing", "trunc"])
def test_every_recorded_crash_has_a_cause(logs, name, capsys):
    assert cli.main(["log", str(logs / f"crash-{name}.log")]) == 1
    assert "no failure that is known" not in capsys.readouterr().out


def test_only_the_last_start_counts_and_the_number_of_starts_is_said(logs):
    crashed = (logs / "crash-fp8-draft-head.log").read_text()
    ran = (logs / "h200-humming.log").read_text()
    nextn = (logs / "h200-humming-nextn.log").read_text()
    found = logread.read(nextn + crashed + ran)
    assert found.starts == 2 and found.diagnosis is None
    assert "It holds 2 starts" in found.view().text
    assert dict(found.facts)["routed experts"] == "40 layers for humming"
    assert logread.read(ran + crashed).diagnosis.kind == "fp8-draft-head"


def test_a_trap_is_told_before_all_else(logs):
    ran = (logs / "h200-humming-nextn.log").read_text()
    found = logread.read(BANNER + ran)
    assert found.facts[0] == ("trap", "SPARKLING_TRAP is set: this server is broken on purpose")
    # The trap of an earlier start is not this one's; its own is told again when the model was loaded.
    sound = (logs / "h200-humming.log").read_text()
    assert "trap" not in dict(logread.read(BANNER + ran + sound).facts)
    assert "trap" in dict(logread.read(BANNER + ran + sound + BANNER).facts)


def test_a_key_in_the_line_of_a_failure_is_masked():
    key = "sk-verysecret0123456789"
    line = f"error: unrecognized arguments: --nonsense --api-key {key}"
    found = logread.read(f"usage: sglang serve\nsglang serve: {line}\n")
    assert found.diagnosis is not None
    assert key not in json.dumps(found.to_json()) and key not in found.view().text


def test_it_reads_standard_input(logs, capsys, monkeypatch):
    data = (logs / "h200-humming.log").read_bytes()
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(data)))
    assert cli.main(["log", "-"]) == 0
    assert "40 layers for humming" in capsys.readouterr().out


def test_what_is_no_log_is_refused_in_one_sentence(tmp_path, capsys):
    with pytest.raises(UsageError, match="No line of it"):
        logread.read("")
    (tmp_path / "text").write_text("Dear reader,\nhello.\n")
    for path, words in (
        (tmp_path / "text", "is no server's log"),
        (tmp_path / "none", "cannot be read: No such file"),
        (tmp_path, "cannot be read: Is a directory"),
    ):
        assert cli.main(["log", str(path)]) == 2
        said = capsys.readouterr().err
        assert words in said and said.count("\n") == 1 and "Traceback" not in said
