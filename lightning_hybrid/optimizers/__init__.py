"""The step of an optimizer: of shards, of owners, layer by layer, with offloaded states, in the backward."""
