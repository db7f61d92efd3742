"""A rank that fails, dies or gets SIGTERM: the others end within seconds and say why."""

import os
import signal
from datetime import timedelta

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import OnExceptionCheckpoint

from harness.trainer_runs import ignore_warnings, lines_of_lightning, trainer_of, weights_of
from lightning_hybrid.patching import replace
from lightning_hybrid.strategies.world import rendezvous
from models.tiny import Tiny, loader


class Fails(Tiny):
    """Fails on one rank in one place."""

    def __init__(self, rank, place):
        super().__init__()
        self.rank, self.place = rank, place

    def fail(self, place, batch_idx):
        if place == self.place and batch_idx == 1 and self.trainer.strategy.mesh.rank == self.rank:
            raise ZeroDivisionError("on purpose")

    def forward(self, x):
        y = super().forward(x)
        self.fail("step", self.trainer.fit_loop.epoch_loop.batch_idx if self.trainer.training else 0)
        return y

    def on_train_batch_start(self, batch, batch_idx):
        self.fail("hook", batch_idx)

    def validation_step(self, batch, batch_idx):
        self.fail("validation", batch_idx)
        self.log("val", self.loss(batch))


def run_failing(size, pp, rank, place, options):
    """The messages of a rank that caught its error and continues."""
    ignore_warnings()
    trainer = trainer_of(
        size, pp, strategy_options=options, callbacks=[OnExceptionCheckpoint(os.getcwd())], enable_checkpointing=True
    )
    try:
        trainer.fit(Fails(rank, place), loader(4, 32), loader(4, 32))
    except Exception as error:
        return type(error).__name__, str(error), getattr(error, "__notes__", [])
    return None


LOST = ("RuntimeError", "DistNetworkError")  # of who loses its connection: gloo's, and that of shared memory
PLACES = {
    "step": "in stage 1 of 2, action 1F0 of training_step (forward of microbatch 0)",
    "hook": "in on_train_batch_start",
    "validation": "of validation_step (forward of microbatch 0)",
}


@pytest.mark.parametrize("place", PLACES)
def test_peers_of_a_raising_rank_stop_with_its_error(worlds, place):
    peer, failed = worlds.run(2, run_failing, 2, 2, 1, place, {"num_microbatches": 2}, timeout=20)
    assert failed[:2] == ("ZeroDivisionError", "on purpose")
    assert not any("had to stop" in text for text in failed[2])
    assert peer[0] in LOST
    [messages] = [text for text in peer[2] if "had to stop" in text]
    assert messages.startswith("rank 0 (pipeline rank 0 of 2) in ")
    assert "rank 1 (pipeline rank 1 of 2)" in messages and PLACES[place] in messages, messages
    assert "ZeroDivisionError: on purpose" in messages


@pytest.mark.parametrize(
    ("size", "pp"),
    [(4, 2), (3, 3), pytest.param(3, 1, marks=pytest.mark.slow)],
    ids=["2 x 2", "3 stages", "3 replicas"],
)
def test_every_rank_learns_which_one_failed_first(worlds, size, pp):
    results = worlds.run(size, run_failing, size, pp, size - 1, "hook", {}, timeout=20)
    for index, (name, _, notes) in enumerate(results):
        if index != size - 1:
            assert name in LOST
            stage = f" (pipeline rank {pp - 1} of {pp})" if pp > 1 else ""
            assert any(f"had to stop: rank {size - 1}{stage} in " in text for text in notes), notes


class FailsOnAllRanks(Tiny):
    def on_train_batch_start(self, batch, batch_idx):
        raise ZeroDivisionError("everywhere")


def run_failing_on_all_ranks():
    ignore_warnings()
    try:
        trainer_of(2, 2).fit(FailsOnAllRanks(), loader(4))
    except ZeroDivisionError as error:
        notes = getattr(error, "__notes__", [])
    model = Tiny()
    trainer_of(2, 2).fit(model, loader(4))
    return notes, weights_of(model)


