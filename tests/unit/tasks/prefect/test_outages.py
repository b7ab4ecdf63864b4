"""A server that is away is worth one sentence per outage, whatever the libraries have to say about it."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Iterator
from types import SimpleNamespace

import httpx
import pytest
from prefect.events import Event
from prefect.events.clients import NullEventsClient, PrefectEventsClient
from prefect.settings import PREFECT_API_URL, get_current_settings, temporary_settings

from tasks.prefect import outages


@pytest.fixture(autouse=True)
def loggers() -> Iterator[None]:
    names = (*outages._COMPLAINING, "urllib3.connectionpool")
    before = {name: (logging.getLogger(name).filters[:], logging.getLogger(name).level) for name in names}
    yield
    for name, (filters, level) in before.items():
        logging.getLogger(name).filters[:] = filters
        logging.getLogger(name).setLevel(level)


def _complain(times: int) -> None:
    for _ in range(times):
        logging.getLogger("prefect.events.clients").warning("Unable to connect to %r. Please check", "ws://there")
        logging.getLogger("prefect._internal.concurrency").error("Service %r failed to process item %r", "Events", "e")


def test_each_outage_is_said_once_and_other_errors_as_they_are(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in outages._COMPLAINING:  # other tests may have put filters there
        monkeypatch.setattr(logging.getLogger(name), "filters", [])
    now = 1000.0
    monkeypatch.setattr(outages.time, "monotonic", lambda: now)
    outages.say_outages_once("http://there/api")
    outages.say_outages_once("http://there/api")
    _complain(3)
    now += outages._QUIET_SECONDS - 1  # a slow round later it is still away
    _complain(3)
    now += outages._QUIET_SECONDS - 1
    _complain(1)
    logging.getLogger("prefect._internal.concurrency").error("something else is wrong")
    logging.getLogger("urllib3.connectionpool").warning("Retrying (Retry(total=1, connect=1")
    assert [record.name for record in caplog.records] == ["millrace.outages", "prefect._internal.concurrency"]
    assert "Prefect at http://there/api does not answer: training goes on" in caplog.messages[0]
    now += outages._QUIET_SECONDS + 1
    _complain(2)
    assert [record.name for record in caplog.records][2:] == ["millrace.outages"]


def test_the_loggers_and_words_are_still_those_of_the_installed_prefect() -> None:
    import inspect

    from prefect._internal.concurrency import logger, services
    from prefect.events import clients

    assert {clients.logger.name, logger.name} == set(outages._COMPLAINING)
    said = inspect.getsource(clients) + inspect.getsource(services)
    assert all(f'"{words}' in said for words in outages._COMPLAINTS)


async def test_the_end_of_a_run_drops_what_a_server_that_stays_away_cannot_take(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Prefect would try for 8 s for each event, and for a minute for each state of the flow run."""

    class Away:
        async def __aenter__(self) -> Away:
            return self

        async def __aexit__(self, *_: object) -> None: ...

        async def read_flow_run(self, _: object) -> None:
            raise httpx.ConnectError("All connection attempts failed")

    monkeypatch.setattr(outages, "get_client", Away)
    monkeypatch.setattr(outages, "LONGEST_WAIT", 0.6)
    context = SimpleNamespace(flow_run=SimpleNamespace(id=uuid.uuid4()))
    monkeypatch.setattr(outages.FlowRunContext, "get", lambda: context)
    monkeypatch.setattr(get_current_settings().client, "max_retries", 5)
    with temporary_settings({PREFECT_API_URL: "http://127.0.0.1:9/api"}):
        try:
            outages.EventsWorker.set_client_override(PrefectEventsClient)
            sending = outages.EventsWorker.instance()
            for _ in range(100):
                sending.send(Event(event="e", resource={"prefect.resource.id": "r"}))
            assert not await outages.prefect_answers()
            assert get_current_settings().client.max_retries == 0
            await asyncio.wait_for(asyncio.wrap_future(sending._drain()), 10)
            new = outages.EventsWorker.instance()
            assert new is not sending and new.client_type is NullEventsClient
            await new.drain()
        finally:
            outages.EventsWorker.set_client_override(None)
    context.flow_run = None
    assert await outages.prefect_answers(), "outside of a flow run nothing waits"
