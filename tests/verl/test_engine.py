"""Around the step: verl's worker, weight export, checkpoints, and what is refused."""

from __future__ import annotations

import pytest

from verl_harness import cpu
from verl_harness.batches import make_samples, verl_batch
from verl_harness.cases import checkpoint_there_and_back, worker_update
from verl_harness.engines import Layout, engine_configs


def test_training_worker(worlds, folders):
    (expected,) = worlds[1].run(worker_update, folders["qwen2"], None)
    (ours,) = worlds[1].run(worker_update, folders["qwen2"], "prefixflow")
    for name in ("loss", "grad_norm"):
        assert ours[name] == pytest.approx(expected[name], rel=1e-5)
    assert expected.keys() <= ours.keys()
    # By data-parallel rank and step, as verl has its own.
    assert ours["prefixflow/fallback"] == [[0.0]]
    assert ours["prefixflow/shared_tokens_ratio"][0][0] > 0.5


def test_weights_and_checkpoints_are_verls_own(worlds, folders, tmp_path):
    """State and export have the same names and bits; a run goes on in the other engine as it would have in its own."""
    (error,) = worlds[1].run(checkpoint_there_and_back, folders["qwen2"], tmp_path)
    # Adam's steps are of about the learning rate, 1e-2.
    assert error < 1e-5


@pytest.mark.parametrize(
    ("config", "name", "value"),
    [
        ("engine_config", "dynamic_context_parallel", True),
        ("engine_config", "use_megatron_fsdp", True),
        ("engine_config", "use_fused_kernels", True),
        ("model_config", "lora", {"rank": 8}),
        ("model_config", "lora_rank", 8),
        ("model_config", "model_type", "value_model"),
    ],
)
def test_options_refused_by_name(config, name, value, folders):
    cpu.install()
    from megatron.prefixflow.integrations.verl import refuse_unsupported

    configs = engine_configs(folders["qwen2"], Layout())
    refuse_unsupported(configs["engine_config"], configs["model_config"])
    configs[config].__dict__[name] = value
    with pytest.raises(ValueError, match=name.split("_rank")[0]):
        refuse_unsupported(configs["engine_config"], configs["model_config"])


@pytest.mark.parametrize("name", ["calculate_sum_pi_squared", "distillation_use_topk", "distillation_only"])
def test_batches_refused_by_name(name):
    cpu.install()
    from verl.utils import tensordict_utils as tu

    from megatron.prefixflow.integrations.verl import _refuse_batch

    batch = verl_batch(make_samples(1, 2, prompt=6, response=8, vocab_size=50, seed=3), 0, 1)
    _refuse_batch(batch)
    tu.assign_non_tensor(batch, **{name: True})
    with pytest.raises(ValueError, match=name):
        _refuse_batch(batch)
