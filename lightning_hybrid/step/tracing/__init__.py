"""The mode that sees each operation of a step: what recording and replay share."""
