"""SOK 1.x's embedding layers, at the paths SOK published them."""
