"""`overlay.integrations.PreflightCallback` in a `Trainer`.

`python preflight_worker.py RESULT.json` writes, for each scenario, what came of `Trainer.train`: how many steps were
made, how often a layer was computed, the error, and what was logged. Some run on two ranks with FSDP2, over gloo.
"""

import json
import logging
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import transformers
from accelerate.state import AcceleratorState
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM, Trainer, TrainingArguments

sys.path.append(str(Path(__file__).resolve().parents[2]))  # where the overlay wheel is not installed
import overlay
from overlay.measure import group

SIZES = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
DATA = [{"input_ids": row, "labels": row} for row in torch.arange(64).reshape(4, 16)]
REENTRANT, NON_REENTRANT = {"use_reentrant": True}, {"use_reentrant": False}

Observed = dict[str, Any]


def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES))


def mixtral() -> MixtralForCausalLM:
    torch.manual_seed(0)
    return MixtralForCausalLM(MixtralConfig(**SIZES, num_local_experts=2, output_router_logits=True))


class Logged(logging.Handler):
    """Keeps what the callback logs."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[tuple[str, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append((record.levelname, record.getMessage()))


def train(model: nn.Module, checkpointing: dict[str, bool] | None, ignore: Any = (), **options: Any) -> Observed:
    """What comes of two steps; `kwargs` is how 5.14 to 5.24 all call the arguments of the checkpoint."""
    calls: list[int] = []
    layer = next(module for name, module in model.named_modules() if name.endswith("layers.0"))
    layer.self_attn.q_proj.register_forward_pre_hook(lambda module, args: calls.append(0))
    logged = Logged()
    logger = logging.getLogger("overlay.integrations")
    logger.addHandler(logged)
    logger.setLevel(logging.INFO)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            max_steps=2,
            per_device_train_batch_size=2,
            use_cpu=True,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
            gradient_checkpointing=checkpointing is not None,
            gradient_checkpointing_kwargs=checkpointing,
            **options,
        )
        trainer = Trainer(
            model, arguments, train_dataset=DATA, callbacks=[overlay.integrations.PreflightCallback(ignore)]
        )
        seen: Observed = {"error": None}
        modes = {name: module.training for name, module in model.named_modules()}
        try:
            trainer.train()
        except overlay.CheckError as error:
            seen = {
                "error": str(error),
                "errors": sorted({one.code for one in error.findings if one.severity == "error"}),
                "modes kept": modes == {name: module.training for name, module in model.named_modules()},
            }
        except overlay.OverlayError as error:
            seen = {"error": str(error)}
        finally:
            logger.removeHandler(logged)
    return seen | {"steps": trainer.state.global_step, "calls": len(calls), "logged": logged.records}


def right() -> Observed:
    return train(llama(), NON_REENTRANT)


def loaded() -> Observed:
    """As `from_pretrained` leaves it."""
    return train(llama().eval(), NON_REENTRANT)


def wrong() -> Observed:
    return train(mixtral(), REENTRANT)


def wrong_and_in_eval_mode() -> Observed:
    return train(mixtral().eval(), REENTRANT)


def ignored() -> Observed:
    return train(mixtral(), REENTRANT, ignore=("captured-outputs",))


def ignored_by_a_string() -> Observed:
    return train(mixtral(), REENTRANT, ignore="captured-outputs")


def finer() -> Observed:
    """A warning."""
    model = llama()
    for layer in model.model.layers:
        layer.mlp = checkpoint_wrapper(layer.mlp)
    return train(model, None)


def no_such_rule() -> Observed:
    try:
        overlay.integrations.PreflightCallback(ignore=("captured-outputs", "no-such-rule"))
    except overlay.OverlayError as error:
        return {"error": str(error)}
    return {"error": None}


def no_checkpointing() -> Observed:
    return train(llama(), None)


SCENARIOS: dict[str, Callable[[], Observed]] = {
    scenario.__name__: scenario
    for scenario in (
        right,
        loaded,
        wrong,
        wrong_and_in_eval_mode,
        ignored,
        ignored_by_a_string,
        finer,
        no_such_rule,
        no_checkpointing,
    )
}


def sharded(checkpointing: dict[str, bool]) -> Observed:
    """Sharded by FSDP2 over one rank; accelerate does so itself, on a GPU."""
    model = llama()
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    return train(model, checkpointing)


def activation_checkpointing(prepared: bool) -> list[str]:
    """Codes and severities for the option of accelerate's FSDP plugin, before and after it has wrapped the layers."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from accelerate.utils.fsdp_utils import fsdp2_apply_ac

    model = llama().train()
    model.config.use_cache = False
    model.gradient_checkpointing_enable(NON_REENTRANT)
    accelerator = Accelerator(cpu=True)
    accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        activation_checkpointing=True,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
    )
    if prepared:
        accelerator.state.fsdp_plugin.set_auto_wrap_policy(model)
        model = fsdp2_apply_ac(accelerator, model)
    found = [f"{one.severity} {one.code}: {one.what}" for one in overlay.check(model)]
    AcceleratorState._reset_state(reset_partial_state=True)
    return found


def wrong_on_one_rank() -> Observed:
    """Nothing is wrong with the model of the other."""
    return train(mixtral(), REENTRANT if dist.get_rank() == 1 else NON_REENTRANT)


def raises_on_one_rank() -> Observed:
    """The check itself, as no model is known to make it."""
    if dist.get_rank() == 0:
        return train(llama(), NON_REENTRANT)
    with mock.patch("overlay.integrations.check", side_effect=overlay.OverlayError("of this rank")):
        return train(llama(), NON_REENTRANT)


def on_ranks(rank: int, world: int, put: Callable[[Any], None]) -> None:
    if world == 1:
        put({"reentrant": sharded(REENTRANT), "non-reentrant": sharded(NON_REENTRANT)})
        return
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(world))
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="0")
    seen = {}
    for scenario in (wrong_on_one_rank, raises_on_one_rank, finer):
        gathered: list[Any] = [None] * world
        dist.all_gather_object(gathered, scenario())
        seen[scenario.__name__] = gathered
    put(seen)


def main() -> None:
    transformers.logging.set_verbosity_error()
    sharded, distributed = group.train([1, 2], on_ranks)  # before anything here starts a thread
    torch.set_num_threads(1)
    observed: Observed = {"sharded": sharded, "distributed": distributed}
    observed |= {name: scenario() for name, scenario in SCENARIOS.items()}
    observed["activation_checkpointing"] = {
        str(prepared): activation_checkpointing(prepared) for prepared in (False, True)
    }
    Path(sys.argv[1]).write_text(json.dumps(observed), "utf-8")


if __name__ == "__main__":
    main()
