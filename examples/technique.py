"""Train with a technique of your own: layers compute with weights of 8 bits, their optimizer steps the full ones.

The module is unchanged. The technique works with stages, replicas, ZeRO and recomputation, which it knows nothing of.

    python examples/technique.py                   two processes, two stages
    python examples/technique.py --zero 3          two replicas that shard parameters
    python examples/technique.py --bits 4
"""

import argparse

from lightning.pytorch import Trainer, seed_everything
from quickstart import Classifier

from lightning_hybrid import Hybrid3DStrategy
from lightning_hybrid.techniques import LayerTechnique, computed_parameters


class QuantizedWeights(LayerTechnique):
    """Rounds the matrices of each layer in its forward (quantisation-aware training, Jacob et al. 2018, section 3).

    Args:
        bits: Of a weight; each row has a scale of its own.
    """

    def __init__(self, bits: int = 8) -> None:
        self.bits = bits

    def forward(self, name, layer, forward, *args, **kwargs):
        with computed_parameters(layer, self.rounded):
            return forward(*args, **kwargs)

    def rounded(self, weight):
        """Return a weight as the layer sees it; its gradient passes through the rounding."""
        if weight.dim() != 2:
            return weight
        scale = weight.detach().abs().amax(1, keepdim=True).clamp_min(1e-8) / (2 ** (self.bits - 1) - 1)
        return weight + ((weight / scale).round() * scale - weight).detach()

    def lines(self, run):
        return [f"weights of layers: {self.bits} bits in the forward"]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bits", type=int, default=8)
    parser.add_argument("--zero", type=int, default=0, help="stage of ZeRO over two replicas; two stages without")
    arguments = parser.parse_args()
    layout = {"zero_stage": arguments.zero} if arguments.zero else {"pipeline_parallel_size": 2}
    strategy = Hybrid3DStrategy(**layout, techniques=[QuantizedWeights(arguments.bits)])
    seed_everything(0)
    trainer = Trainer(
        accelerator="cpu", devices=2, max_epochs=1, strategy=strategy, logger=False, enable_checkpointing=False
    )
    trainer.fit(Classifier())
