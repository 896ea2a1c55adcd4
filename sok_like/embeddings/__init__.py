"""SOK 1.x's embedding layers, at SOK's published paths."""
