"""Measures tables, and estimates their memory."""
