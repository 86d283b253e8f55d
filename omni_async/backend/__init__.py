"""Device operations: the protocol, and the backends that implement it."""
