#!/usr/bin/env bash
# Makes the two environments of this repository, and does nothing that is already done:
#   .venv         the notebooks and the library       (requirements.txt, lib/)
#   .venv-server  SGLang on this machine's CPU        (env/server-cpu.txt, two small packages in lib/)
# Each carries a stamp of what it was made from; an environment whose stamp is missing or old is
# brought up to date. A set-up that was stopped goes on where it was. Variables:
#   PYTHON                    the Python to use (default: the one that made .venv, else python3.12,
#                             python3.11 or python3)
#   SPARKLING_SERVER_PYTHON   a server environment of your own; .venv-server is then left alone
#   SPARKLING_LANE            spark or gpu (or a GB10 that is found) leaves .venv-server out:
#                             `sparkling setup` makes the environment of those lanes; cpu makes it
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

logs=.cache/setup
say() { printf '%s\n' "$*"; }
fail() { printf 'error: %s\n' "$*" >&2; exit 1; }

find_python() {
  local name made
  made=$(.venv/bin/python -c 'import sys; print(sys._base_executable)' 2>/dev/null || true)
  for name in ${PYTHON:-$made python3.12 python3.11 python3}; do
    if "$name" -c 'import sys; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12)))' \
        2>/dev/null; then
      command -v "$name"
      return
    fi
  done
  if [ -n "${PYTHON:-}" ]; then
    fail "PYTHON is '$PYTHON', which is not a Python 3.11 or 3.12 that runs."
  fi
  fail "Python 3.11 or 3.12 is needed and was not found; install one, or set PYTHON to its path."
}

# What an environment is made from, as one line: the Python and the content of every input.
stamp_of() {
  { "$python" -c 'import platform, sys; print(sys.version, sys.base_prefix, platform.machine())'
    printf '%s\n' "$PWD"  # the packages of lib/ are installed by path
    cat scripts/setup.sh "$@"
  } | sha256sum | cut -d' ' -f1
}

current() {  # current DIR STAMP
  [ -x "$1/bin/python" ] && [ "$(cat "$1/.stamp" 2>/dev/null)" = "$2" ] &&
    "$1/bin/python" -c '' 2>/dev/null
}

make_env() {  # make_env DIR STAMP PIP-ARGUMENTS...
  local dir=$1 stamp=$2
  shift 2
  rm -f "$dir/.stamp"
  # A venv of another Python, one that was moved or one that no longer starts is made anew; into
  # any other pip only adds what is missing.
  local made
  made=$("$dir/bin/python" -c 'import sys; print(sys.version, sys.base_prefix)' 2>/dev/null || true)
  if [ "$made" != "$("$python" -c 'import sys; print(sys.version, sys.base_prefix)')" ] ||
      ! grep -qF " $PWD/$dir" "$dir/pyvenv.cfg"; then
    rm -rf "$dir"
  fi
  if ! "$dir/bin/python" -m pip --version >/dev/null 2>&1; then
    "$python" -m venv --clear "$dir"
  fi
  local pip=("$dir/bin/python" -m pip install --disable-pip-version-check --no-input
    --progress-bar off)
  "${pip[@]}" "$@"
  # Where no CPU build of torch is to be had, pip took the CUDA build, which cannot be imported
  # without CUDA libraries (a large download, and otherwise unused). Get them, then restore the
  # exact versions that resolving them may have moved.
  local torch
  torch=$(sed -n 's/^\(torch==[^ ;]*\).*/\1/p' env/server-cpu.txt)
  if [ "$dir" = .venv-server ] && ! "$dir/bin/python" -c 'import torch'; then
    "${pip[@]}" "$torch"
    "${pip[@]}" "$@"
    "$dir/bin/python" -c 'import torch'
  fi
  printf '%s\n' "$stamp" > "$dir/.stamp"
}

python=$(find_python)
if ! "$python" -c 'import venv, ensurepip' 2>/dev/null; then
  version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
  fail "$python cannot make virtual environments; on Debian or Ubuntu: sudo apt install python$version-venv"
