#!/usr/bin/env bash
# An OCI image with Debian, Open MPI, an ssh server, and Evener from its wheel. No root, no daemon.
#
#     make wheel && scripts/image.sh                       # dist/evener-image.tar
#     scripts/image.sh --without-torch                     # small: torch comes from somewhere else
#     podman load -i dist/evener-image.tar                 # or: skopeo copy oci-archive:... docker://...
#
# Needs mmdebstrap and pip; where you are not root, also uidmap. mmdebstrap unpacks Debian's packages
# in a user namespace, and checks there that Evener, mpirun and sshd start. scripts/oci_archive.py
# makes an image of the tree. NVIDIA's driver is not in it: the container runtime mounts it.
set -euo pipefail
cd "$(dirname "$0")/.."
export PATH="$PATH:/usr/local/bin:/usr/sbin:/sbin" # the programs of the image are found by it, too

suite=bookworm torch=yes output=dist/evener-image.tar
while [ $# -gt 0 ]; do
    case "$1" in
    --without-torch) torch=no ;;
    --output) output=$2; shift ;;
    --suite) suite=$2; shift ;;
    -h | --help) sed -n '2,10s/^# \{0,1\}//p' "$0"; exit 0 ;;
    *) echo "error: $1 is not an option" >&2; echo "  fix: $0 --help" >&2; exit 2 ;;
    esac
    shift
done
need() { command -v "$1" >/dev/null || { echo "error: $1 is missing" >&2; echo "  fix: $2" >&2; exit 2; }; }
need mmdebstrap "apt-get install mmdebstrap"
need python3 "apt-get install python3"
if [ "$(id -u)" != 0 ]; then
    need newuidmap "apt-get install uidmap"
    grep -q "^$(id -un):" /etc/subuid 2>/dev/null || {
        echo "error: /etc/subuid gives $(id -un) no user ids, which a user namespace needs" >&2
        echo "  fix: usermod --add-subuids 100000-165535 --add-subgids 100000-165535 $(id -un), as root" >&2
        exit 2
    }
    unshare --user true 2>/dev/null || {
        echo "error: this kernel allows no user namespaces to ordinary users" >&2
        echo "  fix: sysctl -w kernel.unprivileged_userns_clone=1 (Debian), or" \
            "kernel.apparmor_restrict_unprivileged_userns=0 (Ubuntu), or run this as root" >&2
        exit 2
    }
fi
shopt -s nullglob
wheels=(dist/evener-*.whl)
[ ${#wheels[@]} = 1 ] || {
    echo "error: dist holds ${#wheels[@]} wheels of evener, 1 is needed" >&2
    echo "  fix: make wheel" >&2
    exit 2
}

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir "$work/wheels"
cp "${wheels[0]}" "$work/wheels/"
# Debian bookworm has Python 3.11. The wheels come here, so the chroot needs no network.
fetch=(python3 -m pip download --quiet --dest "$work/wheels" --only-binary=:all: --python-version 3.11
    --platform "manylinux_2_28_$(uname -m)" --platform "manylinux_2_17_$(uname -m)"
    --platform "manylinux2014_$(uname -m)")
extra=""
[ "$torch" = no ] || extra="[torch]"
"${fetch[@]}" -c constraints.txt "${wheels[0]}$extra"
install="pip install --quiet --no-index --find-links /wheels evener$extra"

mkdir -p "$(dirname "$output")"
mmdebstrap --quiet --variant=minbase \
    --include=ca-certificates,openmpi-bin,openssh-client,openssh-server,python3,python3-venv \
    --customize-hook="copy-in $work/wheels /" \
    --customize-hook="chroot \"\$1\" sh -c 'python3 -m venv /opt/evener && /opt/evener/bin/$install'" \
    --customize-hook='rm -rf "$1/wheels" "$1/var/lib/apt/lists/"*' \
    --customize-hook='chroot "$1" mkdir -p /run/sshd' \
    --customize-hook='for tool in evener python torchrun; do
        [ ! -e "$1/opt/evener/bin/$tool" ] || ln -sf "/opt/evener/bin/$tool" "$1/usr/local/bin/$tool"; done' \
    --customize-hook='chroot "$1" evener --version' \
    --customize-hook='chroot "$1" sh -c "mpirun --version | head -1; /usr/sbin/sshd -t && echo sshd: configured"' \
    "$suite" "$work/root.tar"
python3 scripts/oci_archive.py "$work/root.tar" "$output" --name evener:latest
echo "$output: $(du -h "$output" | cut -f1); podman load -i $output"