def test_error_on_all_ranks_keeps_connections_open(worlds):
    for notes, weights in worlds.run(2, run_failing_on_all_ranks, timeout=20):
        assert notes == []
        assert all(torch.isfinite(weight).all() for weight in weights.values())


def run_after_one_failed():
    """The errors of two later runs after one that failed on one rank and was caught."""
    ignore_warnings()
    messages = []
    for rank in (1, -1, -1):
        try:
            trainer_of(2, 2, num_sanity_val_steps=0).fit(Fails(rank, "hook"), loader(4))
        except Exception as error:
            messages.append(str(error))
    return messages


def test_run_on_closed_connections_names_the_failed_rank(worlds):
    for _, second, third in worlds.run(2, run_after_one_failed, timeout=30):
        assert second == third
        assert second.startswith("a run in this process failed, and its connections to the other ranks were closed")
        assert "rank 1 (pipeline rank 1 of 2) in on_train_batch_start failed: ZeroDivisionError: on purpose" in second
        assert second.endswith("start the script again to continue")


class FailsOnce(Tiny):
    """On all ranks, in one hook."""

    def __init__(self, hook):
        super().__init__()
        self.hook = hook

    def fail(self, hook):
        if hook == self.hook:
            self.hook = ""
            raise ZeroDivisionError("everywhere")

    def on_train_batch_end(self, *_):
        self.fail("training")

    def setup(self, stage):
        self.fail("setup")

    def validation_step(self, batch, batch_idx):
        self.log("val", self.loss(batch))


def run_after_failure(hook, pp, options):
    """Runs of the same module after a failed one, in two processes that continue."""
    ignore_warnings()
    model = FailsOnce(hook)
    failed = trainer_of(2, pp, strategy_options=options, num_sanity_val_steps=0)
    with pytest.raises(ZeroDivisionError):
        failed.fit(model, loader(4))
    path = os.path.join(os.getcwd(), "full.ckpt")
    full = trainer_of(2, pp, strategy_options=options, enable_checkpointing=True, max_steps=1)
    full.fit(Tiny(), loader(4))
    full.save_checkpoint(path)
    again = trainer_of(2, pp, strategy_options=options, num_sanity_val_steps=0)
    calls = {
        "fit": lambda: again.fit(model, loader(4)),
        "the same trainer": lambda: failed.fit(model, loader(4)),
        "validate": lambda: trainer_of(2, pp, strategy_options=options).validate(model, loader(4), verbose=False),
        "resume": lambda: trainer_of(2, pp, strategy_options=options).fit(model, loader(4), ckpt_path=path),
        "state_dict": model.state_dict,
    }
    messages = {}
    for name, call in calls.items():
        try:
            call()
        except RuntimeError as error:
            messages[name] = str(error)
    new = Tiny()
    failed.fit(new, loader(4), ckpt_path=path)
    return messages, sorted(new.state_dict()), [bool(p.isfinite().all()) for p in new.parameters()]


IN_PARTS = {
    "stages": (2, {}),
    "tensor": (1, {"tensor_parallel_size": 2}),
    "zero": (1, {"zero_stage": 3}),
}


@pytest.mark.parametrize(("pp", "options"), IN_PARTS.values(), ids=list(IN_PARTS))
def test_module_left_sharded_by_a_failed_run_is_refused(worlds, pp, options):
    for messages, names, finite in worlds.run(2, run_after_failure, "training", pp, options, timeout=60):
        assert set(messages) == {"fit", "the same trainer", "validate", "resume", "state_dict"}
        for message in messages.values():
            assert message.startswith(
                "a run that failed, was stopped or ended without room has left this FailsOnce sharded: "
            )
            assert "of its 10 parameters (such as 'layers." in message
            assert message.endswith("make a new module and load a checkpoint")
        assert names == sorted(weights_of(Tiny())) and all(finite), "a trainer that failed trains another module"


@pytest.mark.parametrize(("hook", "pp", "options"), [("setup", 2, {}), ("training", 1, {})], ids=["stages", "replicas"])
def test_module_left_full_by_a_failed_run_trains(worlds, hook, pp, options):
    for messages, *_ in worlds.run(2, run_after_failure, hook, pp, options, timeout=60):
        assert messages == {}


