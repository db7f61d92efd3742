"""A script that calls LightningCLI, with a link between the arguments of its two classes."""

from lightning.pytorch.cli import LightningCLI

from models.command_line_classes import Data, Stack


class StackCLI(LightningCLI):
    def add_arguments_to_parser(self, parser):
        parser.link_arguments("data.batch_size", "model.num_layers")


if __name__ == "__main__":
    StackCLI(Stack, Data, seed_everything_default=1)
