"""Repositories of the Hugging Face hub; what goes wrong there is one sentence.

In: an id such as `Qwen/Qwen2.5-0.5B-Instruct`. Out: nothing if the hub has it, or the folder of its files.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from settings.errors import InvalidInput, NotFound

Kind = Literal["model", "dataset"]
SECONDS_TO_ANSWER = 5.0


def check_on_hub(name: str, kind: Kind) -> dict[str, Any]:
    """Ask the hub for a repository; of a model returns what the hub knows of its `config.json`: its type, whether it
    has code of its own, how it is quantised. Raises as `fetch_from_hub`."""
    with _hub_errors(name, kind):
        from huggingface_hub import HfApi

        about = HfApi().repo_info(name, repo_type=kind, timeout=SECONDS_TO_ANSWER)
        return getattr(about, "config", None) or {}


def fetch_from_hub(name: str, kind: Kind, *, patterns: Sequence[str]) -> Path:
    """The folder with the files that match `patterns`, downloaded, or from the hub's cache on this machine.

    Raises `NotFound` if the hub has no such repository, or does not show it to this account, and `InvalidInput` for an
    impossible id, and if the hub does not answer and the files are not in the cache.
    """
    with _hub_errors(name, kind):
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(name, repo_type=kind, allow_patterns=list(patterns)))


@contextlib.contextmanager
def _hub_errors(name: str, kind: Kind) -> Iterator[None]:
    from huggingface_hub import constants, errors

    label = f"{kind} = {name!r}"
    try:
        yield
    except errors.GatedRepoError as error:
        fix = f"accept them at {constants.ENDPOINT}, and set HF_TOKEN"
        raise NotFound(f"{label}: the hub shows it only to those who have accepted its terms; {fix}") from error
    except errors.RepositoryNotFoundError as error:
        raise NotFound(
            f"{label}: the hub has no such {kind}, or it is private; check the id, use a folder, or set HF_TOKEN"
        ) from error
    except errors.HFValidationError as error:
        raise InvalidInput(f"{label}: no such file or folder, and not a Hugging Face id: {error}") from error
    except errors.OfflineModeIsEnabled as error:
        raise InvalidInput(
            f"{label}: it is not on this machine, and HF_HUB_OFFLINE forbids to fetch it; unset that, or use a folder"
        ) from error
    except Exception as error:  # the library lets through what its HTTP client raises, of several kinds
        is_of_the_network = isinstance(error, OSError | errors.HTTPError) or "http" in type(error).__module__
        if not is_of_the_network:
            raise
        reason = str(error).partition("\n")[0].removeprefix("Got: ")
        raise InvalidInput(
            f"{label}: it is not on this machine, and the hub at {constants.ENDPOINT} does not answer ({reason}); "
            "check the network, or use a folder"
        ) from error
