"""verl's PPO trainer on a Ray cluster of this machine: two workers, actor and reference, with our engine by the documented lines."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path

from verl_harness.models import VOCAB_SIZE, save_tiny

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parents[1]
TIMEOUT_S = 600
# The lines of docs/integrations/verl.md, the shape of the run, and stand-ins for what needs a GPU.
ARGUMENTS = [
    "model_engine=megatron",
    "actor_rollout_ref.model.external_lib=megatron.prefixflow.integrations.verl",
    "actor_rollout_ref.actor.megatron.vanilla_mbridge=True",
    "actor_rollout_ref.actor.use_prefix_grouper=True",
    "trainer.use_v1=False",
    "+actor_rollout_ref.actor.megatron.override_mcore_model_config.prefixflow.require_sharing=True",
    "algorithm.adv_estimator=grpo",
    "data.train_batch_size=4",
    "data.max_prompt_length=64",
    "data.max_response_length=16",
    "actor_rollout_ref.rollout.n=4",
    "actor_rollout_ref.actor.use_kl_loss=True",
    "actor_rollout_ref.actor.ppo_mini_batch_size=2",
    "actor_rollout_ref.actor.use_dynamic_bsz=True",
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=256",
    "actor_rollout_ref.rollout.log_prob_use_dynamic_bsz=True",
    "actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu=256",
    "actor_rollout_ref.ref.log_prob_use_dynamic_bsz=True",
    "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu=256",
    "actor_rollout_ref.rollout.agent.num_workers=1",
    "reward.num_workers=1",
    "trainer.n_gpus_per_node=2",
    "trainer.total_training_steps=2",
    "trainer.val_before_train=False",
    "trainer.test_freq=-1",
    "trainer.save_freq=-1",
    "trainer.logger=[console,file]",
    "trainer.device=cpu",
    "+actor_rollout_ref.model.override_config.attn_implementation=eager",
    "actor_rollout_ref.rollout.name=vllm",
    "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
    "ray_kwargs.ray_init.num_cpus=16",
    "+ray_kwargs.ray_init.num_gpus=2",
]


def _write_prompts(file: Path) -> None:
    import pandas

    draw = random.Random(1)
    rows = [
        {
            "data_source": "random",
            "prompt": [{"role": "user", "content": " ".join(f"t{draw.randrange(2, VOCAB_SIZE)}" for _ in range(40))}],
            "reward_model": {"style": "rule", "ground_truth": ""},
            "extra_info": {"index": number},
        }
        for number in range(8)
    ]
    pandas.DataFrame(rows).to_parquet(file)


def test_two_steps_of_the_ppo_trainer(tmp_path):
    model = save_tiny("llama", tmp_path / "model")
    (model / "chat_template.jinja").write_text("{% for m in messages %}{{ m['content'] }} {% endfor %}")
    _write_prompts(tmp_path / "prompts.parquet")
    arguments = [
        *ARGUMENTS,
        f"data.train_files={tmp_path / 'prompts.parquet'}",
        f"data.val_files={tmp_path / 'prompts.parquet'}",
        f"actor_rollout_ref.model.path={model}",
        f"trainer.default_local_dir={tmp_path / 'checkpoints'}",
        f"reward.custom_reward_function.path={FOLDER / 'ray_ppo' / 'verl_on_cpu.py'}",
    ]
    environment = {
        **os.environ,
        "VERL_ENGINE_VENDOR": "prefixflow",
        "VERL_USE_EXTERNAL_MODULES": "verl_on_cpu",
        "VERL_FILE_LOGGER_PATH": str(tmp_path / "metrics.jsonl"),
        "PYTHONPATH": os.pathsep.join(map(str, (FOLDER / "ray_ppo", FOLDER, ROOT))),
    }
    run = subprocess.run(
        [sys.executable, "-m", "verl.trainer.main_ppo", *arguments],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-3000:]
    steps = [json.loads(line)["data"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert len(steps) == 2
    for metrics in steps:
        assert metrics["actor/prefixflow/fallback"] == 0
        assert metrics["actor/prefixflow/shared_tokens_ratio"] > 0.5
        assert metrics["actor/grad_norm"] > 0
