#!/usr/bin/env bash
# Build the wheel against glibc 2.28, look at what is in it, and use it in a clean environment
# whose PATH has no cargo.
set -eu
rm -rf dist
say() { echo "[$((SECONDS / 60)):$(printf %02d $((SECONDS % 60)))] $*"; }
# Panic messages name source files: by their place in the project, not on this machine.
export RUSTFLAGS="--remap-path-prefix=$PWD=. --remap-path-prefix=${CARGO_HOME:-$HOME/.cargo}=cargo --remap-path-prefix=$HOME=home"
# `evener --version` says it.
EVENER_BUILD=$(git describe --always --dirty --abbrev=12 2>/dev/null || true)
export EVENER_BUILD
target="$(uname -m)-unknown-linux-gnu"
say "compiling the NCCL plug-in and TensorFlow's operations (1 of 3)"
cargo zigbuild --release --locked -p evener-nccl -p evener-tensorflow --target "$target.2.28"
mkdir -p python/evener/lib
for part in nccl_net_evener:nccl-net-evener tensorflow_evener:evener-tensorflow; do
    cp "target/$target/release/lib${part%%:*}.so" python/evener/lib/.part.so
    mv python/evener/lib/.part.so "python/evener/lib/lib${part##*:}.so"
done
say "compiling the native module and packing the wheel (2 of 3)"
maturin build --release --locked --zig --compatibility manylinux_2_28 \
    --target "$target" --out dist
wheel=$(ls dist/*.whl)
python scripts/check_wheel.py "$wheel"

say "installing the wheel into an empty environment (3 of 3)"
project=$PWD clean=$(mktemp -d)
trap 'rm -rf "$clean"' EXIT
python -m venv "$clean/venv"
uv pip install --quiet --python "$clean/venv/bin/python" -c constraints.txt "$wheel"
cd "$clean"
bare() { env -i PATH=/usr/bin:/bin HOME="$clean" "$@"; }
evener() { bare "$clean/venv/bin/evener" "$@"; }
evener --version | tee found
[ -z "$EVENER_BUILD" ] || grep -q "commit $EVENER_BUILD" found
bare "$clean/venv/bin/python" - <<'PY'
import ctypes
from evener import net

plugin = ctypes.CDLL(str(net.plugin_path()))
for version in range(6, 13):
    getattr(plugin, f"ncclNetPlugin_v{version}")
PY
evener analyze "$project"/tests/analyze/runs/sockets >found || [ $? -eq 1 ] # 1: it found a problem
grep -q 'network.one-stream' found
say "$wheel: installs and works without cargo and without torch"
