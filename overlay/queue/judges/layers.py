"""Judges of transformers' `GradientCheckpointingLayer` (modeling_layers.py), and of what else drops a cache."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from overlay.queue.judges import GENERIC, LAYERS, CannotJudgeError, Files, Verdict, extract, stand_ins
from overlay.queue.judges.stand_ins import Checkpoint, FSDPState, Importer, NNModule, Tensor

_CLASS = "GradientCheckpointingLayer"
_CACHES = ("cache", "past_key_values", "past_key_value", "layer_past")
"""What releases have called the cache of a layer."""


def _layer_class(files: Files) -> Any:
    found = extract.Module(files[LAYERS], "transformers.modeling_layers").run(_CLASS, Importer().builtins)
    if not isinstance(found, type) or not issubclass(found, NNModule):
        raise CannotJudgeError(f"expected {_CLASS} to be a class of modules in {LAYERS}, found that it is not")
    return found


def _subclass(base: Any, forward: Callable[..., Any]) -> Any:
    """A decoder layer of a model: a subclass with its own `forward`."""
    return type("DecoderLayer", (base,), {"forward": forward})


def _enable(layer: Any, function: Any) -> None:
    """As enabling checkpointing does for each layer of a model."""
    layer.train()
    layer.gradient_checkpointing = True
    layer._gradient_checkpointing_func = function


def _is_checkpointed(checkpoint: Checkpoint, inside: list[bool]) -> bool:
    """Whether all that ran did so in one checkpoint, in the forward and in the recompute."""
    return len(checkpoint.calls) == 1 and inside == [True, True]


def _must_be_checkpointed(checkpoint: Checkpoint, inside: list[bool]) -> None:
    if not _is_checkpointed(checkpoint, inside):
        raise CannotJudgeError(
            f"expected a plain layer to be checkpointed once, found {len(checkpoint.calls)} checkpoints and "
            f"{len(inside)} forwards, {sum(inside)} of them inside"
        )


def fsdp2_gradients(files: Files) -> Verdict:
    """Whether the hooks of a layer run inside of its checkpoint, as FSDP2's must not."""
    base = _layer_class(files)
    for sharded in (True, False):
        checkpoint, inside, seen = Checkpoint(), [], []

        def forward(_layer: Any, hidden: Any) -> Any:
            inside.append(checkpoint.depth > 0)  # noqa: B023 - called in this round
            return hidden

        layer = _subclass(base, forward)()
        _enable(layer, checkpoint)
        if sharded:
            stand_ins.shard(layer)
        layer.register_forward_pre_hook(lambda *_: seen.append(checkpoint.depth > 0), prepend=True, with_kwargs=True)  # noqa: B023
        layer.register_forward_hook(lambda *_: seen.append(checkpoint.depth > 0))  # noqa: B023
        layer(Tensor(requires_grad=True))
        _must_be_checkpointed(checkpoint, inside)
        if any(seen) and not sharded:
            raise CannotJudgeError(
                "expected the hooks of every layer to run in one place, found those of a sharded layer outside of its "
                "checkpoint, and others inside"
            )
        if any(seen):
            return Verdict("live", f"hooks of a layer ran inside of its checkpoint ({sum(seen)} of {len(seen)} times)")
        if len(seen) != 2:
            raise CannotJudgeError(f"expected two hooks of a layer to run once each, found {len(seen)} runs")
    return Verdict("not live", "hooks of a layer ran once, outside of its checkpoint")


def forward_replaced(files: Files) -> Verdict:
    """Whether a layer whose `forward` was replaced, or whose checkpoint function asks for it, is checkpointed."""
    base = _layer_class(files)

    def run(where: str, hooked: bool) -> bool:
        checkpoint, inside = Checkpoint(), []

        def forward(_layer: Any, hidden: Any) -> Any:
            inside.append(checkpoint.depth > 0)
            return hidden

        def asking(function: Any, *args: Any) -> Any:
            if function.func.__self__ is not layer:
                raise CannotJudgeError("expected the layer at func.func.__self__, found something else")
            return checkpoint(function, *args)

        cls = _subclass(base, forward if where in ("nowhere", "asked") else lambda _layer, hidden: hidden)
        if where == "class":
            cls.forward = forward
        layer = cls()
        if where == "instance":
            layer.forward = lambda hidden: forward(layer, hidden)
        _enable(layer, asking if where == "asked" else checkpoint)
        if hooked:
            layer.register_forward_pre_hook(lambda *_: None)
        try:
            layer(Tensor(requires_grad=True))
        except AttributeError as error:
            if where == "asked" and error.name == "__self__":
                return False
            raise
        if where == "nowhere":
            _must_be_checkpointed(checkpoint, inside)
        if not inside:
            raise CannotJudgeError(f"expected the replaced forward ({where}) to run, found that it did not")
        return _is_checkpointed(checkpoint, inside)

    for hooked in (False, True):
        run("nowhere", hooked)
    failed = [
        text
        for where, text in (
            ("class", "replaced on the class"),
            ("instance", "replaced on the layer"),
            ("asked", "with a checkpoint function that reads func.func.__self__"),
        )
        if not (run(where, False) and run(where, True))
    ]
    if failed:
        return Verdict("live", f"a layer is not checkpointed: {', '.join(failed)}")
    return Verdict("not live", "a layer is checkpointed, whoever replaced its forward")


