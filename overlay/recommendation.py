"""What `gradient_checkpointing_kwargs` should be for a model, in this environment."""

from collections.abc import Iterator
from functools import cached_property, partial
from types import CodeType, FunctionType
from typing import TYPE_CHECKING, Any

from overlay.checks import found_by, rules
from overlay.checks.environment import Environment
from overlay.checks.finding import Finding
from overlay.checks.subject import Layer, Subject, class_forward, expect_module, in_training
from overlay.errors import OverlayError

if TYPE_CHECKING:
    from torch import nn

_GUARD = "transformers.modeling_utils"
"""Has this project's guard, where it is patched: it makes checkpointing of PEFT under ZeRO-3 reentrant."""

_INPUTS = "inputs-without-gradients"
"""What reentrant checkpointing is found at fault for until `enable_input_require_grads()` was called."""


class Recommendation(dict[str, bool]):
    """Arguments for `torch.utils.checkpoint.checkpoint`, and `why` they are these.

    A dict: hand it to `gradient_checkpointing_enable(gradient_checkpointing_kwargs=...)` or to `TrainingArguments`.
    """

    def __init__(self, arguments: dict[str, bool], why: str) -> None:
        super().__init__(arguments)
        self.why = why


def recommended_checkpoint_kwargs(model: "nn.Module") -> Recommendation:
    """What `gradient_checkpointing_kwargs` should be for this model, as it is now, in this environment.

    Non-reentrant, unless a rule of `overlay.check` finds an error with it and none with reentrant checkpointing: frozen
    parameters under ZeRO-3 of a DeepSpeed before 0.19.3. And without keeping the state of the random number generators,
    a copy for each block, where it is sure that no block draws a random number.

    Call it after PEFT, `fully_shard` or DeepSpeed. Checkpointing need not be on; the model is not changed, and no
    forward is run.

    Args:
        model: a model of transformers, wrapped or not.

    Raises:
        OverlayError: neither kind trains this model right in this environment, and what to change; or it is no module.
    """
    expect_module(model)
    with in_training(model):
        against = {reentrant: _against(model, reentrant=reentrant) for reentrant in (False, True)}
        blocks = [layer.module for layer in Subject(model, None, Environment()).layers]
        random = any(_may_draw(block) for block in blocks)
        is_sharded = bool(Subject(model, None, Environment()).sharded)
    wrong = {kind: [one for one in found if one.severity == "error"] for kind, found in against.items()}
    # Inputs can be made to require gradients, and `why` says so
    reentrant = bool(wrong[False]) and all(one.code == _INPUTS for one in wrong[True])
    if wrong[False] and not reentrant:
        # Once what is wrong with the default is mended, that is the one to take
        found = "; ".join(f"{one.what}: {one.fix}" for one in wrong[False])
        raise OverlayError(f"expected a kind of checkpointing that trains this model right, found none: {found}")
    arguments = {"use_reentrant": reentrant}
    why = _why_reentrant(against[False]) if reentrant else _why_non_reentrant(against, is_sharded=is_sharded)
    if blocks and not random:
        arguments["preserve_rng_state"] = False
        why.append("preserve_rng_state=False: no block draws random numbers, so that there is no state to keep")
    return Recommendation(arguments, "; ".join(why))


class _Supposed(Subject):
    """The model as it would be with one kind of checkpointing on, or with none."""

    def __init__(self, model: "nn.Module", environment: Environment, *, reentrant: bool | None) -> None:
        super().__init__(model, None, environment)
        self._reentrant = reentrant

    @cached_property
    def layers(self) -> tuple[Layer, ...]:
        from torch.utils.checkpoint import checkpoint

        on = self._reentrant is not None
        function = partial(checkpoint, use_reentrant=self._reentrant) if on else None
        return tuple(
            Layer(layer.name, layer.module, on=on, function=function, reentrant=self._reentrant)
            for layer in super().layers
        )


class _Unguarded(Environment):
    """The environment without the guard: with it no rule has anything against what the guard changes."""

    @cached_property
    def patched(self) -> frozenset[str]:
        return super().patched - {_GUARD}


def _against(model: "nn.Module", *, reentrant: bool) -> list[Finding]:
    """What the rules have against a kind of checkpointing, without what they find where there is none."""
    environment = _Unguarded()
    without = set(_findings(_Supposed(model, environment, reentrant=None)))
    found = _findings(_Supposed(model, environment, reentrant=reentrant))
    return [one for one in found if one not in without and one.severity != "info"]


