"""The command line: one sentence for a mistake, the right exit code, a fast start."""

from __future__ import annotations

import errno
import inspect
import json
import os
import signal
import subprocess
import sys
import types
from pathlib import Path

import pytest
from sparkling import cli
from sparkling.errors import NotLive, ServerError, SparklingError, UsageError

PYTHON = sys.executable
HEAVY = ("numpy", "matplotlib", "httpx", "IPython", "papermill", "psutil", "nbformat", "tokenizers")


@pytest.fixture(autouse=True)
def _cpu(monkeypatch, root):
    monkeypatch.chdir(root)
    monkeypatch.setenv("SPARKLING_LANE", "cpu")


def sparkling(*args: str, **options) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [PYTHON, "-m", "sparkling.cli", *args],
        capture_output=True,
        text=True,
        timeout=120,
        **options,
    )


def run(capsys, *args: str) -> tuple[int, str, str]:
    try:
        code = cli.main(args)
    except SystemExit as done:  # argparse
        code = done.code
    out, err = capsys.readouterr()
    return code, out, err


def refused(capsys, *args: str, code: int = 2) -> str:
    """Return the sentence of a refusal: one line on stderr, nothing on stdout."""
    got, out, err = run(capsys, *args)
    assert (got, out) == (code, "")
    assert err.startswith("error: ") and err.count("\n") == 1
    assert "Traceback" not in err
    return err.removeprefix("error: ").rstrip("\n")


