"""Which files are a split's: named as a word of its own; what could be meant in two ways is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from datasets import load_dataset

from rollouts.environments import datasets
from rollouts.environments.datasets import read_dataset
from settings.errors import InvalidInput, NotFound

_CARD = """---
configs:
- config_name: main
  data_files:
  - {split: train, path: main/train-*}
  - {split: test, path: [main/test-0.jsonl]}
- config_name: socratic
  data_files:
  - {split: train, path: socratic/train-*}
---
# A card
"""
_ONE = _CARD.replace("- config_name: socratic\n  data_files:\n  - {split: train, path: socratic/train-*}\n", "")


def _folder(path: Path, *names: str, card: str = "") -> str:
    for name in names:
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_text(f'{{"from": "{name}"}}\n')
    if card:
        (path / "README.md").write_text(card)
    return str(path)


_TWICE = ("main/train-0.jsonl", "main/test-0.jsonl", "socratic/train-0.jsonl")


@pytest.mark.parametrize(
    ("names", "split", "found"),
    [
        (("train.jsonl", "pretrain.jsonl", "test.jsonl", "contest.jsonl"), "train", "train.jsonl"),
        (("train.jsonl", "pretrain.jsonl", "test.jsonl", "contest.jsonl"), "test", "test.jsonl"),
        (("train-0-of-2.jsonl", "train-1-of-2.jsonl"), "train", "train-0-of-2.jsonl train-1-of-2.jsonl"),
        (("data/my_train.v2.jsonl", "latest.jsonl"), "train", "data/my_train.v2.jsonl"),
        (("train/a.jsonl", "train/b.jsonl", "test/a.jsonl"), "train", "train/a.jsonl train/b.jsonl"),
        (("train/x/a.jsonl", "train/y/a.jsonl"), "train", "train/x/a.jsonl train/y/a.jsonl"),
        (("dev.jsonl", "eval.jsonl"), "validation", "dev.jsonl"),
        (("dev.jsonl", "eval.jsonl"), "test", "eval.jsonl"),
        (("test.jsonl", "eval.jsonl"), "test", "test.jsonl"),
        (("TRAIN.jsonl", ".cache/train.jsonl", "train.txt"), "train", "TRAIN.jsonl"),
        (("hard.jsonl", "harder.jsonl"), "hard", "hard.jsonl"),
        (("x-test/train.jsonl", "x-test/a.jsonl"), "test", "x-test/a.jsonl"),
        (("train/train-0.jsonl", "train/b.jsonl", "train/eval.jsonl"), "train", "train/b.jsonl train/train-0.jsonl"),
        (("train-0-of-1-f00.jsonl", "train_sft-0-of-1.jsonl"), "train", "train-0-of-1-f00.jsonl"),
        (("train_sft-0-of-1.jsonl", "train-0-of-1.jsonl"), "train_sft", "train_sft-0-of-1.jsonl"),
        (("b_train.jsonl", "a_train.jsonl", "__old/train.jsonl"), "train", "a_train.jsonl b_train.jsonl"),
        (("d/train.JSONL", "._train.jsonl"), "train", "d/train.JSONL"),
    ],
)  # fmt: skip
def test_a_split_is_a_word_of_its_own(tmp_path: Path, names: tuple[str, ...], split: str, found: str) -> None:
    rows = read_dataset(_folder(tmp_path, *names), split, required=[])
    assert " ".join(row["from"] for row in rows) == found


def test_folders_behind_links_are_read_once_and_a_circle_of_them_ends(tmp_path: Path) -> None:
    _folder(tmp_path / "elsewhere", "a.jsonl")
    (tmp_path / "set").mkdir()
    (tmp_path / "set/train").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere/round").symlink_to(tmp_path / "set")
    assert [row["from"] for row in read_dataset(str(tmp_path / "set"), "train", required=[])] == ["a.jsonl"]


@pytest.mark.parametrize("dataset", ["~no-such-user/train.jsonl", "~no-such-user"])
def test_a_folder_of_no_user_is_not_there(dataset: str) -> None:
    with pytest.raises(NotFound, match="~no-such-user.*no such file or folder"):
        read_dataset(dataset, "train", required=[])


@pytest.mark.parametrize(
    ("names", "card", "message"),
    [
        (("train.jsonl", "train.parquet"), "", "in two formats, train.jsonl and train.parquet; name one file"),
        (("train.jsonl", "train.jsonl.gz"), "", "in two formats, train.jsonl and train.jsonl.gz"),
        (
            ("train-00000-of-00003.jsonl", "train-00002-of-00003.jsonl"),
            "",
            r"has 2 of 3 files \*-of-00003\*; fetch all",
        ),
        (
            ("train.jsonl", "train_old.jsonl"),
            "",
            "may be train.jsonl or train_old.jsonl; name one file, or say in README.md",
        ),
        (("train.jsonl", "train (1).jsonl"), "", r"may be train \(1\).jsonl or train.jsonl"),
        (("train.jsonl", "train-0.jsonl"), "", "may be train-0.jsonl or train.jsonl"),
        (("train.jsonl", "train/a.jsonl"), "", "may be train or train.jsonl"),
        (("train-0-of-1.jsonl", "train-0-of-2.jsonl"), "", "may be train-0-of-1.jsonl or train-0-of-2.jsonl"),
        (("train_sft-0-of-1.jsonl", "train_dpo-0-of-1.jsonl"), "", "may be train_dpo-0-of-1.jsonl or train_sft-0-of-1"),
        (_TWICE, _CARD.replace("main\n", "2024\n").replace("socratic\n", "2025\n"), "configurations 2024, 2025; name"),
        (_TWICE, _CARD.replace("  data_files", "  default: true\n  data_files"), "configurations main, socratic; name"),
        (_TWICE, _CARD.replace("config_name: main", "data_dir: x"), "cannot be read: KeyError"),
        (_TWICE, "", "in several configurations, main, socratic; name one, such as dataset = '.*/socratic'"),
        (_TWICE, _CARD, "has the configurations main, socratic; name one, such as dataset = '.*/main'"),
        (("train-test.jsonl",), "", "train-test.jsonl is named for training and for being held out; rename it"),
        (("a/val_train.jsonl", "test.jsonl"), "", "a/val_train.jsonl is named for training and for being held out"),
        (("train.jsonl",), "---\nconfigs: [\n---\n", "the head of .*README.md cannot be read"),
        *(
            (_TWICE, _ONE.replace("path: main/train-*", path), rf"has the path {said} for split 'train' of 'main'")
            for path, said in (("path: ''", "''"), ("x: 1", "None"), ("path: 7", "7"), ("path: [7]", "7"))
        ),
    ],
)
def test_what_is_ambiguous_is_refused_by_name(tmp_path: Path, names: tuple[str, ...], card: str, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        read_dataset(_folder(tmp_path, *names, card=card), "train", required=[])


def test_a_card_says_which_files_are_a_splits_as_for_the_datasets_library(tmp_path: Path) -> None:
    folder = _folder(tmp_path / "set", *_TWICE, "train.jsonl", card=_ONE)
    ours = {split: [row["from"] for row in read_dataset(folder, split, required=[])] for split in ("train", "test")}
    theirs = load_dataset(folder, cache_dir=str(tmp_path / "cache"))
    assert ours == {split: list(rows["from"]) for split, rows in theirs.items()}
    assert ours == {"train": ["main/train-0.jsonl"], "test": ["main/test-0.jsonl"]}
    with pytest.raises(
        NotFound, match="no file for split 'validation'; .* README.md says under `configs` that it is none"
    ):
        read_dataset(folder, "validation", required=[])
    with pytest.raises(NotFound, match=r"expected a.jsonl or a\*.parquet, and there are train.csv, train.json"):
        read_dataset(_folder(tmp_path / "other", "train.json", "train.csv"), "a", required=[])


def test_a_configuration_of_a_folder_is_named_behind_it_wherever_its_files_are(tmp_path: Path) -> None:
    folder = _folder(tmp_path, *_TWICE, card=_CARD.replace("config_name: main", "config_name: plain"))
    for name, files in (("plain", ["main/train-0.jsonl"]), ("socratic", ["socratic/train-0.jsonl"])):
        assert [row["from"] for row in read_dataset(f"{folder}/{name}", "train", required=[])] == files


@pytest.mark.parametrize("card", ["", _CARD])
def test_a_configuration_of_a_hub_set_is_named_behind_its_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, card: str
) -> None:
    folder, asked = Path(_folder(tmp_path, *_TWICE, card=card)), []

    def fetched(name: str, kind: str, *, patterns: list[str]) -> Path:
        asked.append((name, kind, patterns))
        return folder

    monkeypatch.setattr(datasets, "fetch_from_hub", fetched)
    assert [row["from"] for row in read_dataset("openai/gsm8k/main", "train", required=[])] == ["main/train-0.jsonl"]
    wanted = "main/train-*" if card else "main/*train*"
    assert asked[0] == ("openai/gsm8k", "dataset", ["README.md"]) and wanted in asked[1][2]
    with pytest.raises(InvalidInput, match="main, socratic; name one, such as dataset = 'openai/gsm8k/"):
        read_dataset("openai/gsm8k", "train", required=[])
    if card:
        with pytest.raises(InvalidInput, match="has the configurations main, socratic, not hard; name one"):
            read_dataset("openai/gsm8k/hard", "train", required=[])
