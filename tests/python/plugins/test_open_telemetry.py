"""What loaders count, and epochs as spans, as the SDK of OpenTelemetry gives them to its exporters."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import nostall

if importlib.util.find_spec("opentelemetry") is None:
    pytest.skip("needs the package opentelemetry-sdk", allow_module_level=True)

from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from nostall.plugins import open_telemetry


@pytest.fixture
def loader(image_folder: Path) -> Iterator[nostall.DataLoader]:
    source = nostall.ImageFolder(image_folder, index=False)
    with nostall.DataLoader(source, 4, epochs=2, tiers=["ram:64MiB"], output="numpy") as made:
        yield made


def points(reader: InMemoryMetricReader, loader: str) -> dict[tuple[str, str], tuple[float, str]]:
    """Value and unit by the name, and by the origin or pool."""
    data: Any = reader.get_metrics_data()
    return {
        (metric.name, point.attributes.get("origin") or point.attributes.get("pool") or ""): (
            point.value,
            metric.unit,
        )
        for resource in data.resource_metrics
        for scope in resource.scope_metrics
        for metric in scope.metrics
        for point in metric.data.data_points
        if point.attributes["loader"] == loader
    }


def test_a_reader_gets_what_loaders_counted(loader: nostall.DataLoader) -> None:
    reader = InMemoryMetricReader()
    open_telemetry.export(MeterProvider([reader]))
    for _ in loader:
        pass
    found = points(reader, loader.name)
    stats = loader.stats()
    assert found["nostall_batches_total", ""] == (stats.epochs[0].batches, "{batch}")
    for origin in ("ram", "source"):
        counted = stats.epochs[0].origins[origin]
        assert found["nostall_samples_total", origin] == (counted.samples, "{sample}")
        assert found["nostall_bytes_total", origin] == (counted.bytes, "By")
    assert found["nostall_stall_seconds_total", ""] == (stats.stall_seconds, "s")
    assert {name for name, _ in found} == set(nostall.metrics.HELP)
    for _ in loader:
        pass
    batches = sum(epoch.batches for epoch in loader.stats().epochs)
    assert points(reader, loader.name)["nostall_batches_total", ""][0] == batches


def test_each_epoch_is_a_span_around_those_of_the_training(loader: nostall.DataLoader) -> None:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracer = provider.get_tracer("training")
    steps = 0
    for epoch in open_telemetry.epochs(loader, provider):
        for _ in epoch:
            with tracer.start_as_current_span("step"):
                steps += 1
    spans = exporter.get_finished_spans()
    whole = [span for span in spans if span.name == "nostall.epoch"]
    assert [dict(span.attributes or {})["nostall/epoch"] for span in whole] == [0.0, 1.0]
    assert dict(whole[1].attributes or {}) == nostall.metrics.scalars(loader.stats())
    within = [span for span in spans if span.name == "step"]
    assert len(within) == steps > 2
    of = {span.context.span_id: span for span in whole}
    for span in within:
        assert span.parent is not None and span.parent.span_id in of
