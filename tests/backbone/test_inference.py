"""Cached generation against the plain forward pass over the whole, finished sequence."""

import numpy as np
import pytest
import torch

from ernie5.backbone.config import BackboneConfig
from ernie5.backbone.inference.engine import InferenceEngine
from ernie5.backbone.inference.sampler import draw, draw_rows
from ernie5.backbone.layout import lay_out
from ernie5.backbone.model.transformer import Backbone
from ernie5.backbone.rows import pack
from ernie5.protocol.errors import InvalidInputError, TokenizerMismatchError
from ernie5.protocol.generation import DoneEvent, GenerationParams, Request, SpanEvent, TokenEvent
from ernie5.protocol.tokens import SequenceLayout, TokenSegment, TokenSequence, TokenSpan
from tests.backbone.samples import NANO, VOCABULARY, picture, sequence, sound, text

HASHES = {"text": "t", "vision": "v", "audio": "a"}


def loud(config: BackboneConfig = NANO) -> Backbone:
    """A random model with spread-out logits, so that arg-maxima are far from ties."""
    model = Backbone(config, seed=1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3) if parameter.dim() > 1 else None
    return model.eval()


def run(engine: InferenceEngine, *requests: Request) -> dict[str, list]:
    for request in requests:
        engine.submit(request)
    events: dict[str, list] = {request.id: [] for request in requests}
    for _ in range(500):
        for event in engine.step():
            events[event.request_id].append(event)
        if not engine.active:
            return events
    raise AssertionError("the engine does not end")


def finished(prompt: TokenSequence, events: list) -> TokenSequence:
    """The conversation with the generated answer as target segments (markers and end_turn left out)."""
    segments, ids = list(prompt.segments), []

    def flush():
        if ids:
            codes = np.array(ids, np.int32)
            span = TokenSpan("text", SequenceLayout(NANO.text_vocabulary), codes, "t")
            segments.append(TokenSegment(span, "target"))
            ids.clear()

    for event in events:
        if isinstance(event, SpanEvent):
            flush()
            segments.append(TokenSegment(event.span, "target"))
        elif isinstance(event, TokenEvent) and VOCABULARY.is_text(event.token):
            ids.append(event.token)
    flush()
    return TokenSequence("whole", tuple(segments))


@pytest.mark.parametrize("audio_layers", [1, 2])
@pytest.mark.parametrize("audio_mask", ["causal", "sparse"])
def test_greedy_answers_are_the_argmax_of_one_full_pass(audio_layers, audio_mask):
    config = NANO.model_copy(
        update={
            "audio_layers": audio_layers,
            "audio_mask": audio_mask,
            "audio_window": 2,
            "audio_anchor_every": 3,
        }
    )
    rng = np.random.default_rng(3)
    model = loud(config)
    engine = InferenceEngine(model, HASHES, capacity=3, max_length=200)
    greedy = {"temperature": 0.0, "seed": 1, "max_tokens": 40}
    requests = [
        Request("write", sequence(text(rng, "context")), GenerationParams(**greedy)),
        Request(
            "draw",
            sequence(text(rng, "context")),
            GenerationParams(modalities=("image",), image_grid=(4, 4), **greedy),
        ),
        Request(
            "say",
            sequence(picture(rng, "context"), sound(rng, "context")),
            GenerationParams(modalities=("speech",), max_frames=6, **greedy),
        ),
        Request("read", sequence(picture(rng, "context"), text(rng, "context")), GenerationParams(**greedy)),
    ]
    answers = run(engine, *requests)
    kinds = {name: [type(event) for event in events] for name, events in answers.items()}
    assert SpanEvent in kinds["draw"] and SpanEvent in kinds["say"]
    for request in requests:
        events = answers[request.id]
        assert isinstance(events[-1], DoneEvent)
        layout = lay_out(finished(request.sequence, events), config, VOCABULARY)
        batch = pack([[layout]], len(layout), config)
        with torch.no_grad():
            outputs = model(batch)
        spans = [event.span for event in events if isinstance(event, SpanEvent)]
        pictures = [span for span in spans if span.modality == "image"]
        if pictures:
            weight = 1 << torch.arange(config.bits)
            predicted = ((outputs.bits > 0) * weight).sum(-1)
            assert predicted.tolist() == np.concatenate([span.codes for span in pictures]).tolist()
        sounds = [span for span in spans if span.modality == "speech"]
        if sounds:
            for level, logits in enumerate(outputs.audio):
                if level:
                    logits = logits[:, :-1]
                offset = 0
                for span in sounds:
                    assert (
                        logits[offset : offset + len(span)].argmax(-1).tolist()
                        == span.codes[:, level].tolist()
                    )
                    offset += len(span) + 1
        if not spans:
            said = [event.token for event in events if isinstance(event, TokenEvent)]
            allowed = torch.zeros(VOCABULARY.size, dtype=torch.bool)
            allowed[: VOCABULARY.text_size] = allowed[VOCABULARY.marker("end_turn")] = True
            best = outputs.text.masked_fill(~allowed, -torch.inf).argmax(-1)
            assert best[: len(said)].tolist() == said


