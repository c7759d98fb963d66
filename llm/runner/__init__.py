"""One process, one device: the model, its caches, the persistent batch, the sampler, and what drafts tokens."""
