"""The demonstration's prompt, and why this one."""

#: 44 tokens, so that the answer passes the 64 that the indexer may select and sparse attention leaves something out.
PROMPT = "Please explain in short sentences how a pipeline keeps every stage busy while several users wait."
