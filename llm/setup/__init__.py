"""From `LLMArgs` to a running engine: read the model (`model_folder`), plan (`plan`), build (`build`)."""
