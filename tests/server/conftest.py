"""A server that two modules share: starting one takes some fifteen seconds of two cores."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest


class TinyNextn:
    """The tiny Ling on the nextn stage, its log reporting every decode step; started when asked for.

    An idle server keeps a core busy, so the last module that uses it stops it (`test_cross_checks`).
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


@pytest.fixture(scope="session")
def tiny_nextn(
    server_python: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[TinyNextn]:
    shared = TinyNextn(tmp_path_factory.mktemp("tiny-nextn"), server_python)
    yield shared
    shared.stop()
