"""The shell scripts, with a Python that only pretends: fast, and every failure can be had."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

FAKE = r"""#!/usr/bin/env bash
# Pretends to be Python as far as scripts/setup.sh asks. FAKE_* say how it behaves.
here=$(cd "$(dirname "$0")/.." && pwd)
if [ "$1" = -c ]; then
  case "$2" in
    *"not in ((3, 11)"*) exit "${FAKE_WRONG_VERSION:-0}" ;;
    *"import venv"*) exit "${FAKE_NO_VENV:-0}" ;;
    *"%d.%d"*) echo 3.11 ;;
    "import torch") [ -z "${FAKE_NO_TORCH:-}" ] || [ -f "$here/cuda" ]; exit ;;
    "") ;;
    *_base_executable*) cat "$here/bin/.base" 2>/dev/null ;;
    *) cat "$here/bin/.version" 2>/dev/null || echo "${FAKE_VERSION:-3.11.9} /usr" ;;
  esac
elif [ "$2" = venv ]; then
  dir=${!#}
  echo "venv $dir" >> "$FAKE_LOG"
  rm -rf "$dir" && mkdir -p "$dir/bin"
  cp "$0" "$dir/bin/python"
  echo "${FAKE_VERSION:-3.11.9} /usr" > "$dir/bin/.version"
  readlink -f "$0" > "$dir/bin/.base"
  echo "command = python -m venv $PWD/$dir" > "$dir/pyvenv.cfg"
  printf '#!/usr/bin/env bash\necho "sparkling $*" >> "$FAKE_LOG"\n[ "$1" != suite ] || exit "${FAKE_EXIT:-0}"\n' \
    > "$dir/bin/sparkling"
  chmod +x "$dir/bin/sparkling"
elif [ "$3" = --version ]; then
  [ -x "$here/bin/python" ]
elif [ "$2" = pip ]; then
  echo "pip $(basename "$here") $*" >> "$FAKE_LOG"
  case "$*" in *" torch=="*) touch "$here/cuda" ;; esac
  echo "Collecting something"
  sleep "${FAKE_SLOW:-0}"
  while [ -e "${FAKE_HOLD:-/dev/null/no}" ]; do sleep 0.05; done
  [ "${FAKE_KILL:-}" != "$(basename "$here")" ] || kill -9 $$
  if [ "${FAKE_FAIL:-}" = "$(basename "$here")" ]; then
    echo "ERROR: No matching distribution found for nothing==1" >&2
    exit 1
  fi
  echo "done $(basename "$here")" >> "$FAKE_LOG"
else
  echo "python ${*: 1} require=${SPARKLING_REQUIRE_SERVER:-}" >> "$FAKE_LOG"
  exit "${FAKE_EXIT:-0}"
