"""What loaders count, and the epochs of a training, for OpenTelemetry.

    nostall.plugins.open_telemetry.export()
    for epoch in nostall.plugins.open_telemetry.epochs(loader):
        for images, labels in epoch:
            ...

The SDK that the program has set up decides where metrics and spans go; without one nothing is sent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from opentelemetry import metrics, trace

import nostall

if TYPE_CHECKING:
    from opentelemetry.metrics import CallbackOptions, MeterProvider, Observation
    from opentelemetry.trace import TracerProvider

__all__ = ["epochs", "export"]

_UNITS = {"seconds": "s", "bytes": "By", "batches": "{batch}", "samples": "{sample}"}


def export(provider: MeterProvider | None = None) -> None:
    """Offers the numbers of all loaders of this process, under the names that Prometheus has.

    The SDK's reader reads them, with the rank, the loader and the origin as attributes.

    Args:
        provider: that of the program if None.
    """
    meter = metrics.get_meter("nostall", nostall.__version__, provider)
    for name, about in nostall.metrics.HELP.items():
        unit = next(unit for word, unit in _UNITS.items() if word in name)
        read: list[Callable[[CallbackOptions], Iterable[Observation]]] = [partial(_observed, name)]
        if name.endswith("_total"):
            meter.create_observable_counter(name, read, unit, about)
        else:
            meter.create_observable_gauge(name, read, unit, about)


def _observed(name: str, _: CallbackOptions) -> Iterator[Observation]:
    for measured, labels, value in nostall.metrics.measured():
        if measured == name:
            yield metrics.Observation(value, labels)


def epochs(loader: nostall.DataLoader, provider: TracerProvider | None = None) -> Iterator[Any]:
    """The epochs of a loader, each within a span ``nostall.epoch``: the program's own are its children.

    The span ends with the epoch, and has `nostall.metrics.scalars` as attributes.

    Args:
        provider: that of the program if None.
    """
    tracer = trace.get_tracer("nostall", nostall.__version__, provider)
    for epoch in loader.epochs():
        with tracer.start_as_current_span("nostall.epoch") as span:
            try:
                yield epoch
            finally:
                span.set_attributes(nostall.metrics.scalars(loader.stats()))
