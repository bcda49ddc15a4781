"""A server that several modules share: starting one takes some fifteen seconds of two cores."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest


class TinyNextn:
    """The tiny Ling on the nextn stage, its log reporting every decode step; started when asked for.

    An idle server keeps a core busy, so it ends before a test that does not ask for this fixture.
    """

    def __init__(self, folder: Path, python: Path) -> None:
        from sparkling import tiny

        self.folder, self.python = folder, python
        self.model = tiny.build(folder / "tiny")
        self._started: list = []

    def running(self):
        from sparkling import recipe, server

        if not self._started or not self._started[-1].alive():
            launch = recipe.load("tiny-ling").render("nextn", model=self.model, port=0)
            launch = dataclasses.replace(launch, argv=(*launch.argv, "--decode-log-interval", "1"))
            one = server.start(
                launch,
                python=self.python,
                log=self.folder / f"server-{len(self._started)}.log",
                deadline_s=600,
                runs=self.folder,
            )
            self._started.append(one)
        return self._started[-1]

    def stop(self) -> None:
        for one in self._started:
            one.stop()


_shared: list[TinyNextn] = []


@pytest.fixture(scope="session")
def tiny_nextn(
    server_python: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[TinyNextn]:
    _shared.append(TinyNextn(tmp_path_factory.mktemp("tiny-nextn"), server_python))
    yield _shared[-1]
    _shared.pop().stop()


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    if "tiny_nextn" not in getattr(nextitem, "fixturenames", ()):
        for one in _shared:
            one.stop()
