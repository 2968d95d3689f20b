"""Make an OCI archive (one layer) of a tree in a tar file: what `podman load` and skopeo read.

    python scripts/oci_archive.py ROOT.tar IMAGE.tar --name evener:latest

The format is OCI's image layout, version 1.0: blobs named by their SHA-256, and an index.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import platform
import shutil
import tarfile
import tempfile
import zlib
from pathlib import Path
from typing import Any

ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
MEDIA = "application/vnd.oci.image"
ENVIRONMENT = [
    "PATH=/opt/evener/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    # NVIDIA's container runtime mounts the driver where it sees these.
    "NVIDIA_VISIBLE_DEVICES=all",
    "NVIDIA_DRIVER_CAPABILITIES=compute,utility",
]


def layer(root: Path, out: Path) -> tuple[str, str, int]:
    """Compress `root` into `out`: digest of what is inside, digest and size of what comes out."""
    inside, outside, size = hashlib.sha256(), hashlib.sha256(), 0
    packer = zlib.compressobj(level=1, wbits=31)  # gzip
    with root.open("rb") as source, out.open("wb") as target:
        while data := source.read(1 << 20):
            inside.update(data)
            packed = packer.compress(data)
            outside.update(packed)
            size += target.write(packed)
        packed = packer.flush()
        outside.update(packed)
        size += target.write(packed)
    return inside.hexdigest(), outside.hexdigest(), size


def archive(root: Path, image: Path, name: str) -> None:
    """Write `image`, whose one layer is the tar file `root`."""
    with tempfile.TemporaryDirectory(dir=image.parent) as folder:
        packed = Path(folder) / "layer"
        inside, outside, size = layer(root, packed)
        blobs: dict[str, bytes] = {}

        def blob(kind: str, content: dict[str, Any]) -> dict[str, Any]:
            data = json.dumps(content, separators=(",", ":")).encode()
            digest = hashlib.sha256(data).hexdigest()
            blobs[digest] = data
            return {"mediaType": kind, "digest": f"sha256:{digest}", "size": len(data)}

        config = blob(
            f"{MEDIA}.config.v1+json",
            {
                "architecture": ARCHITECTURES[platform.machine()],
                "os": "linux",
                "config": {"Env": ENVIRONMENT, "Cmd": ["/bin/bash"], "WorkingDir": "/workspace"},
                "rootfs": {"type": "layers", "diff_ids": [f"sha256:{inside}"]},
            },
        )
        kind = f"{MEDIA}.layer.v1.tar+gzip"
        manifest = blob(
            f"{MEDIA}.manifest.v1+json",
            {
                "schemaVersion": 2,
                "mediaType": f"{MEDIA}.manifest.v1+json",
                "config": config,
                "layers": [{"mediaType": kind, "digest": f"sha256:{outside}", "size": size}],
            },
        )
        manifest["annotations"] = {"org.opencontainers.image.ref.name": name}
        index = {"schemaVersion": 2, "manifests": [manifest]}
        files = {
            "oci-layout": b'{"imageLayoutVersion":"1.0.0"}',
            "index.json": json.dumps(index).encode(),
            **{f"blobs/sha256/{digest}": data for digest, data in blobs.items()},
        }
        part = Path(folder) / "image"
        with tarfile.open(part, "w") as tar:
            for path, data in files.items():
                entry = tarfile.TarInfo(path)
                entry.size = len(data)
                tar.addfile(entry, io.BytesIO(data))
            tar.add(packed, f"blobs/sha256/{outside}")
        shutil.move(part, image)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("root", type=Path)
    parser.add_argument("image", type=Path)
    parser.add_argument("--name", default="evener:latest")
    arguments = parser.parse_args()
    archive(arguments.root, arguments.image, arguments.name)


if __name__ == "__main__":
    main()
