"""What a request asks of the sampler, and the tables that carry it to the device."""
