"""The execution of steps, the check of the first one, and changes of the layout between them."""
