"""A secret that is made once is kept in a file that its owner alone can read."""

import os
import secrets
from pathlib import Path


def kept_secret(path: Path) -> str:
    """The secret in a file, which is made when it is missing or empty."""
    if path.exists() and (known := path.read_text().strip()):
        return known
    secret = secrets.token_urlsafe(32)
    write_private(path, secret)
    return secret


def write_private(path: Path, text: str) -> None:
    """Write a file that nobody else may read, from its first moment on."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(text)
    os.chmod(path, 0o600)  # of a file that was there before