def fsdp2_nested(files: Files) -> Verdict:
    """Whether a recompute goes through that runs a sharded submodule in the state in which FSDP2 loses its gradients.

    FSDP2 leaves a submodule in `PRE_BACKWARD` until the whole backward has ended, and registers no post-backward for a
    recompute that meets that state after the group's gradients are reduced (`POST_BACKWARD`). That FSDP2 loses
    gradients then is not shown here: that is torch's code.
    """
    base = _layer_class(files)

    def run(lost: bool, sharded: bool) -> bool:
        """Whether the recompute went through."""
        inside: list[bool] = []

        def forward(layer: Any, hidden: Any) -> Any:
            inside.append(checkpoint.depth > 0)
            return layer.mlp(hidden)

        layer = _subclass(base, forward)()
        layer.mlp = type("Experts", (NNModule,), {"forward": lambda _module, hidden: hidden})()
        layer.mlp.weight = stand_ins.Parameter()
        stand_ins.shard(layer.mlp)

        def reduced() -> None:
            if lost:
                vars(layer.mlp)["_judged_state"] = FSDPState("PRE_BACKWARD", "POST_BACKWARD")

        checkpoint = Checkpoint(reduced)
        _enable(layer, checkpoint)
        if sharded:
            stand_ins.shard(layer)
            layer.register_forward_pre_hook(lambda *_: None, prepend=True, with_kwargs=True)
        try:
            layer(Tensor(requires_grad=True))
        except RuntimeError as error:
            if lost and "mlp" in str(error) and len(inside) == 2:
                return False
            raise
        _must_be_checkpointed(checkpoint, inside)
        return True

    through = []
    for sharded, text in ((False, "only the submodule is sharded"), (True, "the layer is sharded, too")):
        run(lost=False, sharded=sharded)
        if run(lost=True, sharded=sharded):
            through.append(text)
    if through:
        return Verdict("live", f"a second recompute of a sharded submodule is not refused: {', '.join(through)}")
    return Verdict("not live", "a second recompute of a sharded submodule is refused, by its name")


def training_cache(files: Files) -> Verdict:
    """Whether a model or a layer in training mode, with checkpointing on, drops its cache without gradients."""
    dropped = [text for text in (_layer_drops(files), _model_drops(files)) if text]
    if dropped:
        return Verdict("live", f"without gradients {' and '.join(dropped)}")
    return Verdict("not live", "without gradients a layer and a model keep their cache")


def _layer_drops(files: Files) -> str:
    base = _layer_class(files)
    given: dict[str, Any] = {}
    inside: list[bool] = []

    def forward(_layer: Any, hidden: Any, **keywords: Any) -> Any:
        given.update(keywords)
        inside.append(checkpoint.depth > 0)
        return hidden

    checkpoint = Checkpoint()
    layer = _subclass(base, forward)()
    _enable(layer, checkpoint)
    layer(Tensor(requires_grad=True))
    _must_be_checkpointed(checkpoint, inside)
    with stand_ins.set_grad_enabled(False):
        layer(Tensor(), use_cache=True, **dict.fromkeys(_CACHES, "the cache"))
    lost = [name for name in ("use_cache", *_CACHES) if not given.get(name)]
    return f"a layer drops {', '.join(lost)}" if lost else ""


def _model_drops(files: Files) -> str:
    module = extract.Module(files[GENERIC], "transformers.utils.generic")
    names = module.functions("use_cache", "gradient_checkpointing")
    if len(names) != 1:
        raise CannotJudgeError(
            f"expected one function about use_cache in {GENERIC}, found {', '.join(names) or 'none'}"
        )
    seen: list[Any] = []

    def forward(_model: Any, _hidden: Any, use_cache: Any = None, **_keywords: Any) -> Any:
        seen.append(use_cache)

    decorated = module.run(names[0], Importer().builtins)(forward)
    model = NNModule()
    model.config = SimpleNamespace(use_cache=True)
    model.gradient_checkpointing = True
    decorated(model, Tensor(), use_cache=True)
    with stand_ins.set_grad_enabled(False):
        decorated(model, Tensor(), use_cache=True)
        decorated(model, Tensor())
    if len(seen) != 3 or seen[0] is not False:
        raise CannotJudgeError(f"expected {names[0]} to set use_cache to False with gradients, found {seen}")
    return "" if all(seen[1:]) else f"{names[0]} sets use_cache to False"
