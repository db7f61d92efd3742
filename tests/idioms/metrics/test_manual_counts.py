"""Manual counts over the samples of steps: correct predictions, confusion matrices, histograms."""

import torch
from torch.nn import functional as F

from harness.layouts import each
from harness.trainer_runs import ignore_warnings, trainer_of
from models.tiny import Tiny, loader


class Counts(Tiny):
    """Stores a list of its counts of each batch."""

    def __init__(self):
        super().__init__()
        self.start()

    def start(self):
        self.kept = []

    def store(self, count):
        self.kept.append(count)

    def total(self):
        return torch.stack(self.kept).sum(0)

    def validation_step(self, batch, batch_idx):
        predicted, target = (self(batch["x"])[:, 0] > 0.3).long(), (batch["y"][:, 0] > 0.3).long()
        self.store(self.count(target, predicted))

    def on_validation_epoch_end(self):
        self.seen = torch.as_tensor(self.total()).clone()
        self.start()


class Sum:
    def count(self, target, predicted):
        return (target == predicted).sum()


class Product:
    def count(self, target, predicted):
        return F.one_hot(target, 2).double().T @ F.one_hot(predicted, 2).double()


class Einsum:
    def count(self, target, predicted):
        return torch.einsum("ni,nj->ij", F.one_hot(target, 2).double(), F.one_hot(predicted, 2).double())


class Stack:
    def count(self, target, predicted):
        counts = [((target == a) & (predicted == b)).sum() for a in range(2) for b in range(2)]
        return torch.stack(counts).view(2, 2)


class Scatter:
    def count(self, target, predicted):
        zeros = torch.zeros(4, dtype=torch.long)
        return zeros.scatter_add_(0, target * 2 + predicted, torch.ones_like(target)).view(2, 2)


class IndexAdd:
    def count(self, target, predicted):
        counts = torch.zeros(4, dtype=torch.long)
        counts.index_add_(0, target * 2 + predicted, torch.ones_like(target))
        return counts


class Bincount:
    def count(self, target, predicted):
        return torch.bincount(target * 2 + predicted, minlength=4)


class BincountMatrix:
    def count(self, target, predicted):
        return torch.bincount(target * 2 + predicted, minlength=4).view(2, 2)


class Histogram:
    def count(self, target, predicted):
        return torch.histc((target * 2 + predicted).double(), 4, 0, 3)


class OneMore:
    def count(self, target, predicted):
        count = (target == predicted).sum()
        count += 1
        return count - 1


class Mixed:
    """A sum over predictions of the model, and one over the batch only."""

    def count(self, target, predicted):
        return (target == predicted).sum() + target.sum()


class Mean:
    def count(self, target, predicted):
        return (target == predicted).double().sum() / target.numel()


class Added(Counts):
    """Binds a new sum in each batch."""

    def start(self):
        self.kept = torch.ones((), dtype=torch.float64)

    def store(self, count):
        self.kept = self.kept + count

    def total(self):
        return self.kept


class AddedInPlace(Added):
    """Begins with a number, as most do, and adds to it in place."""

    def start(self):
        self.kept = 0

    def store(self, count):
        self.kept += count


class AddedToTensor(AddedInPlace):
    def start(self):
        self.kept = torch.zeros(4, dtype=torch.long)


class AddedTwice(Added):
    def store(self, count):
        self.kept = self.kept + count
        self.kept = (self.kept + count).detach()


class Moving(Added):
    def store(self, count):
        self.kept = 0.9 * self.kept + 0.1 * count


class Returned(Counts):
    """Returns its counts; a hook stores them."""

    def store(self, count):
        self.output = count

    def validation_step(self, batch, batch_idx):
        super().validation_step(batch, batch_idx)
        output, self.output = self.output, None
        return {"count": output}

    def on_validation_batch_end(self, outputs, *_):
        self.kept.append(outputs["count"])


EACH = [Sum, Product, Einsum, Stack, Scatter, IndexAdd, Bincount, BincountMatrix, Histogram, Mean, Mixed]
CASES = [(Counts, count) for count in EACH]
CASES += [(Added, count) for count in (Sum, Product, Bincount)]
CASES += [
    (AddedInPlace, Sum),
    (AddedInPlace, Product),
    (AddedInPlace, Bincount),
    (AddedToTensor, Bincount),
    (AddedTwice, Sum),
    (Moving, Mean),
]
CASES += [(Returned, count) for count in (Sum, Product, Stack, BincountMatrix)]


def run_counts(size, pp, kind, count, options):
    ignore_warnings()
    torch.manual_seed(0)
    module = type(f"{kind.__name__}{count.__name__}", (count, kind), {})()
    trainer_of(size, pp, strategy_options=options).validate(module, loader(8, 16), verbose=False)
    return module.seen


COVERED = {
    (Counts, Einsum): (Counts, Product),
    (Counts, IndexAdd): (Counts, Scatter),
    (Added, Product): (Added, Sum),
    (AddedInPlace, Product): (AddedInPlace, Sum),
    (AddedInPlace, Bincount): (Added, Bincount),
    (Returned, Product): (Returned, Sum),
}


@each("kind, count", CASES, covered_by=COVERED)
def test_counts_match_one_process(worlds, kind, count):
    [expected] = worlds.run(1, run_counts, 1, 1, kind, count, {})
    alone = worlds.run(1, run_counts, 1, 1, kind, count, {"num_microbatches": 2})
    staged = worlds.run(2, run_counts, 2, 2, kind, count, {"num_microbatches": 2})
    for seen in (*alone, *staged):
        torch.testing.assert_close(seen, expected, rtol=1e-10, atol=1e-12)
