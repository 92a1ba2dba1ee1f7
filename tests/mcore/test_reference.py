"""parity's reference against transformers: the same weights, the same trajectories, float64 on both sides.

Both sides keep their rotary tables in float32. transformers computes its norms in float32 as well, so it is compared as
it is at that precision, and once more with its norms in float64, where only the tables are left.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from megatron.prefixflow.configs import cpu_safe
from megatron.prefixflow.reference import Reference, ReferenceStep, UpdateSettings, build_reference_model
from megatron.prefixflow.session import start_session
from prefixflow.plan.layout import ParallelLayout
from prefixflow.runtime.loss import LossConfig
from prefixflow.runtime.world import Worlds
from prefixflow.testing.generate import Style, two_level_groups
from prefixflow.trajectories import Trajectory

pytest.importorskip("transformers")

VOCAB_SIZE = 131
SHAPE = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 512,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {"rope_parameters": LLAMA3}),
    "llama-tied": ("LlamaConfig", {"tie_word_embeddings": True}),
    "qwen2": ("Qwen2Config", {}),
    "qwen3": ("Qwen3Config", {"head_dim": 16}),
}
LOSSES = {
    "sft": LossConfig.of("sft"),
    "grpo": LossConfig.of("grpo"),
}
LIMITS = {True: 1e-12, False: 2e-6}
"""On relative differences of gradients, log-probabilities and loss, by whether transformers' norms run in float64."""


def trajectories() -> tuple[Trajectory, ...]:
    style = Style(vocab_size=VOCAB_SIZE, per_token_advantages=True)
    return two_level_groups(2, 3, (30, 60), (5, 20), seed=11, style=style)


def hf_model(kind: str, exact_norms: bool) -> Any:
    import transformers

    name, fields = MODELS[kind]
    config = getattr(transformers, name)(**SHAPE, **fields)
    torch.manual_seed(5)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").double()
    with torch.no_grad():
        for parameter in model.parameters():
            # Norms start at 1 and biases at 0: equal weights would hide one taken for another.
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    if exact_norms:
        for module in model.modules():
            if type(module).__name__.endswith("RMSNorm"):
                module.forward = _float64_norm(module)
    return model


def _float64_norm(module: Any) -> Any:
    eps = module.variance_epsilon
    return lambda hidden: F.rms_norm(hidden, module.weight.shape, module.weight, eps)


def hf_step(model: Any, batch: tuple[Trajectory, ...], loss: str) -> tuple[list[Tensor], dict[str, Tensor], float]:
    """Log-probabilities of trained tokens, gradients by transformers' names, and the loss.

    GRPO at the policy that sampled has ratio 1: the mean over trajectories of the mean over tokens of -advantage * ratio.
    """
    logprobs, total = [], torch.zeros((), dtype=torch.float64)
    num_trained = sum(t.num_trained for t in batch)
    for t in batch:
        logits = model(input_ids=torch.from_numpy(t.tokens)[None]).logits[0]
        every = torch.log_softmax(logits[:-1], -1).gather(1, torch.from_numpy(t.tokens)[1:, None])[:, 0]
        mask = torch.from_numpy(t.loss_mask.copy())
        picked = every[mask[1:]]
        logprobs.append(picked.detach())
        if loss == "sft":
            total = total - picked.sum() / num_trained
        else:
            advantages = torch.from_numpy(np.array(t.advantages))[mask]
            ratio = (picked - picked.detach()).exp()
            total = total - (advantages * ratio).mean() / len(batch)
    total.backward()
    return logprobs, {name: p.grad for name, p in model.named_parameters()}, float(total.detach())


def save_hf(model: Any, tensors: dict[str, Tensor], folder: Path) -> None:
    """A folder of `model` with `tensors` for weights."""
    model.config.save_pretrained(folder)
    save_file({name: t.detach().contiguous() for name, t in tensors.items()}, folder / "model.safetensors")


def megatron_model(folder: Path) -> Any:
    from megatron.prefixflow.bridge import load_hf_weights, transformer_config_from_hf

    start_session(ParallelLayout(), 1)
    overrides = cpu_safe({"params_dtype": torch.float64, "pipeline_dtype": torch.float64})
    config, arguments = transformer_config_from_hf(folder, **overrides)
    model = build_reference_model(config, **arguments).double()
    load_hf_weights([model], folder)
    return model


def compare(kind: str, loss: str, exact_norms: bool, folder: Path) -> dict[str, float]:
    """Largest differences of the reference from transformers."""
    batch = trajectories()
    model = hf_model(kind, exact_norms)
    save_hf(model, dict(model.named_parameters()), folder / "weights")
    logprobs, gradients, total = hf_step(model, batch, loss)
    save_hf(model, gradients, folder / "gradients")
    reference = Reference(megatron_model(folder / "weights"), LOSSES[loss])
    step = reference.step(batch)
    # The bridge's map from one set of names to the other is linear, so it carries gradients as well.
    expected = dict(megatron_model(folder / "gradients").named_parameters())
    assert expected.keys() == step.grads.keys()
    errors = [(step.grads[n] - g).norm() / g.norm() for n, g in expected.items()]
    assert min(g.norm() for g in expected.values()) > 0
    return {
        "logprob": max(float(((a - b) / b).abs().max()) for a, b in zip(step.logprobs, logprobs, strict=True)),
        "gradient": float(max(errors)),
        "loss": abs(step.loss - total) / abs(total),
    }


@pytest.mark.parametrize("exact_norms", [False, True], ids=["as it is", "norms in float64"])
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("kind", MODELS)
def test_reference_equals_transformers(worlds: Worlds, tmp_path, kind, loss, exact_norms):
    for name in ("weights", "gradients"):
        (tmp_path / name).mkdir()
    (errors,) = worlds[1].run(compare, kind, loss, exact_norms, tmp_path)
    assert max(errors.values()) < LIMITS[exact_norms], errors


def test_a_step_without_a_gradient_updates_nothing():
    """Where every ratio is clipped the norm is 0, and it must not be divided by."""
    model: Any = torch.nn.Linear(2, 2).double()
    reference = Reference(model, LossConfig.of("sft"))
    before = [p.detach().clone() for p in model.parameters()]
    zeros = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    reference.update(
        ReferenceStep(0.0, zeros, [], 0.0),
        UpdateSettings("sgd", lr=1.0, momentum=0.9, adam_betas=(0.9, 0.999), adam_eps=1e-3, max_norm=1.0),
    )
    assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))
