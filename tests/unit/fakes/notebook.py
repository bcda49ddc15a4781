"""A stand-in for a notebook's kernel: starts a server, says who is who, and waits to be killed.

Usage: notebook.py LOG HOW SERVER-ARGUMENTS..., where HOW is a comma-separated list of
`wait` (until ready), `fork` (leave a fork that holds all our file descriptors), `thread` (start
from a thread that ends), `exit` (end at once, without stopping), `raise` (end by an exception).
"""

import json
import os
import sys
import threading
import time
from pathlib import Path

from sparkling import server
from sparkling.recipe import Launch

log, how, argv = Path(sys.argv[1]), sys.argv[2].split(","), sys.argv[3:]
launch = Launch(
    argv=("-u", str(Path(__file__).with_name("fake_server.py")), *argv),
    env={},
    recipe="fake",
    stage="baseline",
    variant=None,
    switches={},
    served_name="fake",
)
started = []


def begin() -> None:
    started.append(
        server.start(
            launch, python=Path(sys.executable), log=log, wait="wait" in how, deadline_s=60
        )
    )


if "thread" in how:
    thread = threading.Thread(target=begin)
    thread.start()
    thread.join()
else:
    begin()
running = started[0]
fork = 0
if "fork" in how:
    fork = os.fork()
    if fork == 0:
        time.sleep(120)
        os._exit(0)
record = json.loads((log.parent / ".servers" / f"{running.id}.json").read_text())
print(json.dumps({**record, "fork": fork, "port": running.port}), flush=True)
if "raise" in how:
    raise RuntimeError("a cell failed")
if "exit" not in how:
    time.sleep(600)
