"""Prefect task: policy version 0, downloaded, copied or made.

In: a session and the model settings. Out: the base policy, in the store and in the run's log.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from prefect import task

from infra.environment import cache_folder
from infra.user_code import load_object
from settings.places.state_folder import expanded
from settings.run_file import RunConfig
from settings.warmup import DEMONSTRATIONS
from storage.log.entries import Policy
from storage.objects.digests import DIGEST_FILE, DigestMismatch, read_seal, sha256_of_json, verify_folder
from storage.objects.object_store import ObjectStore
from storage.objects.opening import open_store
from storage.objects.staging import staging_folder
from tasks.prefect.task_runs import may_pass
from tasks.session import RunSession
from trainers.model.fetch import GGUF, fetch_model

logger = logging.getLogger("millrace.base_model")

_SECONDS_BETWEEN_LINES = 10.0
_MOST_WAITS = 3
"""The second line comes after twice the time, and all from the third on after three times."""


def _may_pass(task: Any, task_run: Any, state: Any) -> bool:
    """As `may_pass`, and says so: no other worker's line tells of a process that died."""
    if passes := may_pass(task, task_run, state):
        logger.warning("%s; it is tried once more", str(state.data) or type(state.data).__name__)
    return passes


@task(name="base-model", retries=1, retry_condition_fn=_may_pass, persist_result=False)
async def provide_base_model(session: RunSession, *, config: RunConfig) -> Policy:
    """Version 0 of the run. A model made or copied once is found again by its content, by every later run in the store;
    the run goes on with what it began with, whatever becomes of the folder."""
    return await session.once("base-model", lambda: _base_model(session, config))


async def _base_model(session: RunSession, config: RunConfig) -> Policy:
    log, reference = session.log, config.train.reference.model
    if 0 in log.state.policies:
        return log.state.policies[0]
    if config.model:
        key = await asyncio.to_thread(store_model, config.model, log.store)
    else:
        what = f"a tiny one from {config.workflow}'s demonstrations, unless the store has it"
        logger.info("no model given: making %s (about a minute)", what)
        async with _progress_of(session.fleet.cluster.log_file("warmup")):
            key = await session.fleet.cluster.run(
                "warmup", "tasks.base_model:make_model", store=log.store.uri, config=config
            )
    digest = verify_folder(log.store.fetch_folder(key, cache_folder()))
    teacher = await asyncio.to_thread(store_model, reference, log.store) if reference else ""
    policy = Policy(version=0, path=key, weights_sha256=digest, parent=None, reference=teacher)
    log.append(policy)
    return policy


@contextlib.asynccontextmanager
async def _progress_of(log_file: Path) -> AsyncIterator[None]:
    """Pass on how far the process has come that makes the model, which is in its log: now and then, and at the end."""
    begin, last_line = log_file.stat().st_size if log_file.exists() else 0, ""

    def say() -> None:
        nonlocal last_line
        if log_file.exists():
            lines = re.findall(r"base model: .*", log_file.read_bytes()[begin:].decode(errors="replace"))
            if lines and lines[-1] != last_line:
                last_line = lines[-1]
                logger.info("%s", last_line)

    async def say_again_and_again() -> None:
        for line in itertools.count(1):
            await asyncio.sleep(min(line, _MOST_WAITS) * _SECONDS_BETWEEN_LINES)
            say()

    saying = asyncio.create_task(say_again_and_again())
    try:
        yield
        say()
    finally:
        saying.cancel()


@task(name="reference-model", retries=1, retry_condition_fn=_may_pass, persist_result=False)
async def provide_reference(session: RunSession, *, model: str) -> str:
    """Put a model that a replay takes as its reference into the store; returns its key."""
    return await asyncio.to_thread(store_model, model, session.log.store)


def make_model(*, store: str, config: RunConfig) -> str:
    """Warm up a model on the workflow's demonstrations and put it into the store, unless it is there; returns its key,
    which follows from what it learns. Runs in a process of its own."""
    workflow = load_object(config.workflow)(config.dataset or None)
    demonstrations = workflow.demonstrations(DEMONSTRATIONS, config.seed)
    chats = [[(message.role, message.content) for message in chat] for chat in demonstrations]
    made_from = sha256_of_json([chats, config.seed, config.warmup.model_dump()])
    key, its = f"models/warmup-{made_from[:12]}", open_store(store)
    if its.exists(f"{key}/{DIGEST_FILE}"):
        return key
    from trainers.model.warmup import make_base_model

    with staging_folder(cache_folder()) as scratch:
        folder = scratch / "model"
        make_base_model(folder, demonstrations, config.warmup, seed=config.seed)
        its.put_folder(folder, key, last=DIGEST_FILE, given=True)
    return key


def store_model(model: str, store: ObjectStore) -> str:
    """The key of a model's folder in the store, which follows from the content of its files; a local folder, or a hub
    model, is put there now if it is missing or damaged."""
    path = expanded(model)
    name = path.resolve().name if path.is_dir() else path.name.removesuffix(GGUF)
    with staging_folder(cache_folder()) as scratch:
        folder = fetch_model(model, scratch / "model")
        key = f"models/{name}-{sha256_of_json(read_seal(folder).files)[:12]}"
        try:
            verify_folder(store.fetch_folder(key, cache_folder()))
        except (FileNotFoundError, DigestMismatch):
            logger.info("copying model %s into the store", model)
            store.put_folder(folder, key, last=DIGEST_FILE)
    return key
