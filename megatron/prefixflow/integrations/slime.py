"""slime's Megatron backend on shared prefixes: `install()` in every training process, before its first step.

slime asks its model module for Megatron's forward-backward function once a step and hands it a forward step, which reads
a microbatch, runs the model and returns the loss as a function of the logits. Here:

1. The forward step runs once a microbatch with a stand-in for the model, which tells what slime would have run
   (`Microbatch`).
2. `megatron.prefixflow.forward_backward` plans and runs all of them.
3. slime's loss function of each microbatch runs unchanged, on logits of two columns (`packed_scores`): log-probability and
   entropy of the next token, in slime's packed layout. slime's own code divides them by the temperature and cuts them into
   responses; only its step from logits to scores, `calculate_log_probs_and_entropy`, is replaced and hands them over.

slime's own losses are sums over samples, so each sample is a loss call of its own: its backward waits for no other sample of
its microbatch. Where a function of the user's may mix samples (`_MIXING`), a loss call is one of slime's microbatches. All
response tokens are scored, masked ones too: slime reads them and multiplies by its mask, and the ratio of a token without a
score need not be finite.

Seams (docs/integrations/slime.md): `SEAMS`, checked at `install()`.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import ModuleType, TracebackType
from typing import Any

import numpy as np
import torch
from megatron.core import parallel_state
from torch import Tensor
from torch.nn import functional

from megatron.prefixflow.adapter import SequenceInput, SequenceScores
from megatron.prefixflow.attach import PrefixReuseHandle, ReuseSettings, enable_prefix_reuse, handle_of
from megatron.prefixflow.drop_in import forward_backward

PACKAGE = "slime.backends.megatron_utils"


@dataclass(frozen=True, slots=True)
class Seam:
    """A symbol of slime's: parameters that it has in this order, others between them or not, and a global it calls."""

    module: str
    symbol: str
    parameters: tuple[str, ...] = ()
    calls: str = ""


SEAMS = (
    Seam("model", "get_forward_backward_func"),
    Seam("model", "train_one_step", ("data_iterator", "model", "num_microbatches"), "get_forward_backward_func"),
    Seam("model", "forward_only", ("f", "args", "model", "data_iterator"), "get_forward_backward_func"),
    Seam("data", "DataIterator.get_next", ("keys",)),
    Seam("loss", "calculate_log_probs_and_entropy", ("logits", "tokens", "with_entropy")),
    Seam(
        "loss",
        "get_log_probs_and_entropy",
        ("logits", "args", "total_lengths", "response_lengths", "with_entropy"),
        "calculate_log_probs_and_entropy",
    ),
    Seam("loss", "loss_function", ("args", "batch", "num_microbatches", "logits")),
    Seam("cp_utils", "slice_with_cp", ("tokens", "pad_value")),
)

# What slime's forward step gives the model; anything else is a kind of model or training that is not planned for.
_MODEL_INPUTS = frozenset({"input_ids", "position_ids", "attention_mask", "labels", "packed_seq_params", "loss_mask"})


# Options that name a function of the user's which slime's loss calls on all samples of a microbatch.
_MIXING = ("custom_tis_function_path", "custom_pg_loss_reducer_function_path")


@dataclass(frozen=True, slots=True, eq=False)
class Microbatch:
    """One call of slime's forward step, or one sample of it.

    fields: what its data iterator gave: name to one entry a sample, or None; `tokens` are int tensors [n].
    num_rows: length of the packed row of tokens that slime built, padding included.
    loss: slime's loss of logits [1, num_rows, vocabulary], a `functools.partial`.
    """

    fields: dict[str, Any]
    num_rows: int
    loss: Any

    @property
    def args(self) -> Any:
        """slime's arguments, which the loss holds as `args` or first."""
        return self.loss.keywords["args"] if "args" in self.loss.keywords else self.loss.args[0]

    @property
    def temperature(self) -> float:
        return float(self.args.rollout_temperature)

    @property
    def reads_entropy(self) -> bool:
        """In training the policy loss does; a pass of log-probabilities says so."""
        return bool(self.loss.keywords.get("with_entropy", self.args.loss_type == "policy_loss"))

    def sample(self, number: int, num_rows: int) -> Microbatch:
        """One sample, as slime would have it in a microbatch of its own, but for what slime packed."""

        def own(fields: dict[str, Any]) -> dict[str, Any]:
            return _of_sample(fields, number, len(self.fields["tokens"]))

        args = [own(value) if isinstance(value, dict) else value for value in self.loss.args]
        keywords = {**self.loss.keywords, **own(self.loss.keywords)}
        return Microbatch(own(self.fields), num_rows, functools.partial(self.loss.func, *args, **keywords))


