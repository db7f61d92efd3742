"""Saved training state that does not depend on the layout it was saved under."""
