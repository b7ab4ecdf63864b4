"""One writer wins a key, folders are complete or absent, and a store that cannot be used says so in a sentence."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from storage.object_store import LocalStore, S3Store, StoreError, open_store, probe
from tests.builders import local_store
from tests.processes import race_for_keys, run_together


def test_of_eight_processes_exactly_one_wins_each_key(tmp_path: Path):
    store = local_store(tmp_path)
    won = run_together(race_for_keys, 8, store.uri, 40)
    assert Counter(key for keys in won for key in keys) == Counter(range(40))
    for rank, keys in enumerate(won):
        assert {store.get(f"race/{key}") for key in keys} <= {str(rank).encode()}


def test_nothing_but_the_winners_file_is_left(tmp_path: Path):
    store = local_store(tmp_path)
    assert store.put_if_absent("a/key", b"first")
    assert not store.put_if_absent("a/key", b"second")
    store.put("a/other", b"third")
    assert store.get("a/key") == b"first"
    assert sorted(path.name for path in (store.root / "a").iterdir()) == ["key", "other"]


def test_put_replaces_and_get_names_what_is_missing(tmp_path: Path):
    store = local_store(tmp_path)
    store.put("key", b"old")
    store.put("key", b"new")
    assert store.get("key") == b"new"
    assert store.exists("key") and not store.exists("other")
    with pytest.raises(FileNotFoundError):
        store.get("other")


def test_names_are_sorted_and_show_no_half_written_file(tmp_path: Path):
    store = local_store(tmp_path)
    for name in ("b", "a", "c"):
        store.put(f"folder/{name}", b"")
    (store.root / "folder" / ".d.0123.tmp").write_bytes(b"")
    assert store.names("folder") == ["a", "b", "c"]
    assert store.names("nowhere") == []


def test_a_folder_arrives_with_the_named_file_last(tmp_path: Path):
    order = []

    class Watched(LocalStore):
        def put(self, key: str, data: bytes) -> None:
            order.append(key)
            super().put(key, data)

    folder = tmp_path / "model"
    (folder / "not-copied").mkdir(parents=True)
    for name in ("z.json", "a.safetensors", "digest.json", "k.txt"):
        (folder / name).write_text(name)
    store = Watched(tmp_path / "store")
    store.put_folder(folder, "models/m", last="digest.json")
    assert order == ["models/m/a.safetensors", "models/m/k.txt", "models/m/z.json", "models/m/digest.json"]
    fetched = store.fetch_folder("models/m", tmp_path / "cache")
    assert {path.name: path.read_text() for path in fetched.iterdir()} == {
        name: name for name in ("z.json", "a.safetensors", "digest.json", "k.txt")
    }


def test_a_missing_folder_is_an_error(tmp_path: Path):
    with pytest.raises(FileNotFoundError):
        local_store(tmp_path).fetch_folder("models/m", tmp_path)


def test_a_local_store_keeps_writers_apart(tmp_path: Path):
    assert probe(local_store(tmp_path)) is True


def test_a_store_that_lets_two_writers_win_is_found_out(tmp_path: Path):
    class Forgetful(LocalStore):
        """Like an S3 server that ignores `If-None-Match`."""

        def put_if_absent(self, key: str, data: bytes) -> bool:
            self.put(key, data)
            return True

    assert probe(Forgetful(tmp_path)) is False


def test_a_store_that_cannot_be_written_says_what_to_do(tmp_path: Path):
    # A path below a file is refused to root as well.
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="cannot be written.*make it writable"):
        probe(LocalStore(tmp_path / "file" / "store"))


def test_an_unknown_scheme_is_refused_with_the_known_ones():
    with pytest.raises(StoreError, match="gs.*s3://bucket/prefix"):
        open_store("gs://bucket/prefix")


@pytest.mark.parametrize("name", ["plain", "with space", "100%", "50%20", "grün", "a#b?c"])
def test_a_store_opens_again_by_its_uri(tmp_path: Path, name: str):
    store = open_store(str(tmp_path / name))
    store.put("key", b"here")
    again = open_store(store.uri)
    assert again.uri == store.uri
    assert again.get("key") == b"here"


def test_a_file_uri_with_two_slashes_is_not_taken_for_a_folder_at_the_root():
    with pytest.raises(StoreError, match="file:///"):
        open_store("file://data/store")


def test_plain_paths_and_s3_uris_are_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    relative = open_store("here")
    assert isinstance(relative, LocalStore) and relative.root == tmp_path / "here"
    assert isinstance(open_store("~/store"), LocalStore)
    s3 = open_store("s3://bucket/prefix/")
    assert isinstance(s3, S3Store) and s3.uri == "s3://bucket/prefix"