def _findings(subject: Subject) -> Iterator[Finding]:
    for rule in rules():
        if hasattr(rule, "in_model"):
            yield from found_by(rule.CODE, rule.in_model, subject, type(subject.model).__name__)


def _why_non_reentrant(against: dict[bool, list[Finding]], *, is_sharded: bool) -> list[str]:
    """Reasons for PyTorch's default to be, first what speaks against the other kind in this very model."""
    codes = {finding.code for finding in against[False]}
    reasons = [f"{one.code}: {one.what}: {one.why}" for one in against[True] if one.code not in codes]
    if is_sharded:
        reasons.append(
            "with fully_shard gradients are reduced once a backward, and not once a forward: two or more forwards "
            "before a backward then hold a whole model's gradients, unsharded, on every rank (docs/scaling.md)"
        )
    reasons.append("gradients reach all inputs and what is captured inside of a block")
    return ["use_reentrant=False", *reasons]


def _why_reentrant(against: list[Finding]) -> list[str]:
    guarded = _GUARD in Environment().patched
    return [
        "use_reentrant=True",
        *(f"{one.code}: {one.what}: {one.why}" for one in against if one.severity == "error"),
        *(["this project's guard would turn use_reentrant=False into this, with a warning"] if guarded else []),
        "call model.enable_input_require_grads(), and backward after each forward",
        'better, pip install "deepspeed>=0.19.3", which trains with use_reentrant=False',
    ]


_RANDOM = frozenset({
    "bernoulli", "bernoulli_", "cauchy_", "exponential_", "geometric_", "gumbel_softmax", "log_normal_", "multinomial",
    "normal", "normal_", "poisson", "rand", "rand_like", "randint", "randint_like", "randn", "randn_like", "random",
    "random_", "randperm", "rrelu", "rrelu_", "shuffle", "uniform", "uniform_",
})  # fmt: skip
_PROBABILITY = ("drop", "jitter", "noise")
"""In the names of attributes: nothing is drawn where they are zero."""
_KNOWN = frozenset({"peft", "torch", "transformers"})
"""Packages whose random operations are these, with a probability that is an attribute of a module."""


def _may_draw(block: "nn.Module") -> bool:
    """Whether a block may draw random numbers; it cannot where all of its code is known, and nothing in it does."""
    try:
        return any(_module_may_draw(module) for module in block.modules())
    except Exception:  # an unusual module, of which nothing is known
        return True


def _module_may_draw(module: "nn.Module") -> bool:
    forward = vars(module).get("forward") or class_forward(module)
    if not isinstance(getattr(forward, "__func__", forward), FunctionType):
        return True  # traced or scripted: there is no code to look at
    code = [type(module), forward, *module._forward_hooks.values(), *module._forward_pre_hooks.values()]
    while hasattr(forward, "__wrapped__"):
        forward = forward.__wrapped__
        code.append(forward)
    if not all(_package(one) in _KNOWN for one in code):
        return True
    if _package(type(module)) == "torch":
        return ("Dropout" in type(module).__name__ and getattr(module, "p", 1) != 0) or type(module).__name__ == "RReLU"
    settings = vars(module) | vars(getattr(module, "config", None) or object)
    drops = (value for name, value in settings.items() if any(part in name for part in _PROBABILITY))
    if any(isinstance(value, int | float) and value is not False and value > 0 for value in drops):
        return True
    return _code_may_draw(getattr(forward, "__func__", forward), set())


def _package(found: Any) -> str:
    """Where something was made: a function by its globals, which `functools.wraps` does not exchange."""
    function = getattr(found, "__func__", found)
    name = function.__globals__["__name__"] if isinstance(function, FunctionType) else getattr(found, "__module__", "")
    return str(name or type(found).__module__).partition(".")[0]


def _code_may_draw(function: Any, seen: set[int]) -> bool:
    """Whether a function, or one of those that it names, calls an operation that draws. Dropout is seen above."""
    if not isinstance(function, FunctionType) or id(function) in seen or _package(function) == "torch":
        return False
    seen.add(id(function))
    names = _names(function.__code__)
    if names & _RANDOM:
        return True
    called = (function.__globals__.get(name) for name in names)
    return any(_code_may_draw(one, seen) for one in called if _package(one) in _KNOWN)


def _names(code: CodeType) -> set[str]:
    inner = (_names(constant) for constant in code.co_consts if isinstance(constant, CodeType))
    return set(code.co_names).union(*inner)
