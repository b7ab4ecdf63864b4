"""Several servers that answer the same, asked as one.

In: a JSON body for a path. Out: the answer of one of the servers, read by the caller's function.

    call ─▶ the endpoint with fewest requests open ─▶ answer
              │ fault (5xx, cut off, late, garbage): it rests; the next endpoint
              │ 429: it rests as long as it says; the next endpoint
              ▼ none left: wait, with full jitter, and ask again, until the retries or the deadline are used up

An endpoint that has rested is tried with one request before it gets its share again. Being refused for a full queue
is no fault and uses up no retry.
"""

from __future__ import annotations

import asyncio
import email.utils
import os
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import httpx

from millrace import InvalidInput

Answer = TypeVar("Answer")

_FIRST_DELAY = 0.2
_LONGEST_DELAY = 5.0
_DEFAULT_RETRY_AFTER = 1.0
_OTHERS_FAULT = {401, 403, 404, 408}
"""Client errors of HTTP that say the endpoint is not what it should be, and nothing about the body."""
_SHOWN_CHARACTERS = 200


class Unavailable(Exception):
    """No endpoint gave an answer; the message says why, endpoint by endpoint."""


class Refused(ValueError):
    """An endpoint found the request itself wrong, so the others would too."""


@dataclass(kw_only=True)
class Endpoint:
    """One server: its address, its health and what it did."""

    url: str
    outstanding: int = 0
    requests: int = 0
    failures: int = 0
    """Faults of the server: no answer, a late one, 5xx, or garbage."""
    pushed_back: int = 0
    """Answers 429."""
    seconds: float = 0.0
    """Sum over all requests, failed ones included."""
    last_fault: str = "not asked"
    failures_in_row: int = 0
    failed_until: float = 0.0
    busy_until: float = 0.0

    def rests_until(self) -> float:
        """It is not asked before this time (`time.monotonic`)."""
        return max(self.failed_until, self.busy_until)

    def may_be_asked(self, now: float) -> bool:
        """True if it has rested; after a fault, only if no other request is trying it."""
        return now >= self.rests_until() and not (self.failures_in_row and self.outstanding)


class _Fault(Exception):
    pass


class _Busy(Exception):
    pass