# -- starting ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "args",
    [
        ["--version"],
        ["--help"],
        ["render", "--help"],
        ["bench", "--help"],
        ["render", "nextn"],
        ["render", "nextn", "--recipe", "ling-3.0-flash", "--diff", "baseline"],
        ["render", "nope"],
    ],
)
def test_nothing_heavy_is_imported(args):
    code = (
        "import sys\nfrom sparkling import cli\n"
        f"try: cli.main({args!r})\nexcept SystemExit: pass\n"
        f"print([m for m in {HEAVY!r} if m in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run([PYTHON, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.splitlines()[-1] == "[]"


def test_the_version(capsys):
    from sparkling import __version__

    assert run(capsys, "--version") == (0, f"sparkling {__version__}\n", "")


def test_every_command_has_help(capsys):
    code, out, _ = run(capsys, "--help")
    assert code == 0
    names = [
        "render",
        "serve",
        "stop",
        "prove",
        "bench",
        "suite",
        "report",
        "tiny",
        "doctor",
        "setup",
    ]
    names += ["ablation", "concurrency"]
    names += [
        "check-notebooks",
        "sparklet-quality",
        "stats",
        "compare",
        "export",
        "sizing",
        "eval",
        "extract",
        "inventory",
        "costmodel",
        "head",
        "weights",
        "kernels",
        "shapes",
        "log",
    ]
    for name in names:
        assert f"\n    {name}" in out
        code, text, _ = run(capsys, name, "--help")
        assert code == 0 and text.startswith(f"usage: sparkling {name}")


def test_the_console_script_is_this_one(root):
    text = (root / "lib" / "pyproject.toml").read_text()
    assert 'sparkling = "sparkling.cli:main"' in text


# -- render --------------------------------------------------------------------------------------


def test_render_prints_a_command_to_paste(capsys, root):
    code, out, err = run(capsys, "render", "nextn", "--model", "/m/x", "--port", "31000")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert f"{root}/.venv-server/bin/python -m sglang.launch_server \\" in lines
    assert "  --model-path /m/x \\" in lines and "  --port 31000 \\" in lines
    assert "SPARKLING_FP8_LM_HEAD=1 \\" in lines


def test_render_json_is_the_launch(capsys, root):
    from sparkling import recipe

    _, out, _ = run(capsys, "render", "nextn", "--model", "/m/x", "--format", "json")
    launch = recipe.load("sparklet", root=root).render("nextn", model="/m/x")
    assert recipe.Launch.from_json(json.loads(out)) == launch


def test_render_is_the_same_twice(capsys):
    assert run(capsys, "render", "nextn") == run(capsys, "render", "nextn")


def test_render_another_recipe_on_this_lane(capsys):
    code, out, _ = run(capsys, "render", "humming", "--recipe", "ling-3.0-flash")
    assert code == 0
    assert "  --moe-runner-backend humming \\" in out and "ling-3.0-flash-fp4" in out


def test_render_takes_the_model_of_the_recipe_it_renders(capsys, tmp_path, root):
    path = tmp_path / "mine.toml"
    text = (root / "env" / "recipes" / "tiny-ling.toml").read_text()
    path.write_text(text.replace('".cache/models/tiny-ling"', '"/models/trained"'))
    _, out, _ = run(capsys, "render", "baseline", "--recipe", str(path))
    assert "  --model-path /models/trained \\" in out.splitlines()


def test_diff(capsys):
    args = ("render", "fp8-head", "--recipe", "ling-3.0-flash", "--diff", "humming")
    assert run(capsys, *args) == (0, "- --enable-fp32-lm-head\n+ SPARKLING_FP8_LM_HEAD=1\n", "")
    _, out, _ = run(capsys, *args, "--format", "json")
    data = json.loads(out)
    assert data["comparable"] is True
    assert data["changes"] == [
        {"kind": "flag", "name": "--enable-fp32-lm-head", "before": "", "after": None},
        {"kind": "env", "name": "SPARKLING_FP8_LM_HEAD", "before": None, "after": "1"},
    ]


def test_diff_of_nothing(capsys):
    assert run(capsys, "render", "nextn", "--diff", "nextn") == (0, "no difference\n", "")


def test_diff_against_a_variant_says_when_it_is_another_regime(capsys):
    args = ("render", "nextn", "--recipe", "ling-3.0-flash", "--diff", "nextn:two-gpu")
    _, out, _ = run(capsys, *args)
    assert "~ --tp-size 2 -> 1\n" in out
    assert out.splitlines()[-1].startswith("not comparable: 'two GPUs")
    _, out, _ = run(capsys, *args, "--format", "json")
    assert json.loads(out)["comparable"] is False


# -- mistakes ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        ([], "the following arguments are required: COMMAND; see sparkling --help."),
        (["render"], "the following arguments are required: STAGE; see sparkling render --help."),
        (["render", "nextn", "--foo"], "unrecognized arguments: --foo; see sparkling --help."),
        (
            ["render", "nextn", "--port", "x"],
            "argument --port: invalid int value: 'x'; see sparkling render --help.",
        ),
        (
            ["render", "nextn", "--port", "70000"],
            "port 70000 is not a whole number from 0 to 65535.",
        ),
        (
            ["render", "nextm"],
            "env/recipes/sparklet.toml has no stage 'nextm' (stages: baseline, humming, fp8-head, "
            "nextn); did you mean nextn?",
        ),
        (
            ["render", "nextn", "--variant", "yarn"],
            "env/recipes/sparklet.toml has no variant 'yarn' (variants: trap, many-users).",
        ),
        (
            ["render", "humming"],
            "env/recipes/sparklet.toml, table [stages.humming]: not available here: Humming's "
            "kernels are compiled for NVIDIA GPUs, and this lane has none.",
        ),
        (
            ["render", "nextn", "--lane", "tpu"],
            "lane 'tpu' is unknown; the lanes are auto, spark, gpu, cpu.",
        ),
        (
            ["render", "nextn", "--recipe", "qwen"],
            "recipe 'qwen' is unknown (recipes: ling-3.0-flash, sparklet, sparklet-gpu, tiny-ling; or give a .toml file).",
        ),
        (["render", "nextn", "--recipe", "/no/such.toml"], "/no/such.toml: there is no such file."),
        (["render", "nextn", "--diff", "base"], None),
        (
            ["serve", "nextn", "--deadline", "-1"],
            "argument --deadline: invalid number of seconds value: '-1'; see sparkling serve "
            "--help.",
        ),
        (
            ["suite", "--cell-timeout", "nan"],
            "argument --cell-timeout: invalid number of seconds value: 'nan'; see sparkling suite "
            "--help.",
        ),
        (["suite", "-p", "x"], "-p x is not of the form NAME=VALUE."),
        (["suite", "-p", "1x=2"], "-p 1x=2 is not of the form NAME=VALUE."),
        (["suite", "-p", "a=1", "-p", "a=2"], "-p a is given twice."),
    ],
)
def test_a_mistake_is_one_sentence(capsys, args, sentence):
    said = refused(capsys, *args)
    assert sentence is None or said == sentence


def test_a_mistake_in_a_real_process():
    done = sparkling("render", "nextm")
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1


def test_options_are_not_abbreviated(capsys):
    assert "unrecognized arguments: --var" in refused(capsys, "render", "nextn", "--var", "x")


def test_outside_a_checkout(tmp_path):
    env = {**os.environ, "SPARKLING_ROOT": str(tmp_path)}
    done = sparkling("render", "nextn", env=env)
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: SPARKLING_ROOT={tmp_path} is not a Sparkling checkout")


# -- ends ----------------------------------------------------------------------------------------


