"""A training loop of one's own, without and with prefix reuse: Megatron-Core's model, DDP and optimizer, and a loss of ours.

    python examples/bring_your_own_model.py          (or: torchrun --nproc-per-node 2 ..., two data-parallel ranks)

Prints the largest relative difference of a gradient and the speedup; exits with 1 where gradients differ or nothing was shared.
"""

import os
import sys
import time
from functools import partial

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer import TransformerConfig

from megatron.prefixflow import enable_prefix_reuse, forward_backward, install_cpu_device_layer

PROMPT, RESPONSE, GROUP_SIZE, NUM_GROUPS, VOCAB, NUM_MICROBATCHES = 256, 32, 8, 2, 512, 4
ON_GPU = torch.cuda.is_available()


def build_model():
    config = TransformerConfig(num_layers=4, hidden_size=128, num_attention_heads=8, use_cpu_initialization=not ON_GPU)
    config.hidden_dropout = config.attention_dropout = 0.0  # what is computed once must be the same each time
    config.finalize_model_grads_func = finalize_model_grads
    model = GPTModel(config, get_gpt_layer_local_spec(), VOCAB, PROMPT + RESPONSE, position_embedding_type="rope")
    return DistributedDataParallel(config, DistributedDataParallelConfig(), model.cuda() if ON_GPU else model)


def make_microbatches():
    """Groups of responses to one prompt, shuffled over microbatches."""
    prompts = torch.randint(VOCAB, (NUM_GROUPS, PROMPT)).repeat_interleave(GROUP_SIZE, 0)
    responses = torch.randint(VOCAB, (len(prompts), RESPONSE + 1))
    samples = torch.cat([prompts, responses], 1)[torch.randperm(len(prompts))].to("cuda" if ON_GPU else "cpu")
    mask = (torch.arange(PROMPT + RESPONSE, device=samples.device) >= PROMPT - 1).repeat(len(samples), 1)
    advantages = torch.randn(len(samples), 1).to(samples.device)
    columns = {"tokens": samples[:, :-1], "labels": samples[:, 1:], "mask": mask, "advantages": advantages}
    return [{name: c[i::NUM_MICROBATCHES] for name, c in columns.items()} for i in range(NUM_MICROBATCHES)]


def loss_func(batch, losses):
    """A policy gradient; `losses` are minus the log-probabilities of the labels, as Megatron's model returns them."""
    ratio = torch.exp(losses.detach() - losses)
    loss = -(ratio * batch["advantages"] * batch["mask"]).sum() / batch["mask"].sum()
    return loss, {"loss": loss.detach().clone()}


def forward_step(data_iterator, model):
    batch = next(data_iterator)
    positions = torch.arange(PROMPT + RESPONSE, device=batch["tokens"].device).expand_as(batch["tokens"])
    output = model(batch["tokens"], positions, None, labels=batch["labels"], loss_mask=batch["mask"])
    return output, partial(loss_func, batch)


def gradients_of(run, model, microbatches):
    """Seconds of a step that `run` makes, and the gradients that it leaves."""
    model.zero_grad_buffer()
    sizes = {"num_microbatches": len(microbatches), "seq_length": PROMPT + RESPONSE, "micro_batch_size": 4}
    begin = time.perf_counter()
    run(forward_step_func=forward_step, data_iterator=iter(microbatches), model=model, **sizes)
    gradients = [parameter.main_grad.cpu().double() for parameter in model.parameters()]
    return time.perf_counter() - begin, gradients


def main():
    rank, size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    install_cpu_device_layer()  # lets Megatron-Core run without a GPU; does nothing where there is one
    store = {} if size > 1 else {"store": torch.distributed.HashStore()}
    torch.distributed.init_process_group("nccl" if ON_GPU else "gloo", rank=rank, world_size=size, **store)
    parallel_state.initialize_model_parallel()
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    torch.manual_seed(1)
    model = build_model()
    torch.manual_seed(rank)
    microbatches = make_microbatches()
    optimizer = get_megatron_optimizer(OptimizerConfig(optimizer="adam", lr=1e-4), [model])

    plain = [gradients_of(get_forward_backward_func(), model, microbatches) for _ in range(2)]
    handle = enable_prefix_reuse(model)
    shared = [gradients_of(forward_backward, model, microbatches) for _ in range(2)]
    optimizer.step()
    (plain_s, expected), (shared_s, gradients) = (min(runs, key=lambda run: run[0]) for runs in (plain, shared))
    difference = max(float((g - e).norm() / e.norm()) for g, e in zip(gradients, expected, strict=True))
    print(f"gradient difference {difference:.1e}, speedup {plain_s / shared_s:.2f}x, {handle.metrics}")
    torch.distributed.destroy_process_group()
    return 0 if difference < 1e-4 and handle.metrics["prefixflow/fallback"] == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
