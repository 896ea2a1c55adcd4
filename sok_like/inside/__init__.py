"""Looking inside: what tables hold, and what they will."""
