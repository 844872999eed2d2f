"""Certificates of made-up authorities, for servers at ``localhost``."""

from __future__ import annotations

import ssl
import subprocess
from pathlib import Path

__all__ = ["certify"]


def certify(folder: Path) -> tuple[Path, ssl.SSLContext, ssl.SSLContext]:
    """Return an authority's certificate, a context that it has signed, and one of another authority."""

    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)

    contexts = []
    (folder / "names").write_text("subjectAltName=DNS:localhost,IP:127.0.0.1\n")
    for name in ("mine", "another"):
        authority = ("-keyout", f"{name}-ca.key", "-out", f"{name}-ca.pem", "-days", "2")
        openssl("req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", f"/CN={name}", *authority)
        openssl("req", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=localhost", "-keyout", f"{name}.key",
                "-out", f"{name}.csr")  # fmt: skip
        signing = ("-CA", f"{name}-ca.pem", "-CAkey", f"{name}-ca.key", "-CAcreateserial", "-days", "2")
        openssl("x509", "-req", "-in", f"{name}.csr", *signing, "-extfile", "names", "-out", f"{name}.pem")
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(folder / f"{name}.pem", folder / f"{name}.key")
        contexts.append(context)
    return folder / "mine-ca.pem", contexts[0], contexts[1]
