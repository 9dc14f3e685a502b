"""Protects scaling on the lag of a work stream: the policy's arithmetic, a real Ray Serve that follows it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from ernie5.protocol.errors import InvalidInputError
from ernie5.protocol.samples import Sample, Segment
from ernie5.protocol.settings import load_settings
from ernie5.services.ray_environment import free_ports
from ernie5.services.redis_client import connect
from ernie5.services.redis_server import start_server
from ernie5.services.stream_scaling import LAG_METRIC, StreamLagPolicy, newest, replicas_for_lag
from ernie5.services.streams import TokenStream
from ernie5.services.tokenizer_settings import TokenizerServiceSettings
from ernie5.services.work_drain import WorkDrain
from tests.services.generation_helpers import until
from tests.services.stream_helpers import ByteTokenizer

ROOT = Path(__file__).parents[2]
NOW = 1000.0


# The arithmetic.


@given(
    lag=st.integers(0, 10_000),
    current=st.integers(1, 50),
    share=st.integers(1, 500),
    keep=st.floats(0.05, 1.0),
)
def test_the_number_covers_the_lag_and_does_not_swing(
    lag: int, current: int, share: int, keep: float
) -> None:
    wanted = replicas_for_lag(lag, current, share, keep)
    assert wanted * share >= lag, "no lag asks for too few"
    assert (wanted == 0) == (lag == 0)
    assert replicas_for_lag(lag, max(wanted, 1), share, keep) == wanted, "what it asks for satisfies it"
    assert wanted <= replicas_for_lag(lag + 1, current, share, keep), "more lag never asks for fewer"


def test_between_up_and_down_lies_a_gap() -> None:
    assert replicas_for_lag(65, 1, 64, 0.5) == 2
    # Two stay until the lag fills one of them to a half.
    assert [replicas_for_lag(lag, 2, 64, 0.5) for lag in (64, 33, 32, 1, 0)] == [2, 2, 1, 1, 0]


@dataclass
class Context:
    """The fields of Ray Serve's context that the policy reads."""

    raw_metrics: dict[str, dict[str, list[Any]]] | None
    target_num_replicas: int = 1
    total_num_requests: float = 0.0
    capacity_adjusted_min_replicas: int = 1
    capacity_adjusted_max_replicas: int = 4
    current_time: float = NOW
    policy_state: dict[str, Any] = field(default_factory=dict)


def point(age: float, value: float) -> SimpleNamespace:
    return SimpleNamespace(timestamp=NOW - age, value=value)


def lag_of(*replicas: list[SimpleNamespace]) -> dict[str, dict[str, list[Any]]]:
    return {LAG_METRIC: {f"replica {number}": points for number, points in enumerate(replicas)}}


def test_the_newest_report_counts_whichever_replica_made_it() -> None:
    reports = lag_of([point(9, 500), point(6, 400)], [point(3, 10), point(8, 450)], [])
    assert newest(reports[LAG_METRIC].values(), NOW - 30) == 10
    assert newest(reports[LAG_METRIC].values(), NOW - 2) is None
    assert newest([], NOW) is None


@pytest.mark.parametrize(
    ("context", "wanted"),
    [
        (Context(lag_of([point(1, 0)]), target_num_replicas=4), 1),  # idle: the smallest number
        (Context(lag_of([point(1, 0)]), 4, capacity_adjusted_min_replicas=2), 2),
        (Context(lag_of([point(1, 100)])), 2),
        (Context(lag_of([point(1, 100_000)])), 4),  # the largest number
        (Context(lag_of([point(40, 0)]), target_num_replicas=3), 3),  # nobody knows the lag: it stays
        (Context({}, target_num_replicas=3), 3),
        (Context(None, target_num_replicas=3), 3),
        (Context({}, target_num_replicas=1, total_num_requests=50.0), 4),  # requests alone
        (Context(lag_of([point(1, 65)]), total_num_requests=1.0), 2),  # whichever asks for more
        (Context(lag_of([point(1, 1)]), total_num_requests=17.0), 2),
    ],
)
def test_the_policy_keeps_to_its_bounds(context: Context, wanted: int) -> None:
    assert StreamLagPolicy()(context)[0] == wanted


def test_a_swinging_lag_gives_one_way_up_and_one_way_down() -> None:
    policy, current, numbers = StreamLagPolicy(entries_per_replica=10), 1, []
    for lag in [0, 15, 25, 16, 24, 15, 25, 16, 9, 11, 4, 0]:
        current, _ = policy(Context(lag_of([point(0, lag)]), target_num_replicas=current))
        numbers.append(current)
    assert numbers == [1, 2, 3, 3, 3, 3, 3, 3, 2, 2, 1, 1]


@pytest.mark.parametrize("service", ["text", "audio", "vision"])
def test_the_manifests_scale_by_this_policy(service: str) -> None:
    config = pytest.importorskip("ray.serve.config")
    manifest = yaml.safe_load((ROOT / "k8s" / "base" / f"{service}.yaml").read_text())
    (application,) = yaml.safe_load(manifest["spec"]["serveConfigV2"])["applications"]
    (deployment,) = application["deployments"]
    scaling = config.AutoscalingConfig(**deployment["autoscaling_config"])
    policy = scaling.policy.get_policy()(**scaling.policy.policy_kwargs)
    context = Context(lag_of([point(1, 10_000)]), capacity_adjusted_max_replicas=scaling.max_replicas)
    assert policy(context)[0] == scaling.max_replicas


# Settings and reports.


