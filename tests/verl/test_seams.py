"""What we rely on in verl, name by name: an upgrade that moves one of them fails here, and not by training dense in silence."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from verl_harness import cpu
from verl_harness.batches import make_samples, verl_batch
from verl_harness.engines import grpo_loss

TRIED = "0.9.1"


@pytest.fixture(scope="module", autouse=True)
def on_the_cpu():
    cpu.install()


def test_version_tried():
    import verl

    assert verl.__version__ == TRIED, "run tests/verl, then write the new version here and in docs/integrations/verl.md"


def _found(path):
    from verl.workers.engine.megatron import transformer_impl

    found = transformer_impl
    for name in path.split("."):
        found = getattr(found, name)
    return found


def _parameters(function):
    signature = inspect.signature(function)
    bare = [p.replace(annotation=inspect.Parameter.empty) for p in signature.parameters.values()]
    return str(signature.replace(parameters=bare, return_annotation=inspect.Signature.empty))


def test_signatures():
    from megatron.prefixflow.integrations.verl import UPSTREAM

    assert {name: _parameters(_found(name)) for name in UPSTREAM} == UPSTREAM


def test_verl_asks_its_module_for_the_schedule():
    """The name that `_schedule` replaces is looked up when a batch is run, and called with these keywords."""
    run = _found("MegatronEngine.forward_backward_batch").__code__
    assert "get_forward_backward_func" in run.co_names
    assert run.co_names.count("get_forward_backward_func") == 1
    keywords = ("forward_step_func", "data_iterator", "model", "num_microbatches", "seq_length", "micro_batch_size")
    assert (*keywords, "forward_only") in run.co_consts


def test_names_of_the_batch_are_read_by_verl_too():
    names = {
        "MegatronEngineWithLMHead.forward_step": (
            "temperature",
            "calculate_entropy",
            "distillation_use_topk",
            "pad_mode",
        ),
        "MegatronEngine.forward_backward_batch": ("enable_routing_replay", "routed_experts", "batch_num_tokens"),
        "MegatronEngineWithLMHead.prepare_model_inputs": ("input_ids", "loss_mask", "routed_experts"),
    }
    for path, keys in names.items():
        source = inspect.getsource(_found(path))
        assert [key for key in keys if key not in source] == [], path


def test_registry_picks_the_engine_by_vendor(monkeypatch):
    from verl.workers.engine import EngineRegistry

    from megatron.prefixflow.integrations.verl import PrefixReuseEngine

    monkeypatch.setenv("VERL_ENGINE_DEVICE", "cuda")
    monkeypatch.delenv("VERL_ENGINE_VENDOR", raising=False)
    own = _found("MegatronEngineWithLMHead")
    assert EngineRegistry.get_engine_cls("language_model", "megatron") is own
    monkeypatch.setenv("VERL_ENGINE_VENDOR", "prefixflow")
    assert EngineRegistry.get_engine_cls("language_model", "megatron") is PrefixReuseEngine
    # A critic stays with verl's own engine.
    assert EngineRegistry.get_engine_cls("value_model", "megatron") is _found("MegatronEngineWithValueHead")


def test_loaded_by_verls_own_variable():
    """`import verl` imports it, at a time when verl is not complete yet."""
    environment = {**os.environ, "VERL_USE_EXTERNAL_MODULES": "megatron.prefixflow.integrations.verl"}
    environment |= {
        "VERL_ENGINE_VENDOR": "prefixflow",
        "VERL_ENGINE_DEVICE": "cuda",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    script = (
        "import verl\n"
        "from verl.workers.engine import EngineRegistry\n"
        "print(EngineRegistry.get_engine_cls('language_model', 'megatron').__name__)"
    )
    run = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=120)
    assert run.stdout.split() == ["PrefixReuseEngine"], run.stderr


def test_documented_options_are_verls():
    """Every path that docs/integrations/verl.md names is in verl's configuration, or is added to it by a plus sign."""
    import verl
    from hydra import compose, initialize_config_dir
    from omegaconf import OmegaConf

    text = (Path(__file__).parents[2] / "docs" / "integrations" / "verl.md").read_text()
    roots = "model_engine=|(?:actor_rollout_ref|ray_kwargs|trainer)[.]"
    named = set(re.findall(rf"(?<![\w.])[+]?(?:{roots})[\w.]+(?:=\w+(?:[.]\w+)*)?", text))
    trainer = Path(verl.__file__).parent / "trainer"
    with initialize_config_dir(str(trainer / "config"), version_base=None):
        config = compose("ppo_trainer", overrides=sorted(option for option in named if "=" in option))
    paths = {option for option in named if "=" not in option}
    assert len(paths) >= 3
    for path in paths:
        assert OmegaConf.select(config, path) is not None, path
    assert config.actor_rollout_ref.ref.megatron.vanilla_mbridge, "the reference follows the actor"
    newer = (trainer / "ppo" / "v1" / "trainer_base.py").read_text()
    assert "use_prefix_grouper" not in newer, (
        "the default trainer keeps groups now: take trainer.use_v1 out of the lines"
    )


MODES = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")


@pytest.mark.parametrize("aggregation", MODES)
def test_losses_that_are_split_are_sums_over_samples(aggregation):
    """Each loss that verl registers, once over a batch and once sample by sample; those that are not sums are not split."""
    from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY
    from verl.utils import tensordict_utils as tu

    from megatron.prefixflow.integrations.verl import _SAMPLE_LOSSES, _as_verl, splits_into_samples

    samples = make_samples(2, 3, prompt=6, response=8, vocab_size=50, seed=3)
    batch = verl_batch(samples, 0, 1, batch_num_tokens=31, dp_size=2)
    torch.manual_seed(0)
    logprobs = [torch.randn(len(t)) - 3 for t in samples.tokens]
    assert set(_SAMPLE_LOSSES) <= set(POLICY_LOSS_REGISTRY)
    for mode in POLICY_LOSS_REGISTRY:
        for scale in (None, 100):
            loss = grpo_loss(loss_mode=mode, loss_agg_mode=aggregation, loss_scale_factor=scale)
            if not splits_into_samples(loss, batch):
                continue
            parts = tu.chunk_tensordict(batch, len(batch))
            whole, _ = loss(model_output={"log_probs": _as_verl(logprobs)}, data=batch)
            split = [
                loss(model_output={"log_probs": _as_verl([x])}, data=p)[0] for x, p in zip(logprobs, parts, strict=True)
            ]
            torch.testing.assert_close(sum(split), whole, rtol=1e-5, atol=1e-6)
    assert not splits_into_samples(grpo_loss(loss_mode="geo_mean", loss_agg_mode=aggregation), batch)


def test_unknown_losses_are_not_split():
    from megatron.prefixflow.integrations.verl import splits_into_samples

    batch = verl_batch(make_samples(1, 2, prompt=6, response=8, vocab_size=50, seed=3), 0, 1)
    assert splits_into_samples(None, batch)
    assert not splits_into_samples(lambda **_: None, batch)
    horizon = grpo_loss(loss_agg_mode="seq-mean-token-sum-norm")
    assert not splits_into_samples(horizon, batch), "verl divides by the width of its microbatch"
    del batch["global_batch_size"]
    assert not splits_into_samples(grpo_loss(), batch)
