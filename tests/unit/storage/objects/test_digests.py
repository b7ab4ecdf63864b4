"""A sealed folder verifies; anything missing, altered or unfinished is named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from storage.objects.digests import (
    DIGEST_FILE,
    DigestMismatch,
    read_seal,
    seal_folder,
    verify_folder,
)
from tests.builders import a_policy_folder


def test_a_sealed_folder_verifies_to_the_digest_of_its_weights_whatever_lies_beside_them(tmp_path: Path):
    first = a_policy_folder(tmp_path / "first", weights=b"same")
    seal = json.loads((tmp_path / "first" / DIGEST_FILE).read_text())
    assert sorted(seal["files"]) == ["config.json", "model.safetensors"], "every file but itself"
    second = a_policy_folder(tmp_path / "second", weights=b"same")
    (tmp_path / "second" / "notes.json").write_text("{}")
    assert seal_folder(tmp_path / "second") == verify_folder(tmp_path / "first") == second == first
    assert a_policy_folder(tmp_path / "third", weights=b"other") != first
    (tmp_path / "third" / DIGEST_FILE).unlink()
    with pytest.raises(DigestMismatch, match="never finished"):
        verify_folder(tmp_path / "third")


def test_damage_is_named(tmp_path: Path):
    """A damaged seal; a file that was altered, and one that is gone."""
    a_policy_folder(tmp_path / "policy")
    seal = tmp_path / "policy" / DIGEST_FILE
    whole = seal.read_bytes()
    for content in (b"", b'{"weights_sha256": "', b"\xff\xfe", b"[]", b'{"files": {}}', b'{"files": 1}'):
        seal.write_bytes(content)
        for read in (read_seal, verify_folder):
            with pytest.raises(DigestMismatch, match=f"{DIGEST_FILE} is damaged"):
                read(tmp_path / "policy")
    seal.write_bytes(whole)
    for name in ("model.safetensors", "config.json"):
        file = tmp_path / "policy" / name
        data = file.read_bytes()
        for damage in (lambda: file.write_bytes(data[:-1] + b"?"), file.unlink):  # noqa: B023
            damage()
            with pytest.raises(DigestMismatch, match=name):
                verify_folder(tmp_path / "policy")
        file.write_bytes(data)
    assert verify_folder(tmp_path / "policy")
