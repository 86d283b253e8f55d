"""How tokens are drawn: parameters, their tables on the device, and the reference sampler."""
