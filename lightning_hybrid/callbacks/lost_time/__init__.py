"""Lost time of measured steps: waits for input, the table and files of the causes, rebalanced stages."""
