"""The same step on verl's own engine and on ours: scores, loss, gradient norm and every gradient, in all layouts."""

from __future__ import annotations

import pytest

from verl_harness.cases import Case, compare, loss_and_norm, padded_inputs
from verl_harness.engines import Layout

LIMIT = 1e-5
RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
# World size and case. Samples are shuffled, so groups lie scattered over microbatches and data-parallel ranks.
CASES = {
    "one process, two steps": (1, Case(num_steps=2)),
    "padded responses": (1, Case(batch={"is_dense": True})),
    "recomputation": (1, Case(model="llama", layout=Layout(transformer=RECOMPUTE))),
    "microbatches of a fixed size": (1, Case(batch={"use_dynamic_bsz": False, "micro_batch_size_per_gpu": 3})),
    "temperatures": (1, Case(batch={"temperatures": (0.7, 1.3)})),
    "GSPO, a KL term, entropy": (
        1,
        Case(
            loss={
                "loss_mode": "gspo",
                "loss_agg_mode": "seq-mean-token-mean",
                "use_kl_loss": True,
                "kl_loss_coef": 0.1,
                "entropy_coeff": 0.1,
            }
        ),
    ),
    "a loss of whole microbatches": (1, Case(loss={"loss_mode": "geo_mean"})),
    "dp 2, two steps": (2, Case(layout=Layout(is_distributed=False), num_steps=2)),
    "dp 2, distributed optimizer": (2, Case()),
    "tp 2": (2, Case(layout=Layout(tp=2))),
    "pp 2, two steps": (2, Case(layout=Layout(pp=2), num_steps=2)),
    "pp 2 with virtual stages": (2, Case(layout=Layout(pp=2, vpp=2))),
    "pp 2, recomputation, a loss of whole microbatches": (
        2,
        Case(layout=Layout(pp=2, transformer=RECOMPUTE), loss={"loss_mode": "geo_mean"}),
    ),
    "cp 2": (2, Case(layout=Layout(cp=2, is_distributed=False), multiple=4)),
    "cp 2, per-token loss": (
        2,
        Case(layout=Layout(cp=2, is_distributed=False, transformer={"calculate_per_token_loss": True}), multiple=4),
    ),
    "experts, ep 2": (2, Case(model="moe", layout=Layout(ep=2, is_distributed=False))),
    "experts, ep 2, R2": (2, Case(model="moe", layout=Layout(ep=2, is_distributed=False, replay="R2"))),
    "experts, virtual stages, R2": (2, Case(model="moe", layout=Layout(pp=2, vpp=2, replay="R2"))),
    # Lengths that need no padding: verl's own replay gives padding one expert twice, which etp 2 does not take.
    "experts, tp 2, R2": (2, Case(model="moe", layout=Layout(tp=2, etp=2, replay="R2"), multiple=4)),
    "experts, cp 2, R2": (2, Case(model="moe", layout=Layout(cp=2, replay="R2", is_distributed=False), multiple=4)),
    "experts, ep 2, R3, recomputation": (
        2,
        Case(model="moe", layout=Layout(ep=2, is_distributed=False, replay="R3", transformer=RECOMPUTE)),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_equals_verls_own_engine(name, worlds, folders):
    world_size, case = CASES[name]
    results = worlds[world_size].run(compare, folders, case)
    errors = {key: max(r[key] for r in results) for key in results[0] if not key.startswith("prefixflow/")}
    assert max(errors.values()) < LIMIT, errors
    # The last stage tells; the ratio is that of all data-parallel ranks.
    counters = results[-1]
    assert counters["prefixflow/fallback"] == 0
    assert counters["prefixflow/shared_tokens_ratio"] > 0.2


def test_odd_lengths_under_context_parallelism(worlds, folders):
    """verl 0.9.1 rounds its token count down there (docs/integrations/verl.md), so its own engine on one process is the measure."""
    layout = Layout(cp=2, is_distributed=False, transformer={"calculate_per_token_loss": True})
    ((loss, norm),) = worlds[1].run(loss_and_norm, folders, Case(), None)
    for our_loss, our_norm in worlds[2].run(loss_and_norm, folders, Case(layout=layout), "prefixflow"):
        assert our_loss == pytest.approx(loss, rel=LIMIT)
        assert our_norm == pytest.approx(norm, rel=LIMIT)


def test_verification_by_the_user_runs_both_ways(worlds, folders):
    """`verify_steps` runs verl's own forward beside ours, replay of routes included."""
    layout = Layout(ep=2, is_distributed=False, replay="R3", ours={"verify_steps": 1})
    results = worlds[2].run(compare, folders, Case(model="moe", layout=layout))
    assert all(r["gradient"] < LIMIT for r in results)
    assert 0 < results[-1]["prefixflow/gradient_error"] < LIMIT


def test_nothing_shared_is_verls_own_step(worlds, folders):
    (result,) = worlds[1].run(compare, folders, Case(layout=Layout(ours={"prefix_reuse": "off"})))
    assert result["prefixflow/fallback"] == 1
    assert result["prefixflow/shared_tokens_ratio"] == 0
    assert max(result[key] for key in ("logprobs", "loss", "grad_norm", "gradient")) == 0


def test_padded_input_ids_give_the_same(worlds, folders):
    """verl's own engine takes jagged `input_ids` only; ours strips the padding of others."""
    (error,) = worlds[1].run(padded_inputs, folders["qwen2"])
    assert error == 0
