"""The sampler in plain torch: the specification of every other one."""
