"""What an assistant's reply holds: reasoning, tool calls, and the content between them; and replies in a history.

Owns no behaviour: `reader.py` chooses by the chat template how a model writes them, one file per form reads them.
"""
