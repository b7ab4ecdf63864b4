"""Search as a tool: passages for a query, from one of several retrieval servers.

In: a query. Out: passages, best first. If no server answers, `SearchUnavailable` is raised. That is a fault of the
infrastructure: an agent lets it rise, so that the attempt is masked and not scored.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from examples.search_agent.retrieval.endpoints import Endpoint, Endpoints, Refused, Unavailable
from examples.search_agent.retrieval.passages import Passage


class SearchUnavailable(Exception):
    """Every server failed within the deadline; the message says how each did."""


class BadQuery(ValueError):
    """The server will not search for this: the query is too long, or k too large."""


class SearchClient:
    """Searches at `urls`, replicas of one index. `token_env` names the variable with the servers' token, if any."""

    def __init__(
        self,
        urls: Sequence[str],
        *,
        deadline: float = 10.0,
        retries: int = 3,
        token_env: str = "MILLRACE_SEARCH_TOKEN",
    ) -> None:
        """`deadline`: seconds a search may take, waits included. Raises `InvalidInput` for a malformed URL."""
        self._endpoints = Endpoints(urls, deadline=deadline, retries=retries, key_env=token_env)

    async def search(self, query: str, k: int = 5) -> list[Passage]:
        """At most k passages; an empty list if nothing matches. Raises `SearchUnavailable`, `BadQuery`."""
        try:
            return await self._endpoints.post(
                "/search", {"query": query, "k": k}, lambda content: _passages(content, k)
            )
        except Unavailable as error:
            raise SearchUnavailable(f"search: {error}") from error
        except Refused as error:
            raise BadQuery(str(error)) from error

    @property
    def endpoints(self) -> Sequence[Endpoint]:
        """Health and counts of each server."""
        return self._endpoints.endpoints

    async def close(self) -> None:
        """Close the connections."""
        await self._endpoints.close()


def _passages(content: Any, k: int) -> list[Passage]:
    (rows,) = content["results"]
    passages = [
        Passage(id=_text(row["id"]), title=_text(row["title"]), text=_text(row["text"]), score=float(row["score"]))
        for row in rows
    ]
    if len(passages) > k:
        raise ValueError(f"{len(passages)} passages, {k} were asked for")
    return passages


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{type(value).__name__} instead of text")
    return value
