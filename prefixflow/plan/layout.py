"""The parallel layout of a run: how many ranks each kind of parallelism takes.

World = tp * pp * cp * dp. Expert parallelism regroups the same ranks: with `ep` and `etp`, what is
left of tp * cp * dp is the data-parallel size of the experts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ParallelLayout:
    """Sizes of the parallel groups, by Megatron's short names; `vpp` is model chunks per stage.

    Raises:
        ValueError: a size below 1, or expert groups that do not fit the ranks.
    """

    tp: int = 1
    pp: int = 1
    vpp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int = 1
    dp: int = 1

    def __post_init__(self) -> None:
        for name in ("tp", "pp", "vpp", "cp", "ep", "etp", "dp"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name} is {getattr(self, name)}, expected at least 1.")
        if self.vpp > 1 and self.pp == 1:
            raise ValueError(f"--vpp {self.vpp} needs pipeline stages: give --pp of at least 2.")
        ranks = self.tp * self.cp * self.dp
        if ranks % (self.ep * self.etp):
            raise ValueError(
                f"expert groups do not fit: each pipeline stage has tp * cp * dp = {ranks} ranks, "
                f"which ep * etp = {self.ep} * {self.etp} does not divide. Change --ep, --etp or "
                "the number of processes."
            )

    @property
    def world_size(self) -> int:
        return self.tp * self.pp * self.cp * self.dp

    @property
    def expert_dp(self) -> int:
        """Data-parallel size of the experts."""
        return self.tp * self.cp * self.dp // (self.ep * self.etp)

    @property
    def expert_block(self) -> int:
        """Consecutive data-parallel ranks that exchange tokens: neighbours in the order tp, cp, dp that one chain of
        tp * cp and ep * etp groups joins."""
        model_ranks = self.tp * self.cp
        return math.lcm(self.ep * self.etp, model_ranks) // model_ranks

    @property
    def token_multiple(self) -> int:
        """What the physical length of a microbatch is padded to a multiple of."""
        return self.tp * (2 * self.cp if self.cp > 1 else 1)

    def __str__(self) -> str:
        sizes = f"tp {self.tp} pp {self.pp} cp {self.cp} dp {self.dp}"
        if self.vpp > 1:
            sizes += f" vpp {self.vpp}"
        if self.ep > 1 or self.etp > 1:
            sizes += f" ep {self.ep} etp {self.etp}"
        return sizes

    @classmethod
    def for_world(
        cls,
        world_size: int | None,
        *,
        tp: int = 1,
        pp: int = 1,
        vpp: int = 1,
        cp: int = 1,
        ep: int = 1,
        etp: int = 1,
        dp: int | None = None,
    ) -> ParallelLayout:
        """The layout of `world_size` processes, or with None of the smallest world it allows.

        Raises:
            ValueError: the sizes do not multiply to the world size.
        """
        for name, size in (("tp", tp), ("pp", pp), ("cp", cp), ("ep", ep), ("etp", etp)):
            if size < 1:
                raise ValueError(f"--{name} is {size}, expected at least 1.")
        model_ranks = tp * pp * cp
        if world_size is not None:
            if world_size % model_ranks:
                raise ValueError(
                    f"the world has {world_size} processes, which tp * pp * cp = {tp} * {pp} * "
                    f"{cp} = {model_ranks} does not divide. Start a multiple of {model_ranks} processes."
                )
            if dp is not None and dp != world_size // model_ranks:
                raise ValueError(
                    f"--dp is {dp}, but {world_size} processes and tp * pp * cp = {model_ranks} "
                    f"make it {world_size // model_ranks}. Leave --dp out, or start "
                    f"{model_ranks * dp} processes."
                )
            dp = world_size // model_ranks
        if dp is None:
            experts = ep * etp
            dp = experts // math.gcd(experts, tp * cp)
        return cls(tp=tp, pp=pp, vpp=vpp, cp=cp, ep=ep, etp=etp, dp=dp)


def layers_per_stage(
    num_layers: int,
    *,
    pp: int = 1,
    vpp: int = 1,
    first: int | None = None,
    last: int | None = None,
    with_embedding: bool = False,
    with_loss: bool = False,
) -> tuple[int, ...]:
    """Layers of every global stage (model chunk) in order; stage g stands on pipeline rank g % pp.

    first, last: layers of the first and of the last rank, the others share the rest. with_embedding, with_loss: the embedding
    or the loss takes the place of a layer, which may leave its stage none. The rules are Megatron-Core's
    (`get_num_layers_to_build`).

    Raises:
        ValueError: the layers do not divide.
    """
    uneven = {
        flag: number
        for flag, number in (
            ("--decoder-first-pipeline-num-layers", first),
            ("--decoder-last-pipeline-num-layers", last),
        )
        if number is not None
    }
    for flag, number in uneven.items():
        if pp == 1:
            raise ValueError(f"{flag} {number} needs pipeline stages: give --pp of at least 2.")
        if with_embedding or with_loss:
            raise ValueError(
                f"{flag} and --account-for-embedding-in-pipeline-split or --account-for-loss-in-pipeline-split both "
                "say how layers are split; give one of them."
            )
        if not 0 < number < num_layers or number % vpp:
            raise ValueError(
                f"{flag} is {number}, expected from 1 to --num-layers {num_layers} less one, and a multiple of the "
                f"{vpp} model chunks of a rank."
            )
    rest = num_layers + with_embedding + with_loss - sum(uneven.values())
    parts = (pp - len(uneven)) * vpp
    if rest < 0 or (rest % parts if parts else rest):
        raise ValueError(
            f"--num-layers {num_layers} does not divide evenly over "
            + (f"{pp * vpp} model chunks (pp * vpp)" if not uneven else f"{pp} stages with {' and '.join(uneven)}")
            + (", embedding or loss counted as a layer" if with_embedding or with_loss else "")
            + ". Use --decoder-first-pipeline-num-layers and --decoder-last-pipeline-num-layers, or another --pp."
        )
    on_rank = [rest // parts if parts else 0] * pp
    if first is not None:
        on_rank[0] = first // vpp
    if last is not None:
        on_rank[-1] = last // vpp
    layers = on_rank * vpp
    layers[0] -= with_embedding
    layers[-1] -= with_loss
    if min(layers) < 0:
        raise ValueError(
            f"--num-layers {num_layers} leaves {pp * vpp} model chunks less than the embedding and the loss take. Use "
            "fewer of them, or leave out --account-for-embedding-in-pipeline-split or --account-for-loss-in-pipeline-split."
        )
    return tuple(layers)
