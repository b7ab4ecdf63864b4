"""BrowseComp-Plus (Chen et al. 2025, arXiv 2508.06600) as a folder for the agent: decrypted, with its corpus.

In: the queries as JSONL or Parquet: `query_id`, and encrypted `query`, `answer` and lists `evidence_docs`,
`gold_docs`, `negative_docs` of `docid`, `text`, `url`; optionally the corpus (`docid`, `text`, `url`, not encrypted);
the canary string on the data set's page.
Out: `corpus.jsonl`, `train.jsonl`, `test.jsonl`; the evidence supports.

    python -m examples.search_agent.prepare_browsecomp OUT queries.parquet --corpus corpus.parquet --canary "…"

The texts are encrypted to keep them out of training data. Do not publish what this writes.
"""

from __future__ import annotations

import argparse
import base64
import binascii
import hashlib
import itertools
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from examples.search_agent.dataset import Problem, write_dataset
from examples.search_agent.retrieval.passages import Passage
from millrace import read_rows

_DOCUMENTS = ("evidence_docs", "gold_docs", "negative_docs")


def decrypt(ciphertext: str, canary: str) -> str:
    """Base64 of the UTF-8 text, combined by exclusive or with the SHA-256 digest of the canary, repeated: the scheme
    of BrowseComp (`browsecomp_eval.py` in openai/simple-evals), which BrowseComp-Plus keeps.

    Raises `ValueError` for what is no such text, or was encrypted with another canary.
    """
    try:
        encrypted = base64.b64decode(ciphertext, validate=True)
        key = hashlib.sha256(canary.encode()).digest()
        return bytes(byte ^ mask for byte, mask in zip(encrypted, itertools.cycle(key), strict=False)).decode()
    except (binascii.Error, UnicodeDecodeError):
        raise ValueError(f"{ciphertext[:20]!r}… cannot be decrypted with this canary; check --canary") from None


def read_problems(file: Path, canary: str, documents: dict[str, Passage]) -> list[Problem]:
    """The decrypted questions; the documents that come with them go into `documents`, by id.

    Raises `ValueError` naming the line for a missing field, a question without an answer, and a wrong canary.
    """
    problems = []
    for row in read_rows(file, required=["query_id", "query", "answer"]):
        where = f"{file}, query {row['query_id']}"
        try:
            docs = {kind: [_document(each, canary) for each in row.get(kind) or []] for kind in _DOCUMENTS}
            question, answer = decrypt(row["query"], canary), decrypt(row["answer"], canary)
        except (TypeError, KeyError):
            raise ValueError(f"{where}: its documents must be objects with the texts docid, text and url") from None
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None
        if not answer.strip():
            raise ValueError(f"{where}: the answer is empty")
        documents |= {passage.id: passage for passages in docs.values() for passage in passages}
        supporting = tuple(passage.id for passage in docs["evidence_docs"] or docs["gold_docs"])
        problems.append(Problem(id=str(row["query_id"]), question=question, answer=answer, supporting=supporting))
    return problems


def read_documents(file: Path) -> dict[str, Passage]:
    """The corpus, which is not encrypted. Raises `ValueError` naming the line of a broken one."""
    rows = read_rows(file, required=["docid", "text"])
    return {str(row["docid"]): _passage(str(row["docid"]), str(row["text"]), str(row.get("url") or "")) for row in rows}


def _document(row: dict[str, Any], canary: str) -> Passage:
    return _passage(*(decrypt(row[key], canary) for key in ("docid", "text", "url")))


def _passage(identity: str, text: str, url: str) -> Passage:
    return Passage(id=identity, title=url, text=text)


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line, see the top of this file."""
    parser = argparse.ArgumentParser(
        prog="python -m examples.search_agent.prepare_browsecomp",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("out", type=Path, help="folder to write to")
    parser.add_argument("queries", type=Path, help="the encrypted queries, JSONL or Parquet")
    parser.add_argument("--canary", required=True, help="the canary string on the data set's page, the whole sentence")
    parser.add_argument("--corpus", type=Path, help="its corpus; without it, the documents that come with the queries")
    parser.add_argument("--held-out", type=int, default=330, help="queries for test.jsonl, drawn at random")
    given = parser.parse_args(arguments)
    try:
        documents: dict[str, Passage] = {}
        problems = read_problems(given.queries, given.canary, documents)
        if not 0 < given.held_out < len(problems):
            raise ValueError(f"--held-out {given.held_out} of {len(problems)} queries leaves one split empty")
        if given.corpus is not None:
            documents |= read_documents(given.corpus)
        random.Random(0).shuffle(problems)
        splits = {"train": problems[given.held_out :], "test": problems[: given.held_out]}
        print(write_dataset(given.out, documents.values(), splits))
    except (ValueError, OSError) as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
