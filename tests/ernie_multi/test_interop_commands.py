"""``ernie-multi export-hf`` and ``import-hf``: whole folders that transformers loads and answers with."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import sentencepiece
import torch

from ernie5.backbone.config import preset
from ernie5.backbone.model.transformer import Backbone
from ernie5.backbone.training.checkpoint import load_model, save_model
from ernie5.protocol.generation import GenerationParams
from ernie5.protocol.samples import Segment
from ernie5.tokenizers.text.tokenizer import TextTokenizer
from ernie_multi import cli
from ernie_multi.local import LocalModel
from tests.backbone.hugging_face import hugging_face, transformers


def run(*arguments: object) -> int:
    with pytest.raises(SystemExit) as ended:
        cli.main([str(argument) for argument in arguments])
    return int(ended.value.code or 0)


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    model = Backbone(preset("nano"), seed=3)
    with torch.no_grad():
        for layer in model.layers:  # large enough that an answer is no single repeated token
            layer.attention.out.mul_(30)
            layer.feed_forward.down.mul_(30)
    save_model(folder, model, {"text": TextTokenizer.load().hash})
    return folder


@pytest.mark.parametrize("question", ["Which digit is this?", "这是什么？"])
def test_an_exported_model_answers_as_the_own_engine(
    question: str, model_folder: Path, tmp_path: Path
) -> None:
    assert run("export-hf", model_folder, tmp_path / "hf") == 0
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    output = model.generate(**prompt, max_new_tokens=12, do_sample=False)[0]
    found = tokenizer.decode(output[prompt["input_ids"].shape[1] :], skip_special_tokens=True)
    params = GenerationParams(max_tokens=12, temperature=0)
    (expected,) = LocalModel(model_folder).answer([[Segment(modality="text", text=question)]], params)
    assert found == expected.text and len(set(found)) > 3
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id == 8192 + 4


def test_a_sub_network_is_exported_in_bfloat16(model_folder: Path, tmp_path: Path) -> None:
    options = ["--depth", 0.75, "--width", 0.5, "--top-k", 1, "--dtype", "bfloat16"]
    assert run("export-hf", model_folder, tmp_path / "hf", *options) == 0
    head = json.loads((tmp_path / "hf" / "config.json").read_text())
    shape = [head[key] for key in ("num_hidden_layers", "moe_num_experts", "moe_k", "dtype")]
    assert shape == [3, 4, 1, "bfloat16"]


def test_an_exported_model_is_imported_with_its_tokenizer(model_folder: Path, tmp_path: Path) -> None:
    assert run("export-hf", model_folder, tmp_path / "hf") == 0
    assert run("import-hf", tmp_path / "hf", tmp_path / "again") == 0
    (before, hashes), (after, again) = load_model(model_folder), load_model(tmp_path / "again")
    assert again == hashes and before.config == after.config
    assert torch.equal(before.feed_forward(2).gate_up, after.feed_forward(2).gate_up)
    # The folder is a model folder: it can be exported itself.
    assert run("export-hf", tmp_path / "again", tmp_path / "hf2") == 0
    same = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("hf", "hf2")]
    assert same[0] == same[1]


def test_a_foreign_tokenizer_comes_along(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "hf"
    hugging_face("dense", source, vocab_size=420)
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["some words to learn from", "more words"] * 5),
        model_prefix=str(source / "tokenizer"),
        model_type="bpe",
        vocab_size=290,
        byte_fallback=True,
        normalization_rule_name="identity",
        add_dummy_prefix=False,
        remove_extra_whitespaces=False,
        minloglevel=2,
    )
    assert (
        run("import-hf", source, tmp_path / "model", "--experts", 4, "--top-k", 1, "--expert-width", 8) == 0
    )
    assert "text tokenizer" in capsys.readouterr().out
    model, hashes = load_model(tmp_path / "model")
    tokenizer = TextTokenizer.load(tmp_path / "model")
    assert (model.config.experts, model.config.top_k, model.config.expert_width) == (4, 1, 8)
    assert tokenizer.vocabulary_size == model.config.text_vocabulary == 420
    assert hashes == {"text": tokenizer.hash}
    assert run("export-hf", tmp_path / "model", tmp_path / "back") == 0
    auto = transformers.AutoTokenizer.from_pretrained(tmp_path / "back")
    assert auto("some  words").input_ids == tokenizer.ids("some  words").tolist()


def test_a_folder_without_a_tokenizer_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hugging_face("moe", tmp_path / "hf")
    assert run("import-hf", tmp_path / "hf", tmp_path / "model") == 0
    assert "no text tokenizer" in capsys.readouterr().out
    assert load_model(tmp_path / "model")[1] == {}


def test_mistakes_are_told_and_leave_nothing(
    model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "mine").write_text("kept")
    assert run("export-hf", model_folder, out) == 2
    assert "isn't an empty folder" in capsys.readouterr().err
    assert run("import-hf", model_folder, tmp_path / "new") == 2  # a model folder, but not of Hugging Face
    assert "model_type None can't be imported" in capsys.readouterr().err
    head = json.loads((model_folder / "config.json").read_text())
    head["tokenizers"]["text"] = "0" * 32
    (model_folder / "config.json").write_text(json.dumps(head))
    assert run("export-hf", model_folder, tmp_path / "new") == 2
    assert "was trained with text tokenizer 000000000000" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "out"]
    assert [path.name for path in out.iterdir()] == ["mine"]
