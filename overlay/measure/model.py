"""A model with random weights, its batches and what they are labelled with.

MODEL is a `model_type` of transformers, a CONFIG.json, or `FILE.py:FUNCTION`: a function of your own that takes the
settings and returns a model and a function `batch(generator) -> dict` of what the model is called with; what it returns
has a `loss`, and `logits` where an accuracy is wanted.
"""

import difflib
import importlib.util
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from overlay.measure.settings import SEGMENTATION, SMALL, Settings

IGNORED = -100
"""What PyTorch's losses leave out of labels."""

HEAD = 64
"""Channels of an attention head, where no number of heads is given."""

Batch = Mapping[str, Tensor]


class SizeError(ValueError):
    """The sizes do not fit, or there is no such model: one line for the user."""


@dataclass(frozen=True)
class Task:
    """A model and what it is trained on.

    Attributes:
        model: on its device, in training mode.
        batch: makes a micro-batch, on the CPU.
        tokens: a sample's: words, or patches of an image.
        labels: shifted labels (`causal`), or in place.
        sizes: those that the model really has, for the card.
    """

    model: nn.Module
    batch: Callable[[torch.Generator], Batch]
    tokens: int
    causal: bool
    sizes: Mapping[str, int | str]


def build(settings: Settings) -> Task:
    """The model of the settings, the same for the same seed.

    Raises:
        SizeError: there is no such model, or its sizes do not fit.
    """
    torch.manual_seed(settings.seed)
    if ".py:" in settings.model:
        return _of_a_file(settings)
    dtype: torch.dtype = getattr(torch, settings.dtype)
    if settings.model == SEGMENTATION:
        from overlay.measure import segmentation

        without(settings, "seq")
        _fits(settings.hidden, settings.heads)
        config = configure("vit", settings)
        task = segmentation.task(config, settings)
    else:
        task = _of_transformers(settings)
    with torch.no_grad():
        task.model.to(device=settings.device, dtype=dtype).train()
    return task


def configure(name: str, settings: Settings, given: Mapping[str, Any] | None = None) -> Any:
    """The configuration of a `model_type` at the given sizes.

    Args:
        name: the `model_type`.
        given: what a CONFIG.json has.
    """
    if name not in CONFIG_MAPPING:
        close = difflib.get_close_matches(name, [*CONFIG_MAPPING.keys(), SEGMENTATION], n=3, cutoff=0.5)
        hint = f"did you mean {' or '.join(close)}?" if close else "its names are in transformers' documentation"
        raise SizeError(
            f"expected a model_type of transformers, a CONFIG.json or FILE.py:FUNCTION, found {name!r}: {hint}"
        )
    made = CONFIG_MAPPING[name]
    try:
        default = made.from_dict(dict(given)) if given else made()
        own = {key: value for key, value in (given or {}).items() if key != "model_type"}
        parts: dict[str, Any] = {}
        if not _own(default, "layers"):  # those of several parts have none of their own, but that of text and of images
            parts = {part: getattr(default, part, None) for part in getattr(default, "sub_configs", {})}
            parts = {part: inner for part, inner in parts.items() if inner is not None}
        _taken(name, settings, [default, *parts.values()])
        sizes = _sizes(default, settings)
        sizes |= {part: inner.to_dict() | _sizes(inner, settings) for part, inner in parts.items()}
        return made(**own | sizes)
    except SizeError:
        raise
    except Exception as error:
        raise _unfit(name, error) from error


def _unfit(name: str, error: Exception) -> SizeError:
    return SizeError(f"the sizes do not fit {name}: {' '.join(str(error).split())[:160]}")


_NAMES: Mapping[str, Sequence[str]] = {
    "layers": ("num_hidden_layers", "num_decoder_layers", "decoder_layers", "encoder_layers"),
    "hidden": ("hidden_size",),
    "heads": ("num_attention_heads", "num_key_value_heads", "encoder_attention_heads", "decoder_attention_heads"),
    "vocab": ("vocab_size",),
    "experts": ("num_local_experts", "num_experts", "n_routed_experts"),
    "intermediate": ("intermediate_size", "moe_intermediate_size", "d_ff", "encoder_ffn_dim", "decoder_ffn_dim"),
    "head": ("head_dim", "d_kv"),
}
"""What configurations call a size."""

_CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk")
"""What configurations call the number of experts that a token goes to."""


def _own(default: Any, size: str) -> list[str]:
    """The names that this configuration has for a size."""
    names: Mapping[str, str] = getattr(default, "attribute_map", {})
    found = dict.fromkeys(names.get(name, name) for name in _NAMES[size])
    return [name for name in found if isinstance(_get(default, name), int | None) and _settable(default, name)]


