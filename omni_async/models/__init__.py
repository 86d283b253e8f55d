"""Models, and the protocol that the runner knows them by."""
