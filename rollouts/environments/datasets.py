"""Problems from files, local or from the Hugging Face hub: which files are a split's.

In: a `dataset` value and a split. Out: rows as dictionaries. What could be meant in two ways is refused, with the names
to choose from. The rules are those of the `datasets` library, for JSONL and Parquet (its source: `data_files.py`).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rollouts.environments.rows import kind_of, read_rows
from settings.errors import InvalidInput, NotFound, path_errors
from storage.objects.hub import fetch_from_hub

_SYNONYMS = (("train", "training"), ("validation", "valid", "dev", "val"), ("test", "testing", "eval", "evaluation"))


def read_dataset(dataset: str, split: str, *, required: Sequence[str]) -> list[dict[str, Any]]:
    """The rows of one split; see `read_rows` for what is in them.

    `dataset` is a file, which then serves every split; a folder; or a hub id, with the configuration behind it if there
    are several (`openai/gsm8k/main`). In a folder the split is a word of its own in a file's name, or else a folder's
    (`train.jsonl`, `test-00000-of-00001.parquet`, `dev/a.jsonl.gz`), unless README.md says it under `configs`.

    Raises `InvalidInput` for what is ambiguous: several configurations, or a split in two formats; and as `read_rows`.
    Raises `NotFound` if the folder has no such split; for a hub id also as `storage.objects.hub.fetch_from_hub`.
    """
    path = Path(dataset).expanduser()
    with path_errors(f"dataset = {dataset!r}"):
        if path.is_file():
            return read_rows(path, required=required)
        if path.is_dir():
            files = files_of(path, split, dataset=dataset)
        else:
            owner, _, rest = dataset.partition("/")
            name, _, configuration = rest.partition("/")
            if dataset.startswith((".", "/", "~")) or not name:
                raise NotFound(f"dataset = {dataset!r}: no such file or folder, and not a Hugging Face id")
            files = _on_hub(f"{owner}/{name}", split, configuration=configuration)
        return [row for file in files for row in read_rows(file, required=required)]


def files_of(folder: Path, split: str, *, dataset: str, configuration: str = "") -> list[Path]:
    """The files of a split in a folder, in their order. Raises `InvalidInput` and `NotFound` as `read_dataset`."""
    if declared := _declared(folder, dataset):
        patterns = _patterns(declared, split, dataset=dataset, configuration=configuration)
        files = sorted({file for pattern in patterns for file in folder.glob(pattern) if file.is_file()})
    else:
        files = _by_name(folder / configuration, split, dataset=dataset)
    if not files:
        raise NotFound(
            f"{folder / configuration} has no file for split {split!r}; expected {split}.jsonl or {split}*.parquet"
        )
    if len(formats := {(kind_of(file), file.suffix): file.name for file in files}) > 1:
        names = " and ".join(sorted(formats.values()))
        raise InvalidInput(f"dataset = {dataset!r}: split {split!r} is there in two formats, {names}; name one file")
    return files


def _on_hub(name: str, split: str, *, configuration: str) -> list[Path]:
    folder = fetch_from_hub(name, "dataset", patterns=["README.md"])
    if declared := _declared(folder, name):
        patterns = _patterns(declared, split, dataset=name, configuration=configuration)
    else:
        below = f"{configuration}/" if configuration else ""
        patterns = [f"{below}*{word}*" for word in _words(split)]
    folder = fetch_from_hub(name, "dataset", patterns=["README.md", *patterns])
    return files_of(folder, split, dataset=name, configuration=configuration)


def _words(split: str) -> tuple[str, ...]:
    """What the split may be called, its own name first."""
    return (split, *next((words for words in _SYNONYMS if split in words), ()))


def _by_name(folder: Path, split: str, *, dataset: str) -> list[Path]:
    """The files in whose names the split is a word of its own; if there are none, those of folders of its name."""
    relative = [file.relative_to(folder) for file in sorted(folder.rglob("*")) if file.is_file() and kind_of(file)]
    relative = [file for file in relative if not any(part.startswith(".") for part in file.parts)]
    for word in dict.fromkeys(_words(split)):
        is_split = re.compile(rf"(?:^|[-._ 0-9]){re.escape(word)}(?:[-._ 0-9]|$)", re.IGNORECASE).search
        if found := {file: file.parent for file in relative if is_split(file.name)}:
            break
        above = {file: [i for i, part in enumerate(file.parts[:-1]) if is_split(part)] for file in relative}
        if found := {file: Path(*file.parts[: places[-1]]) for file, places in above.items() if places}:
            break
    if len(places := sorted({str(place) for place in found.values()})) > 1:
        raise InvalidInput(
            f"dataset = {dataset!r}: split {split!r} is there in several configurations, {', '.join(places)}; name "
            f"one, such as dataset = {f'{dataset}/{places[-1]}'!r}"
        )
    return [folder / file for file in found]


def _declared(folder: Path, dataset: str) -> dict[str, dict[str, Any]]:
    """The `configs` of a README.md by name, as on the hub; empty without any."""
    readme = folder / "README.md"
    if not readme.is_file():
        return {}
    from huggingface_hub import DatasetCard

    try:
        configs = DatasetCard.load(readme).data.to_dict().get("configs")
    except Exception as error:  # of YAML and of the library, which has no class for it
        raise InvalidInput(f"dataset = {dataset!r}: the head of {readme} cannot be read: {error}") from error
    return {each["config_name"]: each for each in configs or () if "data_files" in each}


def _patterns(declared: dict[str, dict[str, Any]], split: str, *, dataset: str, configuration: str) -> list[str]:
    """The paths that a configuration has for a split."""
    defaults = [name for name, each in declared.items() if each.get("default") or name == "default"]
    chosen = configuration or (next(iter(declared)) if len(declared) == 1 else next(iter(defaults), ""))
    if chosen not in declared:
        raise InvalidInput(
            f"dataset = {dataset!r} has the configurations {', '.join(declared)}"
            + (f", not {configuration}" if configuration else "")
            + f"; name one, such as dataset = {f'{dataset}/{next(iter(declared))}'!r}"
        )
    files = declared[chosen]["data_files"]
    listed = files if isinstance(files, list) and all(isinstance(each, dict) for each in files) else [{"path": files}]
    paths = [each["path"] for each in listed if str(each.get("split", "train")) == split]
    return [path for each in paths for path in ([each] if isinstance(each, str) else each)]
