#!/usr/bin/env bash
# Everything, in one pytest run: static gate, unit tests, the engine's tests (in .venv-server),
# a real server, the notebooks, nbval, and last a look at what is left behind. Arguments go to
# pytest, for instance `-k tiny`, `-m "not slow"` or a path.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
SPARKLING_LANE=cpu ./scripts/setup.sh
# The tiny Ling, in a second, where the recipe in use wants it.
.venv/bin/sparkling tiny --if-needed --lane cpu > /dev/null
export SPARKLING_REQUIRE_SERVER="${SPARKLING_REQUIRE_SERVER:-1}"
if [ "$#" -eq 0 ]; then
  set -- --nbval-lax tests/static tests/unit tests/test_engine.py tests/server tests/notebooks tests/leaks
fi
exec .venv/bin/python -m pytest "$@"
