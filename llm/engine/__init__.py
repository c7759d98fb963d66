"""Policy without tensors: prompts to rows, the scheduler, the block manager, outputs. A runner computes its steps."""