def raising(monkeypatch, error: BaseException) -> None:
    def handler(args):
        raise error

    monkeypatch.setattr(cli, "_render", handler)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (UsageError("Wrong."), 2),
        (ServerError("It died."), 1),
        (NotLive("The head is BF16."), 1),
        (SparklingError("Failed."), 1),
    ],
)
def test_our_errors_carry_their_exit_code(monkeypatch, capsys, error, code):
    raising(monkeypatch, error)
    assert refused(capsys, "render", "nextn", code=code) == str(error)


def test_ctrl_c_is_130(monkeypatch, capsys):
    raising(monkeypatch, KeyboardInterrupt())
    assert run(capsys, "render", "nextn") == (130, "", "interrupted\n")


@pytest.mark.parametrize(
    "number", [errno.ENOSPC, errno.EACCES, errno.EROFS, errno.EDQUOT, errno.ENAMETOOLONG]
)
def test_a_disk_that_refuses_is_one_sentence(monkeypatch, capsys, number):
    raising(monkeypatch, OSError(number, os.strerror(number), "/runs/x"))
    said = refused(capsys, "render", "nextn", code=1)
    assert said == f"/runs/x: {os.strerror(number)}."


@pytest.mark.parametrize(
    "args",
    [["report", "x" * 300], ["check-notebooks", "x" * 300], ["serve", "nextn", "--model"]],
)
def test_a_name_that_is_too_long_is_one_sentence(monkeypatch, capsys, tmp_path, args):
    monkeypatch.setenv("SPARKLING_RUNS", str(tmp_path))
    monkeypatch.setenv("SPARKLING_MODEL", "")
    if args[-1] == "--model":
        args = [*args, "/" + "x" * 300]
    code, out, err = run(capsys, *args)
    assert code in (1, 2) and out + err != "" and "File name too long" in out + err


@pytest.mark.parametrize("name", ["ROOT", "RUNS", "MODEL", "RECIPE"])
def test_a_home_that_is_unknown_is_one_sentence(monkeypatch, capsys, name):
    monkeypatch.setenv(f"SPARKLING_{name}", "~nobody9/x")
    assert "~nobody9/x begins with a home folder" in refused(capsys, "render", "nextn")
    monkeypatch.setenv(f"SPARKLING_{name}", "")
    monkeypatch.setenv("SPARKLING_RECIPE", "")
    said = refused(capsys, "render", "nextn", "--recipe", "~nobody9/x")
    assert "~nobody9/x begins with a home folder" in said