class Signals(Callback):
    def __init__(self, ranks, hook):
        self.ranks, self.hook, self.batches = ranks, hook, 0

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.batches += 1
        self.signal("train", trainer, batch_idx)

    def on_validation_batch_start(self, trainer, pl_module, batch, batch_idx, dataloader_idx=0):
        self.signal("validation", trainer, batch_idx)

    def signal(self, hook, trainer, batch_idx):
        if hook == self.hook and batch_idx == 2 and trainer.strategy.mesh.rank in self.ranks:
            os.kill(os.getpid(), signal.SIGTERM)


def run_signalled(size, pp, ranks, hook, options):
    ignore_warnings()
    signals = Signals(ranks, hook)
    callbacks = [signals, OnExceptionCheckpoint(os.getcwd())]
    trainer = trainer_of(size, pp, callbacks=callbacks, num_sanity_val_steps=0, enable_checkpointing=True, **options)
    model = Fails(-1, "")
    before = signal.getsignal(signal.SIGTERM)
    with lines_of_lightning() as lines:
        try:
            trainer.fit(model, loader(2, 64), loader(2, 64))
            ended = "fit"
        except SystemExit as error:
            ended = type(error).__name__
    assert signal.getsignal(signal.SIGTERM) == before
    saved = os.path.exists("on_exception.ckpt") and torch.load("on_exception.ckpt", weights_only=False)["state_dict"]
    return ended, signals.batches, saved and sorted(saved), [line for line in lines if "SIGTERM" in line]


@pytest.mark.parametrize("ranks", [(0,), (1,), (0, 1)], ids=["first", "last", "all"])
@pytest.mark.parametrize("pp", [1, 2], ids=["replicas", "stages"])
def test_sigterm_to_one_rank_stops_all_after_the_same_batch(worlds, ranks, pp):
    first, second = worlds.run(2, run_signalled, 2, pp, ranks, "train", {}, timeout=20)
    assert first[0] == second[0] == "SIGTERMException"
    assert first[1] == second[1] == 5
    assert first[2] == sorted(weights_of(Tiny())), "a callback may still save the full module"
    for rank, (*_, messages) in enumerate((first, second)):
        received = [f"[rank: {rank}] Received SIGTERM: 15"] * (rank in ranks)
        assert messages[: len(received)] == received
        assert len(messages) == len(received) + (rank == 0)
    assert "has received SIGTERM: all ranks stop, after batch 4 of epoch 0" in first[3][-1]


def test_sigterm_to_one_rank_in_validation_stops_all(worlds):
    first, second = worlds.run(2, run_signalled, 2, 2, (1,), "validation", {"val_check_interval": 4}, timeout=20)
    assert first[:2] == second[:2] == ("SIGTERMException", 4)


class WaitsAlone(Callback):
    """On the first rank: gets a SIGTERM, and waits for ranks that wait for its gradients."""

    def on_train_batch_end(self, trainer, *_):
        if trainer.strategy.mesh.rank == 0:
            os.kill(os.getpid(), signal.SIGTERM)
            trainer.strategy.barrier("nobody else comes here")


def run_waiting_alone():
    ignore_warnings()
    names = ("_SECONDS_UNTIL_TOLD", "_SECONDS_TO_STOP")
    undo = [replace(rendezvous, name, 0.2, reason="a short test") for name in names]
    trainer = trainer_of(2, 1, callbacks=[WaitsAlone()], strategy_options={"timeout": timedelta(seconds=600)})
    try:
        trainer.fit(Tiny(), loader(2, 64))
    except BaseException as error:
        return type(error).__name__, " ".join(getattr(error, "__notes__", []))
    finally:
        for each in undo:
            each()
    return "", ""


def test_sigterm_ends_ranks_that_wait_for_each_other(worlds):
    first, second = worlds.run(2, run_waiting_alone, timeout=60)
    assert first[0] == "SIGTERMException"
    assert "had to stop: rank 0" in second[1] and "failed: SIGTERMException" in second[1]
