"""Problems from files, local or from the Hugging Face hub: which files are a split's.

In: a `dataset` value and a split. Out: rows as dictionaries. What could be meant in two ways is refused, with the names
to choose from. The rules are those of the `datasets` library, for JSONL and Parquet (its source: `data_files.py`).
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from rollouts.environments.rows import kind_of, read_rows
from settings.errors import InvalidInput, NotFound, failure_text, in_one_line, path_errors
from settings.places.state_folder import expanded
from storage.objects.hub import fetch_from_hub

_TRAIN = ("train", "training")
_HELD_OUT = (("validation", "valid", "dev", "val"), ("test", "testing", "eval", "evaluation"))

_OF = re.compile(r"-of-(\d+)")
_NUMBERED = re.compile(r"(.*?)(?:([-._ ]?)\d+(?:(-of-\d+).*)?)?", re.DOTALL)
"""A name without its number; of `train-00000-of-00002-a09b` that is `train`, and `-of-00002`."""


def read_dataset(dataset: str, split: str, *, required: Sequence[str]) -> list[dict[str, Any]]:
    """The rows of one split; see `read_rows` for what is in them.

    `dataset` is a file, which then serves every split; a folder; or a hub id, with the configuration behind it if there
    are several (`openai/gsm8k/main`). In a folder the split is a word of its own in a file's name, or in a folder's
    (`train.jsonl`, `test-00000-of-00001.parquet`, `dev/a.jsonl.gz`), unless README.md says it under `configs`. A file
    whose name says that it is for training is not held out for its folder's name, nor the other way round.

    Raises `InvalidInput` for one of two files `-of-2`, and for what is ambiguous: several configurations, a split in
    two formats, a file named for training and for being held out (`train-test.jsonl`), or all of a split (`train`)
    beside others of its name (`train_old`, `train/`); and as `read_rows`. Raises `NotFound` if the folder has no such
    split; for a hub id also as `storage.objects.hub.fetch_from_hub`.
    """
    path = expanded(dataset)
    with path_errors(f"dataset = {dataset!r}"):
        if path.is_file():
            return read_rows(path, required=required)
        if path.is_dir():
            files = files_of(path, split, dataset=dataset)
        elif path.name in _declared(path.parent, dataset):
            files = files_of(path.parent, split, dataset=dataset, configuration=path.name)
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
        files = sorted({file for each in patterns for file in folder.glob(each.lstrip("/")) if file.is_file()})
        others = f"README.md says under `configs` that it is {', '.join(patterns) or 'none'}"
    else:
        files = _by_name(folder / configuration, split, dataset=dataset)
        beside = sorted(each.name for each in (folder / configuration).glob("[!.]*"))
        others = f"there are {', '.join(beside[:8]) or 'none'}{', …' if len(beside) > 8 else ''}"
    if not files:
        expected = f"expected {split}.jsonl or {split}*.parquet"
        raise NotFound(f"{folder / configuration} has no file for split {split!r}; {expected}, and {others}")
    if len(formats := {(kind_of(file), file.suffix): file.name for file in files}) > 1:
        names = " and ".join(sorted(formats.values()))
        raise InvalidInput(f"dataset = {dataset!r}: split {split!r} is there in two formats, {names}; name one file")
    counts = {match[0]: int(match[1]) for file in files for match in _OF.finditer(file.name)}
    for of, count in counts.items():
        if (there_are := sum(of in file.name for file in files)) != count:
            raise InvalidInput(
                f"dataset = {dataset!r}: split {split!r} has {there_are} of {count} files *{of}*; fetch all"
            )
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
    return (split, *next((words for words in (_TRAIN, *_HELD_OUT) if split in words), ()))


def _says(name: str, words: Iterable[str]) -> bool:
    """True if one of the words is in a name as a word of its own."""
    return re.search(rf"(?:^|[-._ 0-9])(?:{'|'.join(map(re.escape, words))})(?:[-._ 0-9]|$)", name, re.I) is not None


def _by_name(folder: Path, split: str, *, dataset: str) -> list[Path]:
    """The files in whose names the split is a word of its own, and those in folders of its name."""
    relative = [file.relative_to(folder) for file in sorted(_files_below(folder)) if file.is_file() and kind_of(file)]
    relative = [file for file in relative if not any(part.startswith((".", "__")) for part in file.parts)]
    others = [*itertools.chain(*_HELD_OUT)] if split in _TRAIN else [*_TRAIN]
    place_of: dict[Path, Path] = {}  # → itself, or the folder that is the split's
    for word in dict.fromkeys(_words(split)):
        for file in relative:
            above = [number for number, part in enumerate(file.parts[:-1], start=1) if _says(part, [word])]
            if _says(file.name, [word]) or (above and not _says(file.name, others)):
                place_of[file] = Path(*file.parts[: above[-1]]) if above else file
        if place_of:
            break
    is_usual = word in (*_TRAIN, *itertools.chain(*_HELD_OUT))  # and not `train_sft`
    if both := [str(file) for file in place_of if is_usual and _says(file.name, [word]) and _says(file.name, others)]:
        fault = f"{', '.join(both)} is named for training and for being held out"
        raise InvalidInput(
            f"dataset = {dataset!r}: {fault}; rename it, or say in README.md under `configs` whose it is"
        )
    if len(parents := sorted({str(place.parent) for place in place_of.values()})) > 1:
        raise InvalidInput(
            f"dataset = {dataset!r}: split {split!r} is there in several configurations, {', '.join(parents)}; name "
            f"one, such as dataset = {f'{dataset}/{parents[-1]}'!r}"
        )
    series: dict[tuple[str, ...], list[Path]] = {}  # files whose names differ in their number alone
    for file, place in place_of.items():
        stem = place.name.lower().partition(kind_of(file))[0] if place == file else f"{place.name.lower()}/"
        if match := _NUMBERED.fullmatch(stem):
            series.setdefault(match.groups(default=""), []).append(file)
    whole = {name: files for name, files in series.items() if name[0] in (word.lower(), f"{word.lower()}/")}
    are_splits = all(of for *_, of in series)  # as in `train-0-of-2` and `train_sft-0-of-1`
    series = whole if are_splits and whole else series
    if len(series) > 1 and (are_splits or whole):
        names = " or ".join(sorted(place_of[files[0]].as_posix() for files in series.values()))
        fix = "name one file, or say in README.md under `configs` which files it is"
        raise InvalidInput(f"dataset = {dataset!r}: split {split!r} may be {names}; {fix}")
    return sorted(folder / file for files in series.values() for file in files)


def _files_below(folder: Path) -> Iterator[Path]:
    """The files of a folder and of those below it, also behind links, each folder once."""
    seen: set[str] = set()
    for place, folders, names in os.walk(folder, followlinks=True):
        yield from (Path(place, name) for name in names)
        seen.add(os.path.realpath(place))
        folders[:] = [name for name in sorted(folders) if os.path.realpath(os.path.join(place, name)) not in seen]


def _declared(folder: Path, dataset: str) -> dict[str, dict[str, Any]]:
    """The `configs` of a README.md by name, as on the hub; empty without any."""
    readme = folder / "README.md"
    if not readme.is_file():
        return {}
    from huggingface_hub import DatasetCard

    try:
        configs = DatasetCard.load(readme).data.to_dict().get("configs")
        return {str(each["config_name"]): each for each in configs or () if "data_files" in each}
    except Exception as error:  # of YAML and of the library, which has no class for it
        raise InvalidInput(
            f"dataset = {dataset!r}: the head of {readme} cannot be read: {in_one_line(failure_text(error))}"
        ) from error


def _patterns(declared: dict[str, dict[str, Any]], split: str, *, dataset: str, configuration: str) -> list[str]:
    """The paths that a configuration has for a split."""
    defaults = [name for name, each in declared.items() if each.get("default") or name == "default"]
    only = list(declared) if len(declared) == 1 else defaults
    chosen = configuration or (only[0] if len(only) == 1 else "")
    if chosen not in declared:
        raise InvalidInput(
            f"dataset = {dataset!r} has the configurations {', '.join(declared)}"
            + (f", not {configuration}" if configuration else "")
            + f"; name one, such as dataset = {f'{dataset}/{next(iter(declared))}'!r}"
        )
    files = declared[chosen]["data_files"]
    listed = files if isinstance(files, list) and all(isinstance(each, dict) for each in files) else [{"path": files}]
    given = [each.get("path") for each in listed if str(each.get("split", "train")) == split]
    paths: list[Any] = [path for each in given for path in (each if isinstance(each, list) else [each])]
    if wrong := [path for path in paths if not isinstance(path, str) or not path.lstrip("/")]:
        problem = f"README.md has the path {wrong[0]!r} for split {split!r} of {chosen!r}, and not the name of a file"
        raise InvalidInput(f"dataset = {dataset!r}: {problem}; mend it under `configs`")
    return paths
