"""Certificates for tests, made by the `openssl` command."""

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from harvester.platform.tls import Credentials, ServerTls


@dataclass(frozen=True, slots=True)
class Signed:
    cert_file: Path
    key_file: Path


class Authority:
    """A certificate authority. Skips the test on a machine without `openssl`."""

    def __init__(self, folder: Path, name: str = "ca") -> None:
        if shutil.which("openssl") is None:
            pytest.skip("needs openssl")
        self.folder = folder
        self._files = Signed(folder / f"{name}.pem", folder / f"{name}.key")
        extensions = "basicConstraints=critical,CA:TRUE", "keyUsage=critical,keyCertSign"
        self._request(self._files, name, extensions)

    @property
    def file(self) -> Path:
        return self._files.cert_file

    def signs(self, name: str, *addresses: str, days: int = 2) -> Signed:
        """A certificate and key, for a server at the addresses or names, or for a client; again:
        new ones."""
        made = Signed(self.folder / f"{name}.pem", self.folder / f"{name}.key")
        names = ",".join(
            f"{'DNS' if any(map(str.isalpha, address)) else 'IP'}:{address}"
            for address in addresses or ("127.0.0.1",)
        )
        ours = ("-CA", str(self.file), "-CAkey", str(self._files.key_file))
        extensions = "basicConstraints=CA:FALSE", f"subjectAltName={names}"
        self._request(made, name, extensions, *ours, days=days)
        return made

    def server(self, name: str, *addresses: str, client_ca: Path | None = None) -> ServerTls:
        made = self.signs(name, *addresses)
        return ServerTls(cert_file=made.cert_file, key_file=made.key_file, client_ca_file=client_ca)

    def trusted(self, *, server_name: str | None = None, **files: Path) -> Credentials:
        return Credentials(ca_file=self.file, server_name=server_name, **files)

    def _request(
        self, made: Signed, name: str, extensions: tuple[str, ...], *signer: str, days: int = 2
    ) -> None:
        added = (word for extension in extensions for word in ("-addext", extension))
        key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
        files = ("-keyout", str(made.key_file), "-out", str(made.cert_file))
        named = ("-days", str(days), "-subj", f"/CN={name}")
        command = ["openssl", "req", "-x509", *key, *named, *files, *added, *signer]
        subprocess.run(command, check=True, capture_output=True)


def token_file(folder: Path, name: str, *tokens: str) -> Path:
    path = folder / name
    path.touch(mode=0o600)
    path.write_text("\n".join(tokens))
    return path
