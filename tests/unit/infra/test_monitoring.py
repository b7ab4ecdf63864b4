"""Dashboard and alerts ask for what the exporter serves, and every alert is explained."""

from __future__ import annotations

import json
import re
from typing import Any

import yaml

from cli.operate.exporter import _GAUGES
from settings.train import SUSPICIOUS_GAPS
from tests.conftest import PROJECT

FOLDER = PROJECT / "infra" / "monitoring"


def _rules() -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load((FOLDER / "alerts.yaml").read_text())["groups"] for rule in group["rules"]]


def test_every_panel_and_alert_asks_for_what_is_served() -> None:
    panels = json.loads((FOLDER / "grafana.json").read_text())["panels"]
    asked = [target["expr"] for panel in panels for target in panel["targets"]]
    alerts = [rule["expr"] for rule in _rules()]
    assert len(asked) >= 12 and len(alerts) >= 5 and len({panel["id"] for panel in panels}) == len(panels)
    for expression in [*asked, *alerts]:
        names = set(re.findall(r"millrace_\w+", expression))
        assert names and names <= {f"millrace_{name}" for name in _GAUGES}, expression


def test_metrics_that_they_name_and_every_alert_are_documented() -> None:
    documented, operations = ((PROJECT / "docs" / name).read_text() for name in ("metrics.md", "operations.md"))
    text = (FOLDER / "grafana.json").read_text() + (FOLDER / "alerts.yaml").read_text()
    named = {name for names in re.findall(r'metric=~?\\?"([\w|]+)', text) for name in names.split("|")}
    assert len(named) >= 8
    assert [name for name in sorted(named) if f"`{name}`" not in documented] == []
    assert [rule["alert"] for rule in _rules() if f"`{rule['alert']}`" not in operations] == []


def test_prometheus_asks_where_the_exporter_listens_by_default() -> None:
    config = yaml.safe_load((FOLDER / "prometheus.yaml").read_text())
    assert config["rule_files"] == ["alerts.yaml"]
    assert config["scrape_configs"][0]["static_configs"][0]["targets"] == ["127.0.0.1:9464"]


def test_alerts_are_about_runs_that_are_being_trained() -> None:
    """The exporter serves finished runs too. A gap of 0.1 nats per token fires for a run in float32."""
    expressions = {rule["alert"]: " ".join(rule["expr"].split()) for rule in _rules()}
    assert all("millrace_training == 1" in expression for expression in expressions.values())
    assert "> on (run) millrace_suspicious_gap and on (run)" in expressions["MillraceEngineGap"]
    assert SUSPICIOUS_GAPS["float32"] < 0.1 < SUSPICIOUS_GAPS["bfloat16"]
