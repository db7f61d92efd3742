"""A tiny module that records the gradients that its hooks read."""

from models.tiny import Tiny

MAX_NORM = 0.05


class RecordsGradients(Tiny):
    def __init__(self):
        super().__init__()
        self.recorded = []

    def gradients(self):
        return [p.grad for p in self.parameters() if p.grad is not None]
