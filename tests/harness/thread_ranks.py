"""Ranks of one group as threads of this process."""

from lightning_hybrid.tensor.proof.trials import ThreadGroups


def on_ranks(size, run):
    """The results of a function of a rank, in the order of ranks; raises TrialFailed if a rank raises."""
    return ThreadGroups(size, 1).run_on_each(lambda ranks, _: run(ranks))
