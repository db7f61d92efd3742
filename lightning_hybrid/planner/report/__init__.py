"""Reports of a search: tables for a terminal, the arguments of a Trainer, plain values for JSON, a page of HTML."""
