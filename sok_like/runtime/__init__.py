"""This process among the ranks, the two shared libraries, and the ops with their gradients.

The lowest layer, with `planner`: may import only itself. Everything above may import it.
"""
