"""Sends a span for each call to an OpenTelemetry collector, with what the engine tells of its requests."""
