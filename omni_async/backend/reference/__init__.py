"""The operations in plain torch."""