def _of_sample(fields: dict[str, Any], number: int, num_samples: int) -> dict[str, Any]:
    """What `fields` have of one sample: of lists with one entry a sample, that entry alone."""
    lists = {name: value for name, value in fields.items() if isinstance(value, list) and len(value) == num_samples}
    absent = {name: None for name, value in fields.items() if value is None}
    return {**absent, **{name: [value[number]] for name, value in lists.items()}}


class SlimeAdapter:
    """slime's microbatches for `forward_backward` (`megatron.prefixflow.adapter.MicrobatchAdapter`).

    cut: slime's `slice_with_cp`. num_handed_over: how often slime's code was handed scores so far.
    """

    def __init__(
        self, needs_entropy: bool, cut: Callable[[Tensor, float], Tensor], num_handed_over: Callable[[], int]
    ) -> None:
        self.needs_entropy = needs_entropy
        self._cut = cut
        self._num_handed_over = num_handed_over

    def loss_calls(self, microbatch: Microbatch) -> list[Microbatch]:
        """The parts whose losses add up to the microbatch's: samples, or all of it."""
        if any(getattr(microbatch.args, name, None) is not None for name in _MIXING):
            return [microbatch]
        tokens = microbatch.fields["tokens"]
        return [microbatch.sample(number, len(self._cut(sample, 0))) for number, sample in enumerate(tokens)]

    def sequences(self, microbatch: Microbatch) -> list[SequenceInput]:
        fields = microbatch.fields
        samples = zip(fields["tokens"], fields["total_lengths"], fields["response_lengths"], strict=True)
        return [_sequence(*sample, microbatch.temperature) for sample in samples]

    def loss(self, microbatch: Microbatch, scores: Sequence[SequenceScores], *, non_loss_data: bool = False) -> Any:
        before = self._num_handed_over()
        logits = packed_scores(scores, microbatch.num_rows, microbatch.temperature, self._cut)
        result = microbatch.loss(logits, non_loss_data=True) if non_loss_data else microbatch.loss(logits)
        if self._num_handed_over() == before:
            raise RuntimeError(
                f"slime's {_name(microbatch.loss)} did not call calculate_log_probs_and_entropy of its loss module, so it "
                "took PrefixFlow's scores for logits. Train without megatron.prefixflow.integrations.slime."
            )
        return result


def _sequence(tokens: Tensor, total_length: int, response_length: int, temperature: float) -> SequenceInput:
    if len(tokens) != total_length or not 0 <= response_length < total_length:
        raise ValueError(
            f"slime: a sample of {len(tokens)} tokens has total length {total_length} and response length "
            f"{response_length}; expected a total length of {len(tokens)} and a prompt of at least one token."
        )
    scored = np.arange(total_length) >= total_length - response_length
    return SequenceInput(tokens=tokens.cpu().numpy(), scored=scored, temperature=temperature)


def packed_scores(
    scores: Sequence[SequenceScores], num_rows: int, temperature: float, cut: Callable[[Tensor, float], Tensor]
) -> Tensor:
    """[1, num_rows, 2] in place of logits: log-probability and entropy of the token after each row, times the temperature.

    slime divides logits by the temperature before it reads them. Rows without a scored token after them are 0. Under context
    parallelism they are this rank's rows, `cut(rows [n, 2], pad value)` of each sample.
    """
    columns = [
        torch.stack((s.logprobs, torch.zeros_like(s.logprobs) if s.entropy is None else s.entropy), dim=-1)
        for s in scores
    ]
    packed = torch.cat(columns)
    packed = temperature * packed.to(torch.promote_types(packed.dtype, torch.float32))
    group = parallel_state.get_context_parallel_group()
    if group.size() > 1:
        packed = _PartsOfLoss.apply(packed, group)
    samples = packed.split([len(column) for column in columns])
    rows = torch.cat([cut(functional.pad(sample[1:], (0, 0, 0, 1)), 0.0) for sample in samples])
    return functional.pad(rows, (0, 0, 0, num_rows - len(rows))).unsqueeze(0)