fi
"""


class Checkout:
    """A copy of the scripts and their inputs, with a pretended Python."""

    def __init__(self, root: Path, place: Path) -> None:
        self.place = place
        for name in ("requirements.txt", "scripts", ".ci", "env"):
            source, target = root / name, place / name
            if source.is_dir():
                shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                place.mkdir(parents=True, exist_ok=True)
                shutil.copy(source, target)
        for package in ("lib", "lib/sgl_kernel_cpu", "lib/sparkling_sglang"):
            (place / package).mkdir(parents=True, exist_ok=True)
            shutil.copy(root / package / "pyproject.toml", place / package / "pyproject.toml")
        (place / "env").mkdir(exist_ok=True)
        (place / "env" / "server-cpu.txt").touch()
        self.bin = place.parent / f"{place.name}-bin"
        self.bin.mkdir()
        self.python = self.bin / "python3.11"
        self.python.write_text(FAKE)
        self.python.chmod(0o755)
        self.log = place.parent / f"{place.name}.log"
        self.log.touch()

    def environment(self, **extra: str) -> dict[str, str]:
        tools = "/usr/local/bin:/usr/bin:/bin"
        base = {"PATH": f"{self.bin}:{tools}", "HOME": str(self.place), "FAKE_LOG": str(self.log)}
        return base | {"PYTHON": "python3.11"} | extra

    def run(
        self,
        script: str = "scripts/setup.sh",
        *arguments: str,
        cwd: Path | None = None,
        **extra: str,
    ):
        return subprocess.run(
            [str(self.place / script), *arguments],
            env=self.environment(**extra),
            cwd=cwd or self.place,
            capture_output=True,
            text=True,
            timeout=240,
        )

    def start(self, **extra: str):
        return subprocess.Popen(
            [str(self.place / "scripts/setup.sh")],
            env=self.environment(**extra),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            # Background jobs of a shell ignore Ctrl-C, and so would their children.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )

    @property
    def calls(self) -> list[str]:
        return self.log.read_text().splitlines()

    def forget(self) -> None:
        self.log.write_text("")


@pytest.fixture
def checkout(root, tmp_path):
    return Checkout(root, tmp_path / "checkout")


def test_both_environments_are_made_once(checkout, tmp_path):
    first = checkout.run(cwd=tmp_path)  # from anywhere
    assert first.returncode == 0, first.stderr
    assert {c for c in checkout.calls if c.startswith(("venv", "done"))} == {
        "venv .venv",
        "venv .venv-server",
        "done .venv",
        "done .venv-server",
    }
    assert any("-r requirements.txt" in call for call in checkout.calls)
    assert any(
        call.endswith(
            "--no-deps -r env/server-cpu.txt -r env/engine-test.txt "
            "-e lib/sgl_kernel_cpu -e lib/sparkling_sglang"
        )
        for call in checkout.calls
    )
    checkout.forget()
    second = checkout.run()
    assert second.returncode == 0
    assert checkout.calls == []
    assert second.stdout == ".venv is up to date.\n.venv-server is up to date.\n"


@pytest.mark.parametrize(
    ("changed", "again"),
    [
        ("requirements.txt", {".venv"}),
        ("lib/pyproject.toml", {".venv"}),
        ("env/server-cpu.txt", {".venv-server"}),
        ("env/engine-test.txt", {".venv-server"}),
        ("lib/sgl_kernel_cpu/pyproject.toml", {".venv-server"}),
        ("lib/sparkling_sglang/pyproject.toml", {".venv-server"}),
        ("scripts/setup.sh", {".venv", ".venv-server"}),
    ],
)
def test_only_what_is_out_of_date_is_done(checkout, changed, again):
    checkout.run()
    checkout.forget()
    with (checkout.place / changed).open("a") as file:
        file.write("# changed\n")
    assert checkout.run().returncode == 0
    assert {c.split()[1] for c in checkout.calls if c.startswith("done")} == again
    assert not [c for c in checkout.calls if c.startswith("venv")]  # pip adds to what is there


def test_another_python_means_other_environments(checkout):
    checkout.run()
    checkout.forget()
    assert checkout.run(FAKE_VERSION="3.12.1").returncode == 0
    assert [c for c in checkout.calls if c == "venv .venv-server"]


def test_the_python_that_made_the_environments_is_used_again(checkout):
    """Without PYTHON the second run must not find another one first, and start over."""
    other = checkout.bin / "my-python"
    other.write_text(FAKE)
    other.chmod(0o755)
    checkout.run(PYTHON=str(other), FAKE_VERSION="3.12.1")
    checkout.forget()
    # python3.11, first on PATH, calls itself another version; my-python would still be 3.12.1.
    other.write_text(FAKE.replace("3.11.9", "3.12.1"))
    assert checkout.run(PYTHON="").returncode == 0
    assert checkout.calls == []


def test_a_moved_checkout_is_made_anew(checkout, tmp_path):
    checkout.run()
    checkout.place = checkout.place.rename(tmp_path / "moved")
    checkout.forget()
    assert checkout.run().returncode == 0
    assert {"venv .venv", "venv .venv-server", "done .venv"} <= set(checkout.calls)


def test_a_broken_environment_is_made_anew(checkout):
    checkout.run()
    checkout.forget()
    (checkout.place / ".venv/bin/python").unlink()
    assert checkout.run().returncode == 0
    assert [c for c in checkout.calls if c.startswith(("venv", "done"))] == [
        "venv .venv",
        "done .venv",
    ]


def test_an_own_server_environment_is_respected(checkout):
    done = checkout.run(SPARKLING_SERVER_PYTHON="/some/python")
    assert done.returncode == 0 and ".venv-server is left alone" in done.stdout
    assert not (checkout.place / ".venv-server").exists()


@pytest.mark.parametrize("lane", ["spark", "gpu", "cpu"])
def test_a_gpus_lane_has_no_use_for_the_cpus_environment(checkout, lane):
    done = checkout.run(SPARKLING_LANE=lane)
    assert done.returncode == 0 and (checkout.place / ".venv").is_dir()
    assert (checkout.place / ".venv-server").is_dir() is (lane == "cpu")
    assert ("sparkling setup makes this lane's" in done.stdout) is (lane != "cpu")


def test_a_spark_is_found_and_its_cpu_lane_still_to_be_had(checkout):
    smi = checkout.bin / "nvidia-smi"
    smi.write_text("#!/bin/sh\necho 'GPU 0: NVIDIA GB10 (UUID: GPU-x)'\n")
    smi.chmod(0o755)
    assert checkout.run().returncode == 0
    assert not (checkout.place / ".venv-server").exists()
    assert checkout.run("scripts/demo.sh", "--lane", "cpu").returncode == 0
    assert (checkout.place / ".venv-server").is_dir()
    shutil.rmtree(checkout.place / ".venv-server")
    assert checkout.run("scripts/test.sh").returncode == 0
    assert (checkout.place / ".venv-server").is_dir()


def test_a_torch_that_needs_cuda_libraries_gets_them(checkout):
    assert checkout.run(FAKE_NO_TORCH="1").returncode == 0
    server = [c for c in checkout.calls if c.startswith("pip .venv-server")]
    lock = [c for c in server if "--no-deps" in c]
    (torch,) = [c for c in server if " torch==" in c]
    assert "--no-deps" not in torch and torch.split()[-1].startswith("torch==2.")
    assert len(lock) == 2 and server.index(torch) == 1  # then the exact versions once more
    checkout.forget()
    assert checkout.run(FAKE_NO_TORCH="1").returncode == 0
    assert checkout.calls == []


def one_sentence(done) -> str:
    assert done.returncode == 1
    lines = done.stderr.splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: "), done.stderr
    return lines[0]


def test_no_python_is_one_sentence(checkout):
    said = one_sentence(checkout.run(FAKE_WRONG_VERSION="1"))
    assert "PYTHON is 'python3.11', which is not a Python 3.11 or 3.12" in said
    said = one_sentence(checkout.run(PYTHON="/nowhere/python"))
    assert "PYTHON is '/nowhere/python'" in said
    tools = checkout.bin.parent / "tools"
    tools.mkdir()
    for tool in ("bash", "env", "dirname"):
        (tools / tool).symlink_to(shutil.which(tool))
    said = one_sentence(checkout.run(PYTHON="", PATH=str(tools)))
    assert said == (
        "error: Python 3.11 or 3.12 is needed and was not found; install one, or set PYTHON to "
        "its path."
    )


def test_a_debian_without_venv_is_one_sentence(checkout):
    said = one_sentence(checkout.run(FAKE_NO_VENV="1"))
    assert "sudo apt install python3.11-venv" in said


@pytest.mark.parametrize("failing", [".venv", ".venv-server"])
def test_a_failed_pip_is_one_sentence_and_the_other_environment_is_kept(checkout, failing):
    other = {".venv": ".venv-server", ".venv-server": ".venv"}[failing]
    said = one_sentence(checkout.run(FAKE_FAIL=failing))
    log = f".cache/setup/{failing.removeprefix('.')}.log"
    assert said.startswith(f"error: {failing} could not be made: ERROR: No matching distribution")
    assert f"(log: {log})" in said and (checkout.place / log).is_file()
    assert (checkout.place / other / ".stamp").is_file()
    assert not (checkout.place / failing / ".stamp").exists()
    checkout.forget()
    assert checkout.run().returncode == 0
    assert [c for c in checkout.calls if c.startswith(("venv", "done"))] == [f"done {failing}"]


def test_a_killed_pip_is_told(checkout):
    said = one_sentence(checkout.run(FAKE_KILL=".venv"))
    assert said.startswith("error: .venv could not be made:") and "Killed" in said


def wait_for(checkout, *, pips: int) -> None:
    deadline = time.monotonic() + 60
    while sum(call.startswith("pip") for call in checkout.calls) < pips:
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_a_stopped_set_up_ends_pip_and_goes_on_later(checkout, sent):
    running = checkout.start(FAKE_SLOW="300")
    wait_for(checkout, pips=2)
    running.send_signal(sent)
    said, _ = running.communicate(timeout=60)
    assert running.returncode == 130 and "it goes on from here" in said
    deadline = time.monotonic() + 60
    while subprocess.run(["pgrep", "-f", str(checkout.place)], stdout=subprocess.PIPE).stdout:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert not [c for c in checkout.calls if c.startswith("done")]
    checkout.forget()
    assert checkout.run().returncode == 0
    assert sorted(c for c in checkout.calls if c.startswith(("venv", "done"))) == [
        "done .venv",
        "done .venv-server",
    ]


def test_two_set_ups_at_once_do_the_work_once(checkout):
    hold = checkout.bin / "hold"
    hold.touch()
    first = checkout.start(FAKE_HOLD=str(hold))
    wait_for(checkout, pips=1)
    second = checkout.start()
    said = second.stdout.readline()
    hold.unlink()  # the first one goes on when the second one has met it
    rest, _ = second.communicate(timeout=240)
    first.communicate(timeout=60)
    assert (first.returncode, second.returncode) == (0, 0)
    assert said.startswith("Another set-up is running")
    assert rest.endswith(".venv is up to date.\n.venv-server is up to date.\n")
    assert len([c for c in checkout.calls if c.startswith("done")]) == 2


def test_the_demo_passes_its_arguments_and_its_exit_code_on(checkout):
    done = checkout.run("scripts/demo.sh", "--resume", "-p", "text=two words")
    assert done.returncode == 0
    given = "--resume -p text=two words"
    assert checkout.calls[-3:] == [
        f"sparkling setup --if-needed {given}",
        f"sparkling tiny --if-needed {given}",
        f"sparkling suite {given}",
    ]
    checkout.forget()
    assert checkout.run("scripts/demo.sh", FAKE_EXIT="3").returncode == 3
    named = ("setup --if-needed", "tiny --if-needed", "suite")
    assert checkout.calls == [f"sparkling {name}" for name in named]


def test_a_checkpoint_of_ones_own_is_left_alone(checkout):
    # Whose checkpoint it is, `sparkling tiny --if-needed` finds out; nothing else may be called.
    for script in ("scripts/demo.sh", "scripts/test.sh"):
        checkout.forget()
        assert checkout.run(script, SPARKLING_MODEL="/models/ling").returncode == 0
        built = [c for c in checkout.calls if c.startswith("sparkling tiny")]
        assert len(built) == 1 and built[0].startswith("sparkling tiny --if-needed")


def test_a_failed_set_up_stops_the_demo_and_the_tests(checkout):
    for script in ("scripts/demo.sh", "scripts/test.sh", ".ci/run"):
        done = checkout.run(script, FAKE_FAIL=".venv")
        assert done.returncode == 1
        assert not [c for c in checkout.calls if c.startswith(("sparkling", "python"))]


def test_all_tests_are_run_in_order_and_the_ci_runs_them(checkout, root):
    for script in ("scripts/test.sh", ".ci/run"):
        checkout.forget()
        assert checkout.run(script).returncode == 0
        call = checkout.calls[-1]
        folders = call.removeprefix("python -m pytest ").removesuffix(" require=1").split()
        assert [folders.pop(0) for _ in range(3)] == ["-n", "3", "--nbval-lax"]
        # Nothing else is left out or picked: every other word is a folder or a file.
        assert folders[0] == "tests/static" and folders[-1] == "tests/leaks"
        # Every folder of tests is run by the CI, and nothing is named that does not exist.
        there = {f"tests/{p.parent.name}" for p in (root / "tests").glob("*/test_*.py")}
        by_engine = {"tests/engine", "tests/sparklet"}  # they need torch: test_engine.py runs both
        assert (there - by_engine) | {"tests/test_engine.py"} == set(folders)
        module = (root / "tests" / "test_engine.py").read_text()
        assert all(f'"{folder}"' in module for folder in by_engine)
    checkout.forget()
    assert checkout.run("scripts/test.sh", "-k", "tiny", FAKE_EXIT="5").returncode == 5
    assert checkout.calls[-1] == "python -m pytest -k tiny require=1"


def test_the_scripts_are_sound_and_executable(root):
    for script in (*(root / "scripts").glob("*.sh"), root / ".ci" / "run"):
        assert os.access(script, os.X_OK), script
        subprocess.run(["bash", "-n", str(script)], check=True)
        assert script.read_text().count("set -euo pipefail") >= 1
