"""A small reference router in front of OpenAI-compatible engines. The route of a request through the files:

    server       the routes; which engine is tried after which, and what the client is told when none is left
    prompts      body -> names of its prefixes, a chunk of text at a time
    policies     names and loads -> an engine, and why
    prefix_tree  which prefixes an engine has been sent
    engines      who is up, and how busy each is
    forward      one try: request to the engine, answer to the client as it comes
    figures      what Prometheus sees

Brains decide: prompts, policies and prefix_tree do no I/O. Nothing here knows a tokenizer or asks an engine what it holds; an
engine's cache is guessed from what was sent to it.
"""
