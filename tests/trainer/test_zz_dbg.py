import faulthandler, os, sys
import pytest
import torch
from lightning.pytorch import seed_everything
from lightning_runs import Samples, Tiny, ignore_warnings, trainer_of
from torch.utils.data import DataLoader

class Aug(Samples):
    def __getitem__(self, index):
        noise = torch.rand(()).item()
        return {**super().__getitem__(index), "noise": torch.tensor(noise, dtype=torch.float64)}

def init(worker):
    f = open(f"/tmp/dbg_{os.getpid()}", "a")
    print("start", os.getppid(), file=f, flush=True)
    faulthandler.dump_traceback_later(10, file=f)
    globals()["keep"] = f

def run(size, pp, epochs):
    ignore_warnings()
    seed_everything(7, verbose=False)
    trainer_of(size, pp, max_epochs=epochs).fit(Tiny(), DataLoader(Aug(), batch_size=8, num_workers=2, worker_init_fn=init))

@pytest.mark.parametrize("size,pp,epochs", [(4, 2, 1), (2, 2, 2)])
def test_dbg(worlds, size, pp, epochs):
    worlds.run(size, run, size, pp, epochs, timeout=30)
