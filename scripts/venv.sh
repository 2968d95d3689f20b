#!/bin/sh
# A virtual environment with uv in it. A half-made one is removed: it would look finished next time.
set -eu
python=$1 venv=$2
[ -x "$venv/bin/uv" ] && exit 0
rm -rf "$venv"
echo "making a virtual environment in $venv"
if ! "$python" -m venv "$venv"; then
    rm -rf "$venv"
    echo "missing: $python cannot make a virtual environment: install the package python3-venv" >&2
    exit 1
fi
if ! "$venv/bin/python" -m pip install --quiet --disable-pip-version-check -c constraints.txt uv; then
    rm -rf "$venv"
    echo "missing: pip could not install uv: is a package index reachable?" >&2
    exit 1
fi
