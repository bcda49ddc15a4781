#!/usr/bin/env bash
# From a plain machine to the report of an executed suite. Arguments go to `sparkling suite`:
#   ./scripts/demo.sh --resume                 continue a stopped run
#   ./scripts/demo.sh --notebook 90_serve      only this one
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
case " $* " in *" --lane cpu "* | *" --lane=cpu "*) export SPARKLING_LANE=cpu ;; esac
./scripts/setup.sh
# On a machine with a GPU its server environment too; nothing on the cpu lane.
.venv/bin/sparkling setup --if-needed "$@"
# The tiny Ling, in a second, where the suite would use it (--recipe tiny-ling); the cpu lane's own
# model, Sparklet, is in the repository.
.venv/bin/sparkling tiny --if-needed "$@" > /dev/null
exec .venv/bin/sparkling suite "$@"
