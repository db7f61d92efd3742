"""A backend of process groups for tests whose ranks share a GPU, which NCCL refuses: gloo, over pinned memory."""
