"""The search in the process finds what a reader of the corpus would, in the order of BM25."""

from __future__ import annotations

from examples.search_agent.local_search import LocalSearch
from examples.search_agent.world import World
from tests.unit.examples.search_agent.corpora import bm25_by_the_letter, random_passages, random_queries, same_ranking


async def test_the_ranking_is_that_of_bm25_over_title_and_text():
    passages = random_passages(200)
    search = LocalSearch(passages)
    for query in ["", *random_queries(30)]:
        found = [(passage.id, passage.score) for passage in await search.search(query.upper(), k=5)]
        same_ranking(found, bm25_by_the_letter(passages, query)[:5])


def test_the_note_about_a_fact_is_the_first_one_found():
    world = World(entities=300, seed=2)
    search = LocalSearch(world.passages)
    for (subject, relation), identity in list(world.states.items())[:200]:
        assert search.best(f"{relation} of {subject}", 1)[0].id == identity
