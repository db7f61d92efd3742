"""The dataflow of linears, calls of units, and uses of vocabulary weights in a recorded step."""
