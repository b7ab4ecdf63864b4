"""Destinations: what Apprise understands and what is written like a block's name pass, and nothing else does."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from tasks.prefect.notifications import FLOWS, check_destination

PROJECT = Path(__file__).parents[4]


def test_addresses_and_blocks_are_destinations():
    check_destination("https://hooks.slack.com/services/T1JJ3T3L2/A1BRTD4JD/TIiajkdnlazkcOXrIdevi7FQ")
    check_destination("mailto://somebody:s3cret@example.com")
    check_destination("jsons://hooks.example.com/t0ken")
    check_destination("pager-duty-webhook/on-call")


@pytest.mark.parametrize(
    ("destination", "fix"),
    [
        ("https://hooks.example.com/t0ken", "jsons://HOST/PATH"),
        ("slack://t0ken", "https://hooks.slack.com/services/"),
        ("gibberish://t0ken", "no address that Apprise understands"),
        ("t0ken", "TYPE/NAME"),
        ("Slack Webhook/t0ken", "prefect block ls"),
        ("a/b/t0ken", "slack-webhook/on-call"),
    ],
)
def test_others_are_refused_by_a_sentence_with_the_fix_and_without_the_secret(destination: str, fix: str):
    with pytest.raises(ValueError) as refused:
        check_destination(destination)
    assert fix in str(refused.value) and "t0ken" not in str(refused.value)


def test_failures_of_every_deployed_flow_are_told():
    deployments = yaml.safe_load((PROJECT / "prefect.yaml").read_text())["deployments"]
    assert {deployment["flow_name"] for deployment in deployments} == set(FLOWS)