def _get(default: Any, name: str) -> Any:
    """What a configuration has there; an empty text where nothing, or one value for each layer, of which it says so by
    an error."""
    try:
        return getattr(default, name, "")
    except Exception:
        return ""


def _taken(name: str, settings: Settings, configurations: Sequence[Any]) -> None:
    """Refuses a size that would have no effect."""
    for size in ("layers", "hidden", "heads", "vocab", "experts", "intermediate"):
        given = getattr(settings, size)
        if given not in (None, SMALL.get(size)) and not any(_own(one, size) for one in configurations):
            raise SizeError(f"expected a size that the configuration of {name} has, found --{size}: leave it out")


def without(settings: Settings, what: str) -> None:
    """Refuses `seq` or `image` for a model that takes none."""
    if getattr(settings, what) != getattr(Settings(""), what):
        raise SizeError(f"expected no --{what} for {settings.model}, which takes none, found it: leave it out")


def _sizes(default: Any, settings: Settings) -> dict[str, Any]:
    """The options as the names of this configuration have them, and what follows from them."""
    names: Mapping[str, str] = getattr(default, "attribute_map", {})
    hidden, heads = settings.hidden, settings.heads
    if hidden is not None and heads is None:
        heads = max(count for count in range(1, max(1, hidden // HEAD) + 1) if hidden % count == 0)
    if hidden is None and heads is not None:
        hidden = getattr(default, names.get("hidden_size", "hidden_size"), None)
    _fits(hidden, heads)
    wanted: dict[str, Any] = {}
    for size, value in (
        ("layers", settings.layers),
        ("hidden", settings.hidden),
        ("heads", heads),
        ("vocab", settings.vocab),
        ("experts", settings.experts),
        ("intermediate", settings.intermediate or (settings.hidden and 4 * settings.hidden)),
        ("head", hidden and heads and settings.hidden and hidden // heads),
    ):
        if value:
            wanted |= dict.fromkeys(_own(default, size), value)
    if settings.hidden and isinstance(wider := _get(default, "expand"), int) and _get(default, "num_heads"):
        # As Mamba 2 has it: each of its heads is as wide as any, and there are that many of them
        wanted |= {"num_heads": settings.hidden * wider // wanted.get("head_dim", HEAD), "n_groups": 1}
    if settings.experts and _own(default, "experts"):
        wanted |= _experts(default, settings.experts)
    if settings.vocab:
        ids = ("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id")
        wanted |= {
            name: 0 for name in ids if isinstance(one := getattr(default, name, None), int) and one >= settings.vocab
        }
    if getattr(default, "is_encoder_decoder", False):
        first = ("decoder_start_token_id", "pad_token_id")
        wanted |= {name: 0 for name in first if getattr(default, name, None) is None}
    if hasattr(default, "max_position_embeddings") and _settable(default, "max_position_embeddings"):
        wanted["max_position_embeddings"] = max(settings.seq + 2, getattr(default, "max_position_embeddings", 0) or 0)
    for name in ("layer_types", "mlp_layer_types"):
        name = names.get(name, name)
        if settings.layers and _own(default, "layers") and getattr(default, name, None) and _settable(default, name):
            wanted[name] = None  # as many as there are layers
    if hasattr(default, "use_cache"):
        wanted["use_cache"] = False
    if hasattr(default, "image_size"):
        one = isinstance(default.image_size, int | None)
        wanted["image_size"] = settings.image if one else [settings.image] * len(default.image_size)
    return wanted


def _experts(default: Any, count: int) -> dict[str, int]:
    """What has to be less where there are fewer experts: a token goes to no more than there are, and groups of them, as
    DeepSeek-V3 has, are of at least two each."""
    fewer = {name: count for name in _CHOSEN if isinstance(had := _get(default, name), int) and had > count}
    groups = _get(default, "n_group")
    if isinstance(groups, int) and groups > 1 and (count % groups or count < 2 * groups):
        fewer |= {"n_group": 1, "topk_group": 1}
    return fewer


def _settable(default: Any, name: str) -> bool:
    """Whether a size can be given: some follow from others, as a head's where only a part of it is rotated."""
    made = getattr(type(default), name, None)
    if isinstance(made, property) and made.fset is None:
        return False
    return not (name == "head_dim" and hasattr(default, "qk_rope_head_dim"))


def _fits(hidden: int | None, heads: int | None) -> None:
    if hidden and heads and hidden % heads:
        close = min((count for count in range(1, hidden + 1) if hidden % count == 0), key=lambda one: abs(one - heads))
        raise SizeError(
            f"expected heads that divide hidden, found --hidden {hidden} --heads {heads}: --heads {close} does"
        )


def _of_transformers(settings: Settings) -> Task:
    given: dict[str, Any] | None = None
    name = settings.model
    if name.endswith(".json"):
        try:
            given = json.loads(Path(name).read_text("utf-8"))
        except OSError as error:
            raise SizeError(f"{name}: expected a configuration, found none: {error.strerror}") from error
        except ValueError as error:
            raise SizeError(f"{name}: expected a configuration in JSON, found something else: {error}") from error
        own = given.get("model_type") if isinstance(given, dict) else None
        if not isinstance(own, str):
            raise SizeError(f"{name}: expected a configuration with a model_type, found none in it")
        name = own
    config = configure(name, settings, given)
    for kind, mapping in _TASKS.items():
        classes = getattr(modeling_auto, mapping).get(name)
        if classes is not None:
            without(settings, "seq" if kind == "images" else "image")
            made = getattr(transformers, classes if isinstance(classes, str) else classes[0])
            try:
                model = made._from_config(config)
                return _task(kind, model, config, settings)
            except SizeError:
                raise
            except Exception as error:
                raise _unfit(name, error) from error
    raise SizeError(
        f"expected a model of language or images, found {name}, for which nothing here makes batches: "
        "write FILE.py:FUNCTION"
    )


_TASKS = {
    "seq2seq": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "masked": "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "causal": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "images": "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES",
}
"""What a `model_type` is trained for, the first that it can."""


def _task(kind: str, model: nn.Module, config: Any, settings: Settings) -> Task:
    if kind == "images":
        tokens = (settings.image // _patch(config)) ** 2
        classes = int(config.num_labels)

        def images(generator: torch.Generator) -> Batch:
            shape = (settings.batch, getattr(config, "num_channels", 3), settings.image, settings.image)
            pixels = torch.randn(shape, generator=generator).to(getattr(torch, settings.dtype))
            return {
                "pixel_values": pixels,
                "labels": torch.randint(0, classes, (settings.batch,), generator=generator),
            }

        return Task(model, images, tokens, False, sizes_of(model, config))

    vocab = int(config.get_text_config().vocab_size)

    def text(generator: torch.Generator) -> Batch:
        ids = words(vocab, (settings.batch, settings.seq), generator)
        if kind == "masked":
            hidden = torch.rand(ids.shape, generator=generator) < 0.15
            return {"input_ids": ids.masked_fill(hidden, 0), "labels": ids.masked_fill(~hidden, IGNORED)}
        labels = words(vocab, (settings.batch, settings.seq), generator) if kind == "seq2seq" else ids
        return {"input_ids": ids, "labels": labels}

    return Task(model, text, settings.seq, kind == "causal", sizes_of(model, config))


def _patch(config: Any) -> int:
    """Pixels of a patch's side: 16, where the configuration has no such size or several."""
    found = getattr(getattr(config, "vision_config", config), "patch_size", 16)
    return found if isinstance(found, int) else 16


def words(vocab: int, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Token ids, few of which are frequent, so that a model has something to learn in a few steps."""
    return 1 + (torch.rand(shape, generator=generator) ** 3 * (vocab - 1)).long()


def sizes_of(model: nn.Module, config: Any) -> dict[str, int | str]:
    """What a card says about a model: its class, parameters, and the sizes that its configuration names."""
    names = ("num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size", "vocab_size")
    text = config.get_text_config()
    found = {name: value for name in names if isinstance(value := getattr(text, name, None), int)}
    return {"class": type(model).__name__, **found}


def _of_a_file(settings: Settings) -> Task:
    file, _, function = settings.model.rpartition(":")
    spec = importlib.util.spec_from_file_location("overlay_bench_model", file)
    if spec is None or spec.loader is None or not Path(file).is_file():
        raise SizeError(f"expected a file of Python, found none: {file}")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        if not callable(getattr(module, function, None)):
            raise SizeError(f"{file}: expected a function {function}(settings), found none")
        made = getattr(module, function)(settings)
    except SizeError:
        raise
    except (Exception, SystemExit) as error:
        said = " ".join(f"{type(error).__name__}: {error}".split())[:160]
        raise SizeError(f"expected a model from {settings.model}, found {said}") from error
    if not (isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], nn.Module) and callable(made[1])):
        raise SizeError(
            f"{settings.model}: expected a model and a function that makes batches, found {type(made).__name__}"
        )
    model, batch = made
    dtype = getattr(torch, settings.dtype)
    model.to(device=settings.device, dtype=dtype).train()
    return Task(model, batch, settings.seq, True, {"class": type(model).__name__})