def test_a_working_folder_that_is_gone_is_one_sentence(tmp_path):
    gone = tmp_path / "gone"
    gone.mkdir()
    code = (
        "import os, sys; from sparkling import cli; os.rmdir(os.getcwd()); "
        "sys.exit(cli.main(['render', 'nextn']))"
    )
    done = subprocess.run([PYTHON, "-c", code], cwd=gone, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith("error: The working directory cannot be used")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-"])
def test_closed_streams_do_no_harm(closed):
    for args, code in ((["render", "nextn"], 0), (["render", "nope"], 2)):
        command = f"exec '{PYTHON}' -m sparkling.cli {' '.join(args)} {closed}"
        done = subprocess.run(["sh", "-c", command], capture_output=True, text=True)
        assert done.returncode == code
        assert "Traceback" not in done.stderr


def test_a_terminal_that_lacks_letters_gets_others(root, tmp_path):
    env = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = sparkling("render", "nextn", "--model", "/models/größe", env=env)
    assert (done.returncode, done.stderr) == (0, "")
    assert "/models/gr??e" in done.stdout.replace("'", "")


def test_a_bug_keeps_its_traceback(monkeypatch):
    raising(monkeypatch, ZeroDivisionError("bug"))
    with pytest.raises(ZeroDivisionError):
        cli.main(["render", "nextn"])


def test_a_closed_pipe_is_silent():
    child = subprocess.Popen(
        [PYTHON, "-c", "import sys; sys.stdin.read(); from sparkling import cli; "
         "sys.exit(cli.main(['render', 'nextn']))"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert child.stdin and child.stdout and child.stderr
    child.stdout.close()
    child.stdin.close()  # only now it writes
    err = child.stderr.read()
    assert child.wait(60) == 128 + signal.SIGPIPE
    assert err == b""


# -- handlers and what they call -----------------------------------------------------------------


class Running:
    """Stands for a server that `serve` keeps; its process is this one."""

    url, ready_seconds, port, pid = "http://127.0.0.1:31000", 3.0, 31000, os.getpid()
    offset, started = 0, 1.0

    def __init__(self, lives: int = 0) -> None:
        self.lives, self.stopped, self.given, self.notes = lives, False, {}, []

    def start(self, launch, **given):
        self.given = {"launch": launch, **given}
        self.launch, self.log = launch, given["log"]
        self.status_file = self.log.with_suffix(".status.json")
        for phase in ("loading weights", "loading weights", "warming up"):
            given["progress"](phase, 1.0)
        return self

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.stopped = True

    def alive(self):
        self.notes += (self.given["runs"] / "serve").glob("*.json")
        self.lives -= 1
        if self.lives == 0:
            raise KeyboardInterrupt
        return self.lives > 0

    def tail(self, n=20):
        return ["first", "last words"]


def replaced(monkeypatch, name: str, **members) -> types.ModuleType:
    """Put a stand-in for `sparkling.<name>` where the handler imports it."""
    import sparkling

    module = types.ModuleType(f"sparkling.{name}")
    for key, value in members.items():
        setattr(module, key, value)
    monkeypatch.setitem(sys.modules, f"sparkling.{name}", module)
    monkeypatch.setattr(sparkling, name, module, raising=False)
    return module


@pytest.fixture
def fine_weights(monkeypatch):
    replaced(monkeypatch, "weightcheck", check=lambda model: None)


@pytest.fixture
def server(monkeypatch, tmp_path, fine_weights):
    monkeypatch.setenv("SPARKLING_RUNS", str(tmp_path / "runs"))
    made = Running(lives=2)
    replaced(monkeypatch, "server", start=made.start)
    return made


def test_serve_starts_waits_and_stops(monkeypatch, capsys, tmp_path, server):
    monkeypatch.setenv("SPARKLING_API_KEY", "not-to-be-shown")
    log = tmp_path / "server.log"
    code, out, err = run(capsys, "serve", "nextn", "--port", "31000", "--log", str(log))
    assert code == 130 and server.stopped
    assert "Ready after 3 s at http://127.0.0.1:31000/v1" in out and str(log) in out
    assert out.count("loading weights") == 1 and "warming up" in out
    given = server.given
    assert given["launch"].stage == "nextn" and given["launch"].port == 31000
    assert given["exact_port"] is True, "a port that is named is meant"
    assert given["extra_env"] == {"SPARKLING_KEEP_ALIVE_S": "15"}
    assert given["log"] == log and given["runs"] == tmp_path / "runs"
    assert given["api_key"] == "not-to-be-shown" and given["deadline_s"] == 300
    assert "not-to-be-shown" not in out + err
    assert "not-to-be-shown" not in json.dumps(given["launch"].to_json())
    # remembered while it ran, forgotten after
    assert server.notes and not list((tmp_path / "runs" / "serve").glob("*.json"))


@pytest.mark.parametrize("value", ["x", "0", "-1", "nan", "inf"])
def test_serve_refuses_a_silence_that_is_none_before_anything_starts(
    monkeypatch, capsys, server, value
):
    monkeypatch.setenv("SPARKLING_KEEP_ALIVE_S", value)
    code, _, err = run(capsys, "serve", "nextn")
    assert code == 2 and err.startswith(f"error: SPARKLING_KEEP_ALIVE_S is {value!r}: set it to")
    assert not server.given


def test_serve_shows_the_warning_of_a_server_that_is_broken_on_purpose(capsys, tmp_path, server):
    log = tmp_path / "server.log"
    block = "!!!!!!!!\n!!! BROKEN !!!\n!!!!!!!!"
    log.write_text(f"[1] before\n\n{block}\n[2] between\n{block}\n[3] after\n")
    _, out, _ = run(capsys, "serve", "nextn", "--log", str(log))
    assert out.count(block) == 1 and "before" not in out and "between" not in out
    log.write_text("[1] fine\n")
    server.lives = 2
    assert "!!!" not in run(capsys, "serve", "nextn", "--log", str(log))[1]


def test_serve_has_no_key_and_no_fixed_port_by_default(capsys, tmp_path, server):
    run(capsys, "serve", "baseline", "--deadline", "77")
    assert server.given["deadline_s"] == 77
    assert server.given["api_key"] is None and server.given["exact_port"] is False
    assert server.given["launch"].host == "127.0.0.1"
    assert server.given["log"].parent == tmp_path / "runs" / "serve"


def test_serve_says_when_the_server_dies(capsys, server):
    server.lives = 0
    code, _, err = run(capsys, "serve", "baseline")
    assert code == 1 and server.stopped
    assert err.startswith("error: The server has ended") and "last words" in err
    assert err.count("\n") == 1


def test_serve_looks_at_the_checkpoint_first(monkeypatch, capsys, tmp_path):
    def check(model):
        raise UsageError(f"{model}: there is no checkpoint.")

    replaced(monkeypatch, "weightcheck", check=check)
    replaced(monkeypatch, "server", start=None)
    said = refused(capsys, "serve", "baseline", "--model", str(tmp_path / "m"))
    assert said == f"{tmp_path / 'm'}: there is no checkpoint."


def test_sigterm_ends_serve_as_ctrl_c_does(tmp_path):
    """SIGTERM must leave through the `with` that stops the server."""
    code = f"""
import contextlib, sys, types, sparkling
from pathlib import Path
class Running:
    url, ready_seconds = "http://x", 1.0
    def __enter__(self): return self
    def __exit__(self, *_): Path({str(tmp_path / "stopped")!r}).touch()
    def alive(self): return True
for name, members in (("server", {{"start": lambda *a, **k: Running()}}),
                      ("serving", {{"remembered": lambda *a: contextlib.nullcontext()}}),
                      ("weightcheck", {{"check": lambda m: None}})):
    module = types.ModuleType("sparkling." + name)
    module.__dict__.update(members)
    sys.modules["sparkling." + name] = module
    setattr(sparkling, name, module)
from sparkling import cli
sys.exit(cli.main(["serve", "baseline", "--log", {str(tmp_path / "log")!r}]))
"""
    child = subprocess.Popen([PYTHON, "-c", code], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    for line in child.stdout:
        if line.startswith("Ready"):
            break
    child.send_signal(signal.SIGTERM)
    assert child.wait(60) == 130
    assert (tmp_path / "stopped").exists()


@pytest.mark.parametrize(
    ("stopped", "said"),
    [(["stopped port 31000"], "stopped port 31000\n"), ([], "No server of ours is running.\n")],
)
def test_stop(monkeypatch, capsys, root, tmp_path, stopped, said):
    asked = []
    replaced(monkeypatch, "server", stop_all=lambda runs: asked.append(runs) or stopped)
    assert run(capsys, "stop") == (0, said, "")
    assert run(capsys, "stop", "--runs", str(tmp_path)) == (0, said, "")
    monkeypatch.setenv("SPARKLING_RECIPE", "/broken.toml")  # stop must not care
    assert run(capsys, "stop") == (0, said, "")
    assert asked == [root / "runs", tmp_path, root / "runs"]
    typo = str(tmp_path / "typo")
    (tmp_path / "file").touch()
    assert typo in refused(capsys, "stop", "--runs", typo)
    refused(capsys, "stop", "--runs", str(tmp_path / "file"))
    refused(capsys, "stop", "--runs", "")
    assert len(asked) == 3


def test_tiny_builds_where_the_recipe_says(monkeypatch, capsys, root):
    asked = []

    def build(dest, **given):
        asked.append((dest, given))
        return dest

    replaced(monkeypatch, "tiny", build=build)
    code, out, _ = run(capsys, "tiny", "--seed", "3")
    assert (code, out) == (0, f"{root}/.cache/models/tiny-ling\n")
    run(capsys, "tiny", "--dest", "/x", "--noise", "0", "--random")
    assert asked == [
        (root / ".cache/models/tiny-ling", {"seed": 3, "noise": 0.12, "random": False}),
        (Path("/x"), {"seed": 0, "noise": 0.0, "random": True}),
    ]


def copied_recipe(root, folder: Path, model: Path | str) -> Path:
    """A recipe like the tiny Ling's, of another checkpoint."""
    path = folder / "mine.toml"
    text = (root / "env" / "recipes" / "tiny-ling.toml").read_text()
    path.write_text(text.replace('".cache/models/tiny-ling"', json.dumps(str(model))))
    return path


def test_tiny_never_builds_where_somebody_else_s_checkpoint_is(monkeypatch, capsys, root, tmp_path):
    asked = []
    replaced(monkeypatch, "tiny", build=lambda dest, **_: asked.append(dest) or dest, MANIFEST="m")
    own = root / ".cache/models/tiny-ling"
    monkeypatch.setenv("SPARKLING_MODEL", str(tmp_path / "trained"))
    assert run(capsys, "tiny")[0] == 0
    monkeypatch.delenv("SPARKLING_MODEL")
    monkeypatch.setenv("SPARKLING_RECIPE", str(copied_recipe(root, tmp_path, "/models/trained")))
    assert run(capsys, "tiny")[0] == 0
    assert asked == [own, own]


def test_tiny_if_needed_builds_only_what_the_suite_would_use(monkeypatch, capsys, root, tmp_path):
    from sparkling import lane

    asked = []
    replaced(monkeypatch, "tiny", build=lambda dest, **_: asked.append(dest) or dest, MANIFEST="m")
    own = tmp_path / "tiny"
    monkeypatch.setattr(lane, "tiny_model", lambda root: own)
    mine = copied_recipe(root, tmp_path, own)  # another recipe of the tiny Ling
    for name in ("RECIPE", "MODEL"):  # so that what the handler sets is taken back
        monkeypatch.setenv(f"SPARKLING_{name}", "")
    suite = ("--resume", "-p", "text=two words")
    assert run(capsys, "tiny", "--if-needed", "--recipe", str(mine), *suite)[1] == f"{own}\n"
    monkeypatch.setenv("SPARKLING_RECIPE", "")
    for given in (("--lane", "spark"), ("--model", "/models/x"), ()):
        monkeypatch.setenv("SPARKLING_MODEL", "")
        code, out, _ = run(capsys, "tiny", "--if-needed", *given, *suite)
        assert code == 0 and out.startswith("No tiny Ling is built: ") and out.count("\n") == 1
    assert asked == [own]
    # A trained checkpoint in the tiny Ling's own place is left alone as well.
    monkeypatch.setenv("SPARKLING_MODEL", str(own))
    own.mkdir()
    (own / "config.json").touch()
    assert run(capsys, "tiny", "--if-needed")[1].startswith("No tiny Ling is built: ")
    (own / "m").touch()
    assert run(capsys, "tiny", "--if-needed")[0] == 0 and asked == [own, own]


def test_tiny_where_nothing_can_be_built(capsys, tmp_path):
    (tmp_path / "afile").touch()
    for dest in (f"{tmp_path}/afile/x", "/proc/x", str(tmp_path / ("x" * 300))):
        assert dest in refused(capsys, "tiny", "--dest", dest, code=1)
    said = refused(capsys, "tiny", "--dest", str(tmp_path / "t"), "--seed", "-1")
    assert said == "seed is -1: give a whole number from 0."


@pytest.mark.parametrize("ok", [True, False])
def test_doctor(monkeypatch, capsys, ok):
    from sparkling import doctor

    verdict = doctor.OK if ok else doctor.FAIL
    made = doctor.Finding(
        "disk", "disk, free", "1 GB", "2 GB", verdict, "Room.", "" if ok else "more"
    )
    monkeypatch.setattr(doctor, "run", lambda scene: doctor.Findings([made]))
    code, out, _ = run(capsys, "doctor")
    assert code == (0 if ok else 1)
    assert "Lane cpu: SPARKLING_LANE says so." in out and "disk, free" in out and "2 GB" in out
    code, out, _ = run(capsys, "doctor", "--json")
    data = json.loads(out)
    assert code == (0 if ok else 1)
    assert data["ok"] is ok and data["lane"] == "cpu" and data["checks"][0]["needed"] == "2 GB"
    assert {"id", "found", "needed", "verdict", "remedy"} <= set(data["checks"][0])
    assert data["model"].endswith("models/sparklet") and data["edition"] == "stock"
    _, out, _ = run(capsys, "doctor", "--brief")
    assert ("disk, free" in out) is not ok


def test_setup_of_a_lane_that_needs_none(capsys):
    said = refused(capsys, "setup")
    assert said.startswith(
        "This lane's server environment is .venv-server, which ./scripts/setup.sh"
    )
    assert run(capsys, "setup", "--if-needed", "--resume", "--notebook", "x") == (0, "", "")


def test_setup_says_what_it_would_build(capsys, root):
    code, out, _ = run(capsys, "setup", "--lane", "spark", "--edition", "fork", "--dry-run")
    assert code == 0 and f"environment: {root}/.venv-server-spark-fork\n" in out
    assert f"pins: {root}/env/server-spark-fork.txt\n" in out


def test_setup_leaves_an_own_environment_alone(monkeypatch, capsys):
    monkeypatch.setenv("SPARKLING_SERVER_PYTHON", "/my/bin/python")
    code, out, _ = run(capsys, "setup", "--lane", "spark")
    assert code == 0 and out.startswith("The server's Python is /my/bin/python, an environment of")


def test_an_edition_is_rendered(capsys):
    args = ("render", "fp8-head", "--recipe", "ling-3.0-flash", "--model", "/m")
    code, out, _ = run(capsys, *args, "--edition", "fork")
    assert code == 0 and "SGLANG_ENABLE_FP8_LM_HEAD=1 \\" in out
    assert ".venv-server-spark-fork/bin/python" in out
    said = refused(capsys, *args, "--edition", "frok")
    assert said.startswith("env/recipes/ling-3.0-flash.toml has no edition 'frok' (editions: stock")


def test_suite_passes_everything_on(monkeypatch, capsys):
    asked = {}
    result = types.SimpleNamespace(text=lambda: "the table", exit_code=7)

    def run_suite(lane, **given):
        asked.update(given, lane=lane.kind, recipe=os.environ.get("SPARKLING_RECIPE"))
        return result

    replaced(monkeypatch, "suite", run_suite=run_suite)
    code, out, _ = run(
        capsys, "suite", "--lane", "cpu", "--notebook", "40_baseline", "-p", "a=1=2",
        "--run", "r1", "--resume", "--cell-timeout", "60", "--recipe", "tiny-ling",
    )  # fmt: skip
    assert code == 7 and out.endswith("the table\n")
    progress = asked.pop("progress")
    progress("10_environment")
    assert capsys.readouterr().out == "10_environment\n"
    assert asked == {
        "lane": "cpu",
        "recipe": "tiny-ling",
        "notebooks": ["40_baseline"],
        "params": {"a": "1=2"},
        "run_id": "r1",
        "resume": True,
        "cell_timeout_s": 60.0,
        "record_minutes": False,
    }


def test_report_of_a_run(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("SPARKLING_RUNS", str(tmp_path))
    (tmp_path / "r1").mkdir()
    asked = []
    replaced(monkeypatch, "report", build=lambda d: asked.append(d) or d / "report.html")
    assert run(capsys, "report", "r1")[1] == f"{tmp_path}/r1/report.html\n"
    assert run(capsys, "report", str(tmp_path / "r1"))[0] == 0
    assert asked == [tmp_path / "r1"] * 2
    assert refused(capsys, "report", "r2") == f"There is no run 'r2' in {tmp_path}."
    replaced(monkeypatch, "store", latest=lambda runs, holding: None)
    assert refused(capsys, "report").startswith(f"There is no run in {tmp_path}")
    newest = types.SimpleNamespace(dir=tmp_path / "newest")
    replaced(monkeypatch, "store", latest=lambda runs, holding: newest)
    assert run(capsys, "report")[1] == f"{tmp_path}/newest/report.html\n"


def test_report_takes_the_newest_run_in_which_there_is_something(monkeypatch, capsys, tmp_path):
    from sparkling import store

    monkeypatch.setenv("SPARKLING_RUNS", str(tmp_path))
    asked = []
    replaced(monkeypatch, "report", build=lambda d: asked.append(d.name) or d)
    for number, name in enumerate(("suite", "bench", "eval", "empty")):
        made = store.open_run(tmp_path, name, notebook="n")
        made.update({"created_s": number})
        run(capsys, "report")
        if name == "suite":
            (made.dir / "timings.json").write_text("{}")
        elif name == "bench":
            made.append("rows", {"arm": "nextn"})
        elif name == "eval":  # an evaluation has no rows of requests
            made.append("gsm8k", {"id": "0000", "correct": True})
        run(capsys, "report")
    assert asked == ["suite", "suite", "suite", "bench", "bench", "eval", "eval", "eval"]


@pytest.mark.parametrize(("problems", "code"), [([], 0), (["a.ipynb: cell 3: a shell line"], 1)])
def test_check_notebooks(monkeypatch, capsys, root, problems, code):
    asked = []
    fixed = []
    replaced(
        monkeypatch,
        "nbcheck",
        check=lambda paths: asked.append(paths) or problems,
        fix=lambda paths: fixed.extend(paths) or paths,
    )
    assert run(capsys, "check-notebooks")[0] == code
    got = run(capsys, "check-notebooks", "a.ipynb", "b")
    assert got == (code, "".join(f"{p}\n" for p in problems), "")
    assert asked == [[root / "notebooks"], [Path("a.ipynb"), Path("b")]] and not fixed
    _, out, _ = run(capsys, "check-notebooks", "--fix", "b")
    assert out.startswith("b: rewritten\n") and fixed == [Path("b")]


class Session:
    """Stands for a notebook session; writes down what it was asked."""

    def __init__(self, ladder=("baseline", "fp8-head", "nextn"), fails_at=None) -> None:
        self.asked: list[str] = []
        self.began = 0
        self.recipe = types.SimpleNamespace(ladder=ladder)
        self.run = types.SimpleNamespace(path=lambda name: Path("/runs/r") / name)
        self.proofs = ["the proof"]
        self.fails_at = fails_at

    def begin(self, name, lane, run_id):
        self.began += 1
        return self

    def start(self, stage, variant=None):
        self.asked.append(f"start {stage} {variant}")
        return "ready"

    def prove(self):
        self.asked.append("prove")
        if self.fails_at and self.fails_at in self.asked[-2]:
            raise NotLive("The head is BF16.")

    def stop(self):
        self.asked.append("stop")


@pytest.fixture
def session(monkeypatch):
    made = Session()
    replaced(monkeypatch, "notebook", begin=made.begin)
    replaced(monkeypatch, "show", proof=str)
    monkeypatch.setenv("SPARKLING_SERVER_PYTHON", PYTHON)
    return made


def test_prove(capsys, session):
    code, out, _ = run(capsys, "prove", "nextn")
    assert (code, out) == (0, "ready\nthe proof\n")
    assert session.asked == ["start nextn None", "prove", "stop"]
    session.fails_at = "nextn"
    assert run(capsys, "prove", "nextn")[0] == 1


def test_prove_refuses_what_cannot_run_here_before_it_starts_anything(capsys, session):
    assert "has no stage 'nope'" in refused(capsys, "prove", "nope")
    assert "has no variant 'yarn'" in refused(capsys, "prove", "nextn", "--variant", "yarn")
    assert session.asked == [] and session.began == 0


def test_prove_what_is_being_served(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("SPARKLING_RUNS", str(tmp_path))
    asked = []

    class Proof:
        def __init__(self, ok):
            self.ok = ok

        def require(self):
            if not self.ok:
                raise NotLive("The head is BF16.")

        def __str__(self):
            return "the table"

    replaced(monkeypatch, "serving", find=lambda runs, port: asked.append((runs, port)) or "it")
    replaced(monkeypatch, "show", proof=str)
    replaced(monkeypatch, "proof", prove=lambda server: Proof(server == "it"))
    assert run(capsys, "prove") == (0, "the table\n", "")
    replaced(monkeypatch, "proof", prove=lambda server: Proof(False))
    assert run(capsys, "prove", "--port", "31000") == (
        1,
        "the table\n",
        "error: The head is BF16.\n",
    )
    assert asked == [(tmp_path, None), (tmp_path, 31000)]


# -- the real functions take what the handlers give ----------------------------------------------


@pytest.mark.parametrize(
    ("module", "name", "args", "given"),
    [
        (
            "server",
            "start",
            ["launch"],
            "python log api_key deadline_s extra_env progress exact_port runs",
        ),
        ("server", "stop_all", ["runs"], ""),
        ("serving", "remembered", ["server", "runs"], ""),
        ("serving", "find", ["runs", 1], ""),
        ("weightcheck", "check", ["model"], ""),
        ("tiny", "build", ["dest"], "seed noise random"),
        ("needs", "check", [(), "lane"], ""),
        ("notebook", "begin", ["name"], "lane run_id"),
        ("notebook", "Session.launch", ["self", "stage"], ""),
        ("notebook", "Session.start", ["self", "stage"], "variant"),
        ("notebook", "Session.prove", ["self"], ""),
        ("notebook", "Session.measure", ["self", ["w"]], "repeats"),
        ("notebook", "Session.ladder", ["self"], ""),
        ("notebook", "Session.stop", ["self"], ""),
        ("proof", "prove", ["server"], ""),
        ("proof", "Proof.require", ["self"], ""),
        ("show", "proof", ["proof"], ""),
        (
            "suite",
            "run_suite",
            ["lane"],
            "notebooks params run_id resume cell_timeout_s progress record_minutes",
        ),
        ("store", "latest", ["runs"], "holding"),
        ("workloads", "workloads", [{}, ["names"]], ""),
        ("workloads", "repeats_of", [{}, 1], ""),
        ("report", "build", ["folder"], ""),
        ("nbcheck", "check", [["paths"]], ""),
        ("nbcheck", "fix", [["paths"]], ""),
    ],
)
def test_signatures(module, name, args, given):
    import importlib

    found = importlib.import_module(f"sparkling.{module}")
    for part in name.split("."):
        found = getattr(found, part)
    inspect.signature(found).bind(*args, **dict.fromkeys(given.split()))


def test_without_a_server_environment(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("SPARKLING_SERVER_PYTHON", str(tmp_path / "python"))
    replaced(monkeypatch, "notebook")
    said = refused(capsys, "prove", "nextn")
    assert said == (
        f"There is no server environment at {tmp_path / 'python'}; run ./scripts/setup.sh."
    )


def test_as_a_module_where_the_command_is_not_installed():
    done = subprocess.run(
        [sys.executable, "-m", "sparkling", "--version"],
        env={**os.environ, "PYTHONPATH": str(Path(cli.__file__).parents[1])},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0 and done.stdout.startswith("sparkling ")
