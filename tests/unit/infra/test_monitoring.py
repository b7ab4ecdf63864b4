"""Dashboard and alerts ask for what the exporter serves, and every alert is explained."""

from __future__ import annotations

import json
import re
from typing import Any

import yaml

from cli.operate.exporter import _GAUGES
from tests.conftest import PROJECT

FOLDER = PROJECT / "infra" / "monitoring"
SERVED = {f"millrace_{name}" for name in _GAUGES}


def _asked(expression: str) -> set[str]:
    return set(re.findall(r"millrace_\w+", expression))


def _rules() -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load((FOLDER / "alerts.yaml").read_text())["groups"] for rule in group["rules"]]


def test_every_panel_and_alert_asks_for_what_is_served() -> None:
    dashboard = json.loads((FOLDER / "grafana.json").read_text())
    panels = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    alerts = [rule["expr"] for rule in _rules()]
    assert len(panels) >= 12 and len(alerts) >= 5
    for expression in [*panels, *alerts]:
        assert _asked(expression) and _asked(expression) <= SERVED, expression
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])


def test_metrics_they_name_are_documented() -> None:
    documented = (PROJECT / "docs/metrics.md").read_text()
    text = (FOLDER / "grafana.json").read_text() + (FOLDER / "alerts.yaml").read_text()
    named = {name for names in re.findall(r'metric=~?\\?"([\w|]+)', text) for name in names.split("|")}
    assert len(named) >= 8
    assert [name for name in sorted(named) if f"`{name}`" not in documented] == []


def test_the_operations_page_explains_every_alert() -> None:
    page = (PROJECT / "docs/operations.md").read_text()
    assert [rule["alert"] for rule in _rules() if f"`{rule['alert']}`" not in page] == []


def test_prometheus_asks_where_the_exporter_listens_by_default() -> None:
    config = yaml.safe_load((FOLDER / "prometheus.yaml").read_text())
    assert config["rule_files"] == ["alerts.yaml"]
    assert config["scrape_configs"][0]["static_configs"][0]["targets"] == ["127.0.0.1:9464"]
