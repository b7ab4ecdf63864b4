"""Digests of files and folders, to detect any change after writing.

In: bytes or a folder. Out: sha256 as hex, and `digest.json`, the seal: written last, it marks a folder as complete.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, NamedTuple

from settings.errors import UserError
from settings.redaction import read_json

DIGEST_FILE = "digest.json"
WEIGHTS_FILE = "model.safetensors"
"""The weights of a policy that is not a delta."""


class DigestMismatch(UserError):
    """A file differs from its digest; the message names the file."""


def sha256_of(data: bytes) -> str:
    """Hex sha256 of bytes."""
    return hashlib.sha256(data).hexdigest()


def sha256_of_json(value: Any) -> str:
    """Hex sha256 of a JSON value with sorted keys."""
    return sha256_of(json.dumps(value, sort_keys=True, separators=(",", ":")).encode())


def sha256_of_file(path: Path) -> str:
    """Hex sha256 of a file, read in blocks."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def seal_folder(folder: Path) -> str:
    """Write `digest.json` into a finished folder; returns the digest of its safetensors files."""
    payload = [path for path in sorted(folder.iterdir()) if path.is_file() and path.name != DIGEST_FILE]
    files = {path.name: sha256_of_file(path) for path in payload}
    weights = sha256_of_json({name: digest for name, digest in files.items() if name.endswith(".safetensors")})
    (folder / DIGEST_FILE).write_text(json.dumps({"weights_sha256": weights, "files": files}, indent=1))
    return weights


class Seal(NamedTuple):
    """The content of `digest.json`: the digest of all safetensors files together, and file name → hex sha256."""

    weights_sha256: str
    files: dict[str, str]


def read_seal(folder: Path) -> Seal:
    """A folder's seal. Raises `DigestMismatch` when the seal is missing (an unfinished folder) or damaged."""
    file = folder / DIGEST_FILE
    try:
        content = read_json(file.read_bytes())
        return Seal(str(content["weights_sha256"]), dict(content["files"]))
    except FileNotFoundError:
        raise DigestMismatch(f"{folder} has no {DIGEST_FILE}: it was never finished") from None
    except (ValueError, LookupError, TypeError) as error:
        raise DigestMismatch(f"{file} is damaged: {error}") from error


def verify_folder(folder: Path) -> str:
    """Check every file of a sealed folder; returns the weights digest. Raises `DigestMismatch`."""
    seal = read_seal(folder)
    for name, digest in seal.files.items():
        path = folder / name
        if not path.exists() or sha256_of_file(path) != digest:
            raise DigestMismatch(f"{path} differs from its digest in {DIGEST_FILE}")
    return seal.weights_sha256
