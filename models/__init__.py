"""Model files and their JSON schema, read by ``lynnc.modelfile``."""
