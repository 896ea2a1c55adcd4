"""The shared libraries, and their ops with gradients."""
