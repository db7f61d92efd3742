"""Samples with random augmentation, and a module that records it."""

import random

import numpy as np
import torch

from models.tiny import Samples, Tiny


class Augmented(Samples):
    def __getitem__(self, index):
        noise = torch.rand(()).item(), random.random(), np.random.rand()
        return {**super().__getitem__(index), "noise": torch.tensor(noise, dtype=torch.float64)}


class SeesNoise(Tiny):
    def __init__(self):
        super().__init__()
        self.noise = []

    def training_step(self, batch, batch_idx):
        self.noise.append(batch["noise"].tolist())
        return self.loss(batch)
