"""Chemistry: graphs of many molecules in one batch, forces as derivatives, sums over atoms."""

import torch
import torchmetrics
from conformance.case import Case, Rows, loaders, waves
from lightning.pytorch import LightningModule
from torch import nn
from torch.nn import functional as F

ELEMENTS, CUTOFF = 4, 2.5


def molecule(index):
    num_atoms = 3 + index % 3
    positions = waves(3, count=num_atoms * (index + 1))[-num_atoms:] * 1.2
    distances = torch.cdist(positions, positions)
    near = (distances < CUTOFF) & ~torch.eye(num_atoms, dtype=torch.bool)
    forces = 0.1 * torch.cos(positions)
    z = (torch.arange(num_atoms) * (index + 1)) % ELEMENTS
    return {"z": z, "pos": positions, "edge_index": near.nonzero().t(), "y": positions.norm(), "forces": forces}


def collate_graphs(molecules):
    """Concatenates atoms and edges; ``batch`` says to which molecule an atom belongs."""
    sizes = torch.tensor([len(m["z"]) for m in molecules])
    starts = torch.cat([torch.zeros(1, dtype=torch.long), sizes.cumsum(0)[:-1]])
    return {
        "z": torch.cat([m["z"] for m in molecules]),
        "pos": torch.cat([m["pos"] for m in molecules]),
        "edge_index": torch.cat([m["edge_index"] + s for m, s in zip(molecules, starts, strict=True)], 1),
        "batch": torch.repeat_interleave(torch.arange(len(molecules)), sizes),
        "y": torch.stack([m["y"] for m in molecules]),
        "forces": torch.cat([m["forces"] for m in molecules]),
    }


def graph_data():
    return loaders(Rows(molecule), Rows(molecule, 16), collate_fn=collate_graphs)


class Smearing(nn.Module):
    def __init__(self, count=6):
        super().__init__()
        self.register_buffer("offset", torch.linspace(0, CUTOFF, count))

    def forward(self, distance):
        return torch.exp(-2.0 * (distance.unsqueeze(-1) - self.offset) ** 2)


class Interaction(nn.Module):
    """A continuous-filter convolution: messages along edges, weighted by what the distance says."""

    def __init__(self, width, count=6):
        super().__init__()
        self.filter = nn.Sequential(nn.Linear(count, width), nn.SiLU(), nn.Linear(width, width))
        self.lin1, self.lin2 = nn.Linear(width, width, bias=False), nn.Linear(width, width)
        self.out = nn.Sequential(nn.SiLU(), nn.Linear(width, width))

    def forward(self, h, edge_index, smeared, weight):
        source, target = edge_index
        messages = self.lin1(h)[source] * self.filter(smeared) * weight.unsqueeze(-1)
        return h + self.out(self.lin2(torch.zeros_like(h).index_add_(0, target, messages)))


