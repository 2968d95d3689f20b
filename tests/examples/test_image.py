"""scripts/oci_archive.py: an archive whose digests and sizes are what they say."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import subprocess
import sys
import tarfile
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "scripts/oci_archive.py"


def test_archive_holds_what_its_index_says(tmp_path: Path) -> None:
    root = tmp_path / "root.tar"
    with tarfile.open(root, "w") as tar:
        entry = tarfile.TarInfo("etc/hostname")
        entry.size = 4
        tar.addfile(entry, io.BytesIO(b"box\n"))
    image = tmp_path / "image.tar"
    subprocess.run([sys.executable, SCRIPT, root, image, "--name", "evener:test"], check=True)
    with tarfile.open(image) as tar:
        files = {m.name: f.read() for m in tar if (f := tar.extractfile(m)) is not None}
    assert json.loads(files["oci-layout"]) == {"imageLayoutVersion": "1.0.0"}

    def blob(descriptor: dict[str, object]) -> bytes:
        kind, digest = str(descriptor["digest"]).split(":")
        data = files[f"blobs/{kind}/{digest}"]
        assert hashlib.sha256(data).hexdigest() == digest and len(data) == descriptor["size"]
        return data

    (entry_,) = json.loads(files["index.json"])["manifests"]
    assert entry_["annotations"]["org.opencontainers.image.ref.name"] == "evener:test"
    manifest = json.loads(blob(entry_))
    config = json.loads(blob(manifest["config"]))
    (layer,) = manifest["layers"]
    tree = gzip.decompress(blob(layer))
    assert tree == root.read_bytes()
    assert config["rootfs"]["diff_ids"] == [f"sha256:{hashlib.sha256(tree).hexdigest()}"]
