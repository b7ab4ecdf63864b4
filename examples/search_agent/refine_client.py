"""A second model reads for the agent: passages in, what in them helps with the question out.

In: a question and passages. Out: notes that cite passages by id. The model is at any OpenAI-compatible URLs, such as
vLLM's. If no server answers, `RefineUnavailable` is raised. That is a fault of the infrastructure: an agent lets it
rise, so that the attempt is masked and not scored.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from examples.search_agent.retrieval.endpoints import Endpoint, Endpoints, Refused, Unavailable
from examples.search_agent.retrieval.passages import Passage
from millrace import InvalidInput

_TASK = """\
Note what in the passages helps to answer the question. Keep names, numbers and dates exactly, cite each fact by the \
id of its passage in square brackets, add nothing of your own, and do not answer the question. If nothing helps, \
write: nothing relevant.

Question: {question}

{passages}"""


class RefineUnavailable(Exception):
    """Every server failed within the deadline, or refused these passages; the message says how."""


@dataclass(kw_only=True)
class RefineStatistics:
    """The cost of refining so far."""

    requests: int = 0
    """Calls of `refine` with passages."""
    failures: int = 0
    """Calls that ended in `RefineUnavailable`."""
    truncated: int = 0
    """Notes that were cut off at `max_tokens`."""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    """As the servers count them; 0 for a server that does not."""
    seconds: float = 0.0
    """Sum over calls, failed ones and waits included."""


class RefineClient:
    """Asks `model` at `urls`, each with its `/v1`, as in `http://127.0.0.1:8000/v1`."""

    def __init__(
        self,
        urls: Sequence[str],
        *,
        model: str,
        deadline: float = 60.0,
        retries: int = 2,
        max_tokens: int = 512,
        temperature: float = 0.0,
        key_env: str = "",
    ) -> None:
        """`deadline`: seconds a call may take, waits included; `key_env` names the variable with the API key.

        Raises `InvalidInput` for a malformed URL.
        """
        if not model:
            raise InvalidInput("refining needs the name of the model that the servers know")
        self._endpoints = Endpoints(urls, deadline=deadline, retries=retries, key_env=key_env)
        self._options = {"model": model, "max_tokens": max_tokens, "temperature": temperature}
        self.statistics = RefineStatistics()

    async def refine(self, question: str, passages: Sequence[Passage]) -> str:
        """Notes on the passages; empty without passages. Raises `RefineUnavailable`."""
        if not passages:
            return ""
        shown = "\n\n".join(f"[{passage.id}] {passage.title}\n{passage.text}" for passage in passages)
        message = {"role": "user", "content": _TASK.format(question=question, passages=shown)}
        statistics, started = self.statistics, time.monotonic()
        statistics.requests += 1
        try:
            body = {**self._options, "messages": [message]}
            notes, usage, truncated = await self._endpoints.post("/chat/completions", body, _completion)
        except (Unavailable, Refused) as error:
            statistics.failures += 1
            raise RefineUnavailable(f"refine: {error}") from error
        finally:
            statistics.seconds += time.monotonic() - started
        statistics.truncated += truncated
        statistics.prompt_tokens += usage[0]
        statistics.completion_tokens += usage[1]
        return notes

    @property
    def endpoints(self) -> Sequence[Endpoint]:
        """Health and counts of each server."""
        return self._endpoints.endpoints

    async def close(self) -> None:
        """Close the connections."""
        await self._endpoints.close()


def _completion(content: Any) -> tuple[str, tuple[int, int], bool]:
    """Notes, tokens of prompt and completion, and whether the notes were cut off."""
    choice = content["choices"][0]
    # A model that thinks aloud, behind a server that does not take its thoughts out.
    notes = choice["message"]["content"].rpartition("</think>")[2].strip()
    if not notes:
        raise ValueError("no notes")
    usage = content.get("usage") or {}
    counts = (int(usage.get("prompt_tokens") or 0), int(usage.get("completion_tokens") or 0))
    return notes, counts, choice.get("finish_reason") == "length"
