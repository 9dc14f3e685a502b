"""Ray Serve's number of replicas, made to follow the lag of a work stream.

Replicas report how many entries of their stream are unsettled (``record_autoscaling_stats``), Ray Serve's
controller hands the reports to :class:`StreamLagPolicy`, and waits as long as its configuration says before
it follows. So the controller needs no connection to Redis and no password. Ray stops a replica that is too
many gently: it finishes its requests and its batch of work; what is killed all the same is delivered
again to the others.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from ernie5.services.tokenizer_settings import ScalingSettings

if TYPE_CHECKING:
    from ray.serve.config import AutoscalingConfig

LAG_METRIC = "work_entries"
"""Name under which replicas report the unsettled entries of their work stream."""
POLICY = "ernie5.services.stream_scaling:StreamLagPolicy"


def replicas_for_lag(lag: float, current: int, entries_per_replica: int, keep: float) -> int:
    """How many replicas a lag asks for; 0 where there is none.

    Between the number that the lag fills and the one that it fills to ``keep``, ``current`` stays: a lag that
    swings by less changes nothing.

    >>> [replicas_for_lag(lag, 2, 64, 0.5) for lag in (0, 32, 33, 64, 128, 129)]
    [0, 1, 2, 2, 2, 3]
    """
    fills = math.ceil(lag / entries_per_replica)
    if fills >= current:
        return fills
    return min(current, math.ceil(lag / (entries_per_replica * keep)))


def newest(series: Iterable[Iterable[Any]], not_before: float) -> float | None:
    """The latest value of several replicas' reports (points with ``timestamp`` and ``value``).

    All replicas report the same stream, so their values are not added up. None where no point is as late as
    ``not_before``.
    """
    points = [(point.timestamp, point.value) for points in series for point in points]
    if not points:
        return None
    timestamp, value = max(points)
    return value if timestamp >= not_before else None


class StreamLagPolicy:
    """An autoscaling policy of Ray Serve: called with its context, answers a number and what to remember.

    While no replica has reported for ``stale_after_s`` (Redis is away, or replicas have just started) the
    lag is unknown, and no replica is taken away or added on its account.
    """

    def __init__(
        self,
        entries_per_replica: int = 64,
        requests_per_replica: float = 16.0,
        keep: float = 0.5,
        stale_after_s: float = 30.0,
    ) -> None:
        self.entries_per_replica = entries_per_replica
        self.requests_per_replica = requests_per_replica
        self.keep = keep
        self.stale_after_s = stale_after_s

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        current = context.target_num_replicas
        reports: Mapping[str, Mapping[Any, Iterable[Any]]] = context.raw_metrics or {}
        lag = newest(reports.get(LAG_METRIC, {}).values(), context.current_time - self.stale_after_s)
        wanted = (
            current if lag is None else replicas_for_lag(lag, current, self.entries_per_replica, self.keep)
        )
        for_requests = math.ceil(context.total_num_requests / self.requests_per_replica)
        least, most = context.capacity_adjusted_min_replicas, context.capacity_adjusted_max_replicas
        return min(max(wanted, for_requests, least), most), {"lag": lag}


def autoscaling(settings: ScalingSettings, least: int, most: int) -> AutoscalingConfig:
    """Ray Serve's configuration for between ``least`` and ``most`` replicas."""
    from ray.serve.config import AutoscalingConfig, AutoscalingPolicy

    with warnings.catch_warnings():
        # The field that sets how often replicas report is deprecated, but the variables that shall replace
        # it do not reach the replicas' reports yet (Ray 2.60).
        warnings.simplefilter("ignore", DeprecationWarning)
        return AutoscalingConfig(
            min_replicas=least,
            initial_replicas=least,
            max_replicas=most,
            upscale_delay_s=settings.up_after_s,
            downscale_delay_s=settings.down_after_s,
            metrics_interval_s=settings.report_every_s,
            look_back_period_s=5 * settings.report_every_s,
            policy=AutoscalingPolicy(
                policy_function=POLICY,
                policy_kwargs={
                    "entries_per_replica": settings.entries_per_replica,
                    "requests_per_replica": settings.requests_per_replica,
                    "keep": settings.keep,
                    "stale_after_s": max(30.0, 5 * settings.report_every_s),
                },
            ),
        )
