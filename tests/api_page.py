"""`docs/api.md`, made from the code: every name of `millrace`, its signature and the first paragraph of its docstring.

`python -m tests.api_page` writes the page anew; `tests/unit/millrace/test_public_face.py` compares it with the code.
"""

from __future__ import annotations

import ast
import itertools
from collections.abc import Iterator, Sequence

import millrace
from tests.documents import PROJECT

PAGE = PROJECT / "docs/api.md"
HEAD = """# The Python API

Everything that an environment, a tool, a reward, a loss or a notebook needs comes from one import:

```python
from millrace import Chat, Score, Task, Workflow, exact, score
```

A name is loaded when it is first used, so the import itself is free. In a run file a name is `millrace:NAME`, for
example `workflow = "millrace:VerifiersWorkflow"`. [rollouts.md](rollouts.md) and [training.md](training.md) show the
names at work. `tests/api_page.py` makes this page from the code.
"""
SECTIONS = {
    "Environments": (
        "Workflow Task Score Message Chat Reply CallRequest workflow_context WorkflowContext read_dataset read_rows"
    ),
    "Ready-made kinds of workflows": (
        "EnvironmentWorkflow Environment Observation AgentWorkflow CommandWorkflow VerifiersWorkflow"
    ),
    "Tools": "tool Tool run_python sandboxed",
    "Rewards": "score score_all exact gsm8k math_answer matches final_answer unit_tests Judge RUBRIC",
    "A loss of your own": "LossInputs LossOutput",
    "Notebooks": "open_run Run train evaluate replay",
    "What rollouts produce": "RolloutGroup Trajectory Turn ToolCall Sampling",
    "Errors": (
        "UserError InvalidInput NotFound WrongWorkflow ToolUnavailable AgentFailed RewardFailed RewardTimeout "
        "EngineError OutOfRoom"
    ),
}


def page() -> str:
    """The page as the code is now."""
    entries = [[f"## {section}", *map(_entry, names.split())] for section, names in SECTIONS.items()]
    return "\n\n".join([HEAD.rstrip(), *itertools.chain.from_iterable(entries)]) + "\n"


def _entry(name: str) -> str:
    """Heading, signature, first paragraph, and a line for each member of a class."""
    body = ast.parse((PROJECT / (millrace._HOME[name].replace(".", "/") + ".py")).read_text()).body
    node, text = next((node, text) for node, text in _documented(body) if _name(node) == name)
    members = list(_members(node)) if isinstance(node, ast.ClassDef) else []
    parts = [f"### `{name}`", f"```\n{_signature(node)}\n```", text, "\n".join(members)]
    return "\n\n".join(part for part in parts if part)


def _documented(body: Sequence[ast.stmt]) -> Iterator[tuple[ast.stmt, str]]:
    """Statements, each with the first paragraph of its docstring, or of the string below it."""
    for node, below in itertools.zip_longest(body, body[1:]):
        text = None
        match node, below:
            case ((ast.ClassDef() | ast.FunctionDef() | ast.AsyncFunctionDef()), _):
                text = ast.get_docstring(node)
            case ((ast.Assign() | ast.AnnAssign()), ast.Expr(value=ast.Constant(value=str(text)))):
                pass
        yield node, " ".join((text or "").split("\n\n")[0].split())


def _name(node: ast.stmt) -> str:
    match node:
        case ast.ClassDef(name=name) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
            return name
        case ast.Assign(targets=[target]) | ast.AnnAssign(target=target):
            return ast.unparse(target)
    return ""


def _signature(node: ast.stmt) -> str:
    match node:
        case ast.ClassDef(name=name, bases=bases, body=body):
            made = [each.args for each in body if isinstance(each, ast.FunctionDef) and each.name == "__init__"]
            takes = _without_self(made[0]) if made else ", ".join(map(ast.unparse, bases))
            return f"class {name}({takes})" if takes else f"class {name}"
        case ast.FunctionDef(name=name, args=takes, returns=returns):
            return f"{name}({_without_self(takes)})" + (f" -> {ast.unparse(returns)}" if returns else "")
        case ast.AsyncFunctionDef(name=name, args=takes, returns=returns):
            return f"await {name}({_without_self(takes)})" + (f" -> {ast.unparse(returns)}" if returns else "")
    return ast.unparse(node)


def _without_self(arguments: ast.arguments) -> str:
    return ast.unparse(arguments).removeprefix("self").removeprefix(", ")


def _members(node: ast.ClassDef) -> Iterator[str]:
    """What an object has: documented attributes, those that `__init__` sets too, and methods."""
    for each, text in _documented(node.body):
        if isinstance(each, ast.FunctionDef) and each.name == "__init__":
            yield from [f"* `{node.name}(…)`: {text}"] if text else []
            attributes = [(_name(line), words) for line, words in _documented(each.body)]
            yield from (
                f"* `{name.removeprefix('self.')}`: {words}" for name, words in attributes if _public(name) and words
            )
        elif isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef) and _public(_name(each)):
            is_property = any(ast.unparse(decorator) == "property" for decorator in each.decorator_list)
            yield f"* `{_name(each) if is_property else _signature(each)}`" + (f": {text}" if text else "")
        elif isinstance(each, ast.AnnAssign) and text and _public(_name(each)):
            yield f"* `{ast.unparse(each)}`: {text}"


def _public(name: str) -> bool:
    return name == "__call__" or not name.removeprefix("self.").startswith("_")


if __name__ == "__main__":
    PAGE.write_text(page())
