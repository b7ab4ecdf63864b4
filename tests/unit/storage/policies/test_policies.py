"""Whatever a policy is stored as, what is read is what was written, or an error that names version and fix."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from storage.log.entries import Policy, Retire
from storage.log.run_log import RunLog
from storage.objects.digests import DIGEST_FILE, DigestMismatch, seal_folder, sha256_of, verify_folder
from storage.objects.object_store import LocalStore
from storage.objects.opening import open_store
from storage.policies import policies
from storage.policies.policies import DELTA_FILE, WEIGHTS_FILE, DamagedDelta, PolicyReader, PolicyWriter
from tests.builders import a_log, a_step, local_store


class _Trainer:
    """Writes one policy after another, each a few bits away from the one before."""

    def __init__(self, log: RunLog, folder: Path, *, anchor_every: int = 4, share: float = 0.02) -> None:
        self.log = log
        self.folder = folder
        self.share = share
        self.writer = PolicyWriter(log, folder / "trainer-cache", anchor_every=anchor_every)
        self.weights = {"model.w": torch.randn(100, 50, generator=torch.Generator().manual_seed(0)).bfloat16()}
        self.changed: list[float | None] = []

    def step(self, *, config: str = "{}") -> Policy:
        version = self.log.state.newest_version + 1
        weights = self.weights["model.w"].clone()
        chosen = torch.rand(weights.shape, generator=torch.Generator().manual_seed(version)) < self.share
        weights.view(torch.int16)[chosen] += 1
        self.weights = {"model.w": weights}
        whole = self.folder / f"whole-{version}"
        whole.mkdir()
        for name, text in {"config.json": config, "tokenizer.json": "[]"}.items():
            (whole / name).write_text(text)
        save_file(self.weights, whole / WEIGHTS_FILE, metadata={"format": "pt"})
        digest = seal_folder(whole)
        path = self.log.key(f"policies/{version}-a")
        anchor, written = self.writer.put(whole, path, version=version)
        stored = [file for file in self.log.store.walk("runs/run/policies") if file.key.startswith(f"{path}/")]
        assert written["policy_bytes"] == sum(file.num_bytes for file in stored)
        self.changed.append(written.get("policy_changed_fraction"))
        policy = Policy(version=version, path=path, weights_sha256=digest, parent=version - 1, anchor=anchor)
        self.log.append(replace(a_step(self.log.state), policy=policy))
        return policy

    def files(self, policy: Policy) -> dict[str, bytes]:
        """The folder as the trainer wrote it."""
        whole = self.folder / f"whole-{policy.version}"
        return {file.name: file.read_bytes() for file in whole.iterdir()}


def _files(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


@pytest.fixture(params=["disk", pytest.param("s3", marks=pytest.mark.server)])
def trainer(request: pytest.FixtureRequest, tmp_path: Path) -> _Trainer:
    if request.param == "disk":
        return _Trainer(a_log(local_store(tmp_path)), tmp_path)
    return _Trainer(a_log(open_store(f"s3://{request.getfixturevalue('bucket')}/x")), tmp_path)


@pytest.fixture
def on_disk(tmp_path: Path) -> _Trainer:
    return _Trainer(a_log(local_store(tmp_path)), tmp_path)


def test_every_fourth_policy_is_whole_and_all_read_as_they_were_written(trainer: _Trainer, tmp_path: Path):
    made = [trainer.step(), trainer.step()]
    trainer.writer = PolicyWriter(trainer.log, tmp_path / "another-cache", anchor_every=4)  # of a resumed trainer
    made += [trainer.step() for _ in range(4)]
    assert [policy.anchor for policy in made] == [None, 1, 1, 1, None, 5]
    assert trainer.log.store.names(made[1].path) == [DELTA_FILE, DIGEST_FILE]
    reader = PolicyReader(trainer.log, tmp_path / "cache")
    for policy in made:
        folder = reader.fetch(policy)
        assert _files(folder) == trainer.files(policy)
        assert verify_folder(folder) == policy.weights_sha256
    assert trainer.changed[1] == pytest.approx(0.02, rel=0.3) and trainer.changed[0] is None


def test_a_policy_is_whole_if_a_delta_is_not_wanted_not_possible_or_not_smaller(on_disk: _Trainer):
    on_disk.writer = PolicyWriter(on_disk.log, on_disk.folder / "cache", anchor_every=1)
    assert [on_disk.step().anchor for _ in range(2)] == [None, None], "one means always"
    on_disk.writer = PolicyWriter(on_disk.log, on_disk.folder / "cache", anchor_every=4)
    on_disk.share = 0.9
    assert [on_disk.step().anchor for _ in range(2)] == [None, None], "most values change"
    on_disk.share = 0.02
    assert on_disk.step().anchor == 4, "the newest whole one"
    assert on_disk.step(config='{"other": 1}').anchor is None, "another configuration"


def test_a_policy_that_shares_its_files_with_its_parent_reads_like_it(on_disk: _Trainer, tmp_path: Path):
    """As a step that trained nothing leaves it."""
    delta = [on_disk.step(), on_disk.step()][1]
    skipped = replace(delta, version=3, parent=2)
    on_disk.log.append(replace(a_step(on_disk.log.state), policy=skipped))
    reader = PolicyReader(on_disk.log, tmp_path / "cache")
    assert reader.fetch(skipped) == reader.fetch(delta)
    assert on_disk.step().anchor == 1


def _flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize(
    ("version", "harm", "sentence"),
    [
        (2, lambda folder: _flip(folder / DELTA_FILE), "delta.safetensors differs"),
        (2, lambda folder: (folder / DELTA_FILE).unlink(), "delta.safetensors differs"),
        (2, lambda folder: (folder / DIGEST_FILE).unlink(), "never finished"),
        (2, shutil.rmtree, "policies/2-a"),
        (1, lambda folder: _flip(folder / WEIGHTS_FILE), "model.safetensors differs"),
        (1, lambda folder: _flip(folder / "config.json"), "config.json differs"),
        (1, shutil.rmtree, "policies/1-a"),
    ],
)
def test_damage_is_named_with_version_anchor_and_fix(
    on_disk: _Trainer, tmp_path: Path, version: int, harm: Callable[[Path], None], sentence: str
):
    made = [on_disk.step(), on_disk.step()]
    harm(tmp_path / "store" / made[version - 1].path)
    reader = PolicyReader(on_disk.log, tmp_path / "cache")
    with pytest.raises(DamagedDelta, match="policy 2 cannot be made from its anchor, policy 1") as caught:
        reader.fetch(made[1])
    assert sentence in str(caught.value) and "back from a copy" in str(caught.value)
    assert not [path for path in (tmp_path / "cache").rglob("*") if path.is_file()], "nothing half-made is left"
    if version == 2:
        assert _files(reader.fetch(made[0])) == on_disk.files(made[0]), "the anchor is as good as before"


def test_exchanged_files_are_refused(on_disk: _Trainer, tmp_path: Path):
    """Whole and sealed, and of another version. What is wrong with a whole policy is no error about a delta."""
    made = [on_disk.step() for _ in range(6)]
    reader, store = PolicyReader(on_disk.log, tmp_path / "cache"), tmp_path / "store"
    with pytest.raises(DamagedDelta, match="not those of policy 1"):
        reader.fetch(replace(made[5], version=9, anchor=1))
    for policy, other in ((made[1], made[2]), (made[0], made[4])):
        for path in (store / other.path).iterdir():
            (store / policy.path / path.name).write_bytes(path.read_bytes())
        sentence = "does not give the weights of policy 2" if policy.anchor else "other weights than the log says"
        with pytest.raises(DigestMismatch, match=sentence) as caught:
            reader.fetch(policy)
        assert isinstance(caught.value, DamagedDelta) == (policy.anchor is not None)
    _flip(store / made[4].path / WEIGHTS_FILE)
    with pytest.raises(DigestMismatch) as caught:
        reader.fetch(made[4])
    assert not isinstance(caught.value, DamagedDelta)
    with pytest.raises(FileNotFoundError):
        reader.fetch(replace(made[4], path="runs/run/policies/5-b"))


@pytest.mark.parametrize("resumed", [False, True])
@pytest.mark.parametrize("damage", ["folder", DIGEST_FILE, WEIGHTS_FILE])
def test_an_anchor_that_is_lost_makes_the_next_policy_whole(
    on_disk: _Trainer, tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: str, resumed: bool
):
    folder = tmp_path / "store" / on_disk.step().path
    if damage == "folder":
        shutil.rmtree(folder)
    else:
        (folder / damage).write_bytes(b"broken")
    if resumed:
        on_disk.writer = PolicyWriter(on_disk.log, tmp_path / "cache", anchor_every=4)
    whole, delta = on_disk.step(), on_disk.step()
    assert (whole.anchor, delta.anchor) == (None, 2)
    assert "written whole, because its anchor cannot be read" in caplog.text
    made = PolicyReader(on_disk.log, tmp_path / "cache").fetch(delta)
    assert _files(made) == on_disk.files(delta)


class _Remote(LocalStore):
    """A folder that is read as a bucket is: by copies in a cache."""

    def fetch_folder(self, prefix: str, cache: Path) -> Path:
        copy = cache / sha256_of(self.uri.encode())[:16] / prefix
        return Path(shutil.copytree(super().fetch_folder(prefix, cache), copy, dirs_exist_ok=True))


def test_copies_of_what_retention_removed_leave_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = _Trainer(a_log(_Remote(tmp_path / "store")), tmp_path)
    monkeypatch.setattr(policies, "LocalStore", type(None))
    made = [trainer.step() for _ in range(5)]
    reader = PolicyReader(trainer.log, tmp_path / "cache")
    for policy in made:
        reader.fetch(policy)
    trainer.log.append(Retire(shard_ids=[], policy_versions=[1, 2, 3, 4], state_paths=[], reason="keep_last 1"))
    assert _files(reader.fetch(made[-1])) == trainer.files(made[-1])
    assert sorted(path.name for path in (tmp_path / "cache").glob("*/runs/run/policies/*")) == ["5-a"]


@pytest.mark.server
@pytest.mark.parametrize("file", [DELTA_FILE, WEIGHTS_FILE, DIGEST_FILE])
def test_a_damaged_copy_in_the_cache_is_fetched_again(bucket: str, tmp_path: Path, file: str):
    trainer = _Trainer(a_log(open_store(f"s3://{bucket}/x")), tmp_path)
    anchor, delta = trainer.step(), trainer.step()
    cache = tmp_path / "cache"
    PolicyReader(trainer.log, cache).fetch(delta)
    shutil.rmtree(cache / "whole")
    [copy, *others] = [path for path in cache.rglob(file) if file != DELTA_FILE or path.parent.name == "2-a"]
    for path in (copy, *others):
        _flip(path)
    for policy in (delta, anchor):
        assert _files(PolicyReader(trainer.log, cache).fetch(policy)) == trainer.files(policy)


def test_what_was_made_once_is_used_again_and_a_damaged_copy_made_anew(on_disk: _Trainer, tmp_path: Path):
    delta = [on_disk.step(), on_disk.step()][1]
    folder = PolicyReader(on_disk.log, tmp_path / "cache").fetch(delta)
    inode = folder.stat().st_ino
    assert PolicyReader(on_disk.log, tmp_path / "cache").fetch(delta).stat().st_ino == inode
    _flip(folder / WEIGHTS_FILE)
    again = PolicyReader(on_disk.log, tmp_path / "cache").fetch(delta)
    assert again == folder and again.stat().st_ino != inode and _files(again) == on_disk.files(delta)
    # A trainer may replace a damaged delta by the whole weights.
    (tmp_path / "store" / delta.path / DELTA_FILE).write_bytes(b"broken")
    on_disk.log.store.put_folder(tmp_path / "whole-2", delta.path, last=DIGEST_FILE)
    replaced = PolicyReader(on_disk.log, tmp_path / "cache").fetch(delta)
    assert verify_folder(replaced) == delta.weights_sha256 and (replaced / WEIGHTS_FILE).exists()


def test_many_may_fetch_at_once(on_disk: _Trainer, tmp_path: Path):
    made = [on_disk.step() for _ in range(4)]
    expected = {policy.version: on_disk.files(policy) for policy in made}

    def fetch_all(number: int) -> bool:
        reader = PolicyReader(on_disk.log, tmp_path / "cache")
        order = made[number % 4 :] + made[: number % 4]
        return all(_files(reader.fetch(policy)) == expected[policy.version] for policy in order * 3)

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(fetch_all, range(8)))


def test_a_held_copy_stays_and_the_others_go(on_disk: _Trainer, tmp_path: Path):
    on_disk.writer = PolicyWriter(on_disk.log, tmp_path / "cache", anchor_every=20)
    made = [on_disk.step() for _ in range(8)]
    slow, fast = (PolicyReader(on_disk.log, tmp_path / "cache") for _ in range(2))
    held = slow.fetch(made[1])
    folders = [fast.fetch(policy) for policy in made[2:]]
    assert held.exists()
    assert [folder.exists() for folder in folders] == [False] * 3 + [True] * policies.HELD
    assert sorted(os.listdir(held.parent)) == ["2-a", "6-a", "7-a", "8-a"]