class _PartsOfLoss(torch.autograd.Function):
    """Scores whose loss is the sum of what context-parallel ranks make of their own rows.

    `forward_backward` takes every rank's loss for a whole one and multiplies its gradient by their number, as Megatron would
    count it: so the gradient is the sum over the ranks, by their number.
    """

    @staticmethod
    def forward(ctx: Any, scores: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return scores.view_as(scores)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        total = gradient.contiguous().clone()
        torch.distributed.all_reduce(total, group=ctx.group)
        return total / ctx.group.size(), None


def refused_options(args: Any) -> list[str]:
    """Options of slime's arguments that are not supported, each with the reason."""

    def given(name: str, default: Any = False) -> Any:
        return getattr(args, name, default)

    refused = {
        "--loss-type custom_loss (it may read anything of the logits)": given("loss_type") == "custom_loss",
        "--use-score-centering (it reads logits of other tokens)": given("use_score_centering"),
        "--rollout-top-p below 1 (slime masks logits by it)": given("rollout_top_p", 1.0) != 1.0,
        "--enable-mtp-training": given("enable_mtp_training"),
        "--qkv-format other than thd": given("qkv_format", "thd") != "thd",
        "--use-routing-replay": given("use_routing_replay"),
        "--use-rollout-routing-replay": given("use_rollout_routing_replay"),
        "--allgather-cp": given("allgather_cp"),
    }
    return [option for option, applies in refused.items() if applies]


def _check_supported(microbatch: Microbatch) -> None:
    refused = refused_options(microbatch.args)
    if microbatch.fields.get("multimodal_train_inputs") is not None:
        refused.append("multimodal samples")
    if _name(microbatch.loss) not in ("loss_function", "get_log_probs_and_entropy"):
        refused.append(f"results computed by {_name(microbatch.loss)}")
    _refuse(refused)


def _refuse(refused: Sequence[str]) -> None:
    if refused:
        raise ValueError(
            f"slime with PrefixFlow does not support {'; '.join(refused)}. Change that, or train without "
            "megatron.prefixflow.integrations.slime."
        )


def _name(loss: Any) -> str:
    return str(getattr(getattr(loss, "func", loss), "__name__", loss))


class _Recorder:
    """Stands in for a model chunk: notes the length of the packed row."""

    def __init__(self, chunk: Any) -> None:
        self.vp_stage = getattr(chunk, "vp_stage", None)
        self.num_rows = 0

    def __call__(self, **inputs: Any) -> Tensor:
        _refuse([f"a model that is given {name}" for name in sorted(inputs.keys() - _MODEL_INPUTS)])
        self.num_rows = inputs["input_ids"].numel()
        return torch.empty(0)


class _Source:
    """slime's data iterator, noting what it gave."""

    def __init__(self, iterator: Any) -> None:
        self._iterator = iterator
        self.fields: dict[str, Any] = {}

    def get_next(self, keys: Sequence[str]) -> Any:
        given = self._iterator.get_next(keys)
        self.fields = dict(given)  # slime packs the tokens within the dict that it was given
        return given


class _Again:
    """A data iterator that gives the microbatch that was recorded."""

    def __init__(self, microbatch: Microbatch) -> None:
        self._microbatch = microbatch

    def get_next(self, keys: Sequence[str]) -> dict[str, Any]:
        return {key: self._microbatch.fields[key] for key in keys}


def record(forward_step: Callable[..., Any], iterator: Any, chunk: Any) -> Microbatch:
    """The next microbatch of slime's forward step."""
    source, model = _Source(iterator), _Recorder(chunk)
    _, loss = forward_step(source, model)
    microbatch = Microbatch(source.fields, model.num_rows, loss)
    _check_supported(microbatch)
    return microbatch


class Installation:
    """slime's modules with PrefixFlow in their seams, and the models that it enabled; a context manager."""

    def __init__(self, package: str, critic: str, settings: dict[str, Any]) -> None:
        self._package = package
        self._critic = critic
        self._settings = settings
        self._handles: list[PrefixReuseHandle] = []
        self._originals: list[tuple[ModuleType, str, Any]] = []
        self._num_handed_over = 0
        self._num_runs = 0
        model, loss, cp_utils = (importlib.import_module(f"{package}.{name}") for name in ("model", "loss", "cp_utils"))
        self._cut = cp_utils.slice_with_cp
        self._replace(model, "get_forward_backward_func", self._choosing)
        self._replace(model, "train_one_step", self._reporting)
        self._replace(loss, "calculate_log_probs_and_entropy", self._handing_over)

    def __enter__(self) -> Installation:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.uninstall()

    def uninstall(self) -> None:
        """Give slime's modules their own functions back, and disable the models that were enabled here."""
        _installed.pop(self._package, None)
        while self._originals:
            setattr(*self._originals.pop())
        while self._handles:
            self._handles.pop().disable()

    def _replace(self, module: ModuleType, name: str, around: Callable[[Any], Any]) -> None:
        original = getattr(module, name)
        self._originals.append((module, name, original))
        setattr(module, name, functools.wraps(original)(around(original)))

    def _choosing(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def get_forward_backward_func(*args: Any, **kwargs: Any) -> Callable[..., Any]:
            return functools.partial(self._run, original(*args, **kwargs))

        return get_forward_backward_func

    def _run(
        self,
        original: Callable[..., Any],
        *,
        forward_step_func: Callable[..., Any],
        data_iterator: Any,
        model: Any,
        num_microbatches: int,
        **options: Any,
    ) -> Any:
        self._num_runs += 1
        chunks = model if isinstance(model, list) else [model]
        iterators = data_iterator if isinstance(data_iterator, list) else [data_iterator]
        if getattr(chunks[0], "role", "actor") == "critic":
            if self._critic == "refuse":
                _refuse(["a critic, unless install(critic='original') leaves it to slime"])
            return original(
                forward_step_func=forward_step_func,
                data_iterator=data_iterator,
                model=model,
                num_microbatches=num_microbatches,
                **options,
            )
        microbatches = [record(forward_step_func, iterators[0], chunks[-1]) for _ in range(num_microbatches)]

        def forward_step(items: Iterator[Microbatch], chunk: Any) -> Any:
            """slime's own, where `forward_backward` falls back."""
            return forward_step_func(_Again(next(items)), chunk)

        self._enable(chunks)
        return forward_backward(
            forward_step_func=forward_step,
            data_iterator=[iter(microbatches) for _ in iterators],
            model=model,
            num_microbatches=num_microbatches,
            adapter=SlimeAdapter(microbatches[0].reads_entropy, self._cut, lambda: self._num_handed_over),
            **options,
        )

    def _enable(self, chunks: list[Any]) -> None:
        if handle_of(chunks[0]) is None:
            self._handles.append(enable_prefix_reuse(chunks, **self._settings))

    def _reporting(self, original: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(original)

        def train_one_step(*args: Any, **kwargs: Any) -> Any:
            before = self._num_runs
            losses, grad_norm = original(*args, **kwargs)
            if self._num_runs == before:
                raise RuntimeError(
                    "slime's train_one_step did not ask its module for get_forward_backward_func, so it trained without "
                    "PrefixFlow. Train without megatron.prefixflow.integrations.slime."
                )
            handle = handle_of(signature.bind(*args, **kwargs).arguments["model"][0])
            return {**losses, **handle.metrics} if losses and handle is not None else losses, grad_norm

        return train_one_step

    def _handing_over(self, original: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(original)

        def calculate_log_probs_and_entropy(logits: Tensor, *args: Any, **kwargs: Any) -> Any:
            if logits.shape[-1] != 2:  # no vocabulary has two tokens: these are not `packed_scores`
                return original(logits, *args, **kwargs)
            self._num_handed_over += 1
            options = signature.bind(logits, *args, **kwargs).arguments
            if options.get("log_prob_keep_mask") is not None:
                _refuse(["a mask over the vocabulary"])
            logprobs, entropy = logits[:, :1], logits[:, 1]
            if not options.get("with_entropy", False):
                return logprobs, None
            return logprobs, entropy if options.get("with_entropy_grad", True) else entropy.detach()

        return calculate_log_probs_and_entropy


_installed: dict[str, Installation] = {}


def install(args: Any = None, *, package: str = PACKAGE, critic: str = "refuse", **settings: Any) -> Installation:
    """Let slime's training and log-probability passes reuse shared prefixes; `--custom-megatron-init-path` may name this.

    args: slime's arguments; what they hold that is not supported is refused here already. package: where slime's Megatron
    backend is. critic: "refuse" it, or "original" leaves it to slime. settings: of `enable_prefix_reuse`, which each model
    gets at its first step.

    Raises ValueError where it is installed already, a symbol of slime's has moved, or an option or a setting is not supported.
    """
    if package in _installed:
        raise ValueError(f"PrefixFlow is installed in {package} already: uninstall() it first.")
    if critic not in ("refuse", "original"):
        raise ValueError(f"critic: expected 'refuse' or 'original', got {critic!r}.")
    ReuseSettings.of(**settings)  # models come after the first rollout; a wrong name should not
    moved = moved_symbols(package)
    if moved:
        raise ValueError(f"This slime is not the one that PrefixFlow was written for: {'; '.join(moved)}.")
    _refuse(refused_options(args))
    _installed[package] = installation = Installation(package, critic, settings)
    return installation


def uninstall(package: str = PACKAGE) -> None:
    """Undo `install`; where it is not installed, nothing happens."""
    if package in _installed:
        _installed[package].uninstall()


def moved_symbols(package: str = PACKAGE) -> list[str]:
    """What of `SEAMS` this slime does not have as it should, a sentence each."""
    return [problem for seam in SEAMS if (problem := _problem(package, seam))]


def _problem(package: str, seam: Seam) -> str | None:
    place = f"{package}.{seam.module}.{seam.symbol}"
    found: Any = importlib.import_module(f"{package}.{seam.module}")
    for name in seam.symbol.split("."):
        found = getattr(found, name, None)
    if not callable(found):
        return f"{place} is missing"
    parameters = iter(inspect.signature(found).parameters)
    if not all(name in parameters for name in seam.parameters):  # each is looked for after the one before
        return f"{place} takes {inspect.signature(found)}, expected {', '.join(seam.parameters)} in this order"
    if seam.calls and seam.calls not in inspect.unwrap(found).__code__.co_names:
        return f"{place} does not call {seam.calls} of its module"
    return None
