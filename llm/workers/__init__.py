"""Worker processes of this program: how they are started, watched and ended, and the messages between it and them.

What a worker does is its role: `llm.replicas` has one.
"""
