#!/usr/bin/env bash
# fuzz.sh [SECONDS [TARGET...]]: libFuzzer on what hears packets, SECONDS for each target (60). Nightly
# Rust for the sanitizer and the coverage; no cargo-fuzz. Inputs that were found are kept in target/fuzz.
set -euo pipefail
cd "$(dirname "$0")/.."
seconds=${1:-60}
shift || true
targets=("$@")
[ ${#targets[@]} -gt 0 ] || targets=(packets connection association)

cargo +nightly --version >/dev/null 2>&1 || {
  echo "skipped: there is no nightly Rust here"
  echo "  fix: rustup toolchain install nightly"
  exit 0
}
host=$(rustc +nightly -vV | sed -n 's/^host: //p')
flags="--cfg fuzzing -Zsanitizer=address -Ccodegen-units=1 -Cpasses=sancov-module"
for one in level=4 inline-8bit-counters pc-table trace-compares; do
  flags+=" -Cllvm-args=-sanitizer-coverage-$one"
done
RUSTFLAGS=$flags cargo +nightly build --quiet --release --target "$host" --target-dir target/fuzz \
  --manifest-path crates/fuzz/Cargo.toml
for target in "${targets[@]}"; do
  corpus=target/fuzz/corpus/$target
  mkdir -p "$corpus" target/fuzz/found
  echo "$target: $seconds s"
  if ! "target/fuzz/$host/release/$target" -max_total_time="$seconds" -max_len=2048 -timeout=20 \
    -rss_limit_mb=2048 -print_final_stats=1 -artifact_prefix=target/fuzz/found/"$target"- "$corpus" 2>&1 |
    tee target/fuzz/"$target".log | { grep -E 'ERROR|panicked|SUMMARY|Done|stat::|Test unit' || true; }; then
    echo "error: $target failed"
    echo "  fix: look at target/fuzz/$target.log; the input is in target/fuzz/found"
    exit 1
  fi
done