def test_equal_seed_gives_equal_answers_in_any_company():
    rng = np.random.default_rng(4)
    model = loud()
    question = sequence(text(rng, "context"))
    params = GenerationParams(seed=7, modalities=("text", "speech", "image"), max_tokens=60)
    alone = run(InferenceEngine(model, HASHES, capacity=1, max_length=300), Request("a", question, params))[
        "a"
    ]
    crowd = [Request(str(i), sequence(text(rng, "context", 3 + i)), params) for i in range(4)]
    together = run(
        InferenceEngine(model, HASHES, capacity=3, max_length=300), *crowd, Request("a", question, params)
    )["a"]
    assert together == alone


@pytest.mark.parametrize("modalities", [("text",), ("image",), ("speech",)])
def test_resuming_anywhere_gives_the_rest_of_the_same_answer(modalities):
    rng = np.random.default_rng(5)
    model = loud()
    params = GenerationParams(seed=11, modalities=modalities, max_tokens=30, max_frames=4, image_grid=(4, 4))
    request = Request("r", sequence(sound(rng, "context"), text(rng, "context")), params)
    whole = run(InferenceEngine(model, HASHES, capacity=1, max_length=300), request)["r"]
    for cut in range(len(whole)):
        engine = InferenceEngine(model, HASHES, capacity=1, max_length=300)
        engine.submit(request, resume=whole[:cut])
        rest = []
        while engine.active:
            rest += engine.step()
        assert rest == whole[cut:]


def test_subnetworks_run_and_answer():
    rng = np.random.default_rng(6)
    engine = InferenceEngine(loud(), HASHES, capacity=4, max_length=200)
    requests = [
        Request(str(i), sequence(text(rng, "context")), GenerationParams(max_tokens=5, seed=i, **choice))
        for i, choice in enumerate(
            [{}, {"depth": 0.5}, {"width": 0.5}, {"experts_per_token": 1}, {"depth": 0.5, "width": 0.5}]
        )
    ]
    answers = run(engine, *requests)
    assert all(isinstance(events[-1], DoneEvent) for events in answers.values())


def test_bad_requests_are_refused():
    rng = np.random.default_rng(7)
    engine = InferenceEngine(loud(), HASHES, capacity=1, max_length=20)
    foreign = sequence(
        TokenSegment(TokenSpan("text", SequenceLayout(50), np.zeros(1, np.int32), "x"), "context")
    )
    with pytest.raises(TokenizerMismatchError):
        engine.submit(Request("f", foreign))
    with pytest.raises(InvalidInputError, match="positions"):
        engine.submit(Request("l", sequence(text(rng, "context", 30))))
    with pytest.raises(InvalidInputError, match="must end with"):
        engine.submit(Request("t", sequence(text(rng, "target"))))
    with pytest.raises(InvalidInputError, match="table"):
        engine.submit(Request("m", sequence(text(rng, "context")), GenerationParams(modalities=("table",))))
    with pytest.raises(InvalidInputError, match="experts"):
        engine.submit(Request("k", sequence(text(rng, "context")), GenerationParams(experts_per_token=5)))


def test_draws_follow_the_distribution():
    logits = torch.tensor([0.0, 1.0, -1.0, 2.0])
    wanted = torch.softmax(logits / 0.7, -1)
    numbers = (torch.arange(20000) + 0.5) / 20000
    rows = draw_rows(logits.expand(20000, -1), numbers, torch.full((20000,), 0.7))
    assert torch.allclose(torch.bincount(rows, minlength=4) / 20000, wanted, atol=1e-3)
    singles = torch.tensor([draw(logits, float(u), 0.7) for u in numbers[::100]])
    assert torch.equal(singles, rows[::100])
    assert draw(logits, 0.999, 1.0, top_k=1) == 3
    assert {draw(logits, float(u), 1.0, top_p=0.6) for u in numbers[::50]} == {3}
