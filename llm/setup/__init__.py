"""From `EngineArgs` to a running engine: read the model (`source`), plan (`plan`), build (`build`)."""
