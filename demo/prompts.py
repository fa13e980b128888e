"""The demonstration's prompt, and why this one."""

#: About 100 tokens: more than the 64 that the indexer may select, so that sparse attention has something to leave out.
PROMPT = "Please explain in short sentences how a pipeline keeps every stage busy while several users wait."
