#!/usr/bin/env bash
# Everything, in one pytest run: static gate, unit tests, the engine's tests (in .venv-server),
# a real server, the notebooks, nbval, and last a look at what is left behind. Three workers share the
# files; what is judged by a clock or by the machine's memory runs at the end, alone (tests/in_turn.py).
# Arguments go to pytest instead, for instance `-k tiny`, `-m "not slow"` or a path; without `-n` among
# them one test runs after the other.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
SPARKLING_LANE=cpu ./scripts/setup.sh
# Hundreds of short processes import our packages; compiled once, also where Python may write no
# bytecode of its own accord.
.venv/bin/python -m compileall -q lib > /dev/null || true
# The tiny Ling, in a second, where the recipe in use wants it.
.venv/bin/sparkling tiny --if-needed --lane cpu > /dev/null
export SPARKLING_REQUIRE_SERVER="${SPARKLING_REQUIRE_SERVER:-1}"
if [ "$#" -eq 0 ]; then
  set -- -n 3 --nbval-lax \
    tests/static tests/unit tests/test_engine.py tests/server tests/notebooks tests/leaks
fi
exec .venv/bin/python -m pytest "$@"
