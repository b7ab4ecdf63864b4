"""A base model is known by what is in it: not by the string, the folder or the workflow's name that it came from."""

from __future__ import annotations

import asyncio
import logging
import os
from pathlib import Path

import pytest

from settings.errors import InvalidInput
from settings.run_file import RunConfig
from storage.objects.digests import DIGEST_FILE, verify_folder
from storage.objects.object_store import LocalStore
from tasks import base_model
from tasks.base_model import make_model, store_model
from tests.unit.trainers.builders import full_model, tiny_model

_WORKFLOW = """
from millrace import Message, Workflow

class Sums(Workflow):
    def demonstrations(self, n, seed):
        return [[Message(role="user", content="1+1="), Message(role="assistant", content="{answer}")]] * 8
"""


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path / "store")


def _names(folder: Path) -> set[str]:
    return {file.name for file in folder.iterdir()}


def test_a_folder_retrained_in_place_is_another_model_and_one_of_equal_content_the_same(
    store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number, project in enumerate(("one", "two")):
        tiny_model(tmp_path / project / "base", seed=number)
    keys = []
    for project in ("one", "two"):
        monkeypatch.chdir(tmp_path / project)
        keys.append(store_model("./base", store))
    assert keys[0] != keys[1] and all(key.startswith("models/base-") for key in keys)
    assert store_model(str(tmp_path / "two/base"), store) == keys[1]

    weights = tmp_path / "one/base/model.safetensors"
    before, stat = weights.read_bytes(), weights.stat()
    weights.write_bytes((tmp_path / "two/base/model.safetensors").read_bytes())
    os.utime(weights, ns=(stat.st_atime_ns, stat.st_mtime_ns))  # as large, and as old
    assert store_model(str(tmp_path / "one/base"), store) == keys[1]
    weights.write_bytes(before)
    assert store_model(str(tmp_path / "one/base"), store) == keys[0]


def test_a_folder_that_was_broken_is_read_anew_when_it_is_mended(store: LocalStore, tmp_path: Path) -> None:
    base = tiny_model(tmp_path / "base")
    tokenizer = (base / "tokenizer.json").read_text()
    (base / "tokenizer.json").unlink()
    broken = store_model(str(base), store)
    (base / "tokenizer.json").write_text(tokenizer)
    mended = store_model(str(base), store)
    assert _names(store.root / mended) - _names(store.root / broken) == {"tokenizer.json"}

    for file, damage in (("model.safetensors", b"cut off"), (DIGEST_FILE, b"{")):  # and so is a copy in the store
        (store.root / mended / file).write_bytes(damage)
        assert store_model(str(base), store) == mended
        assert verify_folder(store.root / mended) == verify_folder(store.root / broken)


def test_the_store_has_the_weights_that_the_index_names_alone(store: LocalStore, tmp_path: Path) -> None:
    full_model(tmp_path / "base")
    key = store_model(str(tmp_path / "base"), store)
    weights = {name for name in _names(store.root / key) if name.endswith(".safetensors")}
    assert weights == {"model-1.safetensors", "model-2.safetensors"}
    assert not any(file.is_symlink() for file in (store.root / key).iterdir())
    (tmp_path / "base/consolidated.safetensors").write_bytes(b"another")
    assert store_model(str(tmp_path / "base"), store) == key
    (tmp_path / "base/model-2.safetensors").unlink()
    with pytest.raises(InvalidInput, match="lacks model-2.safetensors, which model.safetensors.index.json names"):
        store_model(str(tmp_path / "base"), store)


def test_a_warmed_up_model_is_known_by_what_it_learnt(store: LocalStore, tmp_path: Path) -> None:
    def key(file: str, answer: int, **warmup: int) -> str:
        (tmp_path / file).write_text(_WORKFLOW.format(answer=answer))
        settings = {"num_steps": 1, "hidden_size": 32, "num_layers": 1, **warmup}
        config = RunConfig.model_validate(
            {"run": "r", "workflow": f"{tmp_path / file}:Sums", "steps": 1, "warmup": settings}
        )
        return make_model(store=store.uri, config=config)

    first = key("first.py", 2)
    written = (store.root / first / DIGEST_FILE).stat().st_mtime_ns
    assert key("moved.py", 2) == first and (store.root / first / DIGEST_FILE).stat().st_mtime_ns == written
    assert len({first, key("edited.py", 3), key("deeper.py", 2, num_layers=2)}) == 3


async def test_a_long_warm_up_says_how_far_it_has_come(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the terminal and to Prefect's page, of this session alone, and each line once."""
    monkeypatch.setattr(base_model, "_SECONDS_BETWEEN_LINES", 0.01)
    log_file = tmp_path / "warmup.log"
    log_file.write_text("INFO base model: step 2000 of an earlier session\n")
    with caplog.at_level(logging.INFO, logger="millrace.base_model"), log_file.open("a", buffering=1) as log:
        async with asyncio.timeout(60), base_model._progress_of(log_file):
            log.write("INFO base model: step 100\nWARNING of a library\n")
            while not caplog.messages:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.05)
            log.write("INFO base model: step 150\nINFO base model: step 200\n")
    assert caplog.messages == ["base model: step 100", "base model: step 200"]
