"""This process among the ranks: engines, collectives and their order, agreement, the watch."""
