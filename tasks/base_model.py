"""Prefect task: policy version 0, downloaded, copied or made.

In: a session and the model settings. Out: the base policy, in the store and in the run's log.
"""

from __future__ import annotations

import asyncio
import logging
import tempfile
from pathlib import Path

from prefect import task

from infra.environment import cache_folder
from infra.user_code import load_object
from settings.run_file import RunConfig
from storage.log.entries import Policy
from storage.log.runs import model_key
from storage.objects.digests import DIGEST_FILE, sha256_of_json, verify_folder
from storage.objects.object_store import ObjectStore
from storage.objects.opening import open_store
from tasks.session import RunSession
from trainers.model.fetch import fetch_model

logger = logging.getLogger("millrace.base_model")

DEMONSTRATIONS = 50_000


@task(name="base-model", retries=1, persist_result=False)
async def provide_base_model(session: RunSession, *, config: RunConfig) -> Policy:
    """Version 0 of the run. A model made or copied once is found again by every later run in the store."""
    log, made_from = session.log, [config.workflow, config.dataset, config.seed, config.warmup.model_dump()]
    if 0 in log.state.policies:
        return log.state.policies[0]
    if config.model:
        key = await asyncio.to_thread(store_model, config.model, log.store)
    else:
        key = f"models/warmup-{sha256_of_json(made_from)[:12]}"
        if not log.store.exists(f"{key}/{DIGEST_FILE}"):
            logger.info(
                "no model given: making a tiny one from %s's demonstrations (about half a minute)", config.workflow
            )
            await session.fleet.cluster.run(
                "warmup", "tasks.base_model:make_model", store=log.store.uri, key=key, config=config
            )
    digest = verify_folder(log.store.fetch_folder(key, cache_folder()))
    policy = Policy(version=0, path=key, weights_sha256=digest, parent=None)
    log.append(policy)
    return policy


@task(name="reference-model", retries=1, persist_result=False)
async def provide_reference(session: RunSession, *, model: str) -> None:
    """Put the model that `train.reference.model` names into the store, where the trainer looks for it."""
    await asyncio.to_thread(store_model, model, session.log.store)


def make_model(*, store: str, key: str, config: RunConfig) -> None:
    """Warm up a model on the workflow's demonstrations and put it into the store. Runs in a process of its own."""
    from trainers.model.warmup import make_base_model

    workflow = load_object(config.workflow)(config.dataset or None)
    demonstrations = workflow.demonstrations(DEMONSTRATIONS, config.seed)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "model"
        make_base_model(folder, demonstrations, seed=config.seed, **config.warmup.model_dump())
        open_store(store).put_folder(folder, key, last=DIGEST_FILE)


def store_model(model: str, store: ObjectStore) -> str:
    """The key of a model's folder in the store; a local folder, or a hub model, is put there now if it is missing."""
    key = model_key(model)
    if not store.exists(f"{key}/{DIGEST_FILE}"):
        logger.info("fetching model %s", model)
        with tempfile.TemporaryDirectory() as scratch:
            store.put_folder(fetch_model(model, Path(scratch) / "model"), key, last=DIGEST_FILE)
    return key
