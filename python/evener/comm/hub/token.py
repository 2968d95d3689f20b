"""What lets a node in: one line of text with the hub's certificate and a secret.

The certificate is self-signed, and whoever holds the token trusts this one alone, whatever name or
address the hub has. So a node knows that it talks to its hub before it sends the secret, and the
hub knows by the secret that the node may come in. TLS 1.3, by Python's `ssl`; the certificate is
made by the `openssl` command. The hub's private key lies beside the token, in `FILE.key`, and never
leaves the hub's host.
"""

from __future__ import annotations

import base64
import binascii
import json
import os
import secrets
import shutil
import ssl
import subprocess
from dataclasses import dataclass
from pathlib import Path

from evener.errors import UsageError

_BEGINS = "evener-token-1:"
_LONGEST = 1 << 14
_YEARS = 10


@dataclass(frozen=True)
class Token:
    """See the module. `certificate`: DER."""

    certificate: bytes
    secret: str

    @property
    def text(self) -> str:
        """The one line."""
        held = {"certificate": _base64(self.certificate), "secret": self.secret}
        return _BEGINS + _base64(json.dumps(held).encode())

    @classmethod
    def of(cls, text: str, where: str) -> Token:
        """Read the line; `where` it was found. Raises UsageError."""
        text = text.strip()
        try:
            if not text.startswith(_BEGINS) or len(text) > _LONGEST:
                raise ValueError(text)
            held = json.loads(base64.b64decode(text.removeprefix(_BEGINS), validate=True))
            certificate = base64.b64decode(held["certificate"], validate=True)
            return cls(certificate, str(held["secret"]))
        except (ValueError, KeyError, TypeError, binascii.Error):
            raise UsageError(
                f"{where} holds no token", "copy the file that `evener hub` wrote, unchanged"
            ) from None

    @classmethod
    def read(cls, path: Path) -> Token:
        """Raises UsageError for a file that is not there or is no token."""
        try:
            return cls.of(path.read_text(encoding="utf-8"), str(path))
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(
                f"the token file {path} cannot be read: {error}",
                "copy it from the hub's host, where `evener hub` wrote it",
            ) from None

    def of_client(self) -> ssl.SSLContext:
        """TLS that trusts the hub's certificate and nothing else."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname = False  # one certificate is trusted, under any name
        context.load_verify_locations(cadata=ssl.DER_cert_to_PEM_cert(self.certificate))
        return context


def of_server(path: Path) -> tuple[Token, ssl.SSLContext]:
    """The hub's token and TLS, from `path` and `path`.key; both are made where there are none.

    Raises UsageError where only one of them is there, or `openssl` is missing.
    """
    key = path.with_name(path.name + ".key")
    if not path.exists() and not key.exists():
        _make(path, key)
    token = Token.read(path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    try:
        context.load_cert_chain(key)
    except (OSError, ssl.SSLError) as error:
        raise UsageError(
            f"the hub's key {key} cannot be used: {error}",
            f"run the hub where both files are, or remove {path} and {key} to make new ones",
        ) from None
    return token, context


def _make(path: Path, key: Path) -> None:
    if shutil.which("openssl") is None:
        raise UsageError(
            "there is no openssl command to make the hub's certificate",
            "install openssl on the hub's host; the nodes do not need it",
        )
    words = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"]
    words += ["-nodes", "-days", str(365 * _YEARS), "-subj", "/CN=evener-hub", "-keyout", "-"]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=60)
    begin = done.stdout.find("-----BEGIN CERTIFICATE-----")
    if done.returncode or begin < 0:
        raise UsageError(
            f"openssl made no certificate: {done.stderr.strip()[-300:]}",
            "install a current openssl on the hub's host",
        )
    token = Token(ssl.PEM_cert_to_DER_cert(done.stdout[begin:]), secrets.token_urlsafe(32))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        for file, text in ((key, done.stdout), (path, token.text + "\n")):
            with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as to:
                to.write(text)
    except OSError as error:
        raise UsageError(f"the token cannot be written: {error}", "name another file") from None


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()
