"""What the documents say is there is there."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import tomllib
from typing import Any

import typer
import yaml
from packaging.requirements import Requirement

from cli.main import app
from storage.log.runs import MAY_CHANGE, MAY_DIFFER
from tests.documents import DOCUMENTS, PROJECT, README, TUTORIAL, commands, refusal, sentences


def test_the_example_in_readme_is_the_example() -> None:
    example = (PROJECT / "examples/arithmetic.py").read_text()
    assert example.strip() in (PROJECT / "README.md").read_text()
    assert len(example.splitlines()) <= 60


def test_readme_and_tutorial_are_short() -> None:
    assert len(README.read_text().splitlines()) <= 200
    for document in (README, TUTORIAL):
        lengths = [len(sentence.split()) for sentence in sentences(document)]
        assert len(lengths) > 25 and sum(lengths) / len(lengths) <= 18, document.name


def test_every_file_is_in_the_tree_and_every_line_of_it_is_a_file() -> None:
    tree = (PROJECT / "docs/tree.md").read_text().split("```")[1]
    folder, listed = "", set()
    for line in tree.splitlines():
        if match := re.match(r"^([\w/]+)/\s", line):
            folder = match[1] + "/"
        elif match := re.match(r"^  ([\w.-]+)\s", line):
            listed.add(folder + match[1])
    folders = "millrace cli examples flows infra rollouts settings storage tasks trainers benchmarks"
    files = {
        str(path.relative_to(PROJECT))
        for name in folders.split()
        for path in (PROJECT / name).rglob("*")
        if path.is_file() and (path.name != "__init__.py" or name == "millrace") and "__pycache__" not in path.parts
    }
    assert listed == files


def test_no_package_registry_is_named_by_host() -> None:
    """Each machine configures its own indexes; the machines of some users reach no public one."""
    hosts = re.compile(r"pypi\.org|pythonhosted\.org|download\.pytorch\.org|anaconda\.org|npmjs\.(org|com)")
    places = [path for path in PROJECT.iterdir() if path.name == ".ci" or not path.name.startswith(".")]
    files = [file for place in places for file in (place.rglob("*") if place.is_dir() else [place])]
    texts = {file: file.read_bytes().decode(errors="ignore") for file in files if file.is_file()}
    assert len(texts) > 300
    assert [str(file) for file, text in texts.items() if hosts.search(text)] == []


def test_links_in_documents_lead_to_files() -> None:
    for document in [PROJECT / "README.md", *(PROJECT / "docs").glob("*.md")]:
        for target in re.findall(r"\]\(([^)#:]+)\)", document.read_text()):
            assert (document.parent / target).exists(), f"{document.name}: {target}"


def test_what_a_document_says_is_in_a_file_is_in_it() -> None:
    """`make_engine` in `rollouts/production/engine_choice.py`."""
    named = {
        (document.name, name, path)
        for document in DOCUMENTS
        for name, path in re.findall(r"`([\w.]+)` (?:in|of)\s`((?:\w+/)+\w+\.py)`", document.read_text())
    }
    assert len(named) > 10
    assert [each for each in named if each[1].split(".")[-1] not in (PROJECT / each[2]).read_text()] == []


def test_the_settings_that_may_change_when_a_run_goes_on_are_on_the_operations_page() -> None:
    text = (PROJECT / "docs/operations.md").read_text()
    sentence = text[text.index("these may be others:") : text.index("Any other change is refused")]
    assert set(re.findall("`([^`]+)`", sentence)) == MAY_CHANGE | MAY_DIFFER


def test_every_direct_dependency_is_on_its_page() -> None:
    about = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]
    rows = [*about["dependencies"], *(row for extra in about["optional-dependencies"].values() for row in extra)]
    names = {Requirement(row).name for row in rows} - {about["name"]}
    page = (PROJECT / "docs/dependencies.md").read_text()
    cells = {
        name for cell in re.findall(r"^\| ([\w/, -]+) \|", page, flags=re.MULTILINE) for name in re.split("[/,]", cell)
    }
    assert names - {cell.strip() for cell in cells} == set()


def test_the_deployment_trains_what_the_example_trains() -> None:
    deployments = yaml.safe_load((PROJECT / "prefect.yaml").read_text())["deployments"]
    parameters = dict(deployments[0]["parameters"])
    example = tomllib.loads((PROJECT / "examples/arithmetic.toml").read_text())
    assert {**parameters.pop("settings"), **parameters, "run": "arithmetic"} == example
    assert all(schedule["active"] is False for schedule in deployments[0]["schedules"])


_FOLDERS = ("cli", "flows", "infra", "rollouts", "settings", "storage", "tasks", "trainers")
SOURCES = [path.read_text() for folder in _FOLDERS for path in (PROJECT / folder).rglob("*.py")]


def _messages(page: str, before: str = "") -> list[str]:
    """Messages in the first column of a page's tables, up to a heading."""
    text = (PROJECT / "docs" / page).read_text()
    return re.findall(r"^\| `([^`]+)` \|", text[: text.index(before)] if before else text, flags=re.MULTILINE)


