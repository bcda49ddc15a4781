"""Memory safety with a real server and a real hog: what is available to the whole machine decides."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from sparkling import memory, memwatch, procs, recipe, server, tiny

pytestmark = [pytest.mark.server, pytest.mark.timeout(900)]

READY_S = 400
GIB = 2**30


def test_a_hog_beside_a_real_server(server_python: Path, tmp_path: Path) -> None:
    """Real memory: the machine and this process live, the server does not."""
    free = procs.memory_available()
    if free < 10 * GIB:
        pytest.skip("less than 10 GiB are available")
    model = tiny.build(tmp_path / "tiny-ling")
    launch = recipe.load("tiny-ling").render("baseline", model=model, port=0)
    log = tmp_path / "runs" / "s.log"
    with server.start(
        launch, python=server_python, log=log, deadline_s=READY_S, wait=False
    ) as first:
        first.wait_ready(READY_S)
        base = procs.memory_available()
    # The second start watches a limit that a hog of at most 3 GiB reaches.
    end = base - (512 << 20)
    limits = memwatch.Limits(end + (128 << 20), end)
    code = (
        "import sys, time\nheld = []\n"
        "for _ in range(24):\n    held.append(bytearray(b'x' * (128 << 20)))\n    time.sleep(0.1)\n"
        "print('full', flush=True)\nsys.stdin.read()\n"
    )
    with pytest.raises(server.StartFailed) as caught:
        hog = subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL
        )
        try:
            server.start(launch, python=server_python, log=log, deadline_s=READY_S, watch=limits)
        finally:
            alive = hog.poll() is None
            hog.kill()
            hog.wait()
    assert caught.value.diagnosis.kind == "memory-guard" and alive
    assert memory.watch_limits() is not None
