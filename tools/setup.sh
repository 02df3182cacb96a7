#!/usr/bin/env bash
# Makes the project's own environment in $1 (default .venv): a virtual environment with the pinned packages of
# constraints.txt. Says what is missing instead of failing half way. PYTHON=... and CXX=... choose the programs.
#
# The pins name torch 2.13.0. Where pip would take its CUDA build (several GB; the CPU build is enough here), point pip at
# PyTorch's CPU index first, by PIP_EXTRA_INDEX_URL or in pip's configuration.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=${1:-.venv}

missing() {
  echo "eagle_cuda: missing: $1" >&2
  echo "            on Debian or Ubuntu: $2" >&2
  exit 1
}

# ---- Python 3.10 or newer, with venv and headers ---------------------------------------------------------------------
usable() { "$1" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, '"$2"'))' 2>/dev/null; }
python=
for candidate in ${PYTHON:-python3 python3.13 python3.12 python3.11 python3.10}; do
  if usable "$candidate" 13; then python=$candidate && break; fi
done
# Newer than the pins were tried with: better than nothing.
if [ -z "$python" ] && usable "${PYTHON:-python3}" 99; then python=${PYTHON:-python3}; fi
if [ -z "$python" ]; then
  found=$("${PYTHON:-python3}" --version 2>/dev/null || echo "no ${PYTHON:-python3}")
  missing "python 3.10 or newer (found: $found)" "apt install python3 python3-venv python3-dev"
fi
"$python" -c 'import venv, ensurepip' 2>/dev/null ||
  missing "the venv module of $($python --version)" "apt install python3-venv"
"$python" -c 'import sysconfig, os, sys; sys.exit(not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")))' ||
  missing "Python.h, the headers of $($python --version)" "apt install python3-dev"

# ---- a C++20 compiler -------------------------------------------------------------------------------------------------
compiler=${CXX:-c++}
command -v "${compiler%% *}" >/dev/null || missing "a C++ compiler ($compiler)" "apt install g++ (version 12 or newer)"
major=$($compiler -dumpversion | cut -d. -f1)
if $compiler --version | grep -qi clang; then oldest=16; else oldest=12; fi
[ "$major" -ge "$oldest" ] ||
  missing "$compiler version $oldest or newer (found $major)" "apt install g++-12, then CXX=g++-12 make ..."

# ---- the packages -------------------------------------------------------------------------------------------------------
echo "eagle_cuda: setting up $venv with $($python --version), $($compiler --version | head -1)"
"$venv/bin/python" -c '' 2>/dev/null || "$python" -m venv --clear "$venv"
requirements=$("$venv/bin/python" tools/requirements.py)
# shellcheck disable=SC2086  # one requirement a word
"$venv/bin/python" -m pip install -qq --no-compile --disable-pip-version-check --constraint constraints.txt $requirements
