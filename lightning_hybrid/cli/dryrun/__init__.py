"""The command ``lightning-hybrid dryrun``: what any rank of any world would hold and send, without the cluster."""

from lightning_hybrid.cli.dryrun.command import add_to as add_to
