"""The Spark's pins resolve: every wheel is there for aarch64 Linux and Python 3.12, and fits the rest.

Only metadata is fetched, through the index that pip or uv is set up with. Without a network, or where
uv is missing, the resolution is skipped with a message; what the file itself promises is always checked.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from sparkling.environments_run import pip_index

PLATFORM = "aarch64-manylinux_2_39"  # DGX OS 7 and Ubuntu 24.04 have glibc 2.39
NO_NETWORK = re.compile(
    r"error sending request|dns error|failed to lookup|Connection refused|timed out|tcp connect"
    r"|Network is unreachable|Failed to fetch|invalid peer certificate",
    re.IGNORECASE,
)
PIN = re.compile(r"([A-Za-z0-9._-]+)==(\S+)")


def pins(path: Path) -> dict[str, str]:
    """name → version, of a file in which every line is a pin or a comment."""
    found = {}
    for line in path.read_text("utf-8").splitlines():
        bare = line.partition("#")[0].strip()
        if bare:
            match = PIN.fullmatch(bare)
            assert match, f"{path.name}: {line!r} is no exact pin"
            name = match[1].lower().replace("_", "-").replace(".", "-")
            assert name not in found, f"{path.name}: {name} is pinned twice"
            found[name] = match[2]
    return found


@pytest.fixture(scope="module")
def spark(root):
    return pins(root / "env" / "server-spark.txt")


def resolve(requirements: str, tmp_path: Path, *, platform: str = PLATFORM) -> dict[str, str]:
    """What uv makes of `requirements`, wheels only. Skips where nothing can be asked."""
    beside = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    uv = shutil.which("uv", path=beside)
    if uv is None:
        pytest.skip("uv is not installed (requirements.txt has it), so nothing can be resolved")
    source, out = tmp_path / "in.txt", tmp_path / "out.txt"
    source.write_text(requirements)
    env = dict(os.environ)
    index = pip_index(env)
    if index:
        env.setdefault("UV_DEFAULT_INDEX", index)
    done = subprocess.run(
        [uv, "pip", "compile", "--python-version", "3.12", "--python-platform", platform,
         "--only-binary", ":all:", "--no-annotate", "--no-header", "--no-config", "--quiet",
         str(source), "-o", str(out)],
        env=env, capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    if done.returncode != 0 and "No solution found" not in done.stderr:
        if NO_NETWORK.search(done.stderr):
            pytest.skip("the package index cannot be reached, so the pins are not resolved here")
        pytest.fail(f"uv: {done.stderr[-1500:]}")
    assert done.returncode == 0, done.stderr[-1500:]
    return pins(out)


@pytest.mark.slow
def test_the_pins_resolve_for_aarch64_and_nothing_is_missing(root, spark, tmp_path):
    text = (root / "env" / "server-spark.txt").read_text()
    found = resolve(text, tmp_path)
    assert found == spark  # complete: nothing is asked for that is not pinned


@pytest.mark.slow
def test_a_pin_that_is_gone_fails(spark, tmp_path):
    with pytest.raises(AssertionError, match=r"sglang==0\.5\.23\.post99"):
        resolve("sglang==0.5.23.post99\n", tmp_path)


@pytest.mark.slow
def test_what_the_fork_publishes_resolves_too(root, tmp_path):
    lines = (root / "env" / "server-spark-fork.txt").read_text().splitlines()
    published = [line for line in lines if line and not line.startswith(("#", "sglang"))]
    found = resolve("\n".join(published), tmp_path)
    assert found["torch"] == "2.13.0" and found["flashinfer-python"] == "0.6.17"
    assert any(name.startswith("nvidia-") and name.endswith("cu13") for name in found)


def test_it_is_sglang_with_cuda_13_and_humming(spark):
    assert spark["sglang"] == "0.5.23" and spark["humming-kernels"] == "0.1.12"
    assert spark["torch"] == "2.14.1" and spark["flashinfer-python"] == "0.7.2"
    # Which torch this is on aarch64 shows in what it asks for: its CUDA libraries, of 13.0.
    assert spark["cuda-toolkit"].startswith("13.0") and spark["nvidia-cuda-nvrtc"].startswith(
        "13.0"
    )
    assert "nvidia-cudnn-cu13" in spark and "ninja" in spark
    assert not [name for name in spark if name.endswith("cu12") and "cutlass" not in name]


def test_the_fork_is_pinned_to_a_commit_of_its_branch(root):
    text = (root / "env" / "server-spark-fork.txt").read_text()
    (line,) = [one for one in text.splitlines() if one.startswith("sglang")]
    assert re.fullmatch(
        r"sglang\[all\] @ git\+https://\S+\.git@[0-9a-f]{9,40}#subdirectory=python", line
    )
    assert "ling_v3_support_mxfp4_humming" in text
