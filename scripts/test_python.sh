#!/usr/bin/env bash
# All Python tests, in four parts side by side: most wait for processes that they started, so fewer
# parts leave a core idle. Fails where a part does; the first part's output is shown as it comes, the
# others' after it, with the seconds that each took.
set -uo pipefail
cd "$(dirname "$0")/.."
unset PYTHONDONTWRITEBYTECODE # without bytecode an import of TensorFlow takes 11 s of a core, not 4
first=(tests/comm tests/door tests/lab tests/launch)
second=(tests/compile tests/guide tests/horovod tests/precision)
third=(tests/bench tests/embedding tests/examples tests/net)
fourth=("${first[@]/#/--ignore=}" "${second[@]/#/--ignore=}" "${third[@]/#/--ignore=}")
mkdir -p .build
part() { # FOLDER-OR-OPTION...: a part; its seconds are the last line
    local began=$SECONDS status
    .venv/bin/python -m pytest --durations=8 "$@"
    status=$?
    echo "$((SECONDS - began)) s: pytest $*"
    return $status
}
part -p no:cacheprovider "${second[@]}" "$@" >.build/test-python-2.log 2>&1 &
two=$!
part -p no:cacheprovider "${third[@]}" "$@" >.build/test-python-3.log 2>&1 &
three=$!
part -p no:cacheprovider "${fourth[@]}" "$@" >.build/test-python-4.log 2>&1 &
four=$!
trap 'kill $two $three $four 2>/dev/null; exit 130' INT TERM
failed=()
part "${first[@]}" "$@" || failed+=(first)
wait $two || failed+=(second)
wait $three || failed+=(third)
wait $four || failed+=(fourth)
cat .build/test-python-[234].log
echo "parts that failed: ${failed[*]:-none}"
[ ${#failed[@]} = 0 ]