ALARMS = _messages("operations.md", "## What to watch")


def test_every_message_that_a_page_explains_is_one_that_the_code_can_say() -> None:
    mistakes = _messages("troubleshooting.md")
    assert len(ALARMS) > 20 and len(mistakes) > 40
    sources = "".join([*SOURCES, (PROJECT / "Makefile").read_text()])
    assert [message for message in ALARMS + mistakes if message not in sources] == []


def test_every_warning_of_the_code_is_on_the_operations_page() -> None:
    """But for those that only pass on a sentence made elsewhere."""
    methods, said = {"warning", "error", "exception", "critical", "log"}, []
    for call in (node for source in SOURCES for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)):
        match call.func:
            case ast.Attribute(value=ast.Name(id="logger"), attr=attr) if attr in methods:
                texts = [a.value for a in call.args if isinstance(a, ast.Constant) and isinstance(a.value, str)]
                said += [text for text in texts if re.search(r"[a-z] [a-z]", text)]
    assert len(said) > 30
    assert [text for text in said if not any(message in text for message in ALARMS)] == []


EVERY_COMMAND = [(document, words) for document in DOCUMENTS for words in commands(document)]


def _of(*program: str) -> list[tuple[str, list[str]]]:
    """Documents and what follows a program in them."""
    length = len(program)
    return [(d.name, words[length:]) for d, words in EVERY_COMMAND if tuple(words[:length]) == program]


def test_millrace_takes_every_command_of_the_documents() -> None:
    """A sentence may name a command without what it is about."""
    shown = [words for document in DOCUMENTS for words in commands(document, sentences=False)]
    refused = [
        f"{document}: millrace {' '.join(words)}: {said}"
        for document, words in _of("millrace")
        if (said := refusal(words)) and (["millrace", *words] in shown or not said.startswith("Missing parameter"))
    ]
    assert not refused and len(_of("millrace")) > 60
    assert refusal(["status", "run", "--no-such-option"]) and refusal(["no-such-command"])


def test_every_command_and_option_is_in_a_document() -> None:
    text = "\n".join(document.read_text() for document in DOCUMENTS)
    lacking = []

    def look(command: Any, path: str) -> None:
        for name, each in getattr(command, "commands", {}).items():
            look(each, f"{path} {name}")
        if not hasattr(command, "commands"):
            options = {option for each in command.params for option in each.opts if option.startswith("--")}
            lacking.extend(f"{path} {option}" for option in options - {"--help"} if option not in text)
            lacking.extend([path] if not re.search(rf"{path}\b", text) else [])

    look(typer.main.get_command(app), "millrace")
    assert lacking == []


def test_make_has_every_target_and_python_every_module_of_the_documents() -> None:
    targets = set(re.findall(r"^([a-z]+):.*##", (PROJECT / "Makefile").read_text(), flags=re.MULTILINE))
    named = {word for _, words in _of("make") for word in words if re.fullmatch("[a-z]+", word)}
    assert named <= targets and named >= {"train", "test", "up", "down"}
    modules = {words[0] for _, words in _of("python", "-m") if words[0].split(".")[0] in ("benchmarks", "examples")}
    assert len(modules) > 3
    assert [name for name in modules if not (PROJECT / (name.replace(".", "/") + ".py")).exists()] == []


def test_every_deployment_the_documents_run_is_there_and_has_the_parameters() -> None:
    deployments = yaml.safe_load((PROJECT / "prefect.yaml").read_text())["deployments"]
    entrypoints = {f"{d['flow_name']}/{d['name']}": d["entrypoint"] for d in deployments}
    run = _of("prefect", "deployment", "run")
    assert len(run) > 3
    for document, words in run:
        assert words[0] in entrypoints, f"{document}: {words[0]}"
        given = {after.partition("=")[0] for word, after in zip(words, words[1:], strict=False) if word == "-p"}
        module, _, name = entrypoints[words[0]].rpartition(".")
        assert given <= inspect.signature(getattr(importlib.import_module(module), name).fn).parameters.keys(), document


def test_the_docker_workers_prefect_is_that_of_the_lock() -> None:
    lock = (PROJECT / "requirements/cpu.lock").read_text()
    versions = set(re.findall(r"\bprefect==([\d.]+)", (PROJECT / "docs/deployment.md").read_text()))
    assert versions == set(re.findall(r"^prefect==([\d.]+)", lock, flags=re.MULTILINE))
