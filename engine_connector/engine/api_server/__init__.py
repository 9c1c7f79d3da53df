"""OpenAI's HTTP API over the included engine. The route of a request through the files:

    connections     a socket, bounded: how many, how long without a request, how much unread
    server          the routes, and how a server starts and ends
    bodies          a body, read within a limit and a deadline
    wire            body and headers -> the fields we know, each checked; what we do not know is refused by its name
    prompts         text, token ids or chat messages -> token ids, on threads of their own
    engine_thread   the one thread that owns the LLM: commands in through one queue, tokens out to each request
    answers         tokens -> OpenAI's objects and chunks
    event_stream    chunks -> server-sent events, to a reader who keeps up
    figures         what Prometheus sees
    refusals        every error -> its status and OpenAI's error object

The event loop never computes and never waits for the engine; the engine's thread never waits for a client.
"""
