"""Memory safety with the real server: the sum against what it takes, and a run that goes on after
the watchdog ended its server. (A hog of real memory: test_memory_hog.py, which has to be alone.)"""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from sparkling import bench, claims, memwatch, procs, recipe, server, tiny
from sparkling.errors import ServerError

pytestmark = [pytest.mark.server, pytest.mark.timeout(900)]

READY_S = 400
GIB = 2**30


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.build(tmp_path_factory.mktemp("model") / "tiny-ling")


def meminfo(path: Path, free: float) -> None:
    fresh = path.with_suffix(".new")
    fresh.write_text(f"MemTotal: {24 * 2**20} kB\nMemAvailable: {int(free * 2**20)} kB\n")
    fresh.replace(path)


def test_a_run_goes_on_after_the_watchdog_ended_its_server(
    model: Path, server_python: Path, tmp_path: Path
) -> None:
    book = recipe.load("tiny-ling")
    launch = book.render("baseline", model=model, port=0)
    run = tmp_path / "runs" / "r"
    run.mkdir(parents=True)
    (run / "manifest.json").write_text("{}")
    info, rows = tmp_path / "meminfo", run / "40_baseline" / "rows.jsonl"
    limits = memwatch.Limits(4 * GIB, 2 * GIB, 24 * GIB, str(info))
    chosen = bench.workloads({**book.sizes, "prompts": 2}, ["short-turn"])

    def start() -> server.Server:
        meminfo(info, 12)
        return server.start(
            launch,
            python=server_python,
            log=run / "40_baseline" / "logs" / "s.log",
            deadline_s=READY_S,
            watch=limits,
        )

    def measure(running: server.Server, progress: object = None) -> list[dict]:
        return bench.run(
            running,
            arm="baseline",
            launch=running.launch,
            workloads=chosen,
            repeats=2,
            out=rows,
            progress=progress,
        )

    with start() as running:
        # What was reckoned covers what it takes, and not twice over.
        need = running.need
        held = claims._held(running._keeper.pid)
        print(f"takes {held / GIB:.2f} GiB, reckoned {need.total / GIB:.2f} GiB")
        assert need.total / 3 < held < need.total
        people = running.processes()

        def starve(done: int, total: int, row: dict) -> None:
            if done == 1:
                meminfo(info, 1)
                # Else all rows may be there before the watchdog looks.
                limit = time.monotonic() + 60
                while not running.ended_for_memory() and time.monotonic() < limit:
                    time.sleep(0.1)

        with pytest.raises(
            ServerError, match=r"the rows so far are kept: restart it and resume"
        ) as e:
            measure(running, starve)
        assert "ended before the machine ran out" in str(e.value)
        assert procs.wait_gone(people, 60) == []
    kept = [json.loads(line) for line in rows.read_text().splitlines()]
    assert 1 <= len(kept) < 2 * len(chosen[0].prompts)
    (event,) = [json.loads(line) for line in (run / server.MEMORY_EVENTS).read_text().splitlines()]
    assert event["level"] == "end" and event["recipe"] == "tiny-ling"
    with start() as running:
        everything = measure(running)
    assert len(everything) == 2 * len(chosen[0].prompts)
    # What was measured before is not measured again.
    assert [json.loads(line) for line in rows.read_text().splitlines()][: len(kept)] == kept


def test_a_small_probe_server_starts_from_a_configuration_alone(
    model: Path, server_python: Path, tmp_path: Path
) -> None:
    """What warms kernels up on a GPU, on this lane: few layers, dummy weights, two starts."""
    from sparkling import kernels_probe, lane

    here = lane.detect("cpu")
    where = here.__class__(
        **{**vars(here), "model": model, "server_python": server_python, "runs": tmp_path / "runs"}
    )
    launch = recipe.load("tiny-ling").render("baseline", model=model, port=0)
    found = kernels_probe.warm(launch, where, tmp_path / "probe", deadline_s=READY_S)
    assert found.first_s > 0 and found.again_s > 0
    assert not list((tmp_path / "probe" / "model").glob("*.safetensors"))
    log = (tmp_path / "probe" / "baseline-again.log").read_text()
    assert "Load weight end" in log
