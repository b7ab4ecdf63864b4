"""Prefect flows. Whoever imports one has turned the telemetry of all libraries off: Prefect reads it at its import."""

from infra.environment import turn_telemetry_off

turn_telemetry_off()
