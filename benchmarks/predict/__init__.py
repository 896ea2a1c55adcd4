"""Predicts the time of a training step on any number of ranks; see docs/scaling.md."""
