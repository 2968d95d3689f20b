#!/usr/bin/env bash
# All Python tests, in two halves side by side: most wait for processes that they started, so one
# half leaves a core idle. Fails where a half does; the second half's output follows the first's.
set -uo pipefail
cd "$(dirname "$0")/.."
first=(tests/comm tests/door tests/examples tests/guide tests/lab tests/launch tests/moe tests/net)
second=.build/test-python.log
mkdir -p .build
.venv/bin/python -m pytest -p no:cacheprovider "${first[@]/#/--ignore=}" "$@" >"$second" 2>&1 &
other=$!
trap 'kill $other 2>/dev/null; exit 130' INT TERM
.venv/bin/python -m pytest "${first[@]}" "$@"
mine=$?
wait $other
his=$?
cat "$second"
echo "first half: $([ $mine = 0 ] && echo passed || echo failed), second half: $([ $his = 0 ] && echo passed || echo failed)"
[ $mine = 0 ] && [ $his = 0 ]
