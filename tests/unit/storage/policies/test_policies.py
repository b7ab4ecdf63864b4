"""Whatever a policy is stored as, what is read is what was written, or an error that names version and fix."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM

from storage.log.entries import Policy
from storage.log.run_log import RunLog
from storage.objects.digests import DIGEST_FILE, DigestMismatch, seal_folder, verify_folder
from storage.objects.object_store import ObjectStore
from storage.objects.opening import open_store
from storage.policies import policies
from storage.policies.policies import DELTA_FILE, WEIGHTS_FILE, DamagedDelta, PolicyReader, PolicyWriter
from tests.builders import a_log, local_store


@pytest.fixture(params=["disk", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> ObjectStore:
    return (
        local_store(tmp_path) if request.param == "disk" else open_store(f"s3://{request.getfixturevalue('bucket')}/x")
    )


class _Trainer:
    """Writes one policy after another, each a few bits away from the one before."""

    def __init__(self, log: RunLog, folder: Path, *, anchor_every: int = 4, share: float = 0.02) -> None:
        self.log = log
        self.folder = folder
        self.share = share
        self.writer = PolicyWriter(log, folder / "trainer-cache", anchor_every=anchor_every)
        self.weights = {"model.w": torch.randn(100, 50, generator=torch.Generator().manual_seed(0)).bfloat16()}
        self.changed: list[float | None] = []

    def step(self, *, files: dict[str, str] | None = None) -> Policy:
        version = self.log.state.newest_version + 1
        weights = self.weights["model.w"].clone()
        chosen = torch.rand(weights.shape, generator=torch.Generator().manual_seed(version)) < self.share
        weights.view(torch.int16)[chosen] += 1
        self.weights = {"model.w": weights}
        whole = self.folder / f"whole-{version}"
        whole.mkdir()
        for name, text in {"config.json": "{}", "tokenizer.json": "[]", **(files or {})}.items():
            (whole / name).write_text(text)
        save_file(self.weights, whole / WEIGHTS_FILE, metadata={"format": "pt"})
        digest = seal_folder(whole)
        path = self.log.key(f"policies/{version}-a")
        written = self.writer.put(whole, path, version=version)
        stored = [file for file in self.log.store.walk("runs/run/policies") if file.key.startswith(f"{path}/")]
        assert written.num_bytes == sum(file.num_bytes for file in stored)
        self.changed.append(written.changed_fraction)
        policy = Policy(version=version, path=path, weights_sha256=digest, parent=version - 1, anchor=written.anchor)
        self.log.append(policy)
        return policy

    def files(self, policy: Policy) -> dict[str, bytes]:
        """The folder as the trainer wrote it."""
        whole = self.folder / f"whole-{policy.version}"
        return {file.name: file.read_bytes() for file in whole.iterdir()}


def _files(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def _stored(log: RunLog, policy: Policy) -> list[str]:
    return log.store.names(policy.path)


@pytest.fixture
def trainer(store: ObjectStore, tmp_path: Path) -> _Trainer:
    return _Trainer(a_log(store), tmp_path)


@pytest.fixture
def on_disk(tmp_path: Path) -> _Trainer:
    return _Trainer(a_log(local_store(tmp_path)), tmp_path)


def test_every_fourth_policy_is_whole_and_all_read_as_they_were_written(trainer: _Trainer, tmp_path: Path):
    made = [trainer.step() for _ in range(6)]
    assert [policy.anchor for policy in made] == [None, 1, 1, 1, None, 5]
    assert _stored(trainer.log, made[1]) == [DELTA_FILE, DIGEST_FILE]
    reader = PolicyReader(trainer.log, tmp_path / "cache")
    for policy in made:
        folder = reader.fetch(policy)
        assert _files(folder) == trainer.files(policy)
        assert verify_folder(folder) == policy.weights_sha256
    assert trainer.changed[1] == pytest.approx(0.02, rel=0.3) and trainer.changed[0] is None


def test_a_resumed_trainer_goes_on_against_the_same_anchor(trainer: _Trainer, tmp_path: Path):
    trainer.step(), trainer.step()
    trainer.writer = PolicyWriter(trainer.log, tmp_path / "another-cache", anchor_every=4)
    policy = trainer.step()
    assert policy.anchor == 1
    assert _files(PolicyReader(trainer.log, tmp_path / "cache").fetch(policy)) == trainer.files(policy)


def test_one_means_always_whole(on_disk: _Trainer):
    on_disk.writer = PolicyWriter(on_disk.log, on_disk.folder / "cache", anchor_every=1)
    assert [on_disk.step().anchor for _ in range(3)] == [None, None, None]


def test_where_most_values_change_each_policy_is_whole_and_an_anchor(on_disk: _Trainer):
    on_disk.share = 0.9
    assert [on_disk.step().anchor for _ in range(3)] == [None, None, None]
    on_disk.share = 0.02
    assert on_disk.step().anchor == 3, "the newest one"


def test_another_configuration_is_written_whole(on_disk: _Trainer):
    on_disk.step()
    assert on_disk.step(files={"config.json": '{"other": 1}'}).anchor is None


def test_a_policy_that_shares_its_files_with_its_parent_reads_like_it(on_disk: _Trainer, tmp_path: Path):
    """As a step that trained nothing leaves it."""
    on_disk.step()
    delta = on_disk.step()
    skipped = Policy(version=3, path=delta.path, weights_sha256=delta.weights_sha256, parent=2, anchor=delta.anchor)
    on_disk.log.append(skipped)
    reader = PolicyReader(on_disk.log, tmp_path / "cache")
    assert reader.fetch(skipped) == reader.fetch(delta)
    assert on_disk.step().anchor == 1


def _flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


_DAMAGE: dict[str, tuple[int, Callable[[Path], None], str]] = {
    "byte of the delta": (2, lambda folder: _flip(folder / DELTA_FILE), "delta.safetensors differs"),
    "delta missing": (2, lambda folder: (folder / DELTA_FILE).unlink(), "delta.safetensors differs"),
    "killed before the seal": (2, lambda folder: (folder / DIGEST_FILE).unlink(), "never finished"),
    "byte of the anchor": (1, lambda folder: _flip(folder / WEIGHTS_FILE), "model.safetensors differs"),
    "byte beside the anchor": (1, lambda folder: _flip(folder / "config.json"), "config.json differs"),
    "anchor missing": (
        1,
        lambda folder: [file.unlink() for file in folder.iterdir()] and folder.rmdir(),
        "policies/1-a",
    ),
}


@pytest.mark.parametrize("damage", _DAMAGE)
def test_damage_is_named_with_version_anchor_and_fix(on_disk: _Trainer, tmp_path: Path, damage: str):
    made = [on_disk.step(), on_disk.step()]
    version, harm, said = _DAMAGE[damage]
    harm(tmp_path / "store" / made[version - 1].path)
    reader = PolicyReader(on_disk.log, tmp_path / "cache")
    with pytest.raises(DamagedDelta, match="policy 2 cannot be made from its anchor, policy 1") as caught:
        reader.fetch(made[1])
    assert said in str(caught.value) and "back from a copy" in str(caught.value)
    assert not [path for path in (tmp_path / "cache").rglob("*") if path.is_file()], "nothing half-made is left"
    if version == 2:
        assert _files(reader.fetch(made[0])) == on_disk.files(made[0]), "the anchor is as good as before"


def test_a_missing_folder_names_the_policy(on_disk: _Trainer, tmp_path: Path):
    on_disk.step()
    reader = PolicyReader(on_disk.log, tmp_path / "cache")
    lost = Policy(version=2, path="runs/run/policies/2-b", weights_sha256="", parent=1, anchor=1)
    with pytest.raises(DamagedDelta, match="policy 2"):
        reader.fetch(lost)
    with pytest.raises(FileNotFoundError):
        reader.fetch(Policy(version=2, path="runs/run/policies/2-b", weights_sha256="", parent=1))


def test_an_exchanged_delta_is_refused(on_disk: _Trainer, tmp_path: Path):
    """Whole and sealed, and of another version."""
    made = [on_disk.step() for _ in range(3)]
    store = tmp_path / "store"
    for name in (DELTA_FILE, DIGEST_FILE):
        (store / made[1].path / name).write_bytes((store / made[2].path / name).read_bytes())
    with pytest.raises(DamagedDelta, match="does not give the weights of policy 2"):
        PolicyReader(on_disk.log, tmp_path / "cache").fetch(made[1])


def test_an_exchanged_anchor_is_refused(on_disk: _Trainer, tmp_path: Path):
    made = [on_disk.step() for _ in range(6)]
    wrong = Policy(version=9, path=made[5].path, weights_sha256=made[5].weights_sha256, parent=8, anchor=1)
    with pytest.raises(DamagedDelta, match="not those of policy 1"):
        PolicyReader(on_disk.log, tmp_path / "cache").fetch(wrong)


def test_an_exchanged_whole_policy_is_refused(on_disk: _Trainer, tmp_path: Path):
    """Sealed, of another version, and not one that an error about a delta could be of."""
    made = [on_disk.step() for _ in range(5)]
    assert made[0].anchor is made[4].anchor is None
    for path in (tmp_path / "store" / made[4].path).iterdir():
        (tmp_path / "store" / made[0].path / path.name).write_bytes(path.read_bytes())
    with pytest.raises(DigestMismatch, match="other weights than the log says policy 1 has"):
        PolicyReader(on_disk.log, tmp_path / "cache").fetch(made[0])


def test_whole_files_may_stand_where_a_delta_was(on_disk: _Trainer, tmp_path: Path):
    delta = [on_disk.step(), on_disk.step()][1]
    (tmp_path / "store" / delta.path / DELTA_FILE).write_bytes(b"broken")
    on_disk.log.store.put_folder(tmp_path / "whole-2", delta.path, last=DIGEST_FILE)
    folder = PolicyReader(on_disk.log, tmp_path / "cache").fetch(delta)
    assert verify_folder(folder) == delta.weights_sha256 and load_file(folder / WEIGHTS_FILE)


def test_an_unreadable_anchor_makes_the_next_policy_whole(on_disk: _Trainer, tmp_path: Path, caplog):  # type: ignore[no-untyped-def]
    anchor = on_disk.step()
    _flip(tmp_path / "store" / anchor.path / WEIGHTS_FILE)
    on_disk.writer = PolicyWriter(on_disk.log, tmp_path / "cache", anchor_every=4)
    assert on_disk.step().anchor is None
    assert "written whole, because its anchor cannot be read" in caplog.text


@pytest.mark.parametrize("damage", ["gone", "seal", "header"])
def test_an_anchor_that_is_lost_while_the_trainer_runs_makes_the_next_policy_whole(
    on_disk: _Trainer, tmp_path: Path, damage: str
):
    folder = tmp_path / "store" / on_disk.step().path
    if damage == "gone":
        shutil.rmtree(folder)
    else:
        (folder / {"seal": DIGEST_FILE, "header": WEIGHTS_FILE}[damage]).write_bytes(b"broken")
    whole, delta = on_disk.step(), on_disk.step()
    assert (whole.anchor, delta.anchor) == (None, 2)
    made = PolicyReader(on_disk.log, tmp_path / "cache").fetch(delta)
    assert _files(made) == on_disk.files(delta)


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


def test_many_may_fetch_at_once(on_disk: _Trainer, tmp_path: Path):
    made = [on_disk.step() for _ in range(4)]
    expected = {policy.version: on_disk.files(policy) for policy in made}

    def fetch_all(number: int) -> bool:
        reader = PolicyReader(on_disk.log, tmp_path / "cache")
        order = made[number % 4 :] + made[: number % 4]
        return all(_files(reader.fetch(policy)) == expected[policy.version] for policy in order * 3)

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(fetch_all, range(8)))


def test_what_somebody_holds_stays_and_the_rest_goes(on_disk: _Trainer, tmp_path: Path):
    on_disk.writer = PolicyWriter(on_disk.log, tmp_path / "cache", anchor_every=20)
    made = [on_disk.step() for _ in range(8)]
    slow, fast = (PolicyReader(on_disk.log, tmp_path / "cache") for _ in range(2))
    held = slow.fetch(made[1])
    folders = [fast.fetch(policy) for policy in made[2:]]
    assert held.exists()
    assert [folder.exists() for folder in folders] == [False] * 3 + [True] * policies.HELD
    assert sorted(os.listdir(held.parent)) == ["2-a", "6-a", "7-a", "8-a"]


def test_transformers_loads_what_came_from_a_delta(tmp_path: Path):
    log = a_log(local_store(tmp_path))
    writer, made = PolicyWriter(log, tmp_path / "cache", anchor_every=2), []
    config = Qwen2Config(
        vocab_size=40, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, tie_word_embeddings=True, dtype="bfloat16",
    )  # fmt: skip
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(config).to(torch.bfloat16)
    for version in (1, 2):
        with torch.no_grad():
            model.model.norm.weight += version
        whole = tmp_path / str(version)
        model.save_pretrained(whole)
        digest = seal_folder(whole)
        written = writer.put(whole, log.key(f"policies/{version}"), version=version)
        made.append(
            Policy(
                version=version,
                path=log.key(f"policies/{version}"),
                weights_sha256=digest,
                parent=version - 1,
                anchor=written.anchor,
            )
        )
        log.append(made[-1])
    assert [policy.anchor for policy in made] == [None, 1]
    for policy in made:
        loaded = AutoModelForCausalLM.from_pretrained(PolicyReader(log, tmp_path / "cache").fetch(policy))
        assert loaded.model.norm.weight[0].item() == (2.0, 4.0)[policy.version - 1]
    assert all(torch.equal(a, b) for a, b in zip(loaded.parameters(), model.parameters(), strict=True))


def test_a_damaged_whole_policy_is_no_damaged_delta(on_disk: _Trainer, tmp_path: Path):
    policy = on_disk.step()
    _flip(tmp_path / "store" / policy.path / WEIGHTS_FILE)
    with pytest.raises(DigestMismatch) as caught:
        PolicyReader(on_disk.log, tmp_path / "cache").fetch(policy)
    assert not isinstance(caught.value, DamagedDelta)
