"""Model families: each file is wiring and parameters, named by Hugging Face's model_type."""
