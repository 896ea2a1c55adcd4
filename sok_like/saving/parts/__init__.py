"""What is saved: hash tables, dense tables, variables of a rank, and their names."""
