"""scripts/oci_archive.py: an archive whose digests and sizes are what they say."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import subprocess
import sys
import tarfile
import zipfile
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


def test_requirements_leave_torch_and_extras_out(tmp_path: Path) -> None:
    wheel = tmp_path / "evener-1-py3-none-any.whl"
    metadata = "Metadata-Version: 2.1\nName: evener\nRequires-Dist: torch>=2.9\n"
    metadata += "Requires-Dist: click>=8.1\nRequires-Dist: torchvision>=0.24 ; extra == 'bench'\n"
    metadata += "Requires-Dist: pyroute2>=0.9.1 ; sys_platform == 'linux'\n"
    with zipfile.ZipFile(wheel, "w") as content:
        content.writestr("evener-1.dist-info/METADATA", metadata)
    shown = subprocess.run(
        [sys.executable, SCRIPT, "--requires", wheel], capture_output=True, text=True, check=True
    )
    assert shown.stdout.split() == ["click>=8.1", "pyroute2>=0.9.1"]
