"""Requests of tensor plans, the user's and the model's, and their precedence."""
