"""The SmolLM2 folder: whole or not there, and a model that answers."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.prefixflow import smollm2


def _write_all(gguf: Path, folder: Path) -> None:
    for name in smollm2._REQUIRED_FILES:
        (folder / name).write_text(gguf.name)


def test_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smollm2, "_convert", _write_all)
    out_dir = tmp_path / "models" / "it"
    assert smollm2.make_model(out_dir, Path("first.gguf")) == out_dir
    assert smollm2.make_model(out_dir, Path("second.gguf")) == out_dir
    assert (out_dir / "config.json").read_text() == "first.gguf"
    assert [path.name for path in out_dir.parent.iterdir()] == ["it"]


def test_a_failure_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail_half_way(gguf: Path, folder: Path) -> None:
        (folder / "config.json").write_text("half")
        raise OSError("disk full")

    monkeypatch.setattr(smollm2, "_convert", fail_half_way)
    with pytest.raises(OSError, match="disk full"):
        smollm2.make_model(tmp_path / "it", Path("a.gguf"))
    assert list(tmp_path.iterdir()) == []


def test_a_folder_of_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("keep")
    with pytest.raises(ValueError, match=r"lacks some of config\.json"):
        smollm2.make_model(tmp_path, Path("a.gguf"))


def test_missing_package_names_the_way_out() -> None:
    with pytest.raises(ValueError, match=r"no-such-package is not installed.*make setup"):
        smollm2.find_gguf("no-such-package")
    with pytest.raises(ValueError, match=r"should carry one \.gguf file, got \[\]"):
        smollm2.find_gguf("numpy")


@pytest.mark.slow
def test_the_model_answers_a_question(smollm2_dir: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2_dir)
    model = AutoModelForCausalLM.from_pretrained(smollm2_dir)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    inputs = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    outputs = model.generate(**inputs, max_new_tokens=20, do_sample=False)
    answer = tokenizer.decode(outputs[0, inputs["input_ids"].shape[1] :])
    assert "Paris" in answer
    assert answer.endswith("<|im_end|>")
    assert tokenizer.eos_token == "<|im_end|>"
    text = "12 + 30 = 42\n\n  é 日本"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