def test_pools_are_set_by_the_environment() -> None:
    environment = {
        "ERNIE_MULTI_SERVICE_REPLICAS": "2",
        "ERNIE_MULTI_SERVICE_AUDIO_MAX_REPLICAS": "8",
        "ERNIE_MULTI_SERVICE_AUDIO_CPUS": "2",
        "ERNIE_MULTI_SERVICE_VISION_REPLICAS": "1",
        "ERNIE_MULTI_SERVICE_SCALING_ENTRIES_PER_REPLICA": "16",
        "ERNIE_MULTI_SERVICE_LIMITS_BYTES": '{"image": 1000}',
    }
    settings = load_settings(TokenizerServiceSettings, environ=environment)
    assert [settings.replicas_of(name) for name in ("text", "audio", "vision")] == [
        (2, None),
        (2, 8),
        (1, None),
    ]
    assert settings.audio.cpus == 2.0 and settings.scaling.entries_per_replica == 16
    assert settings.limits.bytes == {"image": 1000}


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"text": {"replicas": 3, "max_replicas": 2}}, "max_replicas 2 is below replicas 3"),
        ({"replicas": 4, "text": {"max_replicas": 2}}, "set text.replicas"),
        ({"limits": {"bytes": {"imgae": 5}}}, "did you mean 'image'"),
        ({"limits": {"bytes": {"image": 0}}}, "greater than or equal to 1"),
        ({"scaling": {"keep": 0.0}}, "greater than 0"),
        ({"vision": {"dtype": "float16"}}, "'float32' or 'bfloat16'"),
        ({"audio": {"compile": True}}, "unknown setting"),
    ],
)
def test_settings_that_make_no_sense_are_refused(overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        load_settings(TokenizerServiceSettings, overrides=overrides, environ={})


async def test_a_replica_reports_the_unsettled_entries(stream: TokenStream, server: Any) -> None:
    settings = TokenizerServiceSettings.model_validate({"run": "test", "redis": {"url": server.url}})
    drain = WorkDrain("text", ByteTokenizer("text"), settings)
    assert await drain.load() == {LAG_METRIC: 0.0}
    stream.add_sample(0, 0, Sample(segments=(Segment(modality="text", text="a"),)), length=9)
    stream.add_sample(0, 1, Sample(segments=(Segment(modality="text", text="b"),)), length=9)
    assert stream.read_work("text", "somebody", 1, 0)  # in hand, not settled
    assert await drain.load() == {LAG_METRIC: 2.0}
    (port,) = free_ports(1)
    lost = settings.model_copy(
        update={"redis": settings.redis.model_copy(update={"url": f"redis://127.0.0.1:{port}"})}
    )
    assert await WorkDrain("text", ByteTokenizer("text"), lost).load() == {}
    alone = WorkDrain("text", ByteTokenizer("text"), TokenizerServiceSettings())
    assert await alone.load() == {LAG_METRIC: 0.0}


# The real thing.


@dataclass
class Scaling:
    process: psutil.Popen
    stream: TokenStream
    added: list[str] = field(default_factory=list)

    @property
    def replicas(self) -> int:
        """Replicas that run, those that finish their work included."""
        found = 0
        for child in self.process.children(recursive=True):
            try:
                found += "ServeReplica:text:" in " ".join(child.cmdline())
            except psutil.Error:
                continue
        return found

    @property
    def workers(self) -> int:
        return int(self.stream.stats()["consumers"]["text"])

    def add(self, count: int) -> None:
        for _ in range(count):
            self.added.append(f"text {len(self.added)}")
            sample = Sample(segments=(Segment(modality="text", text=self.added[-1]),))
            self.stream.add_sample(0, len(self.added) - 1, sample, length=100_000)


@pytest.fixture
def scaling(tmp_path: Path) -> Iterator[Scaling]:
    (port,) = free_ports(1)
    with start_server(tmp_path / "redis") as server:
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "ERNIE_MULTI_RUN": "test",
            "REDIS_URL": server.url,
            "PYTHONPATH": str(ROOT),  # the replicas import the test's tokenizer
        }
        command = [sys.executable, "-m", "tests.services.scaling_process", str(port), str(tmp_path)]
        output = tmp_path / "output.txt"
        with open(output, "wb") as file:
            process = psutil.Popen(command, cwd=ROOT, env=environment, stdout=file, stderr=subprocess.STDOUT)
        running = Scaling(process, TokenStream(connect(server.url), "test"))

        def ready() -> bool:
            assert process.poll() is None, output.read_text()
            return "ready" in output.read_text()

        try:
            until(ready, "the service is ready", 200)
            yield running
        finally:
            left = process.children(recursive=True)
            process.send_signal(signal.SIGINT)
            psutil.wait_procs([process], timeout=60)
            for child in (process, *left):
                if child.is_running():
                    child.kill()


@pytest.mark.slow
def test_replicas_follow_the_stream_and_lose_nothing(scaling: Scaling) -> None:
    stream = scaling.stream
    assert scaling.replicas == 1
    stream.client.set("closed", 1)
    scaling.add(40)
    until(lambda: scaling.workers == 2, "a lag of 40 makes it two", 120)
    assert scaling.replicas == 2, "never above the largest number"
    stream.client.delete("closed")

    # Work goes on while one of the two is taken away, little enough to do it.
    def one_is_left() -> bool:
        if stream.waiting("text") < 3:
            scaling.add(1)
        return scaling.replicas == 1

    until(one_is_left, "without a lag it is one again", 120)
    until(lambda: stream.waiting("text") == 0, "the rest is done", 60)
    made = {text.decode(): int(count) for text, count in stream.client.hgetall("made").items()}
    assert made == dict.fromkeys(scaling.added, 1), "each text is tokenised exactly once"
    stats = stream.stats()
    assert (stats["published"], stats["pending"]["text"]) == (len(scaling.added), 0)
    assert (stats["retries"], stats["tombstones"], stats["dead"], scaling.workers) == (0, 0, 0, 1)
