"""The engine on an OpenAI endpoint, for many users at once.

`Service` is the engine's thread and knows nothing of the network; `chat` and `completions` turn requests into jobs for
it and what it writes into answers; `app` serves these over HTTP.
"""
