"""What the agent depends on: something to search with, and optionally a refiner and a judge.

In: a folder with `services.toml`, or with `corpus.jsonl`, or with both. Out: `Services`.

    search = ["http://127.0.0.1:8765", "http://127.0.0.1:8766"]     # servers; without them corpus.jsonl is searched

    [refine]                                       # a second model condenses what was found
    urls = ["http://127.0.0.1:8901/v1"]
    model = "Qwen/Qwen2.5-1.5B-Instruct"

    [judge]                                        # a third one says how good an answer is: part `judge` of the score
    base_url = "https://host/v1"
    model = "some-model"
    api_key_env = "JUDGE_API_KEY"                  # the environment variable that holds the key

However a service fails, the policy is not to blame: the failure becomes `ToolUnavailable`, so status `tool_error`.
"""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from examples.search_agent.dataset import CORPUS
from examples.search_agent.refine_client import RefineClient
from examples.search_agent.retrieval.local_search import LocalSearch
from examples.search_agent.retrieval.passages import Passage, read_passages
from examples.search_agent.retrieval.search_client import BadQuery, SearchClient
from millrace import RUBRIC, InvalidInput, Judge, ToolUnavailable


class Searcher(Protocol):
    """`SearchClient` and `LocalSearch`."""

    async def search(self, query: str, k: int = 5) -> list[Passage]: ...

    async def close(self) -> None: ...


class Refiner(Protocol):
    """`RefineClient`."""

    async def refine(self, question: str, passages: Sequence[Passage]) -> str: ...

    async def close(self) -> None: ...


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)


class RefineSettings(_Table):
    """A model that condenses passages; see `RefineClient`."""

    urls: list[str] = Field(min_length=1)
    model: str
    key_env: str = ""


class JudgeSettings(_Table):
    """A model that judges answers; see `millrace.Judge`."""

    base_url: str
    model: str
    api_key_env: str = ""
    rubric: str = RUBRIC


class ServiceSettings(_Table):
    """The content of `services.toml`."""

    search: list[str] = []
    """Retrieval servers, all with the same corpus."""
    refine: RefineSettings | None = None
    judge: JudgeSettings | None = None


def read_settings(folder: Path) -> ServiceSettings:
    """The content of `services.toml`. Raises `InvalidInput` for a wrong key or value, and for nothing to search."""
    file = folder / "services.toml"
    try:
        settings = ServiceSettings(**tomllib.loads(file.read_text())) if file.exists() else ServiceSettings()
    except tomllib.TOMLDecodeError as error:
        raise InvalidInput(f"{file} is not valid TOML: {error}") from None
    except ValidationError as error:
        problems = [f"{'.'.join(map(str, problem['loc']))}: {problem['msg']}" for problem in error.errors()]
        raise InvalidInput(f"{file}: {'; '.join(problems)}") from None
    for url in settings.search:
        if not url.startswith(("http://", "https://")):
            raise InvalidInput(f"{file}: search: {url!r} is not an http(s) URL")
    if not settings.search and not (folder / CORPUS).exists():
        raise InvalidInput(
            f'{folder} has nothing to search: neither corpus.jsonl nor a services.toml with search = ["http://…"]'
        )
    return settings


class Services:
    """What all attempts share."""

    def __init__(self, searcher: Searcher, *, refiner: Refiner | None = None, judge: Judge | None = None) -> None:
        self._searcher = searcher
        self._refiner = refiner
        self.judge = judge
        """None without a judge."""

    @property
    def refines(self) -> bool:
        """True if passages are condensed before they are shown."""
        return self._refiner is not None

    async def search(self, query: str, k: int) -> list[Passage]:
        """The `k` best passages. Raises `BadQuery`, and `ToolUnavailable` if the search fails."""
        try:
            return await self._searcher.search(query, k)
        except BadQuery:  # the policy's own fault, and it is told so
            raise
        except Exception as error:  # any other error: the policy only asked
            raise ToolUnavailable(f"{type(error).__name__}: {error}") from error

    async def refine(self, question: str, passages: Sequence[Passage]) -> str:
        """The passages in short. Raises `ToolUnavailable` if the refiner fails."""
        assert self._refiner is not None
        try:
            return await self._refiner.refine(question, passages)
        except Exception as error:
            raise ToolUnavailable(f"{type(error).__name__}: {error}") from error

    async def close(self) -> None:
        """Close the connections."""
        await self._searcher.close()
        if self._refiner is not None:
            await self._refiner.close()


def connect(folder: Path, settings: ServiceSettings) -> Services:
    """Clients of the services; no server is asked yet. Raises `InvalidInput` for a corpus that cannot be searched."""
    return Services(
        SearchClient(settings.search) if settings.search else LocalSearch(list(read_passages(folder / CORPUS))),
        refiner=None if settings.refine is None else RefineClient(**settings.refine.model_dump()),
        judge=None if settings.judge is None else Judge(**settings.judge.model_dump()),
    )
