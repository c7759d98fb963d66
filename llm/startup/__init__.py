"""From `EngineArgs` to a running engine: read the model (`source`), decide (`plan`), build in order (`build`)."""