class Endpoints:
    """Asks one of `urls`; usable from one event loop at a time."""

    def __init__(self, urls: Sequence[str], *, deadline: float, retries: int, key_env: str = "") -> None:
        """`deadline`: seconds a call may take, waits included; `retries`: how often every endpoint is asked again.

        `key_env` names the environment variable with the bearer token. Raises `InvalidInput` for a malformed URL.
        """
        self.endpoints = [Endpoint(url=_checked(url)) for url in dict.fromkeys(urls)]
        if not self.endpoints:
            raise InvalidInput("no URL is given")
        if deadline <= 0 or retries < 0:
            raise InvalidInput(f"deadline {deadline} must be above 0 and retries {retries} not below 0")
        self._deadline = deadline
        self._retries = retries
        self._key_env = key_env
        self._opened: tuple[asyncio.AbstractEventLoop, httpx.AsyncClient] | None = None

    async def post(self, path: str, body: Any, read: Callable[[Any], Answer]) -> Answer:
        """What `read` makes of an endpoint's JSON; a `ValueError`, `LookupError` or `TypeError` there is garbage.

        Raises `Unavailable` when every endpoint failed or the deadline is over, `Refused` for a request that is wrong.
        """
        until = time.monotonic() + self._deadline
        retry = 0
        while True:
            untried = list(self.endpoints)
            was_pushed_back = False
            while endpoint := self._least_busy(untried):
                untried.remove(endpoint)
                others = sum(other.may_be_asked(time.monotonic()) for other in untried)
                try:  # what is left of the deadline is shared with those that can still be asked
                    return await self._ask(endpoint, path, body, read, (until - time.monotonic()) / (others + 1))
                except _Busy:
                    was_pushed_back = True
                except _Fault:
                    pass  # noted at the endpoint
                if time.monotonic() >= until:
                    raise self._unavailable()
            if len(untried) < len(self.endpoints) and not was_pushed_back:
                if retry == self._retries:
                    raise self._unavailable()
                retry += 1
            rested = min(endpoint.rests_until() for endpoint in self.endpoints)
            # Full jitter (Brooker 2015): requests that failed together do not come back together.
            jitter = random.uniform(0, min(_LONGEST_DELAY, _FIRST_DELAY * 2**retry))
            wake = max(rested, time.monotonic()) + jitter
            if wake >= until:
                raise self._unavailable()
            await asyncio.sleep(wake - time.monotonic())

    async def close(self) -> None:
        """Close the connections; the next call opens new ones."""
        opened, self._opened = self._opened, None
        if opened and opened[0] is asyncio.get_running_loop():
            await opened[1].aclose()

    def _least_busy(self, untried: Sequence[Endpoint]) -> Endpoint | None:
        now = time.monotonic()
        free = [endpoint for endpoint in untried if endpoint.may_be_asked(now)]
        return min(free, key=lambda endpoint: (endpoint.outstanding, random.random()), default=None)

    async def _ask(
        self, endpoint: Endpoint, path: str, body: Any, read: Callable[[Any], Answer], seconds: float
    ) -> Answer:
        started = time.monotonic()
        endpoint.outstanding += 1
        endpoint.requests += 1
        try:
            async with asyncio.timeout(seconds):
                response = await self._client().post(endpoint.url + path, json=body, headers=self._headers())
            answer = self._read(endpoint, response, read)
        except TimeoutError:
            raise self._failed(endpoint, started, f"no answer within {seconds:.2g} s") from None
        except httpx.HTTPError as error:
            raise self._failed(endpoint, started, f"{type(error).__name__} {error}".strip()) from None
        except _Fault as fault:
            raise self._failed(endpoint, started, str(fault)) from None
        finally:
            endpoint.outstanding -= 1
            endpoint.seconds += time.monotonic() - started
        endpoint.failures_in_row, endpoint.failed_until = 0, 0.0
        return answer

    def _read(self, endpoint: Endpoint, response: httpx.Response, read: Callable[[Any], Answer]) -> Answer:
        status = response.status_code
        words = f"status {status}: {response.text[:_SHOWN_CHARACTERS]}"
        if status == 429:
            endpoint.pushed_back += 1
            endpoint.last_fault = words
            endpoint.busy_until = time.monotonic() + _retry_after(response)
            raise _Busy
        if 400 <= status < 500 and status not in _OTHERS_FAULT:
            raise Refused(f"{endpoint.url}: {words}")
        if status != 200:
            raise _Fault(words)
        try:
            return read(response.json())
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise _Fault(f"garbage ({type(error).__name__} {error}): {response.text[:_SHOWN_CHARACTERS]!r}") from None

    def _failed(self, endpoint: Endpoint, started: float, why: str) -> _Fault:
        endpoint.failures += 1
        endpoint.last_fault = why
        now = time.monotonic()
        if started >= endpoint.failed_until:  # requests that were under way when it fell are one fall, not many
            endpoint.failures_in_row += 1
            delay = min(_LONGEST_DELAY, _FIRST_DELAY * 2 ** min(endpoint.failures_in_row - 1, 16))
            endpoint.failed_until = now + delay * random.uniform(0.5, 1)
        return _Fault(why)

    def _unavailable(self) -> Unavailable:
        reasons = "; ".join(f"{endpoint.url}: {endpoint.last_fault}" for endpoint in self.endpoints)
        return Unavailable(
            self._without_key(f"no answer within {self._deadline:g} s and {self._retries} retries: {reasons}")
        )

    def _without_key(self, words: str) -> str:
        key = os.environ.get(self._key_env, "") if self._key_env else ""
        return words.replace(key, "[key]") if key else words  # servers like to quote a wrong key

    def _headers(self) -> dict[str, str]:
        key = os.environ.get(self._key_env, "") if self._key_env else ""
        return {"Authorization": f"Bearer {key}"} if key else {}

    def _client(self) -> httpx.AsyncClient:
        """Connections belong to the event loop that opened them."""
        loop = asyncio.get_running_loop()
        if self._opened is None or self._opened[0] is not loop:
            limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
            self._opened = (loop, httpx.AsyncClient(timeout=None, limits=limits))
        return self._opened[1]


def _checked(url: str) -> str:
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL as error:
        raise InvalidInput(f"{url!r} is not a URL: {error}") from None
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise InvalidInput(f"{url!r} is not the URL of a server, such as http://127.0.0.1:8765")
    if parsed.userinfo:
        raise InvalidInput(f"the URL of {parsed.host} holds a password; put it into the environment as a token")
    return url.rstrip("/")


def _retry_after(response: httpx.Response) -> float:
    """Seconds; the header may also be a date."""
    value = response.headers.get("Retry-After", "")
    try:
        return max(0.0, float(value))
    except ValueError:
        pass
    try:
        return max(0.0, email.utils.parsedate_to_datetime(value).timestamp() - time.time())
    except ValueError:
        return _DEFAULT_RETRY_AFTER
