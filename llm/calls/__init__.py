"""What the methods of `LLM` do: a batch call, a flow, a stream, a conversation, a pooling call, scoring."""
