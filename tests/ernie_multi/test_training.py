"""Training runs over the real stack: real Redis, real Ray Serve, real media."""

import json
import os
import signal
import threading
import time
from io import BytesIO
from pathlib import Path

import numpy as np
import psutil
import pytest
import sentencepiece
import soundfile
import torch
from PIL import Image

from ernie5.backbone.config import preset
from ernie5.backbone.model.transformer import Backbone
from ernie5.backbone.training.checkpoint import load_model, save_model
from ernie5.corpora.corpus import open_corpus
from ernie5.protocol.errors import InvalidInputError, TokenizerMismatchError
from ernie5.services.redis_client import connect
from ernie5.services.streams import RunStream
from ernie5.tokenizers.text.tokenizer import TextTokenizer
from ernie_multi.networks import check_start
from ernie_multi.training import train

BAD = 6
TRAINING = {"rows": 2, "row_length": 256, "threads": 1, "checkpoint_every": 2, "warmup": 2}


def wav(samples: np.ndarray, subtype: str) -> bytes:
    buffer = BytesIO()
    soundfile.write(buffer, samples, 16000, format="WAV", subtype=subtype)
    return buffer.getvalue()


def png(width: int, height: int) -> bytes:
    buffer = BytesIO()
    Image.new("1", (width, height)).save(buffer, "PNG")
    return buffer.getvalue()


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Real digits and speech of the shipped corpus as JSONL, with six damaged media among them."""
    folder = tmp_path_factory.mktemp("corpus")
    shipped = open_corpus("mini")
    lines = []

    def add(segments: list[dict]) -> None:
        lines.append(json.dumps({"segments": segments}, ensure_ascii=False))

    for task in ("digit_read", "digit_draw", "speech_hear", "speech_say"):
        for index in shipped.indices(task)[:40]:
            segments = []
            for number, segment in enumerate(shipped[index].segments):
                entry = {"modality": segment.modality, "role": segment.role}
                if segment.data is None:
                    entry["text"] = segment.text
                else:
                    name = f"{task}-{index}-{number}"
                    (folder / name).write_bytes(segment.data)
                    entry |= {"path": name, "content_type": segment.content_type}
                segments.append(entry)
            add(segments)
    good = png(28, 28)
    damaged = {
        "empty.png": b"",
        "cut.png": good[: len(good) // 2],
        "bomb.png": png(60000, 60000),
        "silence.wav": wav(np.zeros(0, np.float32), "PCM_16"),
        "nan.wav": wav(np.full(8000, np.nan, np.float32), "FLOAT"),
        "noise.wav": bytes(range(256)),
    }
    assert len(damaged) == BAD
    for number, (name, data) in enumerate(damaged.items()):
        (folder / name).write_bytes(data)
        modality = "image" if name.endswith("png") else "speech"
        segments = [
            {"modality": modality, "path": name, "role": "context"},
            {"modality": "text", "text": "?", "role": "target"},
        ]
        lines.insert(3 + 7 * number, json.dumps({"segments": segments}))
    path = folder / "samples.jsonl"
    path.write_text("\n".join(lines) + "\n")
    return path


def killer(url: str, run: str, killed: list[str]) -> None:
    """kill -9 one replica of each tokenizer as soon as work flows."""
    stream = RunStream(connect(url), run)
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and stream.stats()["completed"] == 0:
        time.sleep(0.002)
    for process in psutil.process_iter(["cmdline"]):
        title = " ".join(process.info["cmdline"] or [])
        if title.startswith("ray::ServeReplica") and psutil.Process(os.getpid()) in process.parents():
            process.send_signal(signal.SIGKILL)
            killed.append(title)


def test_killing_replicas_changes_no_weight_and_bad_media_end_as_dead_letters(corpus, tmp_path):
    weights, killed, letters = [], [], []
    for name in ("calm", "killed"):

        def while_running(url: str, port: int, name: str = name) -> None:
            if name == "killed":
                threading.Thread(target=killer, args=(url, name, killed), daemon=True).start()

        out = tmp_path / name
        result = train(
            str(corpus), out, preset="nano", steps=8, overrides=TRAINING, while_running=while_running
        )
        model, hashes = load_model(result.checkpoint)
        assert set(hashes) == {"text", "audio", "vision"}
        weights.append(model.state_dict())
        # Every damaged medium is said with its reason, and the run went on past all of them.
        reasons = [reason for reason, count in result.skipped.items() for _ in range(count)]
        rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        epochs = rows[-1]["next_position"] / len(open_corpus(str(corpus)))
        assert len(reasons) >= BAD * int(epochs) > 0
        letters.append(sorted(set(reasons)))
        left = [p for p in psutil.process_iter(["cmdline"]) if str(out) in " ".join(p.info["cmdline"] or [])]
        assert not left
    assert killed, "no replica was there to kill"
    assert letters[0] == letters[1]
    for key, value in weights[0].items():
        assert value.equal(weights[1][key]), key


def test_a_folder_with_checkpoints_is_not_overwritten(tmp_path):
    (tmp_path / "step-00000001").mkdir()
    (tmp_path / "step-00000001" / "state.json").write_text("{}")
    with pytest.raises(InvalidInputError, match="--resume"):
        train("mini", tmp_path)


def test_a_run_begins_with_another_model_s_weights_and_text_tokenizer(corpus, tmp_path):
    """As after `import-hf`: the folder's own SentencePiece model reaches the text service."""
    written = BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=(f"Which digit is this? {n} eins zwei drei 七" for n in range(200)),
        model_writer=written,
        model_type="bpe",
        vocab_size=320,
        byte_fallback=True,
        normalization_rule_name="identity",
        add_dummy_prefix=False,
        remove_extra_whitespaces=False,
        unk_id=0,
        bos_id=-1,
        eos_id=-1,
        pad_id=-1,
        hard_vocab_limit=False,
    )
    text = TextTokenizer(written.getvalue())
    config = preset("nano").model_copy(update={"text_vocabulary": text.vocabulary_size})
    model = Backbone(config, seed=7)
    save_model(tmp_path / "start", model, {"text": text.hash})
    (tmp_path / "start" / "text.model").write_bytes(written.getvalue())
    options = {**TRAINING, "learning_rate": 1e-12, "weight_decay": 0.0}
    result = train(str(corpus), tmp_path / "run", steps=2, start_from=tmp_path / "start", overrides=options)
    trained, hashes = load_model(result.checkpoint)
    assert trained.config == config and hashes["text"] == text.hash
    for name, value in model.named_parameters():
        torch.testing.assert_close(trained.get_parameter(name), value, atol=1e-6, rtol=0)


def test_a_start_with_other_tokenizers_is_refused(tmp_path):
    save_model(tmp_path, Backbone(preset("nano")), {"text": "a" * 32})
    with pytest.raises(TokenizerMismatchError, match="ERNIE_MULTI_TEXT_MODEL"):
        check_start(tmp_path, {"text": "b" * 32, "vision": "c" * 32})