class SchNet(LightningModule):
    def __init__(self, width=8, interactions=3, lr=5e-3):
        super().__init__()
        self.save_hyperparameters()
        self.embedding, self.smearing = nn.Embedding(ELEMENTS, width), Smearing()
        self.interactions = nn.ModuleList(Interaction(width) for _ in range(interactions))
        self.readout = nn.Sequential(nn.Linear(width, width // 2), nn.SiLU(), nn.Linear(width // 2, 1))
        self.register_buffer("atomref", torch.linspace(-1, 1, ELEMENTS).unsqueeze(1))
        self.mae = nn.ModuleDict({"train_": torchmetrics.MeanAbsoluteError(), "val_": torchmetrics.MeanAbsoluteError()})

    def forward(self, z, pos, edge_index, batch):
        distance = (pos[edge_index[0]] - pos[edge_index[1]]).norm(dim=-1)
        weight = 0.5 * (torch.cos(distance * torch.pi / CUTOFF) + 1)
        h, smeared = self.embedding(z), self.smearing(distance)
        for interaction in self.interactions:
            h = interaction(h, edge_index, smeared, weight)
        per_atom = self.readout(h) + self.atomref[z]
        num_graphs = int(batch.max()) + 1
        return torch.zeros(num_graphs, 1, dtype=h.dtype, device=h.device).index_add(0, batch, per_atom).squeeze(1)

    def step(self, data, stage):
        energy = self(data["z"], data["pos"], data["edge_index"], data["batch"])
        loss = F.l1_loss(energy, data["y"])
        self.mae[stage + "_"](energy.detach(), data["y"])
        self.log(f"{stage}_mae", self.mae[stage + "_"], on_step=False, on_epoch=True, batch_size=len(data["y"]))
        return loss

    def training_step(self, batch, batch_idx):
        return self.step(batch, "train")

    def validation_step(self, batch, batch_idx):
        self.step(batch, "val")

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.hparams.lr, amsgrad=True)


class ForceField(SchNet):
    """Forces are the negative derivative of the energy by the positions, in training and in validation."""

    def __init__(self, force_weight=10.0, **options):
        super().__init__(**options)
        self.force_weight = force_weight

    def forward(self, z, pos, edge_index, batch):
        pos.requires_grad_(True)
        energy = super().forward(z, pos, edge_index, batch)
        [gradient] = torch.autograd.grad(energy.sum(), [pos], create_graph=self.training)
        return energy, -gradient

    def step(self, data, stage):
        energy, forces = self(data["z"], data["pos"], data["edge_index"], data["batch"])
        energy_loss, force_loss = F.mse_loss(energy, data["y"]), F.mse_loss(forces, data["forces"])
        loss = energy_loss + self.force_weight * force_loss
        values = {f"{stage}_energy": energy_loss.detach(), f"{stage}_force": force_loss.detach()}
        self.log_dict(values, on_step=False, on_epoch=True, batch_size=len(data["y"]))
        return loss

    def validation_step(self, batch, batch_idx):
        with torch.enable_grad():
            self.step(batch, "val")


class AtomicNetworks(LightningModule):
    """A network for each element, called where a batch has any such atom; energies are summed over atoms."""

    def __init__(self, features=6, lr=1e-2):
        super().__init__()
        self.save_hyperparameters()
        self.networks = nn.ModuleList(
            nn.Sequential(nn.Linear(features, 8), nn.CELU(0.1), nn.Linear(8, 4), nn.CELU(0.1), nn.Linear(4, 1))
            for _ in range(ELEMENTS)
        )
        self.register_buffer("self_energies", torch.linspace(-0.5, 0.5, ELEMENTS))

    def forward(self, species, aev):
        flat, inputs = species.flatten(), aev.flatten(0, 1)
        energies = inputs.new_zeros(flat.shape)
        for element, network in enumerate(self.networks):
            mask = flat == element
            midx = mask.nonzero().flatten()
            if midx.shape[0] > 0:
                energies.masked_scatter_(mask, network(inputs.index_select(0, midx)).flatten())
        shifts = self.self_energies[species.clamp(min=0)] * (species >= 0)
        return (energies.view_as(species) + shifts).sum(1)

    def training_step(self, batch, batch_idx):
        num_atoms = (batch["species"] >= 0).sum(1).to(batch["energies"].dtype)
        predicted = self(batch["species"], batch["aev"])
        loss = (F.mse_loss(predicted, batch["energies"], reduction="none") / num_atoms.sqrt()).mean()
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        error = self(batch["species"], batch["aev"]) - batch["energies"]
        self.log("val_rmse", error.square().mean().sqrt())

    def configure_optimizers(self):
        weights = [p for name, p in self.named_parameters() if "weight" in name]
        biases = [p for name, p in self.named_parameters() if "bias" in name]
        return [torch.optim.AdamW([{"params": weights, "weight_decay": 1e-4}, {"params": biases}], lr=self.hparams.lr)]


def conformer(index):
    species = torch.full((6,), -1)
    count = 3 + index % 4
    species[:count] = (torch.arange(count) * (1 + index % 5)) % ELEMENTS
    return {"species": species, "aev": waves(6, 6, count=index + 1)[index], "energies": torch.tensor(count / 3.0)}


def conformers():
    return loaders(Rows(conformer), Rows(conformer, 16))


CASES = [
    Case(SchNet, graph_data, splits=False),
    Case(ForceField, graph_data, splits=False, trainer={"inference_mode": False}),
    Case(AtomicNetworks, conformers),
]
