"""What happened in a run: statistics of a loader, traces, served metrics, reports, timelines.

Stats       what a loader counted, and where it waited
trace       spans of all threads, recorded to a file
metrics     the live numbers, for Prometheus
report      one page of one run            (nostall.observe.report)
timelines   what other tools recorded      (nostall.observe.timelines)
"""

from nostall.observe import metrics, trace
from nostall.observe._stats import Stats

__all__ = ["Stats", "metrics", "trace"]
