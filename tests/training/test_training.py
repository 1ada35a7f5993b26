"""End to end on a patched wheel: tokenise, train with checkpointing, save half way, go on in a fresh process."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.variants import PATCHED, Variant, run

WORKER = Path(__file__).with_name("train_worker.py")
CORPUS = Path(__file__).with_name("corpus.txt")
STEPS = 30


@dataclass
class Run:
    """What three processes of one build saw, the last of them with the stock release that the build comes from."""

    build: Variant
    started: dict[str, Any]
    resumed: dict[str, Any]
    stock: dict[str, Any]


@pytest.fixture(scope="module", params=PATCHED, ids=str)
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Run:
    patched: Variant = request.param
    folder = tmp_path_factory.mktemp("training")
    return Run(
        build=patched,
        started=run(WORKER, folder, "start", CORPUS, variant=patched),
        resumed=run(WORKER, folder, "resume", variant=patched),
        stock=run(WORKER, folder, "load", variant=Variant("stock", patched.release)),
    )


@pytest.fixture(params=["reentrant", "non-reentrant"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_losses_are_those_without_checkpointing_bit_for_bit(trained: Run, kind: str) -> None:
    losses = trained.started[kind]["losses"] + trained.resumed[kind]["losses"]
    assert losses == trained.started["without"]["losses"]
    assert len(losses) == STEPS
    assert sum(losses[-5:]) < sum(losses[:5])


def test_the_layers_are_checkpointed(trained: Run, kind: str) -> None:
    assert trained.started["without"]["calls"] == STEPS
    assert trained.started[kind]["calls"] + trained.resumed[kind]["calls"] == 2 * STEPS


def test_the_trained_model_is_the_one_without_checkpointing(trained: Run, kind: str) -> None:
    assert trained.resumed[kind]["logits"] == trained.started["without"]["logits"]


def test_the_saved_model_loads_under_stock(trained: Run, kind: str) -> None:
    assert "+" not in trained.stock["transformers"]
    assert trained.stock[kind]["logits"] == trained.started[kind]["logits"]


def test_the_state_dict_has_the_keys_of_stock(trained: Run, kind: str) -> None:
    assert trained.started["transformers"].startswith(f"{trained.build.release}{trained.build.label}")
    assert trained.started[kind]["keys"] == trained.resumed[kind]["keys"] == trained.stock[kind]["keys"]
