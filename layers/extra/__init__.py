"""Operations that no model here uses, for models of your own: each a definition in PyTorch, without a kernel."""
