#!/usr/bin/env bash
# All Python tests, in five parts side by side: most wait for processes that they started, so fewer
# parts leave a core idle. Fails where a part does; the first part's output is shown as it comes, the
# others' after it, with the seconds that each took.
set -uo pipefail
cd "$(dirname "$0")/.."
unset PYTHONDONTWRITEBYTECODE # without bytecode an import of TensorFlow takes 11 s of a core, not 4
parts=(
    "tests/comm tests/door tests/lab"
    "tests/compile tests/guide tests/horovod tests/precision"
    "tests/embedding tests/examples tests/net"
    "tests/bench tests/doctor tests/launch tests/pipeline tests/why"
)
parts+=("--ignore=$(sed 's/ / --ignore=/g' <<<"${parts[*]}")") # all that no other part has
mkdir -p .build
part() { # NUMBER FOLDER-OR-OPTION...: a part; its seconds are the last line
    local began=$SECONDS number=$1 status
    shift
    .venv/bin/python -m pytest -p no:cacheprovider --durations=8 "$@"
    status=$?
    echo "$((SECONDS - began)) s: pytest $*"
    return $status
}
running=()
for number in 1 2 3 4; do
    # Unquoted: words of a list that stands above.
    part $number ${parts[number]} "$@" >.build/test-python-$number.log 2>&1 &
    running+=($!)
done
trap 'kill "${running[@]}" 2>/dev/null; exit 130' INT TERM
failed=()
part 0 ${parts[0]} "$@" || failed+=(0)
for number in 1 2 3 4; do
    wait "${running[number - 1]}" || failed+=($number)
done
cat .build/test-python-[1234].log
echo "parts that failed: ${failed[*]:-none}"
[ ${#failed[@]} = 0 ]
