"""Notifications of a policy that did not pass its gate and of a flow run that failed, by Prefect's own means.

In: `$MILLRACE_NOTIFY`, an address that Apprise understands or the name of a Prefect notification block. Out: two
automations for the server, which sends: also for a flow run whose process is gone, and no flow knows the address.

    flow ──event──▶ Prefect's server ──automation──▶ the block ──▶ a chat, a mailbox, a webhook
"""

from __future__ import annotations

import datetime
import re
from uuid import UUID

from prefect.automations import AutomationCore, EventTrigger, Posture
from prefect.blocks.notifications import SlackWebhook
from prefect.client.orchestration import get_client
from prefect.events.actions import SendNotification
from prefect.events.schemas.events import ResourceSpecification
from prefect.exceptions import ObjectNotFound

from infra.services.services import NOTIFY
from settings.errors import InvalidInput

FLOWS = ["train-grpo", "evaluate", "rollout", "replay", "maintain"]
"""Flows whose failures are told: the server may have others' too."""
ADDRESS_BLOCK = "millrace-notify"
"""Prefect block that holds the address, encrypted."""
GATE_FAILED = "millrace: a policy did not pass its gate"
RUN_FAILED = "millrace: a flow run failed or crashed"

_GATE_SUBJECT = "Millrace: policy {{ event.payload.version }} of run {{ event.payload.run }} did not pass its gate"
_GATE_BODY = """\
It scored {{ '%.3f' | format(event.payload.score) }} on split '{{ event.payload.split }}'; the bar is \
{{ event.payload.min_score }}.
{% for problem in event.payload.problems %}- {{ problem }}
{% endfor %}Now {{ event.payload.outcome }}. Store: {{ event.payload.store }}"""
_RUN_SUBJECT = "Millrace: flow run {{ event.resource.name }} is {{ event.resource['prefect.state-name'] }}"
# Without the state's message: the text of a user's error may hold what is not for a chat.
_RUN_BODY = """\
Its flow is {{ event.resource_in_role['flow'].name }}. Its log in Prefect says why; what was committed is safe, and \
starting it again continues it."""


def check_destination(destination: str) -> None:
    """Raise `InvalidInput` for what names neither an address nor a block, without repeating it: it may hold a token."""
    from apprise import Apprise

    if "://" in destination:
        if Apprise.instantiate(destination, suppress_exceptions=True) is None:
            raise InvalidInput(
                f"${NOTIFY} is no address that Apprise understands: https://hooks.slack.com/services/…, mailto://…, "
                "discord://… and others are (https://appriseit.com/services/); a webhook of yours that takes JSON "
                "is jsons://HOST/PATH"
            )
    elif not re.fullmatch(r"[a-z0-9-]+/[a-z0-9-]+", destination):
        raise InvalidInput(
            f"${NOTIFY} is neither an address with :// nor a Prefect notification block as TYPE/NAME, such as "
            "slack-webhook/on-call; `prefect block ls` lists those there are"
        )


async def failure_automations(destination: str) -> list[AutomationCore]:
    """The automations that notify `destination`; the block for an address is made here.

    Raises `InvalidInput` for a malformed destination, or a block that the server lacks or that cannot notify.
    """
    check_destination(destination)
    block = await (_keep_address(destination) if "://" in destination else _find_block(destination))
    gate = EventTrigger(
        expect={"millrace.gate.failed"},
        match=ResourceSpecification({"prefect.resource.id": "millrace.run.*"}),
        posture=Posture.Reactive,
        threshold=1,
        within=datetime.timedelta(0),
    )
    flow_run = EventTrigger(
        expect={"prefect.flow-run.Failed", "prefect.flow-run.TimedOut", "prefect.flow-run.Crashed"},
        match=ResourceSpecification({"prefect.resource.id": "prefect.flow-run.*"}),
        match_related=ResourceSpecification({"prefect.resource.role": "flow", "prefect.resource.name": FLOWS}),
        for_each={"prefect.resource.id"},
        posture=Posture.Reactive,
        threshold=1,
        within=datetime.timedelta(seconds=60),  # a crash may be reported twice
    )
    tell_of_gate = SendNotification(block_document_id=block, subject=_GATE_SUBJECT, body=_GATE_BODY)
    tell_of_run = SendNotification(block_document_id=block, subject=_RUN_SUBJECT, body=_RUN_BODY)
    description = f"Millrace makes this automation if ${NOTIFY} is set."
    return [
        AutomationCore(name=GATE_FAILED, description=description, trigger=gate, actions=[tell_of_gate]),
        AutomationCore(name=RUN_FAILED, description=description, trigger=flow_run, actions=[tell_of_run]),
    ]


async def _keep_address(address: str) -> UUID:
    """Every server has Slack's block type, which hands an address that is not Slack's on to Apprise as it stands."""
    return await SlackWebhook(url=address, notify_type="failure").asave(ADDRESS_BLOCK, overwrite=True)


async def _find_block(reference: str) -> UUID:
    slug, name = reference.split("/")
    async with get_client() as client:
        try:
            document = await client.read_block_document_by_name(name, slug, include_secrets=False)
        except ObjectNotFound:
            raise InvalidInput(
                f"${NOTIFY} names a block that the Prefect server does not have; `prefect block ls` lists its blocks"
            ) from None
    if document.block_schema is None or "notify" not in document.block_schema.capabilities:
        raise InvalidInput(f"${NOTIFY} names a block that cannot notify; Prefect's Slack Webhook is one that can")
    return document.id