fi
mkdir -p "$logs"

# Two set-ups at once would write into the same folders. pip holds the lock too, so that a set-up
# waits for what a killed one left running.
if command -v flock >/dev/null; then
  exec 9> "$logs/lock"
  flock -n 9 || { say "Another set-up is running; waiting for it."; flock 9; }
fi

names=() pids=()
started=$SECONDS
finish() {  # end what is still installing; no stamp was written for it
  local pid
  for pid in "${pids[@]}"; do kill -- "-$pid" 2>/dev/null || kill "$pid" 2>/dev/null || true; done
}
trap finish EXIT
trap 'say "Stopped; run it again and it goes on from here."; exit 130' INT TERM

begin() {  # begin DIR INPUTS... -- PIP-ARGUMENTS...
  local dir=$1 stamp
  local inputs=()
  shift
  while [ "$1" != -- ]; do inputs+=("$1"); shift; done
  shift
  stamp=$(stamp_of "${inputs[@]}")
  if current "$dir" "$stamp"; then
    say "$dir is up to date."
    return
  fi
  say "$dir: installing (log: $logs/${dir#.}.log)"
  set -m  # a process group of its own, so that stopping ends pip's children too
  (set -euo pipefail; make_env "$dir" "$stamp" "$@") > "$logs/${dir#.}.log" 2>&1 &
  set +m
  names+=("$dir") pids+=($!)
}

gpu_lane() {  # is it for a GPU's lane that this is set up?
  case "${SPARKLING_LANE:-auto}" in
    spark | gpu) return 0 ;;
    auto) timeout 5 nvidia-smi -L 2>/dev/null | grep -q GB10 ;;
    *) return 1 ;;
  esac
}

begin .venv requirements.txt lib/pyproject.toml -- -r requirements.txt
if [ -n "${SPARKLING_SERVER_PYTHON:-}" ]; then
  say "SPARKLING_SERVER_PYTHON is set: .venv-server is left alone."
elif gpu_lane; then
  say ".venv-server is for the cpu lane and left out; .venv/bin/sparkling setup makes this lane's."
else
  # Its two lists are complete, so pip resolves nothing; both start from SGLang's own pins.
  begin .venv-server env/server-cpu.txt env/engine-test.txt lib/sgl_kernel_cpu/pyproject.toml \
    lib/sparkling_sglang/pyproject.toml -- \
    --no-deps -r env/server-cpu.txt -r env/engine-test.txt \
    -e lib/sgl_kernel_cpu -e lib/sparkling_sglang
fi

# Wait for both, and say every 15 seconds where they are.
failed=()
told=$SECONDS
while [ "${#pids[@]}" -gt 0 ]; do
  sleep 0.5
  left_names=() left_pids=()
  for i in "${!pids[@]}"; do
    if kill -0 "${pids[i]}" 2>/dev/null; then
      left_names+=("${names[i]}") left_pids+=("${pids[i]}")
    elif wait "${pids[i]}"; then
      say "${names[i]}: ready after $((SECONDS - started)) s."
    else
      failed+=("${names[i]}")
    fi
  done
  names=("${left_names[@]}") pids=("${left_pids[@]}")
  if [ $((SECONDS - told)) -ge 15 ]; then
    told=$SECONDS
    for name in "${names[@]}"; do
      count=$(grep -c '^Collecting\|^Processing\|^Obtaining' "$logs/${name#.}.log" || true)
      say "[$((SECONDS - started)) s] $name: $count packages seen"
    done
  fi
done

for name in "${failed[@]}"; do
  log=$logs/${name#.}.log
  why=$(grep -a '^ERROR\|^error\|No space left\|Killed' "$log" | tail -1 || true)
  say "error: $name could not be made: ${why:-see the log} (log: $log); run it again to go on." >&2
done
[ "${#failed[@]}" -eq 0 ]
