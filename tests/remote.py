"""Other hosts, for tests: other addresses of the loopback network, reached by a real sshd."""

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from evener.base.ports import free_port


@pytest.fixture
def sshd(tmp_path: Path) -> Iterator[list[str]]:
    """A real sshd on the loopback network; gives the launcher's options that reach it."""
    server = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin")
    if not server or not shutil.which("ssh-keygen"):
        pytest.skip("no sshd (package openssh-server)")
    for name in ("host", "key"):
        subprocess.run(
            ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(tmp_path / name)], check=True
        )
    port = free_port()
    config = tmp_path / "sshd_config"
    config.write_text(
        f"Port {port}\nListenAddress 0.0.0.0\nHostKey {tmp_path / 'host'}\nStrictModes no\n"
        f"AuthorizedKeysFile {tmp_path / 'key.pub'}\nPidFile none\nPermitRootLogin yes\n"
    )
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(exist_ok=True)
    process = subprocess.Popen([server, "-D", "-f", str(config)], stderr=subprocess.DEVNULL)
    rsh = ["ssh", "-p", str(port), "-i", str(tmp_path / "key"), "-o", "BatchMode=yes"]
    rsh += ["-o", "StrictHostKeyChecking=no", "-o", f"UserKnownHostsFile={tmp_path / 'known'}"]
    try:
        for _ in range(100):
            if (
                subprocess.run([*rsh, "127.0.0.2", "true"], stderr=subprocess.DEVNULL).returncode
                == 0
            ):
                break
            time.sleep(0.1)
        else:
            pytest.skip("sshd does not let us in here")
        yield ["--rsh", " ".join(rsh)]
    finally:
        process.terminate()
        process.wait()
