"""Protects the promise of answering: each request is answered exactly once, whatever happens to workers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
from hypothesis import given
from hypothesis import strategies as st

from ernie5.protocol.errors import WireError
from ernie5.protocol.generation import (
    DoneEvent,
    ErrorEvent,
    Event,
    GenerationParams,
    Request,
    TokenEvent,
    Usage,
)
from ernie5.services import generation_stream as wire
from ernie5.services.inference import InferenceSettings, InferenceWorker
from ernie5.services.redis_server import RedisServer
from tests.services.echo_engine import EchoEngine
from tests.services.generation_helpers import INFO, TEXT_SIZE, ended, reply, submit, text_request, until

ROOT = Path(__file__).parents[2]
QUICK = InferenceSettings(
    claim_after_s=0.05, heartbeat_s=0.05, block_s=0.01, cancel_every_s=0.001, drain_timeout_s=0.0
)
PATIENT = QUICK.model_copy(update={"claim_after_s": 1000.0})


def worker(
    client: redis.Redis, name: str, settings: InferenceSettings = QUICK, **engine: int
) -> InferenceWorker:
    made = InferenceWorker(EchoEngine(TEXT_SIZE, **engine), client, INFO, settings, name)
    made._make_group()
    return made


def turn_until_ended(made: InferenceWorker, client: redis.Redis, *names: str) -> None:
    def done() -> bool:
        made.turn()
        return all(ended(client, name) for name in names)

    until(done, f"answers to {names}")


def expected(request: Request) -> list[Event]:
    return EchoEngine(TEXT_SIZE).script(request)


def test_answers_are_written_in_order_and_entries_are_removed(client: redis.Redis) -> None:
    requests = [text_request(f"r{index}", tokens=5 + index) for index in range(6)]
    for request in requests:
        submit(client, request)
    turn_until_ended(worker(client, "a"), client, *(request.id for request in requests))
    for request in requests:
        assert reply(client, request.id) == expected(request)
        assert client.ttl(wire.reply_key(request.id)) > 0
    assert client.xlen(wire.REQUESTS) == 0
    assert client.xpending(wire.REQUESTS, wire.GROUP)["pending"] == 0


def test_a_full_engine_leaves_requests_to_others(client: redis.Redis) -> None:
    for index in range(3):
        submit(client, text_request(f"r{index}"))
    first, second = worker(client, "a", capacity=2), worker(client, "b", capacity=2)
    first.turn()
    second.turn()
    assert {request.id for request in first.engine.submitted} == {"r0", "r1"}  # type: ignore[attr-defined]
    assert {request.id for request in second.engine.submitted} == {"r2"}  # type: ignore[attr-defined]


def test_another_worker_goes_on_from_the_tokens_already_written(client: redis.Redis) -> None:
    request = text_request("r", tokens=20)
    submit(client, request)
    lost = worker(client, "lost")
    for _ in range(8):
        lost.turn()
    written = len(reply(client, "r"))
    assert 0 < written < 20
    heir = worker(client, "heir")
    turn_until_ended(heir, client, "r")
    assert reply(client, "r") == expected(request)


def test_a_worker_that_wakes_up_late_adds_nothing(client: redis.Redis) -> None:
    request = text_request("r", tokens=20)
    submit(client, request)
    late, heir = worker(client, "late", PATIENT), worker(client, "heir")
    for _ in range(5):
        late.turn()

    def taken_over() -> bool:
        heir.turn()
        return heir.engine.active == 1

    until(taken_over, "the heir has the request")
    late.turn()
    assert late.engine.active == 0
    late.turn()
    turn_until_ended(heir, client, "r")
    assert reply(client, "r") == expected(request)


def test_appending_again_after_a_lost_answer_adds_nothing_twice(client: redis.Redis) -> None:
    client.set(wire.owner_key("r"), "a")
    events: list[Event] = [TokenEvent("r", token) for token in range(5)]
    arguments = wire.append_arguments("a", 60, 0, events[:3])
    for _ in range(2):
        assert client.eval(wire.APPEND, 2, wire.reply_key("r"), wire.owner_key("r"), *arguments) == 1
    arguments = wire.append_arguments("a", 60, 2, events[2:])
    client.eval(wire.APPEND, 2, wire.reply_key("r"), wire.owner_key("r"), *arguments)
    assert reply(client, "r") == events


def test_a_stopped_worker_gives_requests_back_at_once(client: redis.Redis) -> None:
    request = text_request("r", tokens=20)
    submit(client, request)
    stopped = worker(client, "stopped", PATIENT)
    stopped.turn()
    stopped.turn()
    stopped._leave()
    assert 0 < len(reply(client, "r")) < 20
    turn_until_ended(worker(client, "heir", PATIENT), client, "r")
    assert reply(client, "r") == expected(request)


def test_a_busy_worker_keeps_what_it_holds(client: redis.Redis) -> None:
    submit(client, text_request("r", tokens=200))
    busy, other = worker(client, "busy"), worker(client, "other")
    busy.turn()
    for _ in range(10):
        busy._keep()
        other._next_claim = 0.0
        other.turn()  # waits inside Redis, longer than claim_after_s
    assert other.engine.active == 0
    assert client.get(wire.owner_key("r")) == b"busy"


def test_a_cancelled_request_ends_and_frees_its_place(client: redis.Redis) -> None:
    submit(client, text_request("r", tokens=250))
    made = worker(client, "a")
    made.turn()
    client.set(wire.cancel_key("r"), "1")
    turn_until_ended(made, client, "r")
    last = reply(client, "r")[-1]
    assert isinstance(last, DoneEvent)
    assert last.finish_reason == "cancelled"
    assert made.engine.active == 0
    assert client.xlen(wire.REQUESTS) == 0


def test_a_request_that_the_engine_refuses_gets_its_error(client: redis.Redis) -> None:
    submit(client, text_request("r", top_k=666))
    submit(client, text_request("fine"))
    turn_until_ended(worker(client, "a"), client, "r", "fine")
    (error,) = reply(client, "r")
    assert isinstance(error, ErrorEvent)
    assert (error.status, error.param) == (400, "top_k")
    assert reply(client, "fine")[-1].kind == "done"


def test_a_damaged_entry_gets_an_error_and_leaves(client: redis.Redis) -> None:
    fields = wire.request_fields(text_request("r"))
    client.xadd(wire.REQUESTS, fields | {"sequence": b"E5TK nonsense"})
    turn_until_ended(worker(client, "a"), client, "r")
    (error,) = reply(client, "r")
    assert isinstance(error, ErrorEvent)
    assert "can't be read" in error.message
    assert client.xlen(wire.REQUESTS) == 0


def test_a_request_that_kills_every_worker_is_given_up(client: redis.Redis) -> None:
    submit(client, text_request("r", tokens=200))
    settings = QUICK.model_copy(update={"max_deliveries": 2})
    for name in ("a", "b"):
        lost = worker(client, name, settings)

        def holds(lost: InferenceWorker = lost) -> bool:
            lost.turn()
            return lost.engine.active == 1

        until(holds, f"{name} has the request")
    turn_until_ended(worker(client, "c", settings), client, "r")
    last = reply(client, "r")[-1]
    assert isinstance(last, ErrorEvent)
    assert last.status == 503
    assert "2 workers were lost" in last.message


def test_a_worker_serves_on_after_redis_has_lost_everything(client: redis.Redis) -> None:
    made = InferenceWorker(EchoEngine(TEXT_SIZE), client, INFO, QUICK, "a")
    stop = threading.Event()
    thread = threading.Thread(target=made.run, args=(stop,))
    thread.start()
    try:
        submit(client, text_request("before"))
        until(lambda: ended(client, "before"), "the first answer")
        client.flushall()
        submit(client, text_request("after"))
        until(lambda: ended(client, "after"), "the answer after the loss")
        until(lambda: client.zscore(wire.WORKERS, "a"), "the worker is announced again")
    finally:
        stop.set()
        thread.join(10)
    assert not thread.is_alive()
    assert client.zscore(wire.WORKERS, "a") is None


def test_only_workers_that_beat_are_announced(client: redis.Redis) -> None:
    made = worker(client, "a")
    made._announce()
    alive = client.eval(wire.WORKERS_ALIVE, 2, wire.WORKERS, wire.WORKERS_INFO)
    assert [wire.WorkerInfo.from_json(info) for info in alive] == [INFO]
    now = client.time()[0]
    client.zadd(wire.WORKERS, {"a": now - 1})
    assert client.eval(wire.WORKERS_ALIVE, 2, wire.WORKERS, wire.WORKERS_INFO) == []
    worker(client, "b")._announce()
    assert client.hkeys(wire.WORKERS_INFO) == [b"b"]


@pytest.fixture
def spawn(server: RedisServer) -> Iterator[object]:
    processes: list[subprocess.Popen[bytes]] = []

    def start(name: str, step_s: float) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "tests.services.inference_process", server.url, name, str(step_s)]
        processes.append(subprocess.Popen(command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}))
        return processes[-1]

    yield start
    for process in processes:
        process.kill()
        process.wait()


def test_killing_the_process_of_a_worker_changes_no_answer(client: redis.Redis, spawn: object) -> None:
    requests = [text_request(f"r{index}", tokens=60) for index in range(3)]
    first = spawn("first", 0.01)  # type: ignore[operator]
    for request in requests:
        submit(client, request)
    until(lambda: all(len(reply(client, request.id)) > 3 for request in requests), "the first tokens")
    first.send_signal(signal.SIGKILL)
    first.wait()
    assert not any(ended(client, request.id) for request in requests)
    spawn("second", 0.0)  # type: ignore[operator]
    until(lambda: all(ended(client, request.id) for request in requests), "all answers")
    for request in requests:
        assert reply(client, request.id) == expected(request)


@given(
    st.lists(st.integers(0, 459), max_size=20),
    st.sampled_from(["stop", "length", "cancelled"]),
    st.integers(0, 2**40),
)
def test_events_come_back_from_their_fields(tokens: list[int], reason: str, count: int) -> None:
    events: list[Event] = [TokenEvent("r", token) for token in tokens]
    events += [
        DoneEvent("r", reason, Usage(prompt_tokens=count, completion_tokens=len(tokens))),  # type: ignore[arg-type]
        ErrorEvent("r", "what is wrong: ü", "invalid_media", "messages[0]", 422),
    ]
    for event in events:
        fields = [item.encode() if isinstance(item, str) else item for item in wire.event_fields(event)]
        assert wire.read_event("r", dict(zip(fields[::2], fields[1::2]))) == event


def test_requests_come_back_from_their_fields() -> None:
    request = text_request("r", seed=5, image_grid=(6, 10), modalities=("text", "image"), depth=0.6)
    fields = {
        str(name).encode(): item.encode() if isinstance(item, str) else item
        for name, item in wire.request_fields(request).items()
    }
    assert wire.read_request(fields) == request
    assert isinstance(wire.read_request(fields).params, GenerationParams)
    with pytest.raises(WireError, match="params"):
        wire.read_request({name: item for name, item in fields.items() if name != b"params"})
