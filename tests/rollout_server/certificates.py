"""Certificates made for a test by the openssl command: an authority, and whom it signs for."""

import pathlib
import shutil
import subprocess

import pytest


def need_openssl() -> None:
    if shutil.which("openssl") is None:
        pytest.skip("the openssl command, which makes this test's certificates, is not installed")


def _openssl(*arguments: object) -> None:
    subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True)


class Authority:
    """Signs certificates that are good for a day; `certificate` is its own, in PEM."""

    def __init__(self, folder: pathlib.Path, name: str):
        need_openssl()
        self._folder = folder / name
        self._folder.mkdir()
        self.certificate = self._folder / "authority.pem"
        self._key = self._folder / "authority.key"
        _openssl(
            *("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", 1),
            *("-subj", f"/CN={name}", "-keyout", self._key, "-out", self.certificate),
        )

    def sign(
        self, name: str, *, hosts: str = "IP:127.0.0.1,DNS:localhost", days: int = 1
    ) -> tuple[pathlib.Path, pathlib.Path]:
        """(certificate, key) for `hosts`; days: until when it is valid, negative: it has expired."""
        certificate, key = self._folder / f"{name}.pem", self._folder / f"{name}.key"
        request, extensions = self._folder / f"{name}.csr", self._folder / f"{name}.ext"
        extensions.write_text(f"subjectAltName={hosts}\n")
        _openssl(
            *("req", "-new", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"),
            *("-subj", f"/CN={name}", "-keyout", key, "-out", request),
        )
        _openssl(
            *("x509", "-req", "-in", request, "-CA", self.certificate, "-CAkey", self._key, "-CAcreateserial"),
            *("-days", days, "-extfile", extensions, "-out", certificate),
        )
        return certificate, key
