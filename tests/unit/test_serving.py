"""What `sparkling serve` writes down of a running server, and who may rely on it."""

from __future__ import annotations

import json
import subprocess
import sys
import types

import pytest
from sparkling import recipe, serving
from sparkling.errors import UsageError


@pytest.fixture
def process():
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
    yield child
    child.kill()
    child.wait()


@pytest.fixture
def server(process, root, tmp_path):
    launch = recipe.load("tiny-ling", root=root).render("nextn", model="/m", port=31007)
    return types.SimpleNamespace(
        launch=launch,
        pid=process.pid,
        port=31007,
        log=tmp_path / "server.log",
        offset=10,
        started=12.5,
        status_file=tmp_path / "server.status.json",
        api_key="sk-not-to-be-written",
    )


def test_remembered_while_it_runs(server, tmp_path):
    with serving.remembered(server, tmp_path) as path:
        found = serving.find(tmp_path)
        assert (found.launch, found.pid, found.port) == (server.launch, server.pid, 31007)
        assert (found.log, found.offset, found.started) == (server.log, 10, 12.5)
        assert found.status_file == server.status_file and found.url == "http://127.0.0.1:31007"
        assert found.alive()
        assert "sk-not-to-be-written" not in path.read_text()
    assert not path.exists()


def test_the_key_comes_from_the_environment_and_is_not_shown(server, tmp_path, monkeypatch):
    monkeypatch.setenv("SPARKLING_API_KEY", "sk-not-to-be-written")
    with serving.remembered(server, tmp_path):
        found = serving.find(tmp_path)
    assert found.api_key == "sk-not-to-be-written"
    assert "sk-not-to-be-written" not in repr(found) + str(found)


def test_only_the_events_of_this_start(server, tmp_path):
    old = "[2026-11-29 18:00:00] The server is fired up and ready to roll!\n"
    server.log.write_text(old)
    server.offset = len(old)
    with serving.remembered(server, tmp_path):
        assert serving.find(tmp_path).events() == []
        server.log.write_text(old + old)
        assert len(serving.find(tmp_path).events()) == 1


def test_a_process_that_ended_is_forgotten(server, tmp_path, process):
    with serving.remembered(server, tmp_path) as path:
        process.kill()
        process.wait()
        assert serving.served(tmp_path) == [] and not path.exists()


def test_another_process_with_the_same_pid_is_not_it(server, tmp_path):
    with serving.remembered(server, tmp_path) as path:
        note = json.loads(path.read_text())
        others = [key for key in note["identity"] if key != "pid"]
        assert len(others) == 2, "its start time and the boot it belongs to"
        for key in others:
            value = note["identity"][key]
            other = value + 1 if isinstance(value, int) else "another"
            changed = {**note, "identity": {**note["identity"], key: other}}
            path.write_text(json.dumps(changed))
            assert serving.served(tmp_path) == [], key
        path.write_text(json.dumps(note))
        assert len(serving.served(tmp_path)) == 1, "only that was wrong with it"


def test_the_plugins_status_files_are_no_notes(server, tmp_path):
    with serving.remembered(server, tmp_path):
        status = tmp_path / serving.FOLDER / "20261129-181306-nextn.status.json"
        status.write_text("{}")
        assert len(serving.served(tmp_path)) == 1
        assert status.exists()


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"identity": null}', "\x00"])
def test_a_note_that_cannot_be_read_is_no_server(server, tmp_path, text):
    with serving.remembered(server, tmp_path) as path:
        path.write_text(text)
        assert serving.served(tmp_path) == []


def test_choosing(server, tmp_path):
    with pytest.raises(UsageError) as caught:
        serving.find(tmp_path)
    assert str(caught.value) == "`sparkling serve` runs no server; start one, or name a stage."
    other = types.SimpleNamespace(
        **{**vars(server), "port": 31008, "launch": server.launch.with_port(31008)}
    )
    with serving.remembered(server, tmp_path), serving.remembered(other, tmp_path):
        assert serving.find(tmp_path, 31008).port == 31008
        with pytest.raises(UsageError) as caught:
            serving.find(tmp_path)
        assert str(caught.value) == (
            "There are servers on ports 31007, 31008; choose one with --port."
        )
        with pytest.raises(UsageError) as caught:
            serving.find(tmp_path, 31009)
        assert str(caught.value) == (
            "`sparkling serve` runs no server on port 31009 (there is one on 31007, 31008); start "
            "one, or name a stage."
        )
